"""From one row of logits to a distribution over tokens, and to one token of it.

Knows numpy, one row at a time, and nothing of batches, devices or sequences:
that a row's result cannot depend on its neighbours is a property of the
signatures here. Called by ``sampler``.

The definition, which every path below keeps:

    logits -> bias -> penalties -> bans, mask    (``edit``)
           -> w = exp((logit - max) / temperature), float32
           -> top_k, top_p, min_p keep a set     (``keep``; ties go to the lower id)
           -> token = inverse CDF of w over the kept ids in ascending id order (``draw``)

The draw is in id order with filters on or off, so there is one definition and
the common case (no filter) needs no sort.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headwater.core.request import SamplingParams

Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]

# Below this a temperature only changes how exact ties are drawn, and float32
# division would overflow for the next few decades down.
MIN_TEMPERATURE = 1e-6

_LARGEST = float(np.finfo(np.float32).max)

_GROUP = 64  # elements summed or compared at a time where a full pass would be slow

# Nucleus candidates, as a share of the best token's weight, widened until they
# hold enough mass. A flat distribution sorts everything, but values only, which
# numpy does with SIMD.
_NUCLEUS_CUTS = (2.0**-8, 2.0**-14)


@dataclass(frozen=True, slots=True)
class Kept:
    """Tokens that may be drawn: ``weights[i]`` belongs to ``ids[i]`` (ascending),
    or to id i when ``ids`` is None (nothing was filtered). The largest weight is 1."""

    ids: Ids | None
    weights: Floats

    def probabilities(self) -> tuple[Ids, NDArray[np.float64]]:
        """(ids, p) with p summing to 1: what ``draw`` samples from."""
        ids = np.arange(len(self.weights)) if self.ids is None else self.ids
        weights = self.weights.astype(np.float64)
        return ids, weights / weights.sum()


def edit(
    logits: Floats,
    params: SamplingParams,
    seen_ids: Ids,
    output_ids: Ids,
    output_counts: Ids,
    banned_ids: Collection[int],
    allowed_bits: bytes | None = None,
) -> Floats:
    """A copy of ``logits`` [V] with bias, penalties and bans applied, in this order.

    ``seen_ids``: the ids in prompt and output, each at least once. ``output_ids`` and
    ``output_counts``: the distinct output ids and how often each occurs. Bias
    and bans of ids outside the vocabulary have no effect: they are never drawn.
    ``allowed_bits`` bans every id whose bit is not set (``core.ports.Matcher``).

    The repetition penalty divides a positive logit and multiplies a negative
    one (CTRL, Keskar et al. 2019, section 4.1, with the sign fix that is common
    practice). Frequency and presence subtract ``count * frequency + presence``
    (OpenAI API reference, "frequency and presence penalties").
    """
    edited = logits.copy()
    for token_id, bias in params.logit_bias:
        if 0 <= token_id < len(edited):
            edited[token_id] += bias
    if params.repetition_penalty != 1.0 and len(seen_ids):
        values = edited[seen_ids].astype(np.float64)
        repeated = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        # A penalty near 0 must not make an infinity of a large logit.
        edited[seen_ids] = repeated.clip(-_LARGEST, _LARGEST)
    if (params.frequency_penalty or params.presence_penalty) and len(output_ids):
        loss = output_counts * params.frequency_penalty + params.presence_penalty
        edited[output_ids] -= loss.astype(np.float32)
    for token_id in banned_ids:
        if 0 <= token_id < len(edited):
            edited[token_id] = -np.inf
    if allowed_bits is not None:
        np.minimum(edited, ceilings(allowed_bits, len(edited)), out=edited)
    return edited


def ceilings(allowed_bits: bytes, vocab_size: int) -> Floats:
    """+inf for each id whose bit is set, -inf for the others and beyond the last bit.

    A logit is masked by taking the smaller of both. Assigning through a boolean mask
    would take ten times as long: 200 us for 49,152 ids in no order.
    """
    packed = np.frombuffer(allowed_bits, np.uint8)
    words = np.unpackbits(packed, count=vocab_size, bitorder="little").astype(np.uint32)
    words <<= 31
    words ^= 0xFF80_0000  # float32's -inf; with the sign bit turned it is +inf
    return words.view(np.float32)


def keep(logits: Floats, params: SamplingParams) -> Kept:
    """The tokens that temperature, top_k, top_p and min_p leave, for ``temperature > 0``.

    ``logits`` [V] are edited ones with a finite maximum. top_p counts mass
    among what top_k left; min_p compares with the best token's probability.
    """
    best = logits.max()
    temperature = max(params.temperature, MIN_TEMPERATURE)
    ids: Ids | None = None
    if 0 < params.top_k < len(logits):
        ids = top_ids(logits, params.top_k)
        ids.sort()
        logits = logits[ids]
    with np.errstate(over="ignore", under="ignore"):  # -1e4 / 1e-6 is just "never"
        scaled = logits - best
        scaled /= temperature
        weights = np.exp(scaled, out=scaled)
    if params.top_p < 1.0:
        ids, weights = _select(ids, weights, _nucleus(weights, params.top_p))
    if params.min_p > 0.0:
        ids, weights = _select(ids, weights, np.flatnonzero(weights >= min(params.min_p, 1.0)))
    return Kept(ids, weights)


def draw(kept: Kept, uniform: float) -> int:
    """The token at ``uniform`` in [0, 1) of the kept tokens' cumulative distribution."""
    cumulative = _Cumulative(kept.weights)
    index = cumulative.first_above(uniform * cumulative.total)
    return index if kept.ids is None else int(kept.ids[index])


def log_normaliser(logits: Floats) -> float:
    """log(sum(exp(logits))): ``logits[i] - log_normaliser(logits)`` is i's logprob."""
    best = logits.max()
    with np.errstate(over="ignore", under="ignore"):
        shifted = logits - best
        np.exp(shifted, out=shifted)
    return float(best) + math.log(float(shifted.sum()))


def top_ids(values: Floats, k: int) -> Ids:
    """Indices of the ``k`` largest of ``values`` [V], best first, the lower id first on a tie.

    >>> top_ids(np.array([1.0, 3.0, 2.0, 3.0], dtype=np.float32), 3).tolist()
    [1, 3, 2]
    """
    k = min(k, len(values))
    if k <= 0:
        return np.empty(0, np.int64)
    num_groups = len(values) // _GROUP
    if k <= num_groups:
        # k groups have a maximum >= the k-th largest group maximum, so at least
        # k values do: everything below it is out, and few values are left to sort.
        # Groups are strided (i, i + num_groups, ...): the reduction is then SIMD.
        maxima = values[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(axis=0)
        threshold = np.partition(maxima, num_groups - k)[num_groups - k]
    else:
        threshold = np.partition(values, len(values) - k)[len(values) - k]
    candidates = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:k]]


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Ascending indices of the fewest largest weights whose sum reaches top_p of the total."""
    goal = top_p * float(weights.sum())
    candidates: Ids | None = None
    values = weights
    for cut in _NUCLEUS_CUTS:
        likely = np.flatnonzero(weights >= cut)
        likely_values = weights[likely]
        if float(likely_values.sum()) >= goal:
            candidates, values = likely, likely_values
            break
    # Keeping the fewest that reach the goal is dropping the most, smallest first,
    # that the rest can spare.
    ascending = np.sort(values)
    cumulative = _Cumulative(ascending)
    num_dropped = cumulative.first_above(cumulative.total - goal)
    least = ascending[num_dropped]
    chosen = np.flatnonzero(values >= least)
    num_extra = len(chosen) - (len(values) - num_dropped)
    if num_extra:
        ties = np.flatnonzero(values[chosen] == least)
        chosen = np.delete(chosen, ties[len(ties) - num_extra :])
    return chosen if candidates is None else candidates[chosen]


def _select(ids: Ids | None, weights: Floats, indices: Ids) -> tuple[Ids, Floats]:
    return indices if ids is None else ids[indices], weights[indices]


class _Cumulative:
    """The running sum of weights, as far as it is looked at.

    Two levels, because a float64 cumulative sum over a whole vocabulary costs
    ten times the rest: the ends of groups, and inside a group on demand.
    """

    def __init__(self, weights: Floats) -> None:
        self._weights = weights
        group_sums = np.add.reduceat(weights, np.arange(0, len(weights), _GROUP))
        self._group_ends = np.cumsum(group_sums, dtype=np.float64)

    @property
    def total(self) -> float:
        return float(self._group_ends[-1])

    def first_above(self, point: float) -> int:
        """The first index whose running sum exceeds ``point``, at most the last with weight."""
        group = _first_end_above(self._group_ends, point)
        before = float(self._group_ends[group - 1]) if group else 0.0
        start = group * _GROUP
        inside = np.cumsum(self._weights[start : start + _GROUP], dtype=np.float64)
        return start + _first_end_above(inside, point - before)


def _first_end_above(ends: NDArray[np.float64], point: float) -> int:
    """The first index with ``ends[index] > point``: never an entry of weight 0."""
    index = int(ends.searchsorted(point, side="right"))
    if index < len(ends):
        return index
    # Rounding put the point on the very end: take the last entry that has weight,
    # which is the first to reach the final sum.
    return int(ends.searchsorted(ends[-1], side="left"))
