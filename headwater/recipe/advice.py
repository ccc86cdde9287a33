"""The prefix advisor: which habits of a client cost cache hits, and how many.

    records -> per tenant and model: nearest earlier prompt -> what changed in it (align)
            -> an ideal cache over the prompts as they were, and with each habit repaired

A habit's price is the difference between the two: tokens that had to be computed and
need not have been. Says nothing about what is rare or cheap. Values in, values out;
knows no file. Used by ``app``.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headwater.recipe.advice_align import Habit, Region, align
from headwater.recipe.advice_cache import IdealCache
from headwater.recipe.advice_units import Prompt, Unit, UnitMaker
from headwater.recipe.record import RequestRecord, SpanKind
from headwater.recipe.record_maker import MAX_PIECE_TOKENS

MAX_RECORDS: Final = 10_000  # the newest; what is kept in memory grows with them
# Below these it may be chance, or is not worth a client's change.
MIN_REQUESTS: Final = 3
MIN_SAVED_SHARE: Final = 0.01  # of all prompt tokens
_SAMPLED: Final = 8  # one piece in so many is looked up, to find the nearest prompt
_MAX_CANDIDATES: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where prompts part: in tokens [first, last) of the prompt, of what, and of which
    message (-1: of none)."""

    kind: SpanKind
    index: int
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One habit. ``place`` is where it shows most often; without it (and without those named
    before it) ``num_saved_tokens`` need not have been computed."""

    habit: Habit
    num_requests: int
    num_saved_tokens: int
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """``num_hit_tokens`` are those of an ideal cache; ``findings`` with the dearest first."""

    num_requests: int
    num_tenants: int
    num_prompt_tokens: int
    num_hit_tokens: int
    findings: tuple[Finding, ...]

    @property
    def num_saved_tokens(self) -> int:
        """What all habits together cost."""
        return sum(finding.num_saved_tokens for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A prompt, what it grew out of, and how."""

    prompt: Prompt
    parent: int | None
    regions: tuple[Region, ...]


# Units of a prompt as they would be without a habit, for each of its own units.
_Repaired = tuple[tuple[Unit, ...], ...]


def advise(records: Iterable[RequestRecord], *, max_records: int = MAX_RECORDS) -> Advice:
    """Looks at the newest ``max_records`` of ``records``, which are in order of time."""
    groups, num_tenants = _groups(records, max_records)
    histories = [_steps(prompts) for prompts in groups]
    hits = [_simulate(steps, frozenset()) for steps in histories]
    num_prompt_tokens = sum(step.prompt.num_tokens for steps in histories for step in steps)
    num_computed = sum(num_tokens - hit for group in hits for num_tokens, hit in group)
    findings: list[Finding] = []
    left = {h: p for h, p in _affected(histories, hits).items() if len(p) >= MIN_REQUESTS}
    gone: frozenset[Habit] = frozenset()
    computed_now = num_computed
    while left:
        # One that comes earlier in the prompt hides the others: what they cost shows without it.
        least, habit = min((_num_computed(histories, gone | {habit}), habit) for habit in left)
        if computed_now - least < MIN_SAVED_SHARE * num_prompt_tokens:
            break
        findings.append(
            Finding(
                habit=habit,
                num_requests=len(left[habit]),
                num_saved_tokens=computed_now - least,
                place=_usual(left.pop(habit)),
            )
        )
        gone |= {habit}
        computed_now = least
    return Advice(
        num_requests=sum(map(len, histories)),
        num_tenants=num_tenants,
        num_prompt_tokens=num_prompt_tokens,
        num_hit_tokens=num_prompt_tokens - num_computed,
        findings=tuple(findings),
    )


def _groups(records: Iterable[RequestRecord], max_records: int) -> tuple[list[list[Prompt]], int]:
    """Prompts that could have hit each other, and how many tenants there are."""
    maker = UnitMaker()
    newest: deque[tuple[str, str, Prompt]] = deque(maxlen=max_records)
    for record in records:
        newest.append((record.tenant, record.model, maker.prompt(record)))
    groups: defaultdict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for tenant, model, prompt in newest:
        groups[tenant, model].append(prompt)
    return list(groups.values()), len({tenant for tenant, _ in groups})


def _steps(prompts: Sequence[Prompt]) -> list[_Step]:
    nearest = _Nearest()
    steps: list[_Step] = []
    for number, prompt in enumerate(prompts):
        parent = nearest.find(prompt, prompts)
        nearest.keep(number, prompt)
        regions = align(prompts[parent], prompt) if parent is not None else ()
        steps.append(_Step(prompt=prompt, parent=parent, regions=regions))
    return _one_name_for_one_value(steps)


def _one_name_for_one_value(steps: Sequence[_Step]) -> list[_Step]:
    """A value that changes within conversations differs between them, too: that is one habit."""
    changing = {
        _whose(step.prompt, region): region.habit
        for step in steps
        for region in step.regions
        if region.habit in (Habit.CHANGING_VALUE, Habit.TOOLS_CHANGED)
    }

    def renamed(step: _Step, region: Region) -> Region:
        if region.habit is not Habit.VALUE_PER_CONVERSATION:
            return region
        habit = changing.get(_whose(step.prompt, region), region.habit)
        return replace(region, habit=habit)

    return [replace(s, regions=tuple(renamed(s, region) for region in s.regions)) for s in steps]


class _Nearest:
    """Finds the earlier prompt that a prompt has most in common with."""

    def __init__(self) -> None:
        self._last_with: dict[bytes | int, int] = {}

    def keep(self, number: int, prompt: Prompt) -> None:
        for mark in _marks(prompt):
            self._last_with[mark] = number

    def find(self, prompt: Prompt, prompts: Sequence[Prompt]) -> int | None:
        """The number of the nearest, of several the newest; None if nothing is in common."""
        tally: Counter[int] = Counter()
        for mark, num_tokens in _marks(prompt).items():
            number = self._last_with.get(mark)
            if number is not None:
                tally[number] += num_tokens
        own = {unit.body: unit.num_tokens for unit in prompt.units}

        def nearness(number: int) -> tuple[int, int, int]:
            common = own.keys() & {unit.body for unit in prompts[number].units}
            return sum(own[key] for key in common), tally[number], number

        return max((number for number, _ in tally.most_common(_MAX_CANDIDATES)),
                   key=nearness, default=None)  # fmt: skip


def _marks(prompt: Prompt) -> dict[bytes | int, int]:
    """What a prompt is found by, each with its tokens: units, and a few of their pieces."""
    marks: dict[bytes | int, int] = {}
    for unit in prompt.units:
        if unit.kind != "text":  # whose units are pieces
            marks[unit.body] = unit.num_tokens
        for piece in unit.pieces:
            if piece.digest % _SAMPLED == 0:
                marks[piece.digest] = piece.num_tokens
    return marks


def _simulate(steps: Sequence[_Step], habits: frozenset[Habit]) -> list[tuple[int, int]]:
    """(tokens, hit tokens) of each prompt in an ideal cache, without ``habits``."""
    cache = IdealCache()
    repaired: list[_Repaired] = []
    counts: list[tuple[int, int]] = []
    for step in steps:
        before = repaired[step.parent] if step.parent is not None else ()
        own = _without(step, before, habits) if habits else _as_it_was(step.prompt)
        repaired.append(own)
        units = [unit for group in own for unit in group]
        if step.prompt.end is not None:
            units.append(step.prompt.end)
        num_tokens = sum(unit.num_tokens for unit in units)
        counts.append((num_tokens, cache.look_and_keep(units)))
    return counts


def _num_computed(histories: Iterable[Sequence[_Step]], habits: frozenset[Habit]) -> int:
    return sum(
        num_tokens - num_hit_tokens
        for steps in histories
        for num_tokens, num_hit_tokens in _simulate(steps, habits)
    )


def _as_it_was(prompt: Prompt) -> _Repaired:
    return tuple((unit,) for unit in prompt.units)


def _without(step: _Step, before: _Repaired, habits: frozenset[Habit]) -> _Repaired:
    """The prompt with what its parent (``before``, repaired) had in place of what a habit made
    of it. What has no place in the new prompt stands before the next unit that has one."""
    if step.parent is None:
        return _as_it_was(step.prompt)
    units = step.prompt.units
    own: list[tuple[Unit, ...]] = []
    waiting: tuple[Unit, ...] = ()
    moved: tuple[Unit, ...] = ()
    for region in step.regions:
        olds = before[region.old_start : region.old_end]
        if region.is_same:
            own += [(*waiting, *olds[0]), *olds[1:]]
            waiting = ()
        elif region.habit in habits:
            waiting += tuple(unit for group in olds for unit in group)
            if region.num_new and region.num_old:
                own += [waiting, *[()] * (region.num_new - 1)]
                waiting = ()
            elif region.num_new:
                own += [()] * region.num_new
                if region.habit is not Habit.RESULTS_REORDERED:
                    moved += units[region.new_start : region.new_end]
        elif region.num_new:
            news = units[region.new_start : region.new_end]
            own += [(*waiting, news[0]), *((unit,) for unit in news[1:])]
            waiting = ()
    if own:
        own[-1] += waiting + moved
    return tuple(own)


def _affected(
    histories: Sequence[Sequence[_Step]], hits: Sequence[Sequence[tuple[int, int]]]
) -> dict[Habit, list[Place]]:
    """For each habit the places in the prompts whose hits ended there, one per prompt."""
    found: defaultdict[Habit, list[Place]] = defaultdict(list)
    for steps, counts in zip(histories, hits, strict=True):
        for step, (_, num_hit_tokens) in zip(steps, counts, strict=True):
            seen: set[Habit] = set()
            for region in step.regions:
                habit = region.habit
                if habit is None or habit in seen:
                    continue
                if num_hit_tokens > region.last + MAX_PIECE_TOKENS:
                    continue  # another prompt had it the same way
                seen.add(habit)
                found[habit].append(_place(step.prompt, region))
    return found


def _whose(prompt: Prompt, region: Region) -> tuple[SpanKind, int]:
    position = min(region.new_start, len(prompt.units) - 1)
    return prompt.units[position].subject, prompt.indexes[position]


def _place(prompt: Prompt, region: Region) -> Place:
    kind, index = _whose(prompt, region)
    return Place(kind=kind, index=index, first=region.first, last=region.last)


def _usual(places: Sequence[Place]) -> Place:
    """The most frequent message, and the tokens that all differences in it lie between."""
    counted = Counter((place.kind, place.index) for place in places)
    (kind, index), _ = counted.most_common(1)[0]
    here = [place for place in places if (place.kind, place.index) == (kind, index)]
    return Place(
        kind=kind,
        index=index,
        first=min(place.first for place in here),
        last=max(place.last for place in here),
    )
