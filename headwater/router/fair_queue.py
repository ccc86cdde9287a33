"""One bucket's queue: by priority, then fair between tenants, then in order of arrival.

Each tenant has a virtual time: a request's tag is the later of the queue's time and the end
of the tenant's last request, and the least tag is next. So a burst of one tenant goes behind
the single request of another. Priorities are strict, but each ``age_s`` of waiting lifts a
request by one level. Knows ids, seconds and tenants; no clock of its own.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Entry:
    key: str
    tenant: str
    priority: int
    cost_s: float
    arrived_s: float
    number: int
    is_gone: bool = False


@dataclass(slots=True)
class _Level:
    """All requests of one priority."""

    heap: list[tuple[float, int, _Entry]] = field(default_factory=list)
    virtual_s: float = 0.0
    ends_s: dict[str, float] = field(default_factory=dict)  # by tenant: the end of its last tag
    num_gone: int = 0

    def add(self, entry: _Entry) -> None:
        tag_s = max(self.virtual_s, self.ends_s.get(entry.tenant, 0.0))
        self.ends_s[entry.tenant] = tag_s + entry.cost_s
        heapq.heappush(self.heap, (tag_s, entry.number, entry))

    def head(self) -> _Entry | None:
        while self.heap and self.heap[0][2].is_gone:
            heapq.heappop(self.heap)
            self.num_gone -= 1
        return self.heap[0][2] if self.heap else None

    def serve_head(self) -> None:
        self.virtual_s = heapq.heappop(self.heap)[0]
        if len(self.ends_s) > 2 * len(self.heap) + 16:
            # A tenant whose last tag is in the past starts like one that was never here.
            self.ends_s = {t: end for t, end in self.ends_s.items() if end > self.virtual_s}

    def drop_one(self) -> None:
        self.num_gone += 1
        if self.num_gone > len(self.heap) // 2 + 16:
            self.heap = [item for item in self.heap if not item[2].is_gone]
            heapq.heapify(self.heap)
            self.num_gone = 0


class FairQueue:
    """O(log n) per change, O(priorities in use) to look."""

    def __init__(self, age_s: float) -> None:
        self._age_s = age_s
        self._levels: dict[int, _Level] = {}
        self._entries: dict[str, _Entry] = {}
        self._num_added = 0
        self.cost_s = 0.0  # of all that wait

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def add(self, key: str, *, tenant: str, priority: int, cost_s: float, now_s: float) -> None:
        """``cost_s``: predicted seconds of work; ``key`` must not be in the queue."""
        assert key not in self._entries
        entry = _Entry(key, tenant, priority, cost_s, now_s, self._num_added)
        self._num_added += 1
        self._entries[key] = entry
        self.cost_s += cost_s
        self._levels.setdefault(priority, _Level()).add(entry)

    def head(self, now_s: float) -> str | None:
        """Who is next; looking changes nothing that counts."""
        entry = self._head(now_s)
        return entry.key if entry else None

    def cost_of_s(self, key: str) -> float:
        return self._entries[key].cost_s

    def waited_s(self, key: str, now_s: float) -> float:
        return now_s - self._entries[key].arrived_s

    def oldest_s(self, now_s: float) -> float:
        """How long the first to arrive of all that wait has waited; 0 when nobody does."""
        first = next(iter(self._entries.values()), None)  # in order of arrival
        return now_s - first.arrived_s if first else 0.0

    def serve(self, key: str, now_s: float) -> None:
        """``key``, which is the head, leaves and counts as served."""
        entry = self._head(now_s)
        assert entry is not None
        assert entry.key == key
        self._levels[entry.priority].serve_head()
        self._forget(entry)

    def remove(self, key: str) -> None:
        """``key`` leaves unserved, from wherever it is."""
        entry = self._entries[key]
        entry.is_gone = True
        self._levels[entry.priority].drop_one()
        self._forget(entry)

    def _head(self, now_s: float) -> _Entry | None:
        heads = [head for level in self._levels.values() if (head := level.head()) is not None]
        if len(heads) < 2:
            return heads[0] if heads else None
        return min(
            heads,
            key=lambda e: (e.priority - (now_s - e.arrived_s) // self._age_s, e.number),
        )

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        self.cost_s = self.cost_s - entry.cost_s if self._entries else 0.0
        if self._levels[entry.priority].head() is None:
            del self._levels[entry.priority]
