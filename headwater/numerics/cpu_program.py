"""Decode steps as programs: recorded once, then run without Python between the kernels.

A step of few rows streams all weights through the caches, and with them goes the
interpreter: every kernel call from Python then costs 5 to 20 us more than the same
call in a tight loop, some 300 times a step. A program is the list of those calls
with their arguments, run by one compiled loop. It is what a captured graph is on a
GPU, with the same rules: inputs are copied to where the program reads them, and the
body may only call this room's kernels and make views.

    key      (KV, rows, spans of context rounded up to a power of two, which of the
             batch's optional inputs there are)
    program  [call, argument, ...] int64, one row per kernel call
    memory   results of a recorded body come from a pool that all programs share,
             since one runs at a time; the last result is copied out

Used by ``cpu.py`` only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headwater.numerics import cpu_intrinsics as hw
from headwater.numerics.cpu_amx import linear_tiles
from headwater.numerics.cpu_attention import SPLIT_TOKENS, attend_few
from headwater.numerics.cpu_kv import CpuKV
from headwater.numerics.cpu_linear import linear_few_rows
from headwater.numerics.cpu_memory import Activations
from headwater.numerics.cpu_rows import CpuRows
from headwater.numerics.cpu_rows_attention import attend_few_rows
from headwater.numerics.cpu_team import (
    ATTEND_FEW,
    ATTEND_ROWS,
    LAUNCH,
    LINEAR_FEW,
    Tape,
    Team,
    compiled,
    launch,
)
from headwater.numerics.ops import LayerKV, RaggedBatch
from headwater.numerics.reference_rows import PlainRows

MAX_ROWS = 64
MAX_PROGRAMS = 128
WORDS = 30  # of one call: its kind, then up to 29 arguments

Body = Callable[[Tensor, RaggedBatch], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    calls: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    x: Tensor
    batch: RaggedBatch
    result: Tensor
    kv: Sequence[LayerKV]  # keeps the identity in the key from being used again


class Programs:
    """Records and runs the bodies of steps in which every row has one token."""

    def __init__(self, team: Team, activations: Activations) -> None:
        self._team, self._activations = team, activations
        # None: a body that cannot be recorded, as its shape takes it through a library.
        self._programs: OrderedDict[tuple[int, ...], _Program | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._programs)

    def warm_up(self) -> None:
        """Compile the loop that runs programs, by running none."""
        replay(self._team.state, 0, 0)

    def run(self, body: Body, x: Tensor, kv: Sequence[LayerKV], batch: RaggedBatch) -> Tensor:
        """``body(x, batch)``, recorded or replayed. ``x`` is left as it is."""
        num_spans = -(-batch.max_context // SPLIT_TOKENS)
        num_spans = 1 << (num_spans - 1).bit_length()
        key = (
            id(kv),
            x.shape[0],
            num_spans,
            batch.window_starts is None,
            batch.global_slots is None,
        )
        if key in self._programs:
            self._programs.move_to_end(key)
            program = self._programs[key]
            return body(x.clone(), batch) if program is None else self._replay(program, x, batch)
        if len(self._programs) >= MAX_PROGRAMS:
            self._programs.popitem(last=False)
        result, self._programs[key] = self._record(body, x, kv, batch, num_spans)
        return result

    def _record(
        self, body: Body, x: Tensor, kv: Sequence[LayerKV], batch: RaggedBatch, num_spans: int
    ) -> tuple[Tensor, _Program | None]:
        first = kv[0]
        assert isinstance(first, CpuKV | CpuRows | PlainRows)
        num_rows = x.shape[0]
        max_context = num_spans * SPLIT_TOKENS
        fixed = RaggedBatch(
            row_starts=torch.arange(num_rows + 1, dtype=torch.int32),
            context_lens=torch.zeros(num_rows, dtype=torch.int32),
            block_tables=torch.zeros(
                num_rows, -(-max_context // first.block_tokens), dtype=torch.int32
            ),
            positions=torch.zeros(num_rows, dtype=torch.int32),
            slots=torch.zeros(num_rows, dtype=torch.int64),
            max_row_tokens=1,
            max_context=max_context,
            window_starts=_like(batch.window_starts),
            global_slots=_like(batch.global_slots),
        )
        fixed_x = torch.empty_like(x)
        _copy_inputs(fixed_x, fixed, x, batch)
        with self._team.recording() as tape, self._activations.from_pool():
            result = body(fixed_x, fixed)
        if tape.is_spoilt:
            return result.clone(), None
        program = _Program(calls=_pack(tape), x=fixed_x, batch=fixed, result=result, kv=kv)
        return result.clone(), program

    def _replay(self, program: _Program, x: Tensor, batch: RaggedBatch) -> Tensor:
        _copy_inputs(program.x, program.batch, x, batch)
        replay(self._team.state, program.calls.ctypes.data, len(program.calls))
        return program.result.clone()


def _like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)


def _copy_inputs(fixed_x: Tensor, fixed: RaggedBatch, x: Tensor, batch: RaggedBatch) -> None:
    """What changes from step to step. Entries past a row's blocks may be left over: no
    kernel reads beyond a row's context."""
    fixed_x.copy_(x)
    fixed.positions.copy_(batch.positions)
    fixed.slots.copy_(batch.slots)
    fixed.context_lens.copy_(batch.context_lens)
    if fixed.window_starts is not None and batch.window_starts is not None:
        fixed.window_starts.copy_(batch.window_starts)
    if fixed.global_slots is not None and batch.global_slots is not None:
        fixed.global_slots.copy_(batch.global_slots)
    width = min(batch.block_tables.shape[1], fixed.block_tables.shape[1])
    fixed.block_tables[:, :width].copy_(batch.block_tables[:, :width])


def _pack(tape: Tape) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    calls = np.zeros((len(tape.calls), WORDS), np.int64)
    for row, (kind, arguments) in zip(calls, tape.calls, strict=True):
        row[0] = kind
        for place, value in enumerate(arguments, start=1):
            # A real argument keeps its float64 bits.
            row[place] = np.float64(value).view(np.int64) if isinstance(value, float) else value
    return calls


@compiled
def replay(state: int, calls: int, num_calls: int) -> None:
    """Run the calls one after the other; each is spread over the team."""
    for index in range(num_calls):
        c = calls + index * 8 * WORDS
        kind = hw.load_i64(c, 0)
        if kind == LAUNCH:
            launch(
                state, hw.load_i64(c, 1), hw.load_i64(c, 2), hw.load_f64(c, 3),
                hw.load_i64(c, 4), hw.load_i64(c, 5), hw.load_i64(c, 6), hw.load_i64(c, 7),
                hw.load_i64(c, 8), hw.load_i64(c, 9), hw.load_i64(c, 10), hw.load_i64(c, 11),
                hw.load_i64(c, 12), hw.load_i64(c, 13), hw.load_i64(c, 14), hw.load_i64(c, 15),
                hw.load_i64(c, 16), hw.load_i64(c, 17),
            )  # fmt: skip
        elif kind == ATTEND_FEW:
            attend_few(
                state, hw.load_i64(c, 1), hw.load_i64(c, 2), hw.load_i64(c, 3),
                hw.load_f64(c, 4), hw.load_i64(c, 5), hw.load_i64(c, 6), hw.load_i64(c, 7),
                hw.load_i64(c, 8), hw.load_i64(c, 9), hw.load_i64(c, 10), hw.load_i64(c, 11),
                hw.load_i64(c, 12), hw.load_i64(c, 13), hw.load_i64(c, 14), hw.load_i64(c, 15),
                hw.load_i64(c, 16), hw.load_i64(c, 17), hw.load_i64(c, 18), hw.load_i64(c, 19),
                hw.load_i64(c, 20), hw.load_i64(c, 21), hw.load_i64(c, 22), hw.load_i64(c, 23),
                hw.load_i64(c, 24), hw.load_i64(c, 25), hw.load_i64(c, 26), hw.load_i64(c, 27),
                hw.load_i64(c, 28), hw.load_i64(c, 29),
            )  # fmt: skip
        elif kind == ATTEND_ROWS:
            attend_few_rows(
                state, hw.load_i64(c, 1), hw.load_i64(c, 2), hw.load_i64(c, 3),
                hw.load_f64(c, 4), hw.load_i64(c, 5), hw.load_i64(c, 6), hw.load_i64(c, 7),
                hw.load_i64(c, 8), hw.load_i64(c, 9), hw.load_i64(c, 10), hw.load_i64(c, 11),
                hw.load_i64(c, 12), hw.load_i64(c, 13), hw.load_i64(c, 14), hw.load_i64(c, 15),
                hw.load_i64(c, 16), hw.load_i64(c, 17), hw.load_i64(c, 18), hw.load_i64(c, 19),
                hw.load_i64(c, 20), hw.load_i64(c, 21), hw.load_i64(c, 22), hw.load_i64(c, 23),
                hw.load_i64(c, 24), hw.load_i64(c, 25), hw.load_i64(c, 26), hw.load_i64(c, 27),
                hw.load_i64(c, 28), hw.load_i64(c, 29),
            )  # fmt: skip
        elif kind == LINEAR_FEW:
            linear_few_rows(
                state, hw.load_i64(c, 1), hw.load_i64(c, 2), hw.load_i64(c, 3),
                hw.load_i64(c, 4), hw.load_i64(c, 5), hw.load_i64(c, 6), hw.load_i64(c, 7),
                hw.load_i64(c, 8), hw.load_i64(c, 9), hw.load_i64(c, 10), hw.load_i64(c, 11),
                hw.load_i64(c, 12), hw.load_i64(c, 13), hw.load_i64(c, 14), hw.load_i64(c, 15),
                hw.load_i64(c, 16), hw.load_i64(c, 17),
            )  # fmt: skip
        else:
            linear_tiles(
                state, hw.load_i64(c, 1), hw.load_i64(c, 2), hw.load_i64(c, 3),
                hw.load_i64(c, 4), hw.load_i64(c, 5), hw.load_i64(c, 6), hw.load_i64(c, 7),
                hw.load_i64(c, 8), hw.load_i64(c, 9), hw.load_i64(c, 10), hw.load_i64(c, 11),
                hw.load_i64(c, 12), hw.load_i64(c, 13), hw.load_i64(c, 14), hw.load_i64(c, 15),
                hw.load_i64(c, 16), hw.load_i64(c, 17),
            )  # fmt: skip
