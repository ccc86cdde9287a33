"""Workers by role, and how a sequence's KV changes hands between them.

    front --Submit(PREFILL)--> prefill worker --KV--> decode worker <--Submit(DECODE)-- front

Both workers are told of a *handoff* by the same id. The decode side takes blocks for the
prompt as for any sequence, and what it lacks comes from the prefill side, block by block,
while later chunks are still being computed. It computes the prompt's last token itself, so
the first output token is chosen once, by the side that goes on. Where a model's late layers
compute a prompt's last tokens only (decoder replay), it computes all of those itself, and the
prefill side need not even hold the weights of those layers. Plain values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headwater.core.blocks import PrefixKey
from headwater.core.request import Request, late_start


class Role(StrEnum):
    """What a worker does. BOTH mixes the phases under one step budget."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Holding(StrEnum):
    """Which weights a worker keeps in memory."""

    ALL = "all"
    EARLY = "early"  # what the KV before the late layers needs: no output, so PREFILL only


class Phase(StrEnum):
    """Which part of a request a worker is asked for."""

    WHOLE = "whole"
    PREFILL = "prefill"  # compute the prompt's KV and hand it over; no output
    DECODE = "decode"  # take the prompt's KV, go on from there


def handed_tokens(request: Request, decoder_replay_tokens: int | None, alignment: int) -> int:
    """How many of the prompt's first tokens a prefill worker computes for a decode worker.

    All but the last. With decoder replay all up to where the late layers begin, as a multiple
    of ``alignment``: from there on the decode side computes every layer. So of 301 tokens,
    with a replay of 140 and pairs of tokens in one row, it is 160, and none of 100.
    """
    start = late_start(request, decoder_replay_tokens)
    if start is None:
        return max(request.num_prompt_tokens - 1, 0)
    return start - start % alignment


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
