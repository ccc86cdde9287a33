"""What rooms need from each other, as protocols. ``app`` hands the parts in.

One contract suite per port runs over every implementation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headwater.core.blocks import BlockId, CacheIdentity, PrefixKey
from headwater.core.cache import (
    KVPart,
    MissReason,
    RecordMeta,
    Retention,
    StoredRecord,
    StoreStats,
)
from headwater.core.constraint import Constraint
from headwater.core.control import FromWorker, StepTiming, ToWorker, WorkerLoad
from headwater.core.fleet import Holding, Role
from headwater.core.request import ModelInfo, Request, SequenceOutput
from headwater.core.step import StepPlan, StepResult


class Clock(Protocol):
    """Monotonic seconds. Policies take one instead of reading the time."""

    def now_s(self) -> float: ...


class Engine(Protocol):
    """One device, one step. Needed by ``worker``, provided by ``engine``."""

    @property
    def info(self) -> ModelInfo: ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute ``plan``; results in the plan's order. Raises EngineFault; then the
        KV of the plan's rows from ``row.start`` on is undefined, everything else is intact."""
        ...


class BlockMemory(Protocol):
    """The bytes of a device's KV blocks. Needed by ``worker`` and ``disk``, provided by ``engine``.

    Where the host can address the device's memory, buffers are that memory itself; else
    they are staging buffers, copied when they are given back. Any thread may call it,
    for different blocks.
    """

    def part_bytes(self, part: KVPart) -> int:
        """Bytes of one block's ``part``; 0 when the model has no such layers."""
        ...

    def write_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        """Where to put a record's bytes, in order: contiguous, writable, format ``B``.
        Their sizes add up to ``part_bytes``. The block is not complete before ``written``."""
        ...

    def written(self, block: BlockId, part: KVPart) -> None:
        """All bytes are in the buffers: make them the block's."""
        ...

    def read_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        """The block's bytes, in the same order and sizes. Valid while nobody writes the block."""
        ...

    def copy(self, source: BlockId, target: BlockId) -> None:
        """All parts of ``source`` into ``target``. Only from the thread that runs steps."""
        ...


class RecordStore(Protocol):
    """KV records by name, kept beyond the device: the host tier, the disk tier.

    One contract suite runs over every implementation. Calls may block on the system and
    are never made on a step's thread. Threads may share it. What the system refuses
    (no space, input/output errors) never raises from ``put``, ``touch`` or ``remove``: it is
    counted, and the record is not there.
    """

    def find(self, keys: Sequence[PrefixKey]) -> list[StoredRecord | None]:
        """What is there under each key and not expired; the caller compares the meta."""
        ...

    def children(self, parent: PrefixKey, limit: int) -> list[StoredRecord]:
        """Up to ``limit`` records whose parent is ``parent``, the last used first."""
        ...

    def put(self, meta: RecordMeta, data: Sequence[memoryview], retention: Retention) -> bool:
        """Keep a copy of ``data`` unless the key is there already. True when it is there now,
        fully written. A tail whose tokens the new record begins with is dropped."""
        ...

    def read(self, meta: RecordMeta, into: Sequence[memoryview]) -> None:
        """Fill ``into``, whose sizes add up to the record's. Raises RecordLost when it is gone
        or any check fails (then it is dropped, and ``into`` is undefined)."""
        ...

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None:
        """They were used now: keep them for ``retention`` from now, never shorter than before."""
        ...

    def remove(self, keys: Sequence[PrefixKey]) -> None: ...

    def absence(self, key: PrefixKey) -> MissReason:
        """Why the key is not there: EXPIRED, EVICTED or DAMAGED if that is known, else NEW."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None:
        """Finish what was begun. Safe to call twice."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """One block of a prefix beyond the device, in the fastest tier that has it."""

    record: StoredRecord  # the global part
    window: StoredRecord | None = None  # the window part, where the model has one


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPrefix:
    """What the tiers beyond the device hold of some tokens, every meta compared.

    ``rows`` are full blocks from row ``first_row`` on, without a gap. ``tail`` continues
    them: a record of which the first ``num_tail_tokens`` (at least 1) are the tokens' own.
    ``reason`` is why it ends there.
    """

    first_row: int
    rows: tuple[StoredRow, ...] = ()
    tail: StoredRow | None = None
    num_tail_tokens: int = 0
    reason: MissReason = MissReason.NEW


@dataclass(frozen=True, slots=True)
class RecordMove:
    """One record between the device and a tier: ``block`` is its place on the device."""

    meta: RecordMeta
    block: BlockId


class Lookup(Protocol):
    """A look that was asked for."""

    @property
    def is_done(self) -> bool: ...

    def result(self) -> StoredPrefix:
        """Once done; never raises: a store that fails is an empty prefix with its reason."""
        ...


class Load(Protocol):
    """Records on their way to the device, in order. The loader owns their blocks until each
    is loaded or, after ``cancel``, until ``is_done``."""

    @property
    def num_loaded(self) -> int:
        """How many of the first moves are complete. Never goes back."""
        ...

    @property
    def is_done(self) -> bool:
        """Nothing will be written to any block any more: all loaded, failed or cancelled."""
        ...

    @property
    def failure(self) -> MissReason | None:
        """Why it ended before the last move."""
        ...

    def cancel(self) -> None:
        """Begin no further record. Those in progress end in their own time."""
        ...


class Store(Protocol):
    """Blocks on their way out of the device: not to be written before ``is_done``."""

    @property
    def is_done(self) -> bool: ...

    @property
    def failed(self) -> Sequence[RecordMove]:
        """Once done: moves whose records did not get there. They may be tried again."""
        ...


class KVTiers(Protocol):
    """The tiers beyond the device, as ``worker`` uses them: nothing here waits.

    Work is done in threads of its own: reads first, then removals, then writes.
    """

    def look(self, tokens: Sequence[int], identity: CacheIdentity, first_row: int) -> Lookup:
        """What of ``tokens`` is kept from row ``first_row`` on; the device has those before."""
        ...

    def load(self, moves: Sequence[RecordMove]) -> Load: ...

    def predicted_load_s(self, records: Sequence[StoredRecord]) -> float:
        """Seconds until they would all be loaded, from what loads took so far and the queue."""
        ...

    def demote(self, moves: Sequence[RecordMove], retention: Retention) -> Store:
        """Copy blocks that are about to be evicted to the host tier."""
        ...

    def store(self, moves: Sequence[RecordMove], retention: Retention) -> Store:
        """Copy blocks to the disk tier, put-if-absent."""
        ...

    @property
    def num_queued_writes(self) -> int:
        """Moves of ``store`` and ``demote`` that are not done: the caller bounds them."""
        ...

    @property
    def has_host(self) -> bool: ...

    @property
    def has_disk(self) -> bool: ...

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None: ...

    def stats(self) -> tuple[StoreStats, ...]:
        """The last known numbers of each tier, without asking it."""
        ...

    def close(self) -> None:
        """Finish writes in the queue within a bounded time, and let go of everything."""
        ...


class Matcher(Protocol):
    """How far one output has come in its grammar, and what may follow.

    Needed by ``worker``, provided by ``recipe``. The same object for the whole life of
    an output, preemptions included; used from one thread at a time.
    """

    def allowed_bits(self) -> bytes:
        """The ids that may come next: bit ``i % 8`` of byte ``i // 8`` is id i, in whole
        32-bit words. End ids are among them where the output may stop. Raises
        InvalidRequest when the grammar needs more work here than its limits allow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on with ``token_id``. False, with nothing changed, if it may not come next."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the output may stop here."""
        ...

    @property
    def must_stop(self) -> bool:
        """Whether nothing but an end id may follow."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Forget the last ``num_tokens`` accepted ones: drafts that the model did not take."""
        ...

    def fork(self) -> Matcher:
        """An independent matcher at the same place."""
        ...


MatcherFactory = Callable[[], Matcher]  # a matcher at the start of its grammar


class ConstraintCompiler(Protocol):
    """Makes matchers of constraints. May take long: never called on a step's thread."""

    def compile(self, constraint: Constraint) -> MatcherFactory:
        """Raises InvalidRequest saying what is wrong with the schema, regex or grammar."""
        ...

    @property
    def num_cached_grammars(self) -> int: ...


class WorkerPort(Protocol):
    """The worker's end of its channel to the front."""

    def receive(self, timeout_s: float) -> Sequence[ToWorker]:
        """All messages that are there; waits up to ``timeout_s`` for the first. 0 never waits."""
        ...

    def send(self, message: FromWorker) -> None:
        """Never blocks for long: the front drains as fast as it can."""
        ...


class WorkerChannel(Protocol):
    """The front's end of the channel to one worker."""

    async def send(self, message: ToWorker) -> None:
        """Raises WorkerLost when the worker is gone."""
        ...

    def messages(self) -> AsyncIterator[FromWorker]:
        """Messages in order; raises WorkerLost at once when the worker dies. One reader."""
        ...

    async def close(self) -> None:
        """End the worker and release the channel; safe to call twice."""
        ...


class WorkerLauncher(Protocol):
    """Starts workers for ``router``: local processes, threads in tests, a cluster later."""

    async def launch(self, role: Role = Role.BOTH) -> WorkerChannel:
        """A channel to a fresh worker of ``role``, whose first message will be Hello.

        Raises WorkerLost when none could be started."""
        ...


class WorkerState(StrEnum):
    """Where a worker is in its life, as the router sees it."""

    STARTING = "starting"  # launched, its Hello has not come
    UP = "up"
    STUCK = "stuck"  # has work and says nothing
    DOWN = "down"  # lost; another is started after a pause
    REFUSED = "refused"  # serves something else than the others: not started again


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker of the fleet. Seconds count from the front's start, over restarts."""

    worker_id: str
    role: Role
    state: WorkerState
    reason: str = ""  # why it is not up
    load: WorkerLoad | None = None
    num_restarts: int = 0
    num_in_flight: int = 0  # requests that it holds a part of
    queue_s: float = 0.0  # predicted seconds of the prompts it was given and has not computed
    up_s: float = 0.0
    prefill_s: float = 0.0  # seconds of its steps that went into prompts
    decode_s: float = 0.0  # and into output
    acting: Role = Role.BOTH  # what a BOTH worker is used for now
    holds: Holding = Holding.ALL
    weights_bytes: int = 0  # that it holds, and of its model those that it does not; while it is up
    saved_weights_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketStatus:
    """Requests that wait in the front, of prompts with so many miss tokens."""

    max_miss_tokens: int | None  # below this; None: any
    num_waiting: int
    queue_s: float  # predicted seconds of their prompts
    oldest_s: float  # how long the first of them has waited


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTotals:
    """All handoffs since the front started, as the decode sides saw them."""

    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """``ready`` is the truth about taking a request now; ``reason`` says why not."""

    ready: bool
    reason: str
    num_in_flight: int  # requests accepted and not finished
    num_worker_restarts: int
    load: WorkerLoad | None  # of all workers together
    step_totals: StepTiming  # of all steps since the front started
    workers: tuple[WorkerStatus, ...] = ()
    buckets: tuple[BucketStatus, ...] = ()  # shortest prompts first
    handoffs: HandoffTotals = HandoffTotals()
    num_resumed: int = 0  # times that a request went on after its worker or handoff failed


class Generator(Protocol):
    """Where ``api`` sends requests; provided by ``router``."""

    @property
    def info(self) -> ModelInfo | None:
        """What is served; None until a worker said Hello."""
        ...

    def status(self) -> ServiceStatus: ...

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Outputs of all choices as they are committed, ending after the last finish.

        Raises Overloaded, NotReady or PromptTooLong at the first ``anext``, at once:
        a refusal never waits for work. Raises WorkerLost if workers die under it and no other
        can go on with it, NotReady if the service ends first. Closing the iterator
        (``aclose``) aborts whatever has not finished.
        """
        ...

    async def abort_choice(self, request: Request, index: int) -> None:
        """End one choice early (its stop string was seen); the others go on."""
        ...
