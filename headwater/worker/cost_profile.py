"""A handful of steps before the first request, so that the first prediction is not a guess.

    one token | few tokens | chunks | a chunk deep in a prompt | many answers beside a chunk

Where late layers compute a prompt's last tokens only, each chunk also without them. Tokens,
positions and blocks are made up: nothing was admitted yet, so all blocks are free, what is
written to them belongs to nobody and is never published. Knows an Engine and a clock; what
comes of it goes to ``cost_book``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from headwater.core.blocks import BlockId, blocks_for
from headwater.core.cost import NO_STEP, StepShape
from headwater.core.errors import EngineFault
from headwater.core.fleet import Holding
from headwater.core.ports import Clock, Engine
from headwater.core.request import ModelInfo, SamplingParams
from headwater.core.step import SampleSpec, SequenceId, StepPlan, StepRow

PROFILE_S = 1.0


class Observation(NamedTuple):
    """A step, and how long it took."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class _Row:
    start: int
    num_tokens: int
    is_early: bool = False  # late layers leave all of it out

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def late_start(self) -> int:
        return self.end if self.is_early else 0


# The most telling ones first: the time may end before the list does. Deep enough to tell
# what a pair costs, and not so deep that it is all that there is time for.
_DEEP = 1024
_STEPS: tuple[tuple[_Row, ...], ...] = (
    (_Row(64, 1),),
    (_Row(0, 64),),
    (_Row(_DEEP, 64),),
    (_Row(64, 1),) * 8,
    (_Row(_DEEP, 1),) * 4,
    (_Row(0, 16),),
    (*(_Row(64, 1),) * 4, _Row(_DEEP, 128)),
    (_Row(0, 256),),
)


def profile(
    engine: Engine,
    clock: Clock,
    *,
    holds: Holding = Holding.ALL,
    limit_s: float = PROFILE_S,
) -> list[Observation]:
    """Run steps of usual shapes, as far as the pool, the context and ``limit_s`` allow, and the
    layers that the engine holds.

    Each shape runs twice in turn and the faster time counts: the first also pays for memory
    and code that are new. The last step may end after ``limit_s``. Nothing from a step that
    fails: the first real one will say why.
    """
    begin_s = clock.now_s()
    found: list[Observation] = []
    for rows in _usable(engine.info, holds):
        plan = _plan(rows, engine.info)
        times: list[float] = []
        for _ in range(2):
            start_s = clock.now_s()
            if times and start_s - begin_s > limit_s:
                break
            try:
                engine.run(plan)
            except EngineFault:
                return found
            times.append(clock.now_s() - start_s)
        found.append(Observation(_shape(rows, engine.info), min(times)))
        if clock.now_s() - begin_s > limit_s:
            break
    return found


def _usable(info: ModelInfo, holds: Holding) -> Iterator[tuple[_Row, ...]]:
    """The steps, no deeper than the model's context and no larger than the pool."""
    for rows in _STEPS:
        fitting = tuple(_cut(row, info.context_tokens) for row in rows)
        if sum(blocks_for(row.end, info.block_tokens) for row in fitting) > info.num_blocks:
            continue
        if holds is Holding.EARLY:
            yield tuple(replace(row, is_early=True) for row in fitting)
            continue
        yield fitting
        early = tuple(replace(row, is_early=row.num_tokens > 1) for row in fitting)
        if info.decoder_replay_tokens is not None and early != fitting:
            yield early


def _cut(row: _Row, context_tokens: int) -> _Row:
    num_tokens = min(row.num_tokens, context_tokens)
    return _Row(min(row.start, context_tokens - num_tokens), num_tokens)


def _shape(rows: tuple[_Row, ...], info: ModelInfo) -> StepShape:
    shape = NO_STEP
    for row in rows:
        late_start = None if info.decoder_replay_tokens is None else row.late_start
        shape += StepShape.of_row(row.start, row.num_tokens, info.window_tokens, late_start)
    return shape


def _plan(rows: tuple[_Row, ...], info: ModelInfo) -> StepPlan:
    """Each row in blocks of its own."""
    planned = []
    first_block = 0
    for number, row in enumerate(rows):
        end_block = first_block + blocks_for(row.end, info.block_tokens)
        planned.append(
            StepRow(
                sequence_id=SequenceId(number),
                start=row.start,
                tokens=tuple(position % info.vocab_size for position in range(row.start, row.end)),
                block_table=tuple(BlockId(block) for block in range(first_block, end_block)),
                sample=None
                if row.is_early
                else SampleSpec(params=SamplingParams(), position=row.end),
                late_start=row.late_start,
            )
        )
        first_block = end_block
    return StepPlan(tuple(planned))
