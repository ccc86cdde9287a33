"""What a scheduler has counted, and the load that it tells of itself.

Plain numbers and sums over choices; decides nothing. Only ``scheduler`` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.core.control import WorkerLoad
from headwater.core.step import SequenceId
from headwater.kv.manager import KVCounters
from headwater.worker.choice import Choice


@dataclass(slots=True)
class Counts:
    """Since the worker started."""

    num_steps: int = 0
    num_prompt_steps: int = 0  # of those, planned with at least one prompt's chunk
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_output_tokens: int = 0

    def load(
        self,
        kv: KVCounters,
        *,
        choices: Mapping[SequenceId, Choice],
        decoding: Mapping[SequenceId, Choice],
        num_loading: int,
        num_prefilling: int,
        num_cached_grammars: int,
    ) -> WorkerLoad:
        """``choices`` are all unfinished ones, in any state; ``decoding`` some of them.
        O(choices)."""
        return WorkerLoad(
            num_waiting=len(choices) - num_loading - num_prefilling - len(decoding),
            num_prefilling=num_prefilling,
            num_decoding=len(decoding),
            num_free_blocks=kv.num_free_blocks,
            num_cached_blocks=kv.num_cached_blocks,
            num_held_blocks=kv.num_held_blocks,
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_hit_tokens=kv.num_hit_tokens,
            num_miss_tokens=kv.num_miss_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_grammars=num_cached_grammars,
            num_waiting_tokens=sum(
                choice.num_left_tokens for i, choice in choices.items() if i not in decoding
            ),
        )
