"""The queue of those that wait for blocks, in service order.

Knows ids and their order only. ``scheduler`` calls it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from headwater.core.errors import AuditError
from headwater.core.step import SequenceId
from headwater.prefill.plan import ServiceOrder


class WaitingQueue:
    """Sorted; O(log n) to find a place, and a short move to make room."""

    def __init__(self) -> None:
        self._places: list[tuple[ServiceOrder, SequenceId]] = []

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[SequenceId]:
        """In service order, as it is now: the queue may change meanwhile."""
        return iter([sequence_id for _, sequence_id in self._places])

    def add(self, order: ServiceOrder, sequence_id: SequenceId) -> None:
        insort(self._places, (order, sequence_id))

    def remove(self, order: ServiceOrder, sequence_id: SequenceId) -> None:
        """Raises AuditError if it is not there, at this place."""
        place = bisect_left(self._places, (order, sequence_id))
        if place == len(self._places) or self._places[place][1] != sequence_id:
            raise AuditError(f"sequence {sequence_id} is not in the queue")
        del self._places[place]
