"""Workers by role, and how a sequence's KV changes hands between them.

    front --Submit(PREFILL)--> prefill worker --KV--> decode worker <--Submit(DECODE)-- front

Both workers are told of a *handoff* by the same id. The decode side takes blocks for the
prompt as for any sequence, and what it lacks comes from the prefill side, block by block,
while later chunks are still being computed. It computes the prompt's last token itself, so
the first output token is chosen once, by the side that goes on. Plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headwater.core.blocks import PrefixKey


class Role(StrEnum):
    """What a worker does. BOTH mixes the phases under one step budget."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Phase(StrEnum):
    """Which part of a request a worker is asked for."""

    WHOLE = "whole"
    PREFILL = "prefill"  # compute the prompt's KV and hand it over; no output
    DECODE = "decode"  # take the prompt's KV, go on from there


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffRef:
    """One attempt to hand one request's KV over. ``address`` is where the decode side
    takes it (its ``Hello.handoff_address``); ids are never used twice."""

    handoff_id: str
    peer_id: str  # the other worker
    address: str


class HandoffEnd(StrEnum):
    """How a handoff ended, as one side sees it."""

    DONE = "done"
    FAILED = "failed"  # the peer refused, vanished or was too slow


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffReport:
    """Sent once by each side. After FAILED on the decode side its sequence has given back
    its blocks and waits for the router's word; on the prefill side it has ended."""

    handoff_id: str
    end: HandoffEnd
    num_tokens: int = 0  # whose KV was moved
    num_bytes: int = 0
    seconds: float = 0.0  # from the first block offered to the last one taken
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """One choice that goes on after its worker was lost: ``tokens`` were committed before,
    so they are part of its sequence and are not sent again."""

    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEvents:
    """What changed among a worker's device blocks since its last message, as prefix keys of
    full blocks. ``reset``: forget what was known of this worker before applying."""

    added: tuple[PrefixKey, ...] = ()
    removed: tuple[PrefixKey, ...] = ()
    reset: bool = False
