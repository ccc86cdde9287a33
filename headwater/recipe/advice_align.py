"""How a prompt grew out of an earlier one, and which habit changed what was there already.

    old   sys  tools  u1  a1  t1
    new   sys' tools  u1  a1  t1  a2  t2     one change: sys -> sys', then the same, then growth

A change counts as a habit only where the two prompts meet again behind it, so that
something was lost by it; a conversation that goes elsewhere for good is no habit.
Values in, values out. Used by ``advice`` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from enum import StrEnum
from itertools import takewhile
from typing import Final

from headwater.recipe.advice_units import Parting, Prompt, Unit, parting
from headwater.recipe.record import Said

# Comparing costs up to the square of what lies between the common ends.
MAX_ALIGNED_UNITS: Final = 2000
MIN_LIKENESS: Final = 0.5  # from here on, two texts are one text that was changed
# One conversation's beginning is like another's: what they share must be worth a cache.
MIN_SHARED_BEHIND_TOKENS: Final = 64
MAX_VALUE_TOKENS: Final = 256  # a longer difference in a text prompt is another text


class Habit(StrEnum):
    """What a client does that parts prompts which could go on together."""

    CHANGING_VALUE = "changing_value"
    VALUE_PER_CONVERSATION = "value_per_conversation"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_CHANGED = "tools_changed"
    REASONING_DROPPED = "reasoning_dropped"
    REASONING_LEFT_OUT = "reasoning_left_out"
    REASONING_CHANGED = "reasoning_changed"
    RESPELT = "respelt"
    IDS_CHANGED = "ids_changed"
    HISTORY_CUT = "history_cut"
    HISTORY_EDITED = "history_edited"
    RESULTS_REORDERED = "results_reordered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Units [old_start, old_end) of the old prompt became [new_start, new_end) of the new.

    ``habit`` None: they are the same (``is_same``), or new, or gone for good. ``first`` and
    ``last`` are the tokens of the new prompt between which it differs.
    """

    old_start: int
    old_end: int
    new_start: int
    new_end: int
    is_same: bool = False
    habit: Habit | None = None
    first: int = 0
    last: int = 0

    @property
    def num_old(self) -> int:
        return self.old_end - self.old_start

    @property
    def num_new(self) -> int:
        return self.new_end - self.new_start


def align(old: Prompt, new: Prompt) -> tuple[Region, ...]:
    """Regions that cover all units of both prompts, in order."""
    regions = tuple(_opcodes(old.units, new.units))
    moved = _moved_results(old, new, regions)
    found: list[Region] = []
    for number, region in enumerate(regions):
        if region.is_same:
            found.append(region)
            continue
        behind = regions[number + 1 :]
        judge = _Judge(old, new, regions, _shared_tokens(new, behind), moved)
        found += judge.judged(region)
    return tuple(found)


def _opcodes(old: Sequence[Unit], new: Sequence[Unit]) -> Iterator[Region]:
    left, right = [unit.key for unit in old], [unit.key for unit in new]
    start = 0
    while start < min(len(left), len(right)) and left[start] == right[start]:
        start += 1
    if start:
        yield Region(old_start=0, old_end=start, new_start=0, new_end=start, is_same=True)
    rest = (left[start:], right[start:])
    if max(map(len, rest)) > MAX_ALIGNED_UNITS:
        yield Region(old_start=start, old_end=len(left), new_start=start, new_end=len(right))
        return
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, *rest, autojunk=False).get_opcodes():
        yield Region(
            old_start=start + i1,
            old_end=start + i2,
            new_start=start + j1,
            new_end=start + j2,
            is_same=tag == "equal",
        )


def _shared_tokens(new: Prompt, regions: Sequence[Region]) -> int:
    return sum(
        unit.num_tokens
        for region in regions
        if region.is_same
        for unit in new.units[region.new_start : region.new_end]
    )


def _moved_results(old: Prompt, new: Prompt, regions: Sequence[Region]) -> frozenset[bytes]:
    """Tool results that are in both prompts but in another order."""
    before = [unit.body for unit in old.units if unit.subject == "tool_result"]
    after = [unit.body for unit in new.units if unit.subject == "tool_result"]
    common = frozenset(before) & frozenset(after)
    if [c for c in before if c in common] == [c for c in after if c in common]:
        return frozenset()
    changed = (
        unit.body for r in regions if not r.is_same for unit in old.units[r.old_start : r.old_end]
    )
    return common & frozenset(changed)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Names the habit of one region. ``num_behind`` tokens behind it are in both prompts;
    ``moved`` are results that changed their place."""

    old: Prompt
    new: Prompt
    regions: Sequence[Region]
    num_behind: int
    moved: frozenset[bytes]

    def judged(self, region: Region) -> list[Region]:
        units = (*self._olds(region), *self._news(region))
        if any(unit.kind == "text" for unit in units):
            return [self._named(region, self._habit_of_text(region))]
        if num_moved := self._num_moved(region):
            return self._split(region, *num_moved)
        if region.num_old and region.num_new:
            return self._replaced(region)
        if not self._goes_on:
            return [region]
        if any(unit.kind == "tools" for unit in units):
            return [self._named(region, Habit.TOOLS_CHANGED)]
        if region.num_old and self._follows_the_opening(region):
            return [self._named(region, Habit.HISTORY_CUT)]
        return [self._named(region, Habit.HISTORY_EDITED)]

    @property
    def _goes_on(self) -> bool:
        """Whether it is the same conversation: they meet again."""
        return self.num_behind > 0

    def _olds(self, region: Region) -> Sequence[Unit]:
        return self.old.units[region.old_start : region.old_end]

    def _news(self, region: Region) -> Sequence[Unit]:
        return self.new.units[region.new_start : region.new_end]

    def _habit_of_text(self, region: Region) -> Habit | None:
        """A prompt without messages: a short difference before much that is common."""
        longest = max(
            sum(unit.num_tokens for unit in units)
            for units in (self._olds(region), self._news(region))
        )
        if longest <= MAX_VALUE_TOKENS and self.num_behind >= MIN_SHARED_BEHIND_TOKENS:
            return Habit.CHANGING_VALUE
        return None

    def _replaced(self, region: Region) -> list[Region]:
        """One by one where the numbers agree; what is left over at the end is growth."""
        num_pairs = region.num_old
        is_last = region.old_end == len(self.old.units)
        if region.num_new == num_pairs or (is_last and region.num_new > num_pairs):
            return self._in_pairs(region, num_pairs)
        if not self._goes_on:
            return [region]
        # What opens a prompt is not what was cut out behind it.
        both = zip(self._olds(region), self._news(region), strict=False)
        num_opening = sum(1 for _ in takewhile(lambda pair: all(map(_is_opening, pair)), both))
        if num_opening:
            return self._in_pairs(region, num_opening)
        # With no system message before it, what is first now has another opening.
        nearest = parting(self._olds(region)[-1].pieces, self._news(region)[-1].pieces)
        if (
            self._follows_the_opening(region)
            and region.num_new == 1
            and nearest.likeness >= MIN_LIKENESS
        ):
            return [self._named(region, Habit.HISTORY_CUT)]
        return [self._named(region, Habit.HISTORY_EDITED)]

    def _num_moved(self, region: Region) -> tuple[int, int] | None:
        """How many units at the region's start changed their place, in old and new."""
        counts = [
            sum(1 for _ in takewhile(lambda unit: unit.body in self.moved, units))
            for units in (self._olds(region), self._news(region))
        ]
        return (counts[0], counts[1]) if any(counts) else None

    def _split(self, region: Region, num_old: int, num_new: int) -> list[Region]:
        """The start of it was reordered; the rest is judged by itself."""
        middle_old, middle_new = region.old_start + num_old, region.new_start + num_new
        moved = replace(region, old_end=middle_old, new_end=middle_new)
        rest = replace(region, old_start=middle_old, new_start=middle_new)
        found = [self._named(moved, Habit.RESULTS_REORDERED)]
        return [*found, *self.judged(rest)] if rest.num_old or rest.num_new else found

    def _in_pairs(self, region: Region, num_pairs: int) -> list[Region]:
        pairs = [self._pair(region, number) for number in range(num_pairs)]
        rest = replace(
            region,
            old_start=region.old_start + num_pairs,
            new_start=region.new_start + num_pairs,
        )
        if rest.num_old:
            return [*pairs, *self.judged(rest)]
        return [*pairs, rest] if rest.num_new else pairs

    def _pair(self, region: Region, number: int) -> Region:
        at_old, at_new = region.old_start + number, region.new_start + number
        pair = Region(old_start=at_old, old_end=at_old + 1, new_start=at_new, new_end=at_new + 1)
        before, after = self.old.units[at_old], self.new.units[at_new]
        # At the end of both prompts it is another question, not one that was changed; with
        # more behind it, it is what an answer was already given to.
        followed = self._goes_on or at_new + 1 < len(self.new.units)
        if before.kind != after.kind or before.subject != after.subject or not followed:
            return pair
        habit = self._habit_of_pair(at_old, at_new, parting(before.pieces, after.pieces))
        return self._named(pair, habit)

    def _habit_of_pair(self, at_old: int, at_new: int, cut: Parting) -> Habit | None:
        before, after = self.old.units[at_old], self.new.units[at_new]
        if before.kind == "tools":
            return self._habit_of_tools(cut)
        said, says = self.old.said(at_old), self.new.said(at_new)
        if before.has("reasoning") and _same_but_for_reasoning(said, says):
            if not after.has("reasoning"):
                is_kept_by_client = says.reasoning != ""
                return Habit.REASONING_LEFT_OUT if is_kept_by_client else Habit.REASONING_DROPPED
            if said.reasoning != says.reasoning:
                return Habit.REASONING_CHANGED
        if said == says:
            is_only_name = before.without("name") == after.without("name")
            return Habit.IDS_CHANGED if is_only_name else Habit.RESPELT
        is_like = cut.likeness >= MIN_LIKENESS
        if self._is_one_conversation:
            if before.subject == "system" or is_like:
                return Habit.CHANGING_VALUE
            return Habit.HISTORY_EDITED if self._goes_on else None
        return self._habit_of_opening(cut)

    def _habit_of_opening(self, cut: Parting) -> Habit | None:
        """Two conversations that begin alike, but for a value."""
        num_behind = cut.num_after + self.num_behind
        is_like = cut.likeness >= MIN_LIKENESS and cut.num_after > 0
        if is_like and num_behind >= MIN_SHARED_BEHIND_TOKENS:
            return Habit.VALUE_PER_CONVERSATION
        return None

    def _habit_of_tools(self, cut: Parting) -> Habit | None:
        if self.old.tools == self.new.tools:
            return Habit.RESPELT
        if Counter(self.old.tools) == Counter(self.new.tools):
            return Habit.TOOLS_REORDERED
        return Habit.TOOLS_CHANGED if self._is_one_conversation else self._habit_of_opening(cut)

    @property
    def _is_one_conversation(self) -> bool:
        """Whether some message other than the system's is in both prompts."""
        return any(
            unit.kind == "message" and unit.subject != "system"
            for region in self.regions
            if region.is_same
            for unit in self._olds(region)
        )

    def _follows_the_opening(self, region: Region) -> bool:
        """Whether only the system message and the tools stand before it."""
        return all(map(_is_opening, self.old.units[: region.old_start]))

    def _named(self, region: Region, habit: Habit | None) -> Region:
        starts = (*self.new.starts, self.new.num_tokens)
        first, last = starts[region.new_start], starts[region.new_end]
        if region.num_old == region.num_new == 1:
            pair = (self.old.units[region.old_start], self.new.units[region.new_start])
            cut = parting(pair[0].pieces, pair[1].pieces)
            first, last = first + cut.num_before, last - cut.num_after
        return replace(region, habit=habit, first=first, last=last)


def _is_opening(unit: Unit) -> bool:
    return unit.kind == "tools" or unit.subject == "system"


def _same_but_for_reasoning(said: Said, says: Said) -> bool:
    return (said.role, said.content, said.tool_calls) == (says.role, says.content, says.tool_calls)
