"""Who goes where now: the waiting requests, the books of all workers, and the policies.

    add -> [ buckets ] --next--> Placement -> settled, prefilled, grew -> ended
           [ again   ]  (those that lost their worker go first)

The service loop, the simulator and the bench call this one class. It reads no clock and
sends nothing: time comes in, placements go out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from headwater.core.blocks import CacheIdentity, blocks_for
from headwater.core.control import WorkerLoad
from headwater.core.cost import StepCost, StepShape
from headwater.core.errors import AuditError, ConfigError
from headwater.core.fleet import Holding, KVEvents, Role
from headwater.core.ports import BucketStatus
from headwater.core.request import ModelInfo, Request
from headwater.router.books import UNMEASURED, WorkerBook
from headwater.router.buckets import Buckets
from headwater.router.buckets_policy import BucketShares, wire_priority
from headwater.router.decode_policy import DecodeOption, choose_decode, has_room, needed_blocks
from headwater.router.prefill_policy import PrefillLimits, PrefillOption, choose_prefill
from headwater.router.prefix_map import PrefixMap, PromptKeys
from headwater.router.work_policy import PromptWork

RECENT_HALF_LIFE_S = 60.0
_FIRST_OUTPUT_TOKENS = 256.0  # expected of a request before any has finished
_OUTPUT_MEMORY = 0.02  # share of the newest in the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """``max_running_sequences`` of one worker; ``ahead_sequences`` more may wait in it, so
    that a place that gets free is taken at once."""

    shares: BucketShares = field(default_factory=BucketShares)
    prefill: PrefillLimits = field(default_factory=PrefillLimits)
    max_running_sequences: int = 64
    ahead_sequences: int = 8

    def __post_init__(self) -> None:
        if self.max_running_sequences < 1 or self.ahead_sequences < 0:
            raise ConfigError("router: max_running_sequences must be >= 1, ahead_sequences >= 0")


@dataclass(slots=True, kw_only=True, eq=False)
class Ask:
    """One request that waits for a place. ``key`` is never used twice."""

    key: str
    request: Request
    num_choices: int  # that still run
    num_resumed_tokens: int = 0  # longest output that was committed before
    avoid: frozenset[str] = frozenset()  # workers with which it failed
    prompt_keys: PromptKeys | None = None
    work: PromptWork | None = None
    bucket: int = 0
    hits: dict[str, int] = field(default_factory=dict)  # full blocks, by worker
    hits_version: int = -1

    @property
    def num_tokens(self) -> int:
        return self.request.num_prompt_tokens + self.num_resumed_tokens

    @property
    def is_one_piece(self) -> bool:
        """Who decodes must compute the prompt, too: its logprobs come with it."""
        return self.request.num_prompt_logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """``prefill_id`` computes the prompt for ``decode_id``; None: that does all by itself."""

    key: str
    decode_id: str
    prefill_id: str | None
    priority: int  # for who computes the prompt
    num_hit_tokens: int  # as known now


class Wait(Enum):
    """Why somebody cannot be placed now."""

    TURN = "turn"  # workers have enough prompts ahead of it
    ROOM = "room"  # no worker has blocks or places for it
    NOBODY = "nobody"  # no worker that is there could ever hold it


class Dispatcher:
    """One fleet that serves one model."""

    def __init__(self, info: ModelInfo, config: DispatchConfig) -> None:
        self._info = info
        self._config = config
        self._max_active = config.max_running_sequences + config.ahead_sequences
        self._buckets = Buckets(info.context_tokens, config.shares)
        self._asks: dict[str, Ask] = {}  # waiting
        self._again: dict[str, None] = {}  # of them, those that lost their worker; in order
        self._books: dict[str, WorkerBook] = {}
        self._pools: dict[Role, list[WorkerBook]] = {role: [] for role in Role}
        self._shut: set[str] = set()  # workers that get nothing new
        self._map = PrefixMap()
        self._faded_s: float | None = None
        self._mean_output = _FIRST_OUTPUT_TOKENS

    # Workers

    @property
    def books(self) -> dict[str, WorkerBook]:
        return self._books

    def join(
        self, worker_id: str, role: Role, info: ModelInfo, now_s: float, *,
        takes_kv: bool = True, holds: Holding = Holding.ALL,
    ) -> None:  # fmt: skip
        """``takes_kv``: whether another worker can hand KV over to it."""
        book = WorkerBook(
            worker_id, role, info.num_blocks, info.block_tokens,
            acting=role, acting_since_s=now_s, takes_kv=takes_kv, holds=holds,
        )  # fmt: skip
        # One that comes late is not owed the work that the others did before.
        book.recent_s = min((b.recent_s for b in self._books.values()), default=0.0)
        self._books[worker_id] = book
        self._sort_pools()

    def leave(self, worker_id: str) -> None:
        """It is gone, and with it what it was given and what it held."""
        self._books.pop(worker_id, None)
        self._shut.discard(worker_id)
        self._map.drop(worker_id)
        self._sort_pools()
        if not self.can_serve():
            for book in self._books.values():
                book.acting = book.role  # who can do both does both while somebody is missing
            self._sort_pools()

    def act_as(self, worker_id: str, acting: Role, now_s: float) -> None:
        self._books[worker_id].act_as(acting, now_s)
        self._sort_pools()

    def shut(self, worker_id: str, is_shut: bool) -> None:
        """Give a worker nothing new while ``is_shut``."""
        if is_shut != (worker_id in self._shut) and worker_id in self._books:
            (self._shut.add if is_shut else self._shut.discard)(worker_id)
            self._sort_pools()

    def can_serve(self) -> bool:
        """Whether there is a worker for every part of a request."""
        return bool(
            self._pools[Role.BOTH] or (self._pools[Role.PREFILL] and self._pools[Role.DECODE])
        )

    def fleet_info(self) -> ModelInfo:
        """What is served, with the blocks that one request can have: the largest pool of those
        that decode, and of those that compute prompts where these are others."""
        most = {
            role: max((book.num_blocks for book in pool), default=0)
            for role, pool in self._pools.items()
        }
        num_blocks = max(most[Role.BOTH], min(most[Role.PREFILL], most[Role.DECODE]))
        return replace(self._info, num_blocks=num_blocks)

    def told(self, worker_id: str, load: WorkerLoad) -> None:
        self._books[worker_id].told(load)

    def learned(self, worker_id: str, events: KVEvents) -> None:
        self._map.apply(worker_id, events)

    # Requests that wait

    @property
    def has_waiting(self) -> bool:
        return bool(self._asks)

    @property
    def queue_s(self) -> float:
        """Predicted seconds of prompts that nobody has computed, in the front and in workers."""
        return self._buckets.queue_s + sum(book.queue_s for book in self._books.values())

    @property
    def shared_queue_s(self) -> float:
        """Of them, those that are not a decode worker's own part of a prompt."""
        decoders = (book for book in self._books.values() if book.acting is Role.DECODE)
        return self.queue_s - sum(book.queue_s for book in decoders)

    def add(self, ask: Ask, now_s: float) -> None:
        self._look(ask)
        num_hit = self._most_hit_tokens(ask)
        ask.bucket = self._buckets.bucket_of(ask.num_tokens - num_hit)
        self._asks[ask.key] = ask
        self._buckets.add(
            ask.key,
            ask.bucket,
            tenant=ask.request.tenant,
            priority=ask.request.priority,
            cost_s=self._usual_cost().predict_s(self._usual_work(ask, num_hit)),
            now_s=now_s,
        )

    def add_again(self, ask: Ask) -> None:
        """It had its turn already: it goes before all that have not."""
        self._asks[ask.key] = ask
        self._again[ask.key] = None

    def remove(self, key: str) -> None:
        """It waits no longer; unknown keys do not wait."""
        ask = self._asks.pop(key, None)
        if ask is None:
            return
        if key in self._again:
            del self._again[key]
        else:
            self._buckets.remove(ask.bucket, key)

    def next(self, now_s: float) -> Placement | None:
        """Place one request, as sent by now. None: nobody can be placed now."""
        if not self._asks:
            return None
        self._fade(now_s)
        if self._again:
            ask = self._asks[next(iter(self._again))]
            placement = self._place(ask, now_s, is_late=True)
            if isinstance(placement, Placement):
                del self._again[ask.key], self._asks[ask.key]
                return placement
            if placement is not Wait.NOBODY:
                return None  # nobody overtakes it
        heads = self._buckets.heads(now_s)
        overdue_s = self._config.shares.overdue_s
        _, oldest, waited_s = max(heads, key=lambda head: head[2], default=(0, "", 0.0))
        if waited_s > overdue_s and self._lacks_room(self._asks[oldest]):
            return None  # no room is given away until it has what it needs
        for bucket, key, waited_s in heads:
            placement = self._place(self._asks[key], now_s, is_late=waited_s > overdue_s)
            if isinstance(placement, Placement):
                self._buckets.serve(bucket, key, now_s)
                del self._asks[key]
                return placement
        return None

    def buckets(self, now_s: float) -> tuple[BucketStatus, ...]:
        return self._buckets.status(now_s)

    # Requests that are placed

    def computed(self, worker_id: str, num_tokens: int) -> None:
        self._books[worker_id].computed(num_tokens)

    def arrived(self, worker_id: str, key: str) -> None:
        self._books[worker_id].arrived(key)

    def settled(self, worker_id: str, key: str) -> None:
        self._books[worker_id].settled(key)

    def prefilled(self, worker_id: str, key: str) -> None:
        self._books[worker_id].prefilled(key)

    def grew(self, worker_id: str, key: str, num_tokens: int) -> None:
        self._books[worker_id].grew(key, num_tokens)

    def ended(self, worker_id: str, key: str) -> None:
        """Unknown workers and keys are ignored: they are gone already."""
        if worker_id in self._books:
            self._books[worker_id].ended(key)

    def finished(self, num_output_tokens: int) -> None:
        """A choice ended with so much output: what to expect of others."""
        self._mean_output += _OUTPUT_MEMORY * (num_output_tokens - self._mean_output)

    def audit(self, placed: set[tuple[str, str]], waiting: set[str]) -> None:
        """Raises AuditError unless exactly these (worker, key) are booked and these wait."""
        booked = {(book.worker_id, key) for book in self._books.values() for key in book.parts}
        if booked != placed:
            raise AuditError(f"{len(booked ^ placed)} parts of requests are booked wrongly")
        if set(self._asks) != waiting or len(self._buckets) + len(self._again) != len(waiting):
            raise AuditError("who waits is not who is known to wait")
        for book in self._books.values():
            book.audit()

    # Placing

    def _place(self, ask: Ask, now_s: float, *, is_late: bool) -> Placement | Wait:
        self._look(ask)
        order = wire_priority(ask.request.priority, ask.bucket)
        whole = self._pools[Role.BOTH]
        if ask.is_one_piece:
            whole = [*whole, *self._pools[Role.DECODE]]
        if whole:
            done = self._place_whole(ask, order, whole, now_s, is_late)
            if isinstance(done, Placement) or ask.is_one_piece or not self._pools[Role.PREFILL]:
                return done
        return self._place_split(ask, order, now_s, is_late)

    def _place_whole(
        self, ask: Ask, order: int, pool: Sequence[WorkerBook], now_s: float, is_late: bool
    ) -> Placement | Wait:
        needs = self._roomy(ask, pool)
        if not needs:
            return Wait.ROOM if self._could_hold(ask, pool) else Wait.NOBODY
        work, books = self._work(ask), [book for book, _ in needs]
        chosen = self._choose_prefill(ask, order, books, work.alone, now_s, is_late)
        if chosen is None:
            return Wait.TURN
        book, needed = next(n for n in needs if n[0].worker_id == chosen.worker_id)
        num_hit = self._hit_tokens(ask, book)
        decode_s = self._growth_tokens(ask) * ask.num_choices * (
            book.cost.token_s + book.cost.sequence_s
        )  # fmt: skip
        book.give(
            ask.key, order, now_s, num_sequences=ask.num_choices,
            num_tokens=work.alone(num_hit).num_tokens, compute_s=chosen.compute_s,
            num_blocks=needed, num_growth_blocks=self._growth_blocks(ask),
            work_s=chosen.compute_s + decode_s,
        )  # fmt: skip
        return Placement(
            key=ask.key, decode_id=book.worker_id, prefill_id=None, priority=order,
            num_hit_tokens=num_hit,
        )  # fmt: skip

    def _place_split(self, ask: Ask, order: int, now_s: float, is_late: bool) -> Placement | Wait:
        pool = self._pools[Role.DECODE]
        needs = self._roomy(ask, pool)
        to = choose_decode([self._decode_option(ask, book, needed) for book, needed in needs])
        if to is None:
            return Wait.ROOM if self._could_hold(ask, pool) else Wait.NOBODY
        decoder, needed = next(n for n in needs if n[0].worker_id == to.worker_id)
        work, block_tokens = self._work(ask), self._info.block_tokens
        if not work.is_worth_handing_over(self._hit_tokens(ask, decoder), block_tokens):
            return self._place_whole(ask, order, [decoder], now_s, is_late)
        num_least = blocks_for(work.num_handed, block_tokens)
        pool = [b for b in self._pools[Role.PREFILL] if b.num_blocks >= num_least]
        by = self._choose_prefill(ask, order, pool, work.prefill, now_s, is_late)
        if by is None:
            return Wait.TURN
        prefiller = self._books[by.worker_id]
        num_hit = self._hit_tokens(ask, prefiller)
        prefiller.give(
            ask.key, order, now_s, num_sequences=0,
            num_tokens=work.prefill(num_hit).num_tokens, compute_s=by.compute_s,
            num_blocks=0, num_growth_blocks=0, work_s=by.compute_s,
        )  # fmt: skip
        rest = work.decode()
        rest_s = decoder.cost.predict_s(rest) if rest.num_tokens else 0.0
        decoder.give(  # its length gives it no place behind others, see ``submits``
            ask.key, wire_priority(ask.request.priority, 0), now_s, num_sequences=ask.num_choices,
            num_tokens=rest.num_tokens, compute_s=rest_s, num_blocks=needed,
            num_growth_blocks=self._growth_blocks(ask), work_s=rest_s, awaits_kv=True,
        )  # fmt: skip
        return Placement(
            key=ask.key, decode_id=to.worker_id, prefill_id=by.worker_id, priority=order,
            num_hit_tokens=num_hit,
        )  # fmt: skip

    def _roomy(self, ask: Ask, pool: Sequence[WorkerBook]) -> list[tuple[WorkerBook, int]]:
        """Workers that can take it to the end, and the blocks that it needs of each."""
        # These two loops over the workers are most of what a decision costs.
        block_tokens, num_tokens = self._info.block_tokens, ask.num_tokens
        num_least = blocks_for(num_tokens + 1, block_tokens)
        num_shared = num_tokens // block_tokens
        num_cold = needed_blocks(
            num_tokens=num_tokens,
            num_growth_tokens=self._growth_tokens(ask),
            num_choices=ask.num_choices,
            num_hit_blocks=0,
            block_tokens=block_tokens,
        )
        hits, num_new = ask.hits, ask.num_choices
        roomy = []
        for book in self._preferred(ask, pool):
            num_needed = num_cold - min(hits.get(book.worker_id, 0), num_shared)
            if num_least <= book.num_blocks and has_room(
                num_blocks=book.num_blocks,
                num_taken_blocks=book.num_held_blocks + book.num_promised_blocks,
                num_needed_blocks=num_needed,
                num_active=book.num_active,
                num_new=num_new,
                max_active=self._max_active,
            ):
                roomy.append((book, num_needed))
        return roomy

    def _lacks_room(self, ask: Ask) -> bool:
        """Whether some worker could hold it, and none can now."""
        self._look(ask)
        pool = [*self._pools[Role.BOTH], *self._pools[Role.DECODE]]
        return not self._roomy(ask, pool) and self._could_hold(ask, pool)

    def _could_hold(self, ask: Ask, pool: Sequence[WorkerBook]) -> bool:
        num_least = blocks_for(ask.num_tokens + 1, self._info.block_tokens)
        return any(num_least <= book.num_blocks for book in pool)

    def _decode_option(self, ask: Ask, book: WorkerBook, num_needed: int) -> DecodeOption:
        num_active = book.num_active + ask.num_choices
        cost = book.cost
        return DecodeOption(
            book.worker_id,
            book.num_blocks,
            book.num_held_blocks + book.num_promised_blocks + num_needed,
            num_active,
            self._max_active,
            cost.base_s + num_active * (cost.token_s + cost.sequence_s),
        )

    def _choose_prefill(
        self, ask: Ask, order: int, pool: Sequence[WorkerBook],
        work: Callable[[int], StepShape], now_s: float, is_late: bool,
    ) -> PrefillOption | None:  # fmt: skip
        """``work(num_hit)`` is what a worker with such a hit would have to compute."""
        limits = self._config.prefill
        hits = {} if ask.is_one_piece else ask.hits
        shapes: dict[int, StepShape] = {}
        options = []
        for book in self._preferred(ask, pool):
            num_hit_blocks = hits.get(book.worker_id, 0)
            shape = shapes.get(num_hit_blocks)
            if shape is None:
                shape = shapes[num_hit_blocks] = work(num_hit_blocks * self._info.block_tokens)
            compute_s = book.cost.predict_s(shape)
            ahead_s = book.ahead_s(order)
            is_open = ahead_s < limits.max_ahead_s and book.may_be_passed(
                order, compute_s, now_s, limits
            )
            options.append(
                PrefillOption(book.worker_id, ahead_s, compute_s, book.recent_s, is_open)
            )
        return choose_prefill(options, limits, may_wait=not is_late)

    def _preferred(self, ask: Ask, pool: Sequence[WorkerBook]) -> Sequence[WorkerBook]:
        if not ask.avoid:
            return pool
        return [book for book in pool if book.worker_id not in ask.avoid] or pool

    # What is expected

    def _growth_tokens(self, ask: Ask) -> int:
        left = ask.request.stop.max_output_tokens - ask.num_resumed_tokens
        return max(min(left, round(self._mean_output)), 0)

    def _growth_blocks(self, ask: Ask) -> int:
        return ask.num_choices * (self._growth_tokens(ask) // self._info.block_tokens)

    def _look(self, ask: Ask) -> None:
        if ask.hits_version == self._map.version:
            return
        if ask.prompt_keys is None:
            identity = CacheIdentity(self._info.fingerprint, self._info.layout, ask.request.tenant)
            ask.prompt_keys = PromptKeys(
                identity, ask.request.prompt_tokens, self._info.block_tokens
            )
        ask.hits = self._map.lookup(ask.prompt_keys)
        ask.hits_version = self._map.version

    def _hit_tokens(self, ask: Ask, book: WorkerBook) -> int:
        if ask.is_one_piece:
            return 0  # its prompt is computed whole
        return ask.hits.get(book.worker_id, 0) * self._info.block_tokens

    def _most_hit_tokens(self, ask: Ask) -> int:
        if ask.is_one_piece:
            return 0
        return max(ask.hits.values(), default=0) * self._info.block_tokens

    def _work(self, ask: Ask) -> PromptWork:
        if ask.work is None:
            ask.work = PromptWork.of(ask.request, ask.num_resumed_tokens, self._info)
        return ask.work

    def _usual_work(self, ask: Ask, num_hit: int) -> StepShape:
        is_split = bool(self._pools[Role.PREFILL]) and not self._pools[Role.BOTH]
        return self._work(ask).usual(num_hit, self._info.block_tokens, is_split=is_split)

    def _usual_cost(self) -> StepCost:
        """Of one that computes prompts, where there is one."""
        books = self._books.values()
        book = min(books, key=lambda book: book.acting is Role.DECODE, default=None)
        return book.cost if book is not None else UNMEASURED

    def _fade(self, now_s: float) -> None:
        if self._faded_s is None:
            self._faded_s = now_s
        passed_s = now_s - self._faded_s
        if passed_s >= 1.0:
            self._faded_s = now_s
            factor = 0.5 ** (passed_s / RECENT_HALF_LIFE_S)
            for book in self._books.values():
                book.recent_s *= factor

    def _sort_pools(self) -> None:
        for role in Role:
            self._pools[role] = [
                book
                for worker_id, book in self._books.items()
                if book.acting is role and worker_id not in self._shut
            ]
