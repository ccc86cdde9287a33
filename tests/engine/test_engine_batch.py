"""Batch tensors beside a token-by-token loop, and plans that must not reach a kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.blocks import BlockId, blocks_for
from headwater.core.errors import EngineFault
from headwater.core.request import SamplingParams
from headwater.core.step import SampleSpec, SequenceId, StepPlan, StepRow
from headwater.engine.batch import BatchBuilder

BLOCK_TOKENS = 4


WINDOW = 6


def builder(
    num_blocks: int = 200, *, has_windows: bool = False, has_late: bool = False
) -> BatchBuilder:
    return BatchBuilder(
        block_tokens=BLOCK_TOKENS,
        num_blocks=num_blocks,
        context_tokens=100,
        vocab_size=50,
        device=torch.device("cpu"),
        window_tokens=WINDOW if has_windows else None,
        has_late=has_late,
    )


def row(sequence_id: int, start: int, tokens: tuple[int, ...], table: tuple[int, ...]) -> StepRow:
    return StepRow(
        sequence_id=SequenceId(sequence_id),
        start=start,
        tokens=tokens,
        block_table=tuple(BlockId(block) for block in table),
    )


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    rows = []
    for sequence_id in range(draw(st.integers(1, 6))):
        start = draw(st.integers(0, 40))
        tokens = tuple(draw(st.lists(st.integers(0, 49), min_size=1, max_size=20)))
        num_blocks = blocks_for(start + len(tokens), BLOCK_TOKENS) + draw(st.integers(0, 3))
        table = tuple(draw(st.permutations(range(30)))[:num_blocks])
        rows.append(row(sequence_id, start, tokens, table))
    return StepPlan(tuple(rows))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(plans(), min_size=1, max_size=3))
def test_tensors_are_what_a_loop_over_tokens_gives(steps: list[StepPlan]) -> None:
    built_by_one = builder()
    for plan in steps:
        built = built_by_one.build(plan)
        ids, positions, slots, starts = [], [], [], [0]
        for r in plan.rows:
            for i, token in enumerate(r.tokens):
                position = r.start + i
                block = r.block_table[position // BLOCK_TOKENS]
                ids.append(token)
                positions.append(position)
                slots.append(block * BLOCK_TOKENS + position % BLOCK_TOKENS)
            starts.append(len(ids))
        width = max(blocks_for(r.end, BLOCK_TOKENS) for r in plan.rows)
        tables = []
        for r in plan.rows:
            used = list(r.block_table[: blocks_for(r.end, BLOCK_TOKENS)])
            tables.append(used + [0] * (width - len(used)))
        batch = built.batch
        assert built.ids.tolist() == ids
        assert batch.positions.tolist() == positions
        assert batch.slots.tolist() == slots
        assert batch.row_starts.tolist() == starts
        assert batch.context_lens.tolist() == [r.end for r in plan.rows]
        assert batch.block_tables.tolist() == tables
        assert batch.max_row_tokens == max(len(r.tokens) for r in plan.rows)
        assert batch.max_context == max(r.end for r in plan.rows)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(plans(), st.data())
def test_windows_and_replays_are_what_a_loop_over_tokens_gives(
    plan: StepPlan, data: st.DataObject
) -> None:
    rows = tuple(
        replace(
            r,
            window_start=data.draw(st.integers(0, r.start)),
            num_replayed=data.draw(st.integers(0, len(r.tokens))),
        )
        for r in plan.rows
    )
    built = builder(has_windows=True).build(StepPlan(rows)).batch
    plain = builder().build(plan).batch
    assert plain.window_starts is None
    assert plain.global_slots is None
    assert built.window_starts is not None
    assert built.global_slots is not None
    assert built.window_starts.dtype == torch.int32
    assert built.window_starts.tolist() == [r.window_start for r in rows]
    slots = iter(plain.slots.tolist())
    expected = []
    for r in rows:
        for i in range(len(r.tokens)):
            slot = next(slots)
            expected.append(-1 if i < r.num_replayed else slot)
    assert built.global_slots.dtype == torch.int64
    assert built.global_slots.tolist() == expected
    assert built.slots.tolist() == plain.slots.tolist()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(plans(), st.data())
def test_late_tokens_are_what_a_loop_over_tokens_gives(plan: StepPlan, data: st.DataObject) -> None:
    draw = data.draw
    is_easy = draw(st.booleans())  # then all of the step is late
    rows = tuple(
        replace(
            r,
            window_start=draw(st.integers(0, r.start)),
            num_replayed=draw(st.integers(0, len(r.tokens))),
            late_start=draw(st.integers(0, r.start if is_easy else r.end + 2)),
        )
        for r in plan.rows
    )
    batch = builder(has_windows=True, has_late=True).build(StepPlan(rows)).batch
    plain = (
        builder(has_windows=True)
        .build(StepPlan(tuple(replace(r, late_start=0) for r in rows)))
        .batch
    )
    assert plain.late is None
    for name in ("positions", "slots", "global_slots", "window_starts", "row_starts"):
        assert torch.equal(getattr(batch, name), getattr(plain, name)), "of all tokens"

    assert batch.window_starts is not None
    assert batch.global_slots is not None
    indices, row_starts, chosen, looks_alike = [], [0], [], True
    index = 0
    for number, r in enumerate(rows):
        for position in range(r.start, r.end):
            looks_alike &= position >= r.late_start
            if position >= r.late_start:
                indices.append(index)
                seen = max(position - WINDOW + 1, r.window_start)
                looks_alike &= seen >= r.late_start
            index += 1
        if r.end > r.late_start:
            chosen.append(number)
            row_starts.append(len(indices))
    assert (batch.late is None) == looks_alike, "left out exactly where it says nothing new"
    if batch.late is None:
        return
    assert batch.late.indices.dtype == torch.int64
    assert batch.late.indices.tolist() == indices
    late = batch.late.batch
    assert (late is None) == (not indices)
    if late is None:
        return
    assert late.late is None
    assert late.row_starts.tolist() == row_starts
    assert late.context_lens.tolist() == [rows[i].end for i in chosen]
    assert late.block_tables.tolist() == batch.block_tables[chosen].tolist()
    assert late.positions.tolist() == batch.positions[indices].tolist()
    assert late.slots.tolist() == batch.slots[indices].tolist()
    assert late.global_slots is not None
    assert late.global_slots.tolist() == batch.global_slots[indices].tolist()
    assert late.window_starts is not None
    assert late.window_starts.tolist() == [
        max(rows[i].window_start, rows[i].late_start) for i in chosen
    ]
    assert late.max_row_tokens == max(end - start for start, end in pairwise(row_starts))
    assert late.max_context == max(rows[i].end for i in chosen)
    for tensor in (late.row_starts, late.context_lens, late.block_tables, late.positions):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_a_step_that_only_decodes_has_nothing_to_say_of_late_layers() -> None:
    """Their windows end behind where they began: a prompt's replay is longer than a window."""
    rows = [
        replace(row(i, 30 + i, (1,), tuple(range(9))), late_start=31 - WINDOW) for i in range(4)
    ]
    batches = builder(has_windows=True, has_late=True)
    assert batches.build(StepPlan(tuple(rows))).batch.late is None
    early = replace(rows[0], late_start=32 - WINDOW)
    assert batches.build(StepPlan((*rows[1:], early))).batch.late is not None


SAMPLE = SampleSpec(params=SamplingParams(), position=6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (replace(row(1, 2, (1, 2), (3,)), late_start=-1), "before position 0"),
        (replace(row(1, 2, (1, 2), (3,)), late_start=4, sample=SAMPLE), "sequence 1.*position 4"),
        (
            replace(
                row(1, 2, (1, 2), (3,)), late_start=3, next_tokens=(1, 1), num_prompt_logprobs=0
            ),
            "sequence 1.*position 3",
        ),
    ],
)
def test_a_row_that_needs_late_layers_where_they_have_not_begun_is_a_fault(
    bad: StepRow, message: str
) -> None:
    with pytest.raises(EngineFault, match=message):
        builder(has_windows=True, has_late=True).build(StepPlan((row(0, 0, (1,), (4,)), bad)))


@pytest.mark.parametrize("change", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_window_a_replay_or_late_tokens_without_such_layers_are_a_fault(
    change: tuple[int, int, int],
) -> None:
    window_start, num_replayed, late_start = change
    bad = replace(
        row(1, 2, (1,), (3,)),
        window_start=window_start, num_replayed=num_replayed, late_start=late_start,
    )  # fmt: skip
    plan = StepPlan((row(0, 0, (1,), (4,)), bad))
    with pytest.raises(EngineFault, match="no layer has a window"):
        builder().build(plan)
    if late_start:
        with pytest.raises(EngineFault, match="no late layers"):
            builder(has_windows=True).build(plan)


def test_dtypes_are_the_kernel_ports() -> None:
    built = builder().build(StepPlan((row(1, 0, (1, 2), (3,)),)))
    batch = built.batch
    assert built.ids.dtype == batch.slots.dtype == torch.int64
    for tensor in (batch.row_starts, batch.context_lens, batch.block_tables, batch.positions):
        assert tensor.dtype == torch.int32


def test_a_table_that_grew_or_changed_is_read_again() -> None:
    batches = builder()
    first = batches.build(StepPlan((row(1, 3, (1,), (7,)),)))
    assert first.batch.block_tables.tolist() == [[7]]
    grown = batches.build(StepPlan((row(1, 4, (1,), (7, 9)),)))
    assert grown.batch.block_tables.tolist() == [[7, 9]]
    # Preempted and admitted again under the same id, elsewhere.
    moved = batches.build(StepPlan((row(1, 4, (1,), (2, 3)),)))
    assert moved.batch.slots.tolist() == [3 * BLOCK_TOKENS]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((), "at least one row"),
        ((row(1, 0, (), (1,)),), "at least one token"),
        ((row(1, 0, (50,), (1,)),), "vocabulary of 50"),
        ((row(1, 0, (-1,), (1,)),), "vocabulary of 50"),
        ((row(1, 3, (1, 1), (1,)),), "do not cover"),
        ((row(1, 0, (1,), ()),), "do not cover"),
        ((row(1, 0, (1,), (200,)),), "outside the 200 blocks"),
        ((row(1, 0, (1,), (-1,)),), "outside the 200 blocks"),
        ((row(1, 100, (1,), tuple(range(30))),), "context of 100"),
        ((row(1, -1, (1,), (1,)),), "context of 100"),
    ],
)
def test_a_plan_that_would_touch_foreign_memory_is_a_fault(
    bad: tuple[StepRow, ...], message: str
) -> None:
    with pytest.raises(EngineFault, match=message):
        builder().build(StepPlan(bad))
