"""What the tiers hold of a prompt, and why it ends there: ``PrefixLook.look``.

    rows     full blocks by their prefix keys, fastest tier first, until one is in neither
    tail     the child of the last one that shares most leading tokens with the rest
    reason   of the place right after that

Everything that is returned was compared with the prompt: identity, part, place, tokens,
parent. Runs on the reader's thread; knows the two stores and the block size, no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

from headwater.core.blocks import CacheIdentity, PrefixKey, block_keys, chain_key
from headwater.core.cache import KVPart, MissReason, RecordMeta, StoredRecord, Tier, part_key
from headwater.core.ports import RecordStore, StoredPrefix, StoredRow
from headwater.disk.tiers_faults import Faults
from headwater.disk.tiers_pause import let_others_run

# Keys that are hashed and asked for at a time.
BATCH_ROWS = 256
MAX_CHILDREN = 64

_T = TypeVar("_T")
_P = ParamSpec("_P")


@runtime_checkable
class FirstBlocks(Protocol):
    """A store that can say who else has a prompt's beginning."""

    def identities_of_first_block(self, tokens: Sequence[int]) -> list[CacheIdentity]:
        """Under which identities ``tokens``, one full block, are kept as a first block."""
        ...


@dataclass(frozen=True, slots=True)
class Distrusted:
    """A record that is not what its key says: to be removed."""

    tier: Tier
    key: PrefixKey


@dataclass(frozen=True, slots=True)
class _Source:
    tier: Tier
    store: RecordStore
    first_blocks: FirstBlocks | None


class PrefixLook:
    """Looks in the tiers in the order in which they are given."""

    def __init__(
        self,
        stores: Sequence[tuple[Tier, RecordStore]],
        *,
        block_tokens: int,
        part_bytes: Callable[[KVPart], int],
        faults: Faults,
    ) -> None:
        self._sources = [
            _Source(tier, store, store if isinstance(store, FirstBlocks) else None)
            for tier, store in stores
        ]
        self._block_tokens = block_tokens
        self._part_bytes = {part: part_bytes(part) for part in KVPart}
        self._faults = faults

    def look(
        self, tokens: Sequence[int], identity: CacheIdentity, first_row: int
    ) -> tuple[StoredPrefix, list[Distrusted]]:
        """See ``core.ports.StoredPrefix``; never raises. Costs O(blocks of ``tokens``)."""
        return _Walk(
            self._sources, self._block_tokens, self._part_bytes, self._faults, tokens, identity
        ).run(first_row)


class _Walk:
    """One look. A store that fails is not asked again in it."""

    def __init__(
        self,
        sources: Sequence[_Source],
        block_tokens: int,
        part_bytes: dict[KVPart, int],
        faults: Faults,
        tokens: Sequence[int],
        identity: CacheIdentity,
    ) -> None:
        self._sources = list(sources)
        self._block_tokens = block_tokens
        self._part_bytes = part_bytes
        self._faults = faults
        self._tokens = tokens
        self._identity = identity
        self._distrusted: list[Distrusted] = []
        self._has_failed = False

    def run(self, first_row: int) -> tuple[StoredPrefix, list[Distrusted]]:
        rows: list[StoredRow] = []
        parent = self._identity.root_key()
        metas = self._row_metas(parent)
        skipped = first_row
        while skipped:
            passed = list(islice(metas, min(skipped, BATCH_ROWS)))
            if not passed:
                break
            skipped -= len(passed)
            parent = passed[-1].key
            if skipped:
                let_others_run()
        next_meta: RecordMeta | None = None
        while next_meta is None and (batch := list(islice(metas, BATCH_ROWS))):
            found = self._rows(batch)
            rows.extend(found)
            if found:
                parent = batch[len(found) - 1].key
            if len(found) < len(batch):
                next_meta = batch[len(found)]
            elif len(batch) == BATCH_ROWS:
                let_others_run()

        end = (first_row + len(rows)) * self._block_tokens
        tail, num_shared, goes_on = self._tail(parent, end)
        reason = self._reason(end, num_shared, goes_on, next_meta)
        prefix = StoredPrefix(
            first_row=first_row,
            rows=tuple(rows),
            tail=tail,
            num_tail_tokens=num_shared,
            reason=reason,
        )
        return prefix, self._distrusted

    # Rows

    def _row_metas(self, root: PrefixKey) -> Iterator[RecordMeta]:
        parent, start = root, 0
        for key, content in block_keys(root, self._tokens, self._block_tokens):
            yield RecordMeta(
                key=key,
                parent=parent,
                identity=self._identity,
                part=KVPart.GLOBAL,
                start=start,
                tokens=content,
            )
            parent, start = key, start + self._block_tokens

    def _rows(self, metas: Sequence[RecordMeta]) -> list[StoredRow]:
        """The rows that are there, up to the first that is not."""
        records: list[StoredRecord] = []
        for record in self._find(metas):
            if record is None:
                break
            records.append(record)
        windows = self._windows(metas[: len(records)])
        return [
            StoredRow(record=record, window=window)
            for record, window in zip(records, windows, strict=True)
        ]

    def _windows(self, metas: Sequence[RecordMeta]) -> list[StoredRecord | None]:
        if not self._part_bytes[KVPart.WINDOW]:
            return [None] * len(metas)
        return self._find([window_meta(meta) for meta in metas])

    def _find(self, metas: Sequence[RecordMeta]) -> list[StoredRecord | None]:
        """Each record from the first tier that has it."""
        found: list[StoredRecord | None] = [None] * len(metas)
        for source in list(self._sources):
            wanted = [i for i, record in enumerate(found) if record is None]
            if not wanted:
                break
            keys = [metas[i].key for i in wanted]
            records = self._ask(source, source.store.find, keys)
            for i, record in zip(wanted, records or (), strict=False):
                if record is not None and self._is_true(source.tier, record, metas[i]):
                    found[i] = record
        return found

    def _is_true(self, tier: Tier, record: StoredRecord, meta: RecordMeta) -> bool:
        if record.meta == meta and record.num_bytes == self._part_bytes[meta.part]:
            return True
        self._distrusted.append(Distrusted(tier, meta.key))
        self._faults.count(tier, "use a record", "it is not what its key says")
        return False

    # The place after them

    def _tail(self, parent: PrefixKey, start: int) -> tuple[StoredRow | None, int, bool]:
        """The record that shares most tokens with ``tokens[start:]``, how many those are,
        and whether some record that shares so many goes on with another token."""
        rest = self._tokens[start : start + self._block_tokens]
        best: StoredRecord | None = None
        num_best, goes_on = 0, False
        if start >= len(self._tokens) - 1:
            return None, 0, False
        for source in list(self._sources):
            children = self._ask(source, source.store.children, parent, MAX_CHILDREN)
            for child in children or ():
                meta = child.meta
                num_shared = _num_shared(meta.tokens, rest)
                if num_shared < num_best or not self._is_child(child, parent, start):
                    continue
                does_go_on = num_shared < min(len(meta.tokens), len(rest))
                if num_shared > num_best:
                    best, num_best, goes_on = child, num_shared, does_go_on
                else:
                    goes_on = goes_on or does_go_on
        if best is None:
            return None, 0, goes_on
        (window,) = self._windows([best.meta])
        return StoredRow(record=best, window=window), num_best, goes_on

    def _is_child(self, child: StoredRecord, parent: PrefixKey, start: int) -> bool:
        meta = child.meta
        return (
            meta.identity == self._identity
            and meta.part is KVPart.GLOBAL
            and meta.start == start
            and meta.parent == parent
            and meta.key == chain_key(parent, meta.tokens)
            and child.num_bytes == self._part_bytes[KVPart.GLOBAL]
        )

    def _reason(
        self, end: int, num_shared: int, goes_on: bool, next_meta: RecordMeta | None
    ) -> MissReason:
        if end + num_shared >= len(self._tokens) - 1:
            return MissReason.NONE
        if self._has_failed:
            return MissReason.UNAVAILABLE
        if next_meta is not None:
            reason = self._absence(next_meta.key)
            if reason is not MissReason.NEW:
                return reason
        # At the very start all that is kept begins with some other token: that is no news.
        if goes_on and end + num_shared > 0:
            return MissReason.DIFFERS
        if end + num_shared == 0 and next_meta is not None:
            return self._elsewhere(next_meta.tokens)
        return MissReason.UNAVAILABLE if self._has_failed else MissReason.NEW

    def _absence(self, key: PrefixKey) -> MissReason:
        # The slowest tier keeps longest, so its answer is the better one.
        for source in reversed(self._sources[:]):
            reason = self._ask(source, source.store.absence, key)
            if reason is not None and reason is not MissReason.NEW:
                return reason
        return MissReason.UNAVAILABLE if self._has_failed else MissReason.NEW

    def _elsewhere(self, first_block: Sequence[int]) -> MissReason:
        """Whether other weights or another tenant have the first block."""
        others: list[CacheIdentity] = []
        for source in list(self._sources):
            if source.first_blocks is not None:
                ask = source.first_blocks.identities_of_first_block
                others += self._ask(source, ask, first_block) or ()
        if any(
            other.tenant == self._identity.tenant and other != self._identity for other in others
        ):
            return MissReason.OTHER_MODEL
        if any(other.tenant != self._identity.tenant for other in others):
            return MissReason.OTHER_TENANT
        return MissReason.UNAVAILABLE if self._has_failed else MissReason.NEW

    def _ask(
        self, source: _Source, question: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T | None:
        """The store's answer, or None when it could not be had."""
        try:
            return question(*args, **kwargs)
        except Exception as error:
            self._faults.count(source.tier, "look", error)
            self._has_failed = True
            self._sources = [other for other in self._sources if other is not source]
            return None


def window_meta(meta: RecordMeta) -> RecordMeta:
    """The window part's record of the block whose global part is ``meta``."""
    return replace(
        meta,
        key=part_key(meta.key, KVPart.WINDOW),
        parent=part_key(meta.parent, KVPart.WINDOW),
        part=KVPart.WINDOW,
    )


def _num_shared(ours: Iterable[int], theirs: Iterable[int]) -> int:
    num = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        num += 1
    return num
