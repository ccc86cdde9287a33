"""One token per row of a step's logits, and the logprobs that callers asked for.

Knows tensors, SampleSpec and the order of the rules; the arithmetic of one row
is in ``distribution``. Does not know sequences, stops or which row is whose.
Called by ``runner``.

Rows are taken one by one, on the host, each only through the passes its own
spec needs: a greedy row costs one argmax even beside a row with everything on.
At a vocabulary of 50,000 a pass is 3-20 us, so a batched kernel would gain
little and would tie a row's bits to the shape of its batch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headwater.core.randomness import keyed_uniform
from headwater.core.request import SampledToken, TokenLogprob
from headwater.core.step import SampleSpec
from headwater.engine import distribution
from headwater.engine.distribution import Floats, Ids

_NO_IDS: Ids = np.empty(0, np.int64)


class Sampler:
    """Chooses tokens. Its only state is a cache of penalised prompts' distinct ids."""

    def __init__(self, *, num_cached_prompts: int = 256) -> None:
        self._num_cached_prompts = num_cached_prompts
        # Keyed by the tuple's identity (hashing it would cost what the cache saves);
        # holding the tuple keeps its id from being used again.
        self._prompt_ids: OrderedDict[int, tuple[tuple[int, ...], Ids]] = OrderedDict()

    def sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken | None]:
        """The next token of each row of ``logits`` float32 [R, V], which stays as it is.

        None where no token can be chosen: the largest logit is not finite (the
        model broke down on this row), or bans leave no token. Equal logits and
        spec give an equal token, whatever the other rows are.
        """
        if logits.device.type == "cpu":
            rows = logits.numpy()
            return [self._choose(rows[i], spec) for i, spec in enumerate(specs)]
        # Elsewhere only rows that need more than an argmax are worth copying here.
        on_host = [i for i, spec in enumerate(specs) if not _is_plain_greedy(spec)]
        tokens: list[SampledToken | None]
        if len(on_host) == len(specs):
            tokens = [None] * len(specs)
        else:
            greedy_ids = first_argmax(logits)
            tokens = [None if t is None else SampledToken(t) for t in greedy_ids]
        if on_host:
            rows = logits[torch.tensor(on_host, device=logits.device)].cpu().numpy()
            for row, i in zip(rows, on_host, strict=True):
                tokens[i] = self._choose(row, specs[i])
        return tokens

    def score(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int
    ) -> list[SampledToken | None]:
        """What ``logits`` float32 [R, V] say of given tokens: their logprob and the top
        ``num_top``. None where the logits are not finite."""
        rows = logits.cpu().numpy()
        return [
            _with_logprobs(row, token_id, num_top) if math.isfinite(row.max()) else None
            for row, token_id in zip(rows, token_ids, strict=True)
        ]

    def _choose(self, row: Floats, spec: SampleSpec) -> SampledToken | None:
        params = spec.params
        edited = self._edited(row, spec)
        token_id = int(edited.argmax())  # numpy: the first, so the lowest id on a tie
        # argmax stops at a NaN, so one look covers the row; edits may hide its trouble.
        if not math.isfinite(edited[token_id]):
            return None
        if edited is not row and not math.isfinite(row.max()):
            return None
        if params.temperature > 0.0:
            kept = distribution.keep(edited, params)
            token_id = distribution.draw(kept, keyed_uniform(params.seed, spec.position, "sample"))
        if params.num_logprobs is None:
            return SampledToken(token_id)
        return _with_logprobs(row, token_id, params.num_logprobs)

    def _edited(self, row: Floats, spec: SampleSpec) -> Floats:
        params = spec.params
        counts_output = bool(params.frequency_penalty or params.presence_penalty)
        repeats = params.repetition_penalty != 1.0
        bans = spec.banned_ids or spec.allowed_bits is not None
        if not (counts_output or repeats or params.logit_bias or bans):
            return row
        seen_ids = output_ids = output_counts = _NO_IDS
        if counts_output or repeats:
            output_ids, output_counts = np.unique(
                np.array(spec.output_tokens, np.int64), return_counts=True
            )
        if repeats:
            seen_ids = np.concatenate((self._distinct(spec.prompt_tokens), output_ids))
        return distribution.edit(
            row,
            params,
            seen_ids,
            output_ids,
            output_counts,
            spec.banned_ids,
            spec.allowed_bits,
        )

    def _distinct(self, prompt_tokens: tuple[int, ...]) -> Ids:
        """The prompt's distinct ids, once per prompt rather than once per token."""
        key = id(prompt_tokens)
        held = self._prompt_ids.get(key)
        if held is not None:
            self._prompt_ids.move_to_end(key)
            return held[1]
        ids = np.unique(np.array(prompt_tokens, np.int64))
        self._prompt_ids[key] = (prompt_tokens, ids)
        if len(self._prompt_ids) > self._num_cached_prompts:
            self._prompt_ids.popitem(last=False)
        return ids


def first_argmax(logits: Tensor) -> list[int | None]:
    """Per row of [R, V] the lowest id with the highest logit, None where that is not finite.

    ``torch.argmax`` does not promise which of equal entries it returns.
    """
    vocab_size = logits.shape[-1]
    best = logits.amax(dim=-1, keepdim=True)  # NaN if any entry is
    ids = torch.arange(vocab_size, device=logits.device)
    first = torch.where((logits == best) & torch.isfinite(best), ids, vocab_size).amin(dim=-1)
    return [None if token_id == vocab_size else token_id for token_id in first.tolist()]


def _is_plain_greedy(spec: SampleSpec) -> bool:
    p = spec.params
    return (
        p.temperature == 0.0
        and p.num_logprobs is None
        and not p.logit_bias
        and not spec.banned_ids
        and spec.allowed_bits is None
        and p.repetition_penalty == 1.0
        and not p.frequency_penalty
        and not p.presence_penalty
    )


def _with_logprobs(row: Floats, token_id: int, num_top: int) -> SampledToken:
    """``token_id`` with logprobs of the model's own distribution: ``row`` is unedited."""
    total = distribution.log_normaliser(row)
    top = distribution.top_ids(row, num_top)
    return SampledToken(
        token_id,
        float(row[token_id]) - total,
        tuple(TokenLogprob(int(i), float(row[i]) - total) for i in top),
    )
