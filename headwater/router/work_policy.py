"""Which tokens of a prompt are computed by whom, for predictions. Pure.

    alone     [ hit .... | c .................. n )   c: the hit's end, or where the late layers
                                                         begin if that is before it (replay)
    split     [ hit ....... h )                       by the prefill worker
                            [ h ............... n )   by the decode worker, once it has the KV

n tokens, output that was committed before included. Without decoder replay h is the prompt's
last token: what the decode worker computes then is a step of one token, and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.cost import NO_STEP, StepShape
from headwater.core.fleet import handed_tokens
from headwater.core.request import ModelInfo, Request, late_start

_MIN_TOKENS = 1  # whatever is a hit: something has to be computed to be said


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWork:
    """``num_handed`` is h; ``late_start`` None: late layers, if there are any, compute all."""

    num_tokens: int
    num_handed: int
    late_start: int | None
    window_tokens: int | None

    @classmethod
    def of(cls, request: Request, num_resumed_tokens: int, info: ModelInfo) -> PromptWork:
        return cls(
            num_tokens=request.num_prompt_tokens + num_resumed_tokens,
            num_handed=handed_tokens(request, info.decoder_replay_tokens, info.alignment),
            late_start=late_start(request, info.decoder_replay_tokens),
            window_tokens=info.window_tokens,
        )

    def alone(self, num_hit: int) -> StepShape:
        """Of a worker that does it all."""
        start = num_hit if self.late_start is None else min(num_hit, self.late_start)
        start = max(min(start, self.num_tokens - _MIN_TOKENS), 0)
        return self._shape(start, self.num_tokens)

    def prefill(self, num_hit: int) -> StepShape:
        """Of the prefill worker in a split: no token of it is late."""
        start = max(min(num_hit, self.num_handed - _MIN_TOKENS), 0)
        return StepShape.of_row(start, self.num_handed - start, self.window_tokens)

    def decode(self) -> StepShape:
        """Of the decode worker in a split, besides a step of one token."""
        if self.late_start is None:
            return NO_STEP
        return self._shape(self.num_handed, self.num_tokens)

    def usual(self, num_hit: int, block_tokens: int, *, is_split: bool) -> StepShape:
        """Of whoever computes the prompt, or most of it, in a fleet of this kind."""
        if is_split and self.is_worth_handing_over(num_hit, block_tokens):
            return self.prefill(num_hit)
        return self.alone(num_hit)

    def is_worth_handing_over(self, num_hit: int, block_tokens: int) -> bool:
        """Whether a decode worker that holds ``num_hit`` tokens lacks a whole block of what
        would be handed over; else computing takes less time than asking."""
        return self.num_handed - num_hit >= block_tokens

    def _shape(self, start: int, end: int) -> StepShape:
        return StepShape.of_row(start, end - start, self.window_tokens, self.late_start)
