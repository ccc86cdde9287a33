"""What one worker does with KV that it did not just compute: finds, copies, loads, keeps it.

    enter --> (looking) --> waiting: plan_hit --admitted--> begin --> (loading) --> settle
                               ^                                          |
                               +------ too slow, failed: device only -----+

Joins kv's plans with the tiers beyond the device; without tiers, and without a memory
to copy in, there is only what whole shared blocks give. Knows choices, no steps and no
tensors. ``scheduler`` calls it, from its one thread; nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headwater.core.blocks import CacheIdentity, PrefixKey
from headwater.core.cache import (
    CacheReport,
    KVPart,
    MissReason,
    StoredRecord,
    StoreStats,
    Tier,
    WindowKV,
    part_key,
)
from headwater.core.control import WorkerLoad
from headwater.core.errors import ConfigError
from headwater.core.ports import BlockMemory, Clock, KVTiers, Load
from headwater.core.request import FinishReason
from headwater.kv.hit_plan import HitPlan, LoadedRow, RowSource, aligned_down, plan_hit
from headwater.kv.manager import KVManager, Lease
from headwater.kv.prefix_index import PrefixEntry
from headwater.kv.probe import Probe
from headwater.worker.choice import Choice
from headwater.worker.keeper import Keeper
from headwater.worker.load_policy import is_worth_loading
from headwater.worker.loads import EndedLoad, Loads
from headwater.worker.lookups import Lookups
from headwater.worker.pace import PrefillPace

# How long ``close`` goes on storing what was published last.
CLOSE_LIMIT_S = 1.5
# Blocks that are on their way for no longer than this are about to come back.
SOON_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """The tiers beyond the device and what goes with them; ``app`` hands them in."""

    memory: BlockMemory
    clock: Clock
    tiers: KVTiers | None = None
    window_kv: WindowKV = WindowKV.CHECKPOINT


class Tiering:
    """One per scheduler."""

    def __init__(
        self,
        kv: KVManager,
        parts: TierParts | None = None,
        decoder_replay_tokens: int | None = None,
    ) -> None:
        """``decoder_replay_tokens``: as in ``ModelInfo``. Raises ConfigError for it without
        ``parts``: hits are computed on in copies then."""
        if parts is None and decoder_replay_tokens is not None:
            raise ConfigError("decoder replay needs a memory to copy blocks in")
        self._kv = kv
        self._replay_tokens = decoder_replay_tokens or 0
        self._parts = parts
        self._window_kv = WindowKV.CHECKPOINT if parts is None else parts.window_kv
        self.pace = PrefillPace()
        self._lookups: Lookups | None = None
        self._loads: Loads | None = None
        self._keeper: Keeper | None = None
        if parts is not None:
            self._loads = Loads(kv, self.pace, parts.clock)
        if parts is not None and parts.tiers is not None:
            self._lookups = Lookups(parts.tiers, parts.clock)
            self._keeper = Keeper(
                kv,
                parts.tiers,
                parts.clock,
                keeps_windows=kv.window_tokens is not None
                and parts.window_kv is WindowKV.CHECKPOINT,
            )
        self._hit_tokens: Counter[Tier] = Counter()
        self._num_replayed_tokens = 0
        self._misses: Counter[MissReason] = Counter()

    # What others wait for

    @property
    def num_looking(self) -> int:
        return 0 if self._lookups is None else len(self._lookups)

    @property
    def num_loading(self) -> int:
        return 0 if self._loads is None else len(self._loads)

    @property
    def is_keeping(self) -> bool:
        """Whether copies run or wait, or blocks of dead loads have yet to come back."""
        return (self._keeper is not None and self._keeper.is_busy) or (
            self._loads is not None and self._loads.has_holders
        )

    @property
    def num_soon_blocks(self) -> int:
        """Blocks that will come back without anybody giving way: copied out, or of dead loads.
        What takes long is not counted on: a store may hang."""
        if self._parts is None or self._loads is None:
            return 0
        start_s = self._parts.clock.now_s() - SOON_S
        num_pinned = 0 if self._keeper is None else self._keeper.num_pinned_since(start_s)
        return num_pinned + self._loads.num_held_since(start_s)

    # Looking

    def enter(self, choice: Choice, identity: CacheIdentity) -> bool:
        """``choice`` is about to wait. True: it first waits for a look at the tiers."""
        search = choice.search
        if self._lookups is None or search.reason is not None or choice.wants_prompt_scores:
            return False
        if search.is_from_peer:
            return False
        choice.probe = self._probe(choice, identity)
        alone = self._planned(choice, with_stored=False)
        most_tokens = aligned_down(choice.probe.limit_tokens, self._kv.group.alignment)
        if choice.group.late_start is not None:
            most_tokens = min(most_tokens, choice.group.late_start)
        if most_tokens < self._kv.group.block_tokens:  # never a hit
            return False
        if alone.computed_from == most_tokens:
            return False
        # A device row may lack its window part, which a tier may have.
        first_row = len(choice.probe.hits) if self._kv.window_tokens is None else 0
        return self._lookups.start(choice, identity, first_row)

    def look_again(self, choice: Choice, identity: CacheIdentity) -> bool:
        """True: the device evicted what the tiers' answer was to continue; it waits for
        another look, at all of it: that cannot happen twice."""
        stored = choice.search.stored
        if self._lookups is None or stored is None:
            return False
        choice.probe = self._probe(choice, identity)
        if len(choice.probe.hits) >= stored.first_row:
            return False
        return self._lookups.start(choice, identity, 0)

    def take_looked(self) -> list[Choice]:
        return [] if self._lookups is None else self._lookups.take_done()

    # Planning

    def plan_hit(self, choice: Choice, identity: CacheIdentity) -> HitPlan:
        """What ``choice`` would hit if it started now. Also sets ``choice.hit``."""
        choice.probe = self._probe(choice, identity)
        search = choice.search
        hit = self._planned(choice, with_stored=True)
        search.is_slow = False
        tiers = None if self._parts is None or search.is_from_peer else self._parts.tiers
        if tiers is not None and _loaded_rows(hit):
            alone = self._planned(choice, with_stored=False)
            load_s = tiers.predicted_load_s(_records(hit))
            if not is_worth_loading(load_s, _num_saved(hit, alone), self.pace.tokens_per_s):
                search.is_slow = True
                hit = alone
        choice.hit = hit
        return hit

    def _probe(self, choice: Choice, identity: CacheIdentity) -> Probe:
        return self._kv.probe(
            choice.sequence.tokens,
            identity,
            max_hit_tokens=choice.max_hit_tokens,
            earlier=choice.probe,
        )

    def _planned(self, choice: Choice, *, with_stored: bool) -> HitPlan:
        probe = choice.probe
        assert probe is not None
        if self._parts is None:  # nothing to copy with: whole blocks only
            probe = replace(probe, tail=None, num_tail_tokens=0)
        return plan_hit(
            probe,
            choice.search.stored if with_stored else None,
            block_tokens=self._kv.group.block_tokens,
            window_tokens=self._kv.window_tokens,
            window_kv=self._window_kv,
            limit_tokens=probe.limit_tokens,
            alignment=self._kv.group.alignment,
            restart_tokens=choice.group.late_start,
        )

    # Starting

    def begin(self, choice: Choice, lease: Lease, hit: HitPlan, load: Load | None) -> bool:
        """Make the lease's copies, start its loads: ``load`` is of a peer and has begun. True:
        it has to wait for them."""
        for source, target in lease.copies:
            assert self._parts is not None
            self._parts.memory.copy(source, target)
        if not lease.loads:
            return False
        assert self._loads is not None
        num_saved: int | None = None
        if load is None:
            assert self._parts is not None
            assert self._parts.tiers is not None
            load = self._parts.tiers.load(lease.loads)
            num_saved = sum(row.num_tokens for row in _loaded_rows(hit)) - hit.num_replayed_tokens
            num_saved = max(num_saved, 1)
        self._loads.begin(choice, lease, hit, load, num_saved)
        return True

    def take_ended(self) -> list[EndedLoad]:
        """Loads that came, or that nobody waits for any more; the latter's choices must be
        planned again, from what the device has now."""
        if self._loads is None:
            return []
        ended = self._loads.take_ended()
        for end in ended:
            search = end.choice.search
            search.load_s += end.load_s
            self._note_loaded(end)
            if end.failure is not None:
                search.give_up(end.failure)
                for row in _complete_rows(end):
                    tier = row.row.record.tier
                    search.early_tokens[tier] = search.early_tokens.get(tier, 0) + row.num_tokens
        return ended

    def _note_loaded(self, end: EndedLoad) -> None:
        """What came from the disk need not be stored there again."""
        if self._keeper is None:
            return
        from_disk = {
            row.row.record.meta.key
            for row in _complete_rows(end)
            if row.row.record.tier is Tier.DISK
        }
        retention = end.choice.sequence.request.retention
        for move in end.lease.loads[: end.num_loaded]:
            if move.meta.key in from_disk:
                self._keeper.note_loaded(move.meta.key, move.block, retention)

    def settle(self, choice: Choice, hit: HitPlan) -> CacheReport:
        """The hit is there: what it was, counted once per request and kept from expiring."""
        self._renew(choice, hit)
        search = choice.search
        device, by_tier = hit.num_device_tokens, {
            Tier.HOST: hit.num_host_tokens, Tier.DISK: hit.num_disk_tokens,
        }  # fmt: skip
        for tier, num_tokens in search.early_tokens.items():
            moved = min(num_tokens, device)
            device -= moved
            by_tier[tier] += moved
        reason = self._reason(choice, hit)
        report = CacheReport(
            num_device_tokens=device,
            num_host_tokens=by_tier[Tier.HOST],
            num_disk_tokens=by_tier[Tier.DISK],
            num_replayed_tokens=hit.num_replayed_tokens,
            # Who else keeps the same text is not the caller's to know (C12).
            reason=MissReason.NEW if reason is MissReason.OTHER_TENANT else reason,
            load_s=search.load_s,
        )
        if not choice.group.is_prompt_counted:
            self._kv.count_prompt(
                hit.num_hit_tokens, choice.sequence.num_tokens - hit.num_hit_tokens
            )
            self._hit_tokens.update({Tier.DEVICE: device} | by_tier)
            self._num_replayed_tokens += hit.num_replayed_tokens
            if reason is not MissReason.NONE:
                self._misses[reason] += 1
        return report

    def _reason(self, choice: Choice, hit: HitPlan) -> MissReason:
        if choice.wants_prompt_scores:
            return MissReason.ASKED
        if hit.reason is MissReason.NONE:
            return hit.reason
        if choice.search.is_slow:
            return MissReason.SLOW
        return choice.search.reason or hit.reason

    def _renew(self, choice: Choice, hit: HitPlan) -> None:
        """A hit is a use: its records live on, and what of it is on no disk goes there."""
        retention = choice.sequence.request.retention
        if self._keeper is None or retention.keep_s <= 0 or not hit.sources:
            return
        keys = [_key(source) for source in hit.sources]
        if self._keeper.keeps_windows:
            first_row = self._first_window_row(hit.num_hit_tokens)
            keys += [part_key(key, KVPart.WINDOW) for key in keys[first_row:]]
        assert self._parts is not None
        assert self._parts.tiers is not None
        self._parts.tiers.touch(keys, retention)
        self._keeper.keep(self._kv.published(choice.sequence_id), retention)

    def _first_window_row(self, end: int) -> int:
        """The first row that a prompt which goes on at ``end`` sees through a window: from
        there, or from where its late layers begin."""
        assert self._kv.window_tokens is not None
        num_tokens = self._replay_tokens + self._kv.window_tokens
        return max(end - num_tokens + 1, 0) // self._kv.group.block_tokens

    def give_up_load(self, choice: Choice) -> None:
        """It ended or gave way while it was loading."""
        assert self._loads is not None
        self._loads.give_up(choice)

    def forget(self, choice: Choice) -> bool:
        """It ended while it waited for a look. False if it did not."""
        return self._lookups is not None and self._lookups.forget(choice)

    # Keeping

    def wrote(self, choice: Choice, old_end: int) -> None:
        """KV of [old_end, choice.num_written) was written: publish it, keep what is whole."""
        block_tokens = self._kv.group.block_tokens
        sequence, end = choice.sequence, choice.num_written
        retention = sequence.request.retention
        num_prompt = sequence.request.num_prompt_tokens
        if end // block_tokens > old_end // block_tokens:
            entries = self._kv.publish(choice.sequence_id, sequence.tokens, end)
            if self._keeper is not None:
                self._keeper.keep(entries, retention)
        if old_end < num_prompt <= end:
            if self._parts is not None and end == num_prompt:
                # On the device only: more tokens will be written behind it, and what it
                # is part of then is stored.
                choice.tail = self._kv.publish_tail(choice.sequence_id, sequence.tokens, end)
            self._keep_window(choice, self._kv.published(choice.sequence_id), num_prompt)

    def finish(self, choice: Choice, reason: FinishReason) -> None:
        """``choice`` is about to give its blocks back, and nothing more is written to them:
        the end of its output is a prefix unit, if it came to an output."""
        sequence, end = choice.sequence, choice.num_written
        num_prompt = sequence.request.num_prompt_tokens
        if self._parts is None or reason is FinishReason.FAILED or end < num_prompt:
            return
        tail = self._kv.publish_tail(choice.sequence_id, sequence.tokens, end)
        if self._keeper is None:
            return
        entries = self._kv.published(choice.sequence_id)
        if tail is None and choice.tail is not None and choice.tail.row == len(entries):
            tail = choice.tail  # nothing was written behind the end of the input
        if tail is not None:
            entries = (*entries, tail)
        # All of them: what another request published and keeps for itself only is a hole
        # in this one's chain.
        self._keeper.keep(entries, sequence.request.retention)
        self._keep_window(choice, entries, num_prompt)
        self._keep_window(choice, entries, end)

    def _keep_window(self, choice: Choice, entries: Sequence[PrefixEntry], end: int) -> None:
        """Rows of ``entries`` (from row 0) that a token at ``end`` sees through a window."""
        if self._keeper is not None and self._keeper.keeps_windows:
            last_row = (end - 1) // self._kv.group.block_tokens
            rows = entries[self._first_window_row(end) : last_row + 1]
            self._keeper.keep_windows(rows, choice.sequence.request.retention)

    def pump(self) -> None:
        """Go on with copies out of the device."""
        if self._keeper is not None:
            self._keeper.pump()

    def close(self) -> None:
        """Store what was published last, for a bounded time, and let go of the tiers."""
        if self._parts is None or self._parts.tiers is None:
            return
        assert self._keeper is not None
        self._keeper.drain(CLOSE_LIMIT_S)
        self._parts.tiers.close()

    # Telling

    def add_to(self, load: WorkerLoad) -> WorkerLoad:
        """``load`` with what only this file knows."""
        stats: tuple[StoreStats, ...] = ()
        if self._parts is not None and self._parts.tiers is not None:
            stats = self._parts.tiers.stats()
        return replace(
            load,
            num_loading=self.num_loading,
            num_host_hit_tokens=self._hit_tokens[Tier.HOST],
            num_disk_hit_tokens=self._hit_tokens[Tier.DISK],
            num_replayed_tokens=self._num_replayed_tokens,
            num_dropped_loads=0 if self._loads is None else self._loads.num_dropped,
            num_dropped_stores=0 if self._keeper is None else self._keeper.num_dropped,
            num_queued_stores=0 if self._keeper is None else self._keeper.num_queued,
            misses=tuple(sorted((str(reason), n) for reason, n in self._misses.items())),
            tiers=stats,
        )


def _loaded_rows(hit: HitPlan) -> list[LoadedRow]:
    return [source for source in hit.sources if isinstance(source, LoadedRow)]


def _records(hit: HitPlan) -> list[StoredRecord]:
    records = []
    for row in _loaded_rows(hit):
        records.append(row.row.record)
        if row.loads_window and row.row.window is not None:
            records.append(row.row.window)
    return records


def _complete_rows(end: EndedLoad) -> list[LoadedRow]:
    """The hit's loaded rows whose global part is among the moves that came."""
    came = {move.meta.key for move in end.lease.loads[: end.num_loaded]}
    return [row for row in _loaded_rows(end.hit) if row.row.record.meta.key in came]


def _num_saved(hit: HitPlan, other: HitPlan) -> int:
    """Tokens that ``hit`` leaves to compute fewer than ``other``."""
    return hit.computed_from - other.computed_from


def _key(source: RowSource) -> PrefixKey:
    return source.row.record.meta.key if isinstance(source, LoadedRow) else source.entry.key
