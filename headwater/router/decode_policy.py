"""Where a sequence's output is produced: where KV and sequences are used least. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.core.blocks import blocks_for


class DecodeOption(NamedTuple):
    """One worker that has room, as it looks to one request."""

    worker_id: str
    num_blocks: int
    num_blocks_after: int  # taken, with this request and everybody's expected growth
    num_active_after: int  # sequences, with this request's
    max_active: int
    step_s: float = 0.0  # predicted, of one step with all of them


def has_room(
    *, num_blocks: int, num_taken_blocks: int, num_needed_blocks: int, num_active: int,
    num_new: int, max_active: int,
) -> bool:  # fmt: skip
    """Whether a request fits beside the ``num_active`` sequences that a worker has. Blocks are
    counted with expected growth; who is alone only has to fit at all."""
    if num_active == 0:
        return True
    return num_taken_blocks + num_needed_blocks <= num_blocks and num_active + num_new <= max_active


def choose_decode(options: Sequence[DecodeOption]) -> DecodeOption | None:
    """Least of the larger share, KV or sequences; then least latency."""
    best: DecodeOption | None = None
    best_key = (0.0, 0.0, "")
    for option in options:
        share = max(
            option.num_blocks_after / option.num_blocks,
            option.num_active_after / option.max_active,
        )
        if best is None or share <= best_key[0]:
            key = (share, option.step_s, option.worker_id)
            if best is None or key < best_key:
                best, best_key = option, key
    return best


def needed_blocks(
    *, num_tokens: int, num_growth_tokens: int, num_choices: int, num_hit_blocks: int,
    block_tokens: int,
) -> int:  # fmt: skip
    """Blocks that a request takes on a worker that holds ``num_hit_blocks`` of it already.
    Choices share the prompt's full blocks.

    >>> needed_blocks(num_tokens=40, num_growth_tokens=8, num_choices=2, num_hit_blocks=1,
    ...               block_tokens=16)
    3
    """
    num_shared = num_tokens // block_tokens
    num_own = blocks_for(num_tokens + num_growth_tokens, block_tokens) - num_shared
    return max(num_shared - num_hit_blocks, 0) + num_choices * num_own
