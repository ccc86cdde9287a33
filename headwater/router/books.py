"""What the router knows of one worker: what it was given and what it said of itself since.

A worker computes prompts in order of (wire priority, given first), so the tokens of each
step are booked against that order; what is left is the queue that a new prompt would be
behind. Knows counts and predicted seconds; no requests, no clock of its own.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from headwater.core.control import WorkerLoad
from headwater.core.cost import StepCost
from headwater.core.errors import AuditError, InvalidChange
from headwater.core.fleet import Holding, Role
from headwater.router.prefill_policy import PrefillLimits, may_pass

# Until a worker has measured itself: slow, so that little is in flight to it.
UNMEASURED = StepCost(base_s=0.01, token_s=5e-4, pair_s=2e-8, window_pair_s=2e-8, sequence_s=1e-3)


@dataclass(slots=True, kw_only=True)
class Part:
    """What one worker was given of one request."""

    key: str
    order: int  # wire priority
    number: int  # of the parts that the worker was given
    given_s: float
    num_sequences: int  # that it decodes; 0 for a prefill part
    num_tokens_left: int  # of the prompt, to be computed
    token_s: float  # predicted, for each of them
    num_promised_blocks: int  # not yet among those that the worker says it holds
    num_growth_blocks: int  # of them, for output to come
    num_block_tokens: int = 0  # output since the last block of growth was taken up
    passed_s: float = 0.0  # of prompts that were let pass this one
    is_settled: bool = False  # it has begun: its prompt's blocks are among those held
    awaits_kv: bool = False  # what is left of its prompt cannot be computed yet

    @property
    def place(self) -> tuple[int, int]:
        return self.order, self.number

    @property
    def seconds_left(self) -> float:
        return self.num_tokens_left * self.token_s


@dataclass(slots=True, eq=False)
class WorkerBook:
    """One worker's life: a restarted one gets a new book."""

    worker_id: str
    role: Role
    num_blocks: int
    block_tokens: int
    acting: Role  # what it is used for; differs from ``role`` for BOTH only
    acting_since_s: float = 0.0
    takes_kv: bool = True
    holds: Holding = Holding.ALL
    cost: StepCost = UNMEASURED
    parts: dict[str, Part] = field(default_factory=dict)
    num_active: int = 0  # sequences it decodes or will
    num_held_blocks: int = 0  # as it said last
    num_promised_blocks: int = 0
    recent_s: float = 0.0  # work given lately, fading
    _prompts: list[tuple[tuple[int, int], Part]] = field(default_factory=list)  # in its order
    _ahead_s: dict[int, float] = field(default_factory=dict)  # by wire priority
    _num_given: int = 0

    @property
    def queue_s(self) -> float:
        """Predicted seconds of all prompts that it has not computed."""
        return sum(self._ahead_s.values())

    def ahead_s(self, order: int) -> float:
        """Of those that a prompt of this wire priority would be behind."""
        ahead_s = 0.0  # a few priorities at most, and often none: no generator
        for other, seconds in self._ahead_s.items():
            if other <= order:
                ahead_s += seconds
        return ahead_s

    def may_be_passed(self, order: int, cost_s: float, now_s: float, limits: PrefillLimits) -> bool:
        """Whether those that such a prompt would go before have been passed little enough."""
        for _, part in reversed(self._prompts):
            if part.order <= order:
                break
            if not may_pass(part.passed_s, now_s - part.given_s, cost_s, limits):
                return False
        return True

    def give(
        self, key: str, order: int, now_s: float, *, num_sequences: int, num_tokens: int,
        compute_s: float, num_blocks: int, num_growth_blocks: int, work_s: float,
        awaits_kv: bool = False,
    ) -> None:  # fmt: skip
        """``num_tokens`` of the prompt take it ``compute_s``; ``work_s`` is all it will do.
        With ``awaits_kv`` nobody is behind them before ``arrived``."""
        part = Part(
            key=key, order=order, number=self._num_given, given_s=now_s,
            num_sequences=num_sequences, num_tokens_left=num_tokens,
            token_s=compute_s / num_tokens if num_tokens else 0.0,
            num_promised_blocks=num_blocks, num_growth_blocks=num_growth_blocks,
            awaits_kv=awaits_kv,
        )  # fmt: skip
        self._num_given += 1
        self.parts[key] = part
        self.num_active += num_sequences
        self.num_promised_blocks += num_blocks
        self.recent_s += work_s
        if not awaits_kv:
            self._line_up(part)

    def arrived(self, key: str) -> None:
        """What it waited for is there: from now on it is computed like others."""
        part = self.parts.get(key)
        if part is not None and part.awaits_kv:
            part.awaits_kv = False
            self._line_up(part)

    def _line_up(self, part: Part) -> None:
        if not part.num_tokens_left:
            return
        for _, other in reversed(self._prompts):
            if other.order <= part.order:
                break
            other.passed_s += part.seconds_left
        insort(self._prompts, (part.place, part), key=lambda item: item[0])
        self._ahead_s[part.order] = self._ahead_s.get(part.order, 0.0) + part.seconds_left

    def act_as(self, acting: Role, now_s: float) -> None:
        """Raises InvalidChange for a worker that does not hold what that takes."""
        if self.holds is not Holding.ALL and acting is not Role.PREFILL:
            raise InvalidChange(
                f"worker {self.worker_id}: {self.acting} with the {self.holds} part of the model "
                f"cannot become {acting}"
            )
        self.acting, self.acting_since_s = acting, now_s

    def told(self, load: WorkerLoad) -> None:
        self.num_held_blocks = load.num_held_blocks
        if load.cost is not None:
            self.cost = load.cost

    def computed(self, num_tokens: int) -> None:
        """A step computed so many prompt tokens."""
        for _, part in self._prompts:
            if num_tokens <= 0:
                break
            done = min(num_tokens, part.num_tokens_left)
            num_tokens -= done
            part.num_tokens_left -= done
            self._ahead_s[part.order] -= done * part.token_s

    def prefilled(self, key: str) -> None:
        """The prompt is computed, whatever was predicted."""
        part = self.parts.get(key)
        if part is None:
            return
        part.awaits_kv = False
        place = [index for index, (_, other) in enumerate(self._prompts) if other is part]
        for index in place:
            del self._prompts[index]
            self._ahead_s[part.order] -= part.seconds_left
            if all(other.order != part.order for _, other in self._prompts):
                del self._ahead_s[part.order]  # and the rounding with it
        part.num_tokens_left = 0

    def settled(self, key: str) -> None:
        """It has begun: the worker counts its blocks itself from now on, but for growth."""
        part = self.parts.get(key)
        if part is not None and not part.is_settled:
            part.is_settled = True
            self._unpromise(part, part.num_promised_blocks - part.num_growth_blocks)

    def grew(self, key: str, num_tokens: int) -> None:
        """Output was committed; blocks it grew into are among those held."""
        part = self.parts.get(key)
        if part is None or not part.num_growth_blocks:
            return
        part.num_block_tokens += num_tokens
        num_blocks = min(part.num_block_tokens // self.block_tokens, part.num_growth_blocks)
        if num_blocks:
            part.num_block_tokens -= num_blocks * self.block_tokens
            part.num_growth_blocks -= num_blocks
            self._unpromise(part, num_blocks)

    def ended(self, key: str) -> None:
        """The worker has nothing more of it; unknown keys have ended before."""
        self.prefilled(key)
        part = self.parts.pop(key, None)
        if part is not None:
            self.num_active -= part.num_sequences
            self._unpromise(part, part.num_promised_blocks)

    def audit(self) -> None:
        """Raises AuditError if the sums are not those of the parts."""
        parts = self.parts.values()
        if self.num_active != sum(part.num_sequences for part in parts):
            raise AuditError(f"worker {self.worker_id}: sequences do not add up")
        if self.num_promised_blocks != sum(part.num_promised_blocks for part in parts):
            raise AuditError(f"worker {self.worker_id}: promised blocks do not add up")
        if {part.key for _, part in self._prompts} - set(self.parts):
            raise AuditError(f"worker {self.worker_id}: a prompt is queued that has ended")

    def _unpromise(self, part: Part, num_blocks: int) -> None:
        part.num_promised_blocks -= num_blocks
        self.num_promised_blocks -= num_blocks
