"""Pure admission: may this request enter now? No clock, no I/O; the same file in any simulator.

Hard caps, checked before anything is queued: sequences in flight (``num_choices``
count each, E05), prompt tokens that wait for their first output, the context window, and
the predicted seconds of the fleet's queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwater.core.blocks import blocks_for
from headwater.core.errors import ConfigError
from headwater.core.request import ModelInfo, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """``max_running_sequences`` run at once in each worker that decodes;
    ``max_waiting_sequences`` may queue behind them all. ``max_queue_s``: predicted seconds
    until a worker has computed the prompts that wait now; over it nobody enters."""

    max_running_sequences: int = 64
    max_waiting_sequences: int = 256
    max_waiting_tokens: int = 1_000_000
    max_queue_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("max_running_sequences", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"router.{name} must be at least 1, got {getattr(self, name)}")
        if self.max_waiting_sequences < 0:
            raise ConfigError(
                f"router.max_waiting_sequences must be >= 0, got {self.max_waiting_sequences}"
            )
        if self.max_queue_s <= 0:
            raise ConfigError(f"router.max_queue_s must be > 0, got {self.max_queue_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """What has been accepted and has not ended, and the workers there are for it."""

    num_sequences: int
    num_waiting_tokens: int  # prompt tokens of requests without a first output
    queue_s: float = 0.0  # predicted, of prompts that are not computed, per worker
    num_decode_workers: int = 1


@dataclass(frozen=True, slots=True)
class Accept:
    pass


@dataclass(frozen=True, slots=True)
class RefuseBusy:
    """A queue is full now; the same request may enter later."""

    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class RefuseSize:
    """The prompt cannot be served by this model at all."""

    limit_tokens: int


Admission = Accept | RefuseBusy | RefuseSize


def context_limit_tokens(info: ModelInfo) -> int:
    """Tokens of prompt + output that one sequence may have: window and pool both bind."""
    return min(info.context_tokens, info.num_blocks * info.block_tokens)


def decide_admission(
    request: Request, in_flight: InFlight, limits: AdmissionLimits, info: ModelInfo
) -> Admission:
    """Accept, or why not. A prompt needs one position more than itself, for its first output.

    One request whose choices exceed the whole queue is still accepted when nothing
    else is in flight, so that a legal ``n`` is never refused for ever.
    """
    limit_tokens = context_limit_tokens(info)
    room = 1 if request.stop.max_output_tokens > 0 else 0
    if blocks_for(request.num_prompt_tokens + room, info.block_tokens) > info.num_blocks:
        return RefuseSize(limit_tokens)
    if request.num_prompt_tokens + room > limit_tokens:
        return RefuseSize(limit_tokens)
    num_running = limits.max_running_sequences * max(in_flight.num_decode_workers, 1)
    capacity = num_running + limits.max_waiting_sequences
    wanted = in_flight.num_sequences + request.num_choices
    if wanted > capacity and in_flight.num_sequences > 0:
        return RefuseBusy(
            f"the queue is full: {in_flight.num_sequences} of {capacity} sequences in flight",
            _retry_after_s(in_flight, limits),
        )
    waiting_tokens = in_flight.num_waiting_tokens + request.num_prompt_tokens
    if waiting_tokens > limits.max_waiting_tokens and in_flight.num_waiting_tokens > 0:
        return RefuseBusy(
            f"the queue is full: {in_flight.num_waiting_tokens} of "
            f"{limits.max_waiting_tokens} prompt tokens waiting",
            _retry_after_s(in_flight, limits),
        )
    if in_flight.queue_s > limits.max_queue_s:
        return RefuseBusy(
            f"the queue is full: {in_flight.queue_s:.0f} s of prompts wait, "
            f"the limit is {limits.max_queue_s:.0f} s",
            max(in_flight.queue_s - limits.max_queue_s, 1.0),
        )
    return Accept()


def _retry_after_s(in_flight: InFlight, limits: AdmissionLimits) -> float:
    """Longer the deeper the queue: 1 s, and a second per full set of running sequences."""
    num_running = limits.max_running_sequences * max(in_flight.num_decode_workers, 1)
    return 1.0 + in_flight.num_sequences // num_running
