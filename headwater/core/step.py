"""One step of one engine: a frozen plan in, a frozen result out.

    StepPlan(rows) --engine.run--> StepResult(rows), same order

A row is a run of consecutive tokens of one sequence: tokens [start, start + n)
are computed in this step, their KV goes to the row's blocks, and attention sees
[0, start + n). A decode row has n == 1; a prefill chunk has more. Rows of both
kinds mix freely in one plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from headwater.core.blocks import BlockId
from headwater.core.request import SampledToken, SamplingParams

SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """How the engine chooses the token that follows the row's last token.

    ``position`` is the index of the new token in the sequence: the key of its
    randomness. ``prompt_tokens`` and ``output_tokens`` are given only when a
    penalty needs them. ``banned_ids`` are end and stop ids before min tokens.
    ``allowed_bits`` are the ids that an output constraint leaves (``ports.Matcher``):
    ids beyond its last bit are not allowed. None: no constraint.
    """

    params: SamplingParams
    position: int
    prompt_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    banned_ids: frozenset[int] = frozenset()
    allowed_bits: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Tokens [start, start + len(tokens)) of one sequence.

    ``block_table`` covers at least [0, start + len(tokens)). ``sample`` is set
    when the row ends at the sequence's last known token. With
    ``num_prompt_logprobs`` the engine also scores, for each row token but the
    prompt's last, the prompt token that follows it: ``next_tokens[i]`` follows
    ``tokens[i]`` (one shorter than ``tokens`` in the prompt's last chunk).

    Only for models with window layers: those hold this sequence's KV from position
    ``window_start`` on and never look before it. The row's first ``num_replayed`` tokens
    are a *replay*: their global KV is there and stays as it is, only their window KV is
    written.

    Only for models with late layers (those behind the last source of global KV): they compute
    the row's tokens from position ``late_start`` on and hold window KV from
    ``max(window_start, late_start)`` on. A row that is sampled or scored has such tokens.
    """

    sequence_id: SequenceId
    start: int
    tokens: tuple[int, ...]
    block_table: tuple[BlockId, ...]
    sample: SampleSpec | None = None
    num_prompt_logprobs: int | None = None
    next_tokens: tuple[int, ...] = ()
    window_start: int = 0
    num_replayed: int = 0
    late_start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All rows of one forward pass; never empty."""

    rows: tuple[StepRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """``token`` is set exactly when the row had ``sample``; ``prompt_logprobs``
    has one entry per ``next_tokens`` of the row.

    With ``error`` neither is: this row alone came to nothing (its logits are not
    numbers, say), so its sequence fails and its KV is never published.
    """

    sequence_id: SequenceId
    token: SampledToken | None = None
    prompt_logprobs: tuple[SampledToken, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Row results in the plan's order, and how long the parts took."""

    rows: tuple[RowResult, ...]
    forward_s: float = 0.0
    sample_s: float = 0.0
