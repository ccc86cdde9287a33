"""The life of one handoff, the same on both sides, and the bounds on each part of it.

             +---- again: the taker gave way ----+
             v                                   |
Awaited -> Offered -> Accepted -> Moving --------+
             |           |          |
             +-----------+----------+--> Done      all that lacked is there
any but Done +-------------------------> Failed    either side, the peer's silence, or time

who owns the KV: the prefill side until Done; what the decode side has of it by then is a
copy of its own. After Failed each side keeps its own and owes the other nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from headwater.core.errors import ConfigError, InvalidChange


@dataclass(frozen=True, slots=True)
class Awaited:
    """The decode side was told of it; the prefill side has not called yet."""


@dataclass(frozen=True, slots=True)
class Offered:
    """The prefill side holds, or will hold, the KV; nobody takes it yet."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The decode side has blocks and said what it lacks, for the ``attempt``-th time."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Moving:
    """Some of it was taken."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Done:
    pass


@dataclass(frozen=True, slots=True)
class Failed:
    reason: str


State = Awaited | Offered | Accepted | Moving | Done | Failed


def changed(state: State, new: State) -> State:
    """``new``, if it may follow. Raises InvalidChange naming both."""
    match state, new:
        case ((Awaited() | Offered() | Accepted() | Moving()), (Done() | Failed())):
            return new
        case (Awaited(), Offered()) | (Offered(), Accepted()):
            return new
        case ((Accepted(attempt=old) | Moving(attempt=old)), Accepted(attempt=attempt)) if (
            attempt > old
        ):
            return new
        case ((Accepted(attempt=old) | Moving(attempt=old)), Moving(attempt=attempt)) if (
            attempt == old
        ):
            return new
    raise InvalidChange(f"handoff: {state} has no change to {new}")


def is_over(state: State) -> bool:
    return isinstance(state, Done | Failed)


def attempt_of(state: State) -> int | None:
    """Of those who move KV."""
    return state.attempt if isinstance(state, Accepted | Moving) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffLimits:
    """All in seconds of the owner's clock, but the last two.

    ``lease_s``: a peer that is silent for so long is gone; the living say so four times in
    it. ``offer_s``: how long one side waits for the other to hear of a handoff at all.
    ``stall_s``: both live, yet nothing was moved.
    """

    lease_s: float = 2.0
    offer_s: float = 10.0
    stall_s: float = 60.0
    max_handoffs: int = 4096
    max_untaken_bytes: int = 32 << 20  # sent and not taken yet, of one handoff

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ConfigError(f"handoff.{field.name} must be > 0")

    @property
    def alive_s(self) -> float:
        return self.lease_s / 4
