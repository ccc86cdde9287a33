"""``core.ports.Engine`` on one device: a step's plan in, tokens and logprobs out.

    plan -> batch -> model.forward -> hidden [T, H]
                     hidden rows that end a sequence's known tokens -> logits -> sampler
                     hidden rows of scored prompt tokens            -> logits -> logprobs

Knows neither requests nor who holds which block. ``worker`` calls ``run``, from
one thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from headwater.core.errors import EngineFault
from headwater.core.ports import Clock
from headwater.core.request import ModelInfo, SampledToken
from headwater.core.step import RowResult, StepPlan, StepResult, StepRow
from headwater.engine.batch import BatchBuilder
from headwater.engine.kv_cache import KVCache, window_tokens
from headwater.engine.page_ahead import PagesAhead
from headwater.engine.sampler import Sampler
from headwater.model.family import Model

# Logits are float32 [rows, V]: a 2,048-token prompt with logprobs at a vocabulary of
# 150,000 would take 1.2 GB at once, so rows go through the head in slices of this size.
DEFAULT_LOGITS_BYTES = 64 * 2**20

_BAD_NUMBERS = (
    "the model gave no usable numbers for this sequence (not a number or infinite), "
    "or every token was banned"
)


class ModelEngine:
    """Runs one model on one device."""

    def __init__(
        self,
        *,
        model: Model,
        kv: KVCache,
        info: ModelInfo,
        device: torch.device,
        clock: Clock,
        pages: PagesAhead | None = None,
        max_logits_bytes: int = DEFAULT_LOGITS_BYTES,
    ) -> None:
        """``pages`` is told which blocks are in use."""
        self._model = model
        self._pages = pages
        self._kv = kv
        self._info = info
        self._device = device
        self._clock = clock
        self._sampler = Sampler()
        self._batches = BatchBuilder(
            block_tokens=kv.plan.block_tokens,
            num_blocks=kv.plan.num_blocks,
            vocab_size=info.vocab_size,
            context_tokens=info.context_tokens,
            device=device,
            window_tokens=window_tokens(kv.groups),
            # One that holds the early layers alone is told what the others leave out, too.
            has_late=info.decoder_replay_tokens is not None or any(g.is_late for g in kv.groups),
        )
        self._max_logit_rows = max(1, max_logits_bytes // (4 * info.vocab_size))

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def kv(self) -> KVCache:
        """What the engine reads and writes, for ``block_memory``."""
        return self._kv

    @property
    def layout(self) -> str:
        """The KV layout that this engine reads and writes, for CacheIdentity."""
        return self._kv.layout

    def run(self, plan: StepPlan) -> StepResult:
        """Compute ``plan``; see ``core.ports.Engine``. ``forward_s`` includes the head.

        A row with numbers that are not finite comes back with ``error``, the others
        with their tokens. Raises EngineFault when the step as a whole failed.
        """
        try:
            with torch.inference_mode():
                return self._run(plan)
        # What kernels, allocators and index checks raise; anything else is a bug of ours
        # and should end the process.
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            first_line = str(error).partition("\n")[0]
            raise EngineFault(
                f"a step of {len(plan.rows)} rows and {plan.num_tokens} tokens failed: "
                f"{type(error).__name__}: {first_line}"
            ) from error

    def _run(self, plan: StepPlan) -> StepResult:
        timer = _Timer(self._clock, self._device)
        step = self._batches.build(plan)
        hidden = self._model.forward(step.ids, step.batch, self._kv.layers)
        timer.forward_done()
        if self._pages is not None:
            self._pages.reach(self._batches.highest_block)

        tokens = iter(self._sample(plan.rows, hidden, timer))
        results = []
        start = 0  # of the row among the T tokens
        for row in plan.rows:
            sampled = next(tokens) if row.sample is not None else None
            results.append(self._result(row, sampled, start, hidden, timer))
            start += len(row.tokens)
        return StepResult(tuple(results), forward_s=timer.forward_s, sample_s=timer.sample_s)

    def _result(
        self, row: StepRow, sampled: SampledToken | None, start: int, hidden: Tensor, timer: _Timer
    ) -> RowResult:
        failed = RowResult(row.sequence_id, error=_BAD_NUMBERS)
        if row.sample is not None and sampled is None:
            return failed
        # A chunk's KV may be published before its sequence sees any logits, so its
        # hidden states are looked at; one token's are covered by its logits.
        if (row.sample is None or len(row.tokens) > 1) and not _all_finite(
            hidden[start : start + len(row.tokens)]
        ):
            return failed
        scored = self._score(row, start, hidden, timer)
        return failed if scored is None else RowResult(row.sequence_id, sampled, scored)

    def _sample(
        self, rows: Sequence[StepRow], hidden: Tensor, timer: _Timer
    ) -> list[SampledToken | None]:
        """The token of each row that has ``sample``, in their order."""
        ends = accumulate(len(row.tokens) for row in rows)
        wanted = [
            (end - 1, row.sample)
            for row, end in zip(rows, ends, strict=True)
            if row.sample is not None
        ]
        tokens: list[SampledToken | None] = []
        for first in range(0, len(wanted), self._max_logit_rows):
            part = wanted[first : first + self._max_logit_rows]
            if len(part) < len(hidden):
                last_tokens = torch.tensor([last for last, _ in part], device=self._device)
                logits = self._model.logits(hidden[last_tokens])
            else:  # a pure decode step needs every hidden row: nothing to gather
                logits = self._model.logits(hidden)
            timer.forward_done()
            tokens.extend(self._sampler.sample(logits, [spec for _, spec in part]))
            timer.sample_done()
        return tokens

    def _score(
        self, row: StepRow, start: int, hidden: Tensor, timer: _Timer
    ) -> tuple[SampledToken, ...] | None:
        """One entry per ``next_tokens``; None when a position's logits are not finite."""
        if row.num_prompt_logprobs is None:
            return ()
        scored: list[SampledToken] = []
        for first in range(0, len(row.next_tokens), self._max_logit_rows):
            targets = row.next_tokens[first : first + self._max_logit_rows]
            logits = self._model.logits(hidden[start + first : start + first + len(targets)])
            timer.forward_done()
            for token in self._sampler.score(logits, targets, row.num_prompt_logprobs):
                if token is None:
                    return None
                scored.append(token)
            timer.sample_done()
        return tuple(scored)


def _all_finite(hidden: Tensor) -> bool:
    # A sum is one pass without a temporary, and keeps a NaN or an infinity.
    return math.isfinite(hidden.sum(dtype=torch.float32).item())


class _Timer:
    """Splits a step's seconds between forward and sampling."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock = clock
        self._waits = device.type != "cpu"
        self._last_s = clock.now_s()
        self.forward_s = 0.0
        self.sample_s = 0.0

    def forward_done(self) -> None:
        if self._waits:  # kernels run behind the host; sampling would be blamed for them
            torch.accelerator.synchronize()
        self.forward_s += self._lap_s()

    def sample_done(self) -> None:
        self.sample_s += self._lap_s()

    def _lap_s(self) -> float:
        now_s = self._clock.now_s()
        lap_s, self._last_s = now_s - self._last_s, now_s
        return lap_s
