"""What each worker of a placement is told: the messages of one attempt.

Knows the request, the placement and who the workers are; sends nothing.
"""

from __future__ import annotations

from dataclasses import replace

from headwater.core.control import Hello, Submit
from headwater.core.fleet import HandoffRef, Phase
from headwater.core.request import Request, RequestId
from headwater.router.buckets_policy import wire_priority
from headwater.router.call import Call
from headwater.router.dispatch import Placement


def whole_submit(call: Call, placement: Placement) -> Submit:
    """One worker does it all."""
    request = _as_attempt(call.request, placement.key, placement.priority)
    return Submit(request=request, resume=call.resume())


def decode_submit(call: Call, placement: Placement, *, prefiller: Hello, decoder: Hello) -> Submit:
    """The worker that takes the prompt's KV and goes on from there."""
    return Submit(
        # It computes no prompt, so their length gives nobody a place before others.
        request=_as_attempt(call.request, placement.key, wire_priority(call.request.priority, 0)),
        phase=Phase.DECODE,
        handoff=HandoffRef(
            handoff_id=placement.key,
            peer_id=prefiller.worker_id,
            address=decoder.handoff_address,
        ),
        resume=call.resume(),
    )


def prefill_submit(call: Call, placement: Placement, *, decoder: Hello) -> Submit:
    """The worker that computes the prompt and hands its KV over: one sequence is enough for
    that, and no output is chosen. What was committed before is computed by the decode side."""
    request = _as_attempt(call.request, placement.key, placement.priority)
    if request.num_choices != 1 or request.constraint is not None:
        request = replace(request, num_choices=1, constraint=None)
    return Submit(
        request=request,
        phase=Phase.PREFILL,
        handoff=HandoffRef(
            handoff_id=placement.key, peer_id=decoder.worker_id, address=decoder.handoff_address
        ),
    )


def _as_attempt(request: Request, key: str, priority: int) -> Request:
    if key == request.request_id and priority == request.priority:
        return request
    return replace(request, request_id=RequestId(key), priority=priority)
