"""When a sequence ends by a token id or by its length. Pure.

Knows one request's stop parameters and counts; stop *strings* are ``recipe``'s.
``worker`` makes one rule per sequence and asks it at every committed token.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.request import StopParams

_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """``ending_ids`` end the sequence once ``min_output_tokens`` are out; whatever
    comes, it has at most ``max_output_tokens``."""

    ending_ids: frozenset[int]
    min_output_tokens: int
    max_output_tokens: int

    @classmethod
    def of(cls, stop: StopParams, *, num_prompt_tokens: int, context_tokens: int) -> StopRule:
        """The caller's parameters, cut to what the context window leaves."""
        return cls(
            ending_ids=stop.stop_token_ids | (_NOTHING if stop.ignore_end else stop.end_token_ids),
            min_output_tokens=stop.min_output_tokens,
            max_output_tokens=min(stop.max_output_tokens, context_tokens - num_prompt_tokens),
        )

    def banned_ids(self, num_output_tokens: int) -> frozenset[int]:
        """Ids that must not be chosen as output token number ``num_output_tokens`` (from 0)."""
        return self.ending_ids if num_output_tokens < self.min_output_tokens else _NOTHING

    def is_end(self, token_id: int, num_output_tokens: int) -> bool:
        """Whether ``token_id``, chosen after ``num_output_tokens``, ends the sequence
        without becoming part of it."""
        return num_output_tokens >= self.min_output_tokens and token_id in self.ending_ids

    def is_full(self, num_output_tokens: int) -> bool:
        return num_output_tokens >= self.max_output_tokens
