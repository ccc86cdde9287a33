"""What the decode side keeps about a connection and about a handoff, and what it tells.

Plain records; ``handoff_sink`` changes them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from headwater.core.cache import CacheReport
from headwater.core.fleet import HandoffRef
from headwater.transfer import handoff_wire as wire
from headwater.transfer.handoff_load import FrameBuffers, HandoffLoad, Piece
from headwater.transfer.handoff_states import Awaited, State


@dataclass(frozen=True, slots=True)
class PromptTold:
    """What of the prompt was a hit on the prefill side."""

    handoff_id: str
    num_hit_tokens: int
    cache: CacheReport


@dataclass(frozen=True, slots=True)
class Outgoing:
    """To the prefill worker on connection ``link``."""

    link: bytes
    message: wire.FromDecode


@dataclass(slots=True)
class Link:
    """One connection of one prefill worker, whose contract fits."""

    heard_s: float
    said_s: float
    pid: int
    is_direct: bool
    ids: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True)
class Taking:
    """``ref`` is None while only the prefill side has spoken of it, ``link`` while only ours."""

    progress_s: float
    ref: HandoffRef | None = None
    link: bytes | None = None
    state: State = field(default_factory=Awaited)
    num_attempts: int = 0
    load: HandoffLoad | None = None
    num_before: int = 0  # of the load's moves, that were there when it was accepted
    queue: deque[Piece] = field(default_factory=deque)
    queued_bytes: int = 0
    open_part: FrameBuffers = field(default_factory=FrameBuffers)
    offset: int = 0  # where the open part goes on
    dead_ticket: bytes = b""  # what it was for was given up by the prefill side
    num_tokens: int = 0
    num_bytes: int = 0
    start_s: float | None = None
    prompt: PromptTold | None = None

    def drop_queue(self) -> None:
        self.queue.clear()
        self.queued_bytes = self.offset = 0
        self.open_part = FrameBuffers()


@dataclass(frozen=True, slots=True)
class Over:
    """``answer`` is for those who hear of it late."""

    answer: wire.Done | wire.Abort
    was_expected: bool
