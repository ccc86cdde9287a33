"""Pure admission: may this request enter now? No clock, no I/O; the same file in any simulator.

Three hard caps, checked before anything is queued: sequences in flight
(``num_choices`` count each, E05), prompt tokens that wait for their first
output, and the context window.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.blocks import blocks_for
from headwater.core.errors import ConfigError
from headwater.core.request import ModelInfo, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """``max_running_sequences`` run at once; ``max_waiting_sequences`` may queue behind them."""

    max_running_sequences: int = 64
    max_waiting_sequences: int = 256
    max_waiting_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        for name in ("max_running_sequences", "max_waiting_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"router.{name} must be at least 1, got {getattr(self, name)}")
        if self.max_waiting_sequences < 0:
            raise ConfigError(
                f"router.max_waiting_sequences must be >= 0, got {self.max_waiting_sequences}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """What has been accepted and has not ended."""

    num_sequences: int
    num_waiting_tokens: int  # prompt tokens of requests without a first output


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
    capacity = limits.max_running_sequences + limits.max_waiting_sequences
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
    return Accept()


def _retry_after_s(in_flight: InFlight, limits: AdmissionLimits) -> float:
    """Longer the deeper the queue: 1 s, and a second per full set of running sequences."""
    return 1.0 + in_flight.num_sequences // limits.max_running_sequences
