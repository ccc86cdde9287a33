"""Control messages between the front process and a worker: one per engine step.

Plain frozen values; ``transfer`` gives them a wire form. Front to worker:
Submit, Abort, Stop. Worker to front: Hello (once), then one StepDone per step,
and one whenever something ended without a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.cache import StoreStats
from headwater.core.cost import StepCost
from headwater.core.fleet import (
    HandoffRef,
    HandoffReport,
    Holding,
    KVEvents,
    Phase,
    Resume,
    Role,
)
from headwater.core.request import ModelInfo, Request, RequestId, SequenceOutput
from headwater.core.tokenizer_source import TokenizerSource

PROTOCOL_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Compute ``phase`` of the request. With ``resume`` only those choices run, each from
    where it was; without, all of them from the prompt."""

    request: Request
    phase: Phase = Phase.WHOLE
    handoff: HandoffRef | None = None  # set exactly for PREFILL and DECODE
    resume: tuple[Resume, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop ``index`` of the request, or all its choices. Unknown ids are ignored:
    the request may just have finished."""

    request_id: RequestId
    index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the process after the step in progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker's queues and blocks after a step; everything a router or a metric needs."""

    num_waiting: int
    num_prefilling: int
    num_decoding: int
    num_free_blocks: int  # never used, or freed without a key
    num_cached_blocks: int  # hold a reusable prefix, evictable
    num_held_blocks: int
    num_steps: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_hit_tokens: int
    num_miss_tokens: int
    num_output_tokens: int
    num_cached_grammars: int = 0  # compiled output constraints
    num_loading: int = 0  # sequences that wait for KV from another tier
    num_host_hit_tokens: int = 0  # of num_hit_tokens
    num_disk_hit_tokens: int = 0  # of num_hit_tokens
    num_replayed_tokens: int = 0
    num_dropped_loads: int = 0  # given up because computing was faster
    num_dropped_stores: int = 0  # evicted from the device before they could be written
    num_queued_stores: int = 0
    misses: tuple[tuple[str, int], ...] = ()  # prompts by MissReason
    tiers: tuple[StoreStats, ...] = ()
    num_waiting_tokens: int = 0  # prompt tokens that have still to be computed, running ones too
    cost: StepCost | None = None  # as fitted by now; None while nothing was measured
    step_error: float | None = None  # median of |real / predicted - 1| over the last steps
    num_budgeted_steps: int = 0  # that ran while there was a time budget
    num_steps_within: int = 0  # of those, took up to 1.25 times their budget


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Seconds of one step by part; ``num_prefill_tokens + num_decode_tokens`` were computed."""

    plan_s: float
    forward_s: float
    sample_s: float
    apply_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    predicted_s: float = 0.0  # what the cost model said before the step; 0: it said nothing

    def __add__(self, other: StepTiming) -> StepTiming:
        """The timing of both, for totals."""
        return StepTiming(
            plan_s=self.plan_s + other.plan_s,
            forward_s=self.forward_s + other.forward_s,
            sample_s=self.sample_s + other.sample_s,
            apply_s=self.apply_s + other.apply_s,
            num_prefill_tokens=self.num_prefill_tokens + other.num_prefill_tokens,
            num_decode_tokens=self.num_decode_tokens + other.num_decode_tokens,
            predicted_s=self.predicted_s + other.predicted_s,
        )


NO_TIME = StepTiming(
    plan_s=0.0, forward_s=0.0, sample_s=0.0, apply_s=0.0, num_prefill_tokens=0, num_decode_tokens=0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker's first message: what it serves and which protocol it speaks.

    It carries the tokenizer, so that the front encodes with exactly the model
    that the worker loaded, and needs neither the weights nor a tensor library.
    """

    protocol_version: int
    worker_id: str
    pid: int
    info: ModelInfo
    tokenizer: TokenizerSource
    role: Role = Role.BOTH
    handoff_address: str = ""  # where this worker takes KV; empty: it takes none
    holds: Holding = Holding.ALL


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    outputs: tuple[SequenceOutput, ...]
    load: WorkerLoad
    timing: StepTiming | None = None
    kv_events: KVEvents | None = None  # None: nothing changed
    handoffs: tuple[HandoffReport, ...] = ()


ToWorker = Submit | Abort | Stop
FromWorker = Hello | StepDone
