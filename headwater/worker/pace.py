"""How fast this worker prefills, from its own steps: tokens per second, old steps forgotten.

Knows plans and how long they took. ``scheduler`` tells it each step; the load policy is
asked with what it says.
"""

from __future__ import annotations

from headwater.core.step import StepPlan, StepResult

# Each step that counts leaves this much of what was known: about the last ten speak.
KEPT = 0.9
# A step with fewer prompt tokens is mostly overhead and says little of the pace.
MIN_TOKENS = 32


class PrefillPace:
    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """One step. Those that mostly decode do not count."""
        num_decode_rows = sum(len(row.tokens) == 1 for row in plan.rows)
        num_prefill_tokens = plan.num_tokens - num_decode_rows
        if num_prefill_tokens >= max(MIN_TOKENS, num_decode_rows) and result.forward_s > 0:
            self._tokens = KEPT * self._tokens + num_prefill_tokens
            self._seconds = KEPT * self._seconds + result.forward_s

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first step that counts."""
        return self._tokens / self._seconds if self._seconds else None
