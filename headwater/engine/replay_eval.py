"""What replays cost in quality: next-token distributions beside those of a cold, full run.

    cold     [ computed ............................. | scored )
    exact    [ copied, all layers ................... | scored )   hit with its window KV
    replay   [ copied, global layers | replayed ..... | scored )   hit in replay mode
             0                       L - W            L       L + S

A model with late layers computes all of them in those three, the last of which is then called
encoder replay, and has two more, with keep = W and a little:

    decoder  [ computed, but of late layers [L - keep, L) alone  | scored )
    both     [ copied, global layers | replayed ..... | scored )   from min(L - W, L - keep) on

``exact`` differs from ``cold`` only where the prompt was cut into other chunks: that is
the noise of rounding, against which the others must be read. L is where a prompt would end.
After the scored tokens all go on greedily. Works on a loaded model and KV of its own; called
by ``app``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

import torch
from torch import Tensor

from headwater.core.blocks import BlockId, blocks_for
from headwater.core.errors import ConfigError
from headwater.core.request import replay_tokens as keep_tokens
from headwater.core.step import SequenceId, StepPlan, StepRow
from headwater.engine.batch import BatchBuilder
from headwater.engine.kv_cache import alignment, allocate_kv, window_tokens
from headwater.engine.kv_plan import KVLimits, plan_kv
from headwater.model.family import CacheKind, Model
from headwater.numerics.ops import KVFormat, Ops

_CHUNK_TOKENS = 512
_COLD_CHUNK_TOKENS = 384  # other borders than a hit's, as in service
_LOGIT_ROWS = 16  # of float32 [rows, V] at once
_BLOCK_TOKENS = 32


class HitKind(StrEnum):
    """What is compared with a cold run; the last three for models with late layers."""

    EXACT = "exact"
    REPLAY = "replay"
    ENCODER = "encoder"
    DECODER = "decoder"
    BOTH = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One run beside the cold one, over one text."""

    divergence: tuple[float, ...]  # Kullback-Leibler, nats, for each scored token
    top_agrees: tuple[bool, ...]  # the likeliest next token is the same
    num_greedy_agreed: int  # leading tokens of the greedy continuation that are the same


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySample:
    """One text, hit at ``num_hit_tokens``."""

    num_hit_tokens: int
    num_greedy_tokens: int
    differences: Mapping[HitKind, Difference]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Where a run begins, as in ``StepRow``; tokens before ``replay_end`` are replayed."""

    begin: int = 0
    window_start: int = 0
    replay_end: int = 0
    late_start: int = 0


@dataclass(frozen=True, slots=True)
class _Run:
    log_probs: Tensor  # float32 [S, V]
    greedy: tuple[int, ...]


class ReplayMeter:
    """Compares hits of one model with window layers. Raises ConfigError for one without."""

    def __init__(
        self, model: Model, ops: Ops, kv_format: KVFormat, *, max_hit_tokens: int, num_scored: int,
        num_greedy: int, replay_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """``replay_tokens``: how many are replayed; the model's window if None."""
        late_groups = [group for group in model.cache_plan if group.is_late]
        window = window_tokens(model.cache_plan)
        if window is None:
            raise ConfigError("this model has no window layers: nothing of it is ever replayed")
        num_tokens = max_hit_tokens + num_scored + num_greedy
        if num_tokens > model.config.context_tokens:
            raise ConfigError(
                f"a hit of {max_hit_tokens} tokens, {num_scored} scored and {num_greedy} generated "
                f"ones exceed the model's context of {model.config.context_tokens}"
            )
        self.replay_tokens = replay_tokens or window
        # What late layers keep of a prompt; None: there are none.
        self.keep_tokens = keep_tokens(window) if late_groups else None
        self._alignment = alignment(model.cache_plan)
        self._model, self._ops = model, ops
        self._num_scored, self._num_greedy = num_scored, num_greedy
        self._num_rows = blocks_for(num_tokens, _BLOCK_TOKENS)
        plan = plan_kv(
            KVLimits(block_tokens=_BLOCK_TOKENS, num_blocks=3 * self._num_rows),
            bytes_per_token=1,
            model_context_tokens=num_tokens,
            available_bytes=2**62,
        )
        self._kv = allocate_kv(ops, plan, model.cache_plan, kv_format).layers
        self._batches = BatchBuilder(
            block_tokens=_BLOCK_TOKENS,
            num_blocks=plan.num_blocks,
            context_tokens=num_tokens,
            vocab_size=model.config.vocab_size,
            device=ops.device,
            window_tokens=window,
            has_late=bool(late_groups),
        )

    def measure(self, tokens: Sequence[int], num_hit_tokens: int) -> ReplaySample:
        """``tokens`` are at least ``num_hit_tokens + num_scored`` of a real text. Raises
        ConfigError for a hit that ends within a row of KV."""
        if num_hit_tokens % self._alignment:
            raise ConfigError(
                f"a hit of {num_hit_tokens} tokens: this model's hits are multiples of "
                f"{self._alignment} tokens"
            )
        hit, text = num_hit_tokens, tokens[: num_hit_tokens + self._num_scored]
        start = max(hit - self.replay_tokens, 0)
        runs: dict[HitKind, _Run] = {}
        with torch.inference_mode():
            cold = self._run(0, text, _Start(), _COLD_CHUNK_TOKENS)
            self._copy(1, hit, (CacheKind.GLOBAL, CacheKind.WINDOW))
            runs[HitKind.EXACT] = self._run(1, text, _Start(begin=hit))
            self._copy(2, hit, (CacheKind.GLOBAL,))
            kind = HitKind.REPLAY if self.keep_tokens is None else HitKind.ENCODER
            runs[kind] = self._run(2, text, _Start(begin=start, window_start=start, replay_end=hit))
            if self.keep_tokens is not None:
                late_start = max(hit - self.keep_tokens, 0)
                start = min(start, late_start)
                runs[HitKind.DECODER] = self._run(1, text, _Start(late_start=late_start))
                self._copy(2, hit, (CacheKind.GLOBAL,))
                runs[HitKind.BOTH] = self._run(
                    2,
                    text,
                    _Start(begin=start, window_start=start, replay_end=hit, late_start=late_start),
                )
        return ReplaySample(
            num_hit_tokens=hit,
            num_greedy_tokens=self._num_greedy,
            differences={kind: _difference(cold, run) for kind, run in runs.items()},
        )

    def _run(
        self,
        number: int,
        tokens: Sequence[int],
        start: _Start,
        chunk_tokens: int = _CHUNK_TOKENS,
    ) -> _Run:
        """Compute ``tokens[start.begin:]`` in chunks, score the last ones, and go on greedily."""
        begin = start.begin
        first_scored = len(tokens) - self._num_scored
        scored: list[Tensor] = []
        hidden = torch.empty(0)
        while begin < len(tokens):
            # A chunk ends where scoring begins, so that the scored rows are one tensor.
            limit = first_scored if begin < first_scored else len(tokens)
            end = min(begin + chunk_tokens, limit)
            hidden = self._forward(number, tokens[begin:end], begin, start)
            if begin >= first_scored:
                scored += [
                    torch.log_softmax(self._model.logits(part), dim=-1)
                    for part in hidden.split(_LOGIT_ROWS)
                ]
            begin = end
        log_probs = torch.cat(scored)
        greedy: list[int] = []
        choice = int(log_probs[-1].argmax())
        for position in range(len(tokens), len(tokens) + self._num_greedy):
            greedy.append(choice)
            hidden = self._forward(number, [choice], position, start)
            choice = int(self._model.logits(hidden).argmax())
        return _Run(log_probs, tuple(greedy))

    def _forward(self, number: int, tokens: Sequence[int], begin: int, start: _Start) -> Tensor:
        first_block = number * self._num_rows
        row = StepRow(
            sequence_id=SequenceId(number),
            start=begin,
            tokens=tuple(tokens),
            block_table=tuple(BlockId(first_block + i) for i in range(self._num_rows)),
            window_start=start.window_start,
            num_replayed=min(max(start.replay_end - begin, 0), len(tokens)),
            late_start=start.late_start,
        )
        step = self._batches.build(StepPlan((row,)))
        return self._model.forward(step.ids, step.batch, self._kv)

    def _copy(self, number: int, num_tokens: int, kinds: tuple[CacheKind, ...]) -> None:
        """The cold run's KV of ``num_tokens`` tokens into run ``number``'s blocks."""
        for group in self._model.cache_plan:
            for layer in group.layers if group.kind in kinds else ():
                for row in range(blocks_for(num_tokens, _BLOCK_TOKENS)):
                    self._ops.copy_kv_block(self._kv[layer], row, number * self._num_rows + row)


def _difference(cold: _Run, other: _Run) -> Difference:
    divergence = (cold.log_probs.exp() * (cold.log_probs - other.log_probs)).sum(dim=-1)
    agrees = cold.log_probs.argmax(dim=-1) == other.log_probs.argmax(dim=-1)
    pairs = zip(cold.greedy, other.greedy, strict=True)
    return Difference(
        divergence=tuple(divergence.clamp(min=0.0).tolist()),
        top_agrees=tuple(bool(agree) for agree in agrees.tolist()),
        num_greedy_agreed=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)),
    )
