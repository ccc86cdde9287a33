"""Fits what a step costs to the steps that were seen: non-negative weighted least squares.

    observation (shape, seconds) --> its class, by the power of two of its tokens:
                                     each class forgets its own old ones
    all classes together         --> coefficients, none negative
    the last few errors          --> level: how fast the machine is just now

A worker that only decodes for hours must not forget what prefill costs, so old observations
make way only for new ones of the same class. Errors count in proportion to the step, and
one far off the others counts little: somebody else was using the machine. If all are off,
none is an outlier and the fit follows. Knows no clock and no engine; ``cost_book`` calls it.
"""

from __future__ import annotations

import statistics
from collections import deque
from itertools import islice

from headwater.core.cost import StepCost, StepShape

KEPT = 0.9  # of a class's weight, with each new observation: about the last ten speak
REFIT_EVERY = 8  # observations, once there are many
NUM_RECENT = 32  # errors that say what is usual
NUM_LEVEL = 9  # errors that say how fast the machine is now; the median of so many
LEVEL_RANGE = (0.5, 2.0)
# Errors beyond so many times the usual one count less, and never is an error taken for
# unusual that is smaller than this share of the prediction.
USUAL_TIMES = 2.0
MIN_USUAL = 0.05
MAX_SURPRISE = 4.0  # a step so many times off what was expected is weighed as if it was not
# Holds what the observations leave open, with so much of each coefficient's own weight.
RIDGE = 1e-4

_Matrix = list[list[float]]
_N = 7
# Makes columns alike in size; a typical step of each.
_UNITS = (1.0, 1e2, 1e5, 1e5, 1.0, 1e2, 1e5)


class CostFit:
    """Give it steps, ask it for ``cost``. O(1) per step, whatever has been seen."""

    def __init__(self) -> None:
        self._classes: dict[int, _Sums] = {}
        self._solution = [0.0] * _N
        self._num_seen = 0
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)  # (real - fitted) / fitted
        self._level = 1.0

    @property
    def cost(self) -> StepCost | None:
        """As fitted by now; None before the first step."""
        if not self._num_seen:
            return None
        base, token, pair, window_pair, sequence, late_token, late_pair = (
            self._level * value / unit for value, unit in zip(self._solution, _UNITS, strict=True)
        )
        return StepCost(
            base_s=base, token_s=token, pair_s=pair, window_pair_s=window_pair,
            sequence_s=sequence, late_token_s=late_token, late_pair_s=late_pair,
        )  # fmt: skip

    def note(self, shape: StepShape, seconds: float) -> None:
        """One step of ``shape`` took ``seconds``; what is not a time says nothing."""
        if not 0 < seconds < float("inf") or not shape.num_tokens:
            return
        row = _columns(shape)
        fitted = sum(x * value for x, value in zip(row, self._solution, strict=True))
        weight, scale = 1.0, seconds
        if fitted > 0:
            # By the mean of both: by what came alone, slow steps would count less than fast ones.
            scale = (
                min(max(fitted, seconds / MAX_SURPRISE), seconds * MAX_SURPRISE) * seconds
            ) ** 0.5
            error = seconds / fitted - 1
            weight = self._weight(error)
            self._recent.append(error)
            last = list(islice(reversed(self._recent), NUM_LEVEL))
            low, high = LEVEL_RANGE
            self._level = min(max(1 + statistics.median(last), low), high)
        self._classes.setdefault(_class_of(shape), _Sums()).add(
            row, seconds, weight / (scale * scale)
        )
        self._num_seen += 1
        if self._num_seen <= 4 * REFIT_EVERY or self._num_seen % REFIT_EVERY == 0:
            self._refit()

    def _weight(self, error: float) -> float:
        """Huber's: 1 up to what is usual, then falling with the error's size."""
        if len(self._recent) < NUM_LEVEL:
            return 1.0
        usual = max(statistics.median(map(abs, self._recent)), MIN_USUAL) * USUAL_TIMES
        return min(1.0, usual / abs(error)) if error else 1.0

    def _refit(self) -> None:
        gram = [[0.0] * _N for _ in range(_N)]
        moment = [0.0] * _N
        for sums in self._classes.values():
            for i in range(_N):
                moment[i] += sums.moment[i]
                for j in range(_N):
                    gram[i][j] += sums.gram[i][j]
        for i in range(_N):
            hold = RIDGE * gram[i][i]
            moment[i] += hold * self._solution[i]
            gram[i][i] += hold
        self._solution = solve_non_negative(gram, moment)


class _Sums:
    """A class's weighted products: X'WX and X'Wy."""

    def __init__(self) -> None:
        self.gram: _Matrix = [[0.0] * _N for _ in range(_N)]
        self.moment = [0.0] * _N

    def add(self, row: list[float], seconds: float, weight: float) -> None:
        for i in range(_N):
            scaled = weight * row[i]
            self.moment[i] = KEPT * self.moment[i] + scaled * seconds
            line = self.gram[i]
            for j in range(_N):
                line[j] = KEPT * line[j] + scaled * row[j]


def _columns(shape: StepShape) -> list[float]:
    counts = (
        1.0,
        shape.num_tokens,
        shape.num_pairs,
        shape.num_window_pairs,
        shape.num_sequences,
        shape.num_late_tokens,
        shape.num_late_pairs,
    )
    return [count / unit for count, unit in zip(counts, _UNITS, strict=True)]


def _class_of(shape: StepShape) -> int:
    return shape.num_tokens.bit_length()


def solve_non_negative(gram: _Matrix, moment: list[float]) -> list[float]:
    """The x >= 0 that makes x'Gx/2 - m'x least, for a symmetric G without negative eigenvalues.

    Lawson and Hanson's active set: one column at a time is let in, and those that would
    turn negative are put out again. Columns that are all zero stay zero.
    """
    size = len(moment)
    inside: list[int] = []
    x = [0.0] * size
    for _ in range(4 * size):  # each round lowers the value; the bound is for rounding only
        slope = [moment[i] - sum(gram[i][j] * x[j] for j in inside) for i in range(size)]
        enter = max(
            (i for i in range(size) if i not in inside and gram[i][i] > 0),
            key=lambda i: slope[i] / gram[i][i] ** 0.5,
            default=None,
        )
        if enter is None or slope[enter] <= 1e-9 * abs(moment[enter]):
            break
        inside.append(enter)
        while inside:
            wanted = _solve(
                [[gram[i][j] for j in inside] for i in inside], [moment[i] for i in inside]
            )
            if min(wanted) > 0:
                x = [0.0] * size
                for i, value in zip(inside, wanted, strict=True):
                    x[i] = value
                break
            # As far towards it as all stay positive; whoever is at zero then goes out.
            step = min(
                x[i] / (x[i] - value) for i, value in zip(inside, wanted, strict=True) if value <= 0
            )
            for i, value in zip(inside, wanted, strict=True):
                x[i] += step * (value - x[i])
            out = [i for i in inside if x[i] <= 1e-15]
            for i in out:
                x[i] = 0.0
                inside.remove(i)
    return x


def _solve(matrix: _Matrix, right: list[float]) -> list[float]:
    """Gauss with pivots; both arguments are used up."""
    size = len(right)
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(matrix[i][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        right[column], right[pivot] = right[pivot], right[column]
        for i in range(column + 1, size):
            factor = matrix[i][column] / matrix[column][column]
            for j in range(column, size):
                matrix[i][j] -= factor * matrix[column][j]
            right[i] -= factor * right[column]
    for column in reversed(range(size)):
        known = sum(matrix[column][j] * right[j] for j in range(column + 1, size))
        right[column] = (right[column] - known) / matrix[column][column]
    return right
