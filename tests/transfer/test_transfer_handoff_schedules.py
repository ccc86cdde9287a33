"""Handoffs under random schedules, without sockets: what two sides and a bad network can do
to each other. Whatever happens: wrong bytes never count, nobody writes to what is not its
own, and each side ends every handoff, once.
"""

from __future__ import annotations

import os
import random
import threading
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_handoff_parts import (
    ToyMemory,
    assert_right,
    blocks,
    compute,
    contract_of,
    moves_of,
    plan_of,
    ref_to,
)

from headwater.core.blocks import BlockId
from headwater.core.cache import CacheReport, KVPart
from headwater.core.errors import InvalidChange
from headwater.core.fleet import HandoffEnd, HandoffReport
from headwater.core.ports import RecordMove
from headwater.transfer import handoff_wire as wire
from headwater.transfer.handoff_load import CopyJob, HandoffLoad
from headwater.transfer.handoff_memory import ProcessReader
from headwater.transfer.handoff_plan import HandoffPlan
from headwater.transfer.handoff_sink import HandoffSink
from headwater.transfer.handoff_source import HandoffSource, SendJob
from headwater.transfer.handoff_states import HandoffLimits
from headwater.transfer.handoff_taking import PromptTold

LIMITS = HandoffLimits(
    lease_s=2.0, offer_s=10.0, stall_s=30.0, max_handoffs=64, max_untaken_bytes=300
)
WINDOW = 6
ADDRESS = "decode"


class NoReader(ProcessReader):
    """A kernel that does not allow it."""

    def read(self, pid: int, pieces: object) -> None:
        raise PermissionError(1, "not permitted")


@dataclass
class Case:
    """One handoff as the test knows it."""

    name: str
    plan: HandoffPlan
    source_blocks: list[BlockId]
    num_rows_ready: int = 0
    is_held: bool = True  # the source's blocks are its own
    is_offered: bool = False
    is_expected: bool = False
    gave_up_source: bool = False
    gave_up_sink: bool = False
    takes: list[tuple[HandoffLoad, list[RecordMove]]] = field(default_factory=list)
    source_reports: list[HandoffReport] = field(default_factory=list)
    sink_reports: list[HandoffReport] = field(default_factory=list)

    @property
    def may_take(self) -> bool:
        loads = [load for load, _ in self.takes]
        is_there = any(load.is_done and load.failure is None for load in loads)
        is_idle = not loads or loads[-1].is_done
        return self.is_expected and not self.gave_up_sink and is_idle and not is_there


class World:
    """Both sides, a network that may stop, and a clock."""

    def __init__(self, rng: random.Random, *, reader: ProcessReader, is_staged: bool) -> None:
        self.rng = rng
        self.meddle_share = 0.2  # of copies, that something happens in the middle of
        self.retract_share = rng.choice((0.1, 0.5, 1.0))
        self.abort_share = rng.choice((0.0, 0.2, 1.0))
        self.now_s = 0.0
        self.there = ToyMemory(64, pieces=(40, 24), window_pieces=(16,), is_staged=is_staged)
        self.here = ToyMemory(256, pieces=(40, 24), window_pieces=(16,), is_staged=is_staged)
        contract = contract_of(self.there, WINDOW)
        self.source = HandoffSource(contract, LIMITS, pid=os.getpid(), nonce=rng.randbytes(16))
        self.lock = threading.Lock()
        self.sink = HandoffSink(contract, LIMITS, self.lock, reader)
        self.reader = reader
        self.to_sink: deque[list[bytes]] = deque()
        self.to_source: deque[list[bytes]] = deque()
        self.is_cut = False
        self.link = b"link"
        self.send_jobs: list[SendJob] = []
        self.tickets: list[bytearray] = []  # else freed memory, which differs anyhow
        self.copy_jobs: list[CopyJob] = []
        self.cases: list[Case] = []
        self.free_there = blocks(0, 64)
        self.free_here = blocks(0, 256)
        self.reused: dict[BlockId, bytes] = {}
        self.told: dict[str, int] = {}

    # What the two steps' threads do

    def begin(self) -> None:
        num_tokens = self.rng.randrange(4, 30)
        plan = plan_of(num_tokens, self.rng.randrange(10**6), WINDOW)
        if len(self.free_there) < len(plan.rows):
            return
        own = [self.free_there.pop() for _ in plan.rows]
        self.cases.append(Case(f"h{len(self.cases)}", plan, own))

    def act(self, case: Case) -> None:
        ref = ref_to(ADDRESS, case.name)
        match self.rng.randrange(12):
            case 0 | 1 if not case.is_offered:
                case.is_offered = True
                self.source.offer(ref, case.plan, self.now_s)
                self.source.told_prompt(case.name, 3, CacheReport())
            case 2 | 3 if not case.is_expected:
                case.is_expected = True
                self.sink.expect(ref, case.plan.num_tokens, self.now_s)
            case 4 | 5 | 6 if case.is_held and case.num_rows_ready < len(case.plan.rows):
                self.compute_next(case)
            case 7 | 8 if case.may_take:
                self.take(case)
            case 9 if case.takes and self.rng.random() < self.retract_share:
                case.takes[-1][0].cancel()
            case 10 if case.is_held and self.rng.random() < self.retract_share:
                self.source.retract(case.name)
                for block in case.source_blocks:
                    self.there.scribble(block, self.rng)
                case.num_rows_ready = 0
            case 11 if self.rng.random() < self.abort_share:
                if self.rng.random() < 0.5 and case.is_offered and case.is_held:
                    self.source.abort(case.name, "test", self.now_s)
                    case.gave_up_source = True
                    self.release(case)
                elif case.is_expected and not case.sink_reports:
                    self.sink.forget(case.name, "test", self.now_s)
                    case.gave_up_sink = True
            case _:
                pass

    def compute_next(self, case: Case) -> None:
        row = case.num_rows_ready
        compute(
            self.there,
            HandoffPlan(num_tokens=1, block_tokens=4, rows=case.plan.rows[row : row + 1]),
            [case.source_blocks[row]],
        )
        case.num_rows_ready += 1
        num_computed = min(case.num_rows_ready * 4, case.plan.num_tokens)
        self.source.ready(case.name, case.source_blocks, num_computed)

    def take(self, case: Case) -> None:
        num_rows = len(case.plan.rows)
        if len(self.free_here) < num_rows:
            return
        first_row = self.rng.randrange(num_rows)
        own = [self.free_here.pop(0) for _ in range(num_rows - first_row)]
        moves = moves_of(case.plan, own, first_row)
        case.takes.append((self.sink.take(case.name, moves, self.now_s), moves))

    def release(self, case: Case) -> None:
        case.is_held = False
        for block in case.source_blocks:
            self.there.scribble(block, self.rng)
        self.free_there += case.source_blocks

    # What the threads do

    def carry(self) -> None:
        """One thing that one of the two threads does."""
        match self.rng.randrange(8):
            case 0:
                self.source.tick(self.now_s)
                self.sink.tick(self.now_s)
            case 1:
                job = self.source.next_job()
                if job is not None:
                    self.send_jobs.append(job)
                    self.tickets.append(job.ticket)
            case 2 if self.send_jobs:
                send = self.send_jobs.pop(0)
                views, frames = send.run(self.there)
                self.meddle()
                self.source.finish(send, views, frames)
            case 3 if not self.copy_jobs:  # there is one thread: one job at a time
                copy = self.sink.next_job(self.now_s)
                if copy is not None:
                    self.copy_jobs.append(copy)
            case 4 if self.copy_jobs:
                self.finish_copy()
            case 5:
                self.flush()
            case 6 if self.to_sink:
                message, payload = wire.decode_from_prefill(self.to_sink.popleft())
                self.sink.heard(self.link, message, payload, self.now_s)
            case 7 if self.to_source:
                self.source.heard(
                    ADDRESS, wire.decode_from_decode(self.to_source.popleft()), self.now_s
                )
            case _:
                pass
        self.collect()

    def finish_copy(self) -> None:
        job = self.copy_jobs.pop()
        outcome: bool | Exception
        try:
            outcome = job.run(self.here, self.reader)
        except OSError as error:
            outcome = error
        self.meddle()
        self.sink.finish(job, outcome, self.now_s)

    def meddle(self) -> None:
        if self.cases and self.rng.random() < self.meddle_share:
            self.act(self.rng.choice(self.cases))

    def flush(self) -> None:
        while self.source.outbox:
            out = self.source.outbox.popleft()
            parts = [wire.encode(out.message), out.payload][: 2 if out.payload else 1]
            if not self.is_cut:
                self.to_sink.append(parts)
        while self.sink.outbox:
            said = self.sink.outbox.popleft()
            if not self.is_cut:
                self.to_source.append([wire.encode(said.message)])
        if ADDRESS not in self.source.addresses and self.is_cut:
            # A new connection is a new link; the old one's messages are lost.
            self.is_cut = False
            self.link = self.rng.randbytes(4)

    def cut(self) -> None:
        self.is_cut = True
        self.to_sink.clear()
        self.to_source.clear()

    def collect(self) -> None:
        by_name = {case.name: case for case in self.cases}
        for report in self.source.poll():
            assert "worker sent" not in report.reason, "one side takes the other for a liar"
            assert "it took" not in report.reason
            case = by_name[report.handoff_id]
            case.source_reports.append(report)
            self.release(case)
        for event in self.sink.poll():
            case = by_name[event.handoff_id]
            if isinstance(event, PromptTold):
                assert event.num_hit_tokens == 3
            else:
                assert "worker sent" not in event.reason
                case.sink_reports.append(event)
        for case in self.cases:
            for load, moves in case.takes:
                assert_right(self.here, moves[: load.num_loaded])
                if load.is_done and moves:
                    if load.failure is None:
                        assert load.num_loaded == len(moves)
                    self.reuse(moves)

    def reuse(self, moves: list[RecordMove]) -> None:
        """The load is done, so its blocks are somebody else's now."""
        for block in dict.fromkeys(move.block for move in moves):
            self.here.scribble(block, self.rng)
            self.reused[block] = self.here.get(block, KVPart.GLOBAL)
        moves.clear()

    def settle(self) -> None:
        """Everybody goes on until nothing is left to do, or time ends it."""
        for _ in range(1000):
            self.carry()
        for _ in range(50):
            self.now_s += 1.0
            for _ in range(40):
                self.carry()


@pytest.mark.parametrize("way", ["direct", "framed"])
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(seed=st.integers(0, 10**9))
def test_whatever_happens_nothing_wrong_counts_and_everything_ends(way: str, seed: int) -> None:
    rng = random.Random(seed)
    reader = ProcessReader() if way == "direct" else NoReader()
    world = World(rng, reader=reader, is_staged=rng.random() < 0.3)
    num_at_once = rng.choice((1, 2, 4))
    may_cut = rng.random() < 0.3
    for _ in range(rng.randrange(100, 2500)):
        match rng.randrange(30):
            case 0 if rng.random() < num_at_once / 4:
                world.begin()
            case n if n < 7 and world.cases:
                world.act(rng.choice(world.cases[-num_at_once:]))
            case 7 if may_cut and rng.random() < 0.1:
                world.cut()
            case 8:
                world.now_s += rng.choice((0.01, 0.3))
            case _:
                world.carry()
    world.settle()
    for case in world.cases:
        if case.is_offered and not case.gave_up_source:
            assert len(case.source_reports) == 1, case.name
        if case.is_expected and not case.gave_up_sink:
            assert len(case.sink_reports) == 1, case.name
        ends = [report.end for report in case.source_reports]
        if HandoffEnd.DONE in ends:
            assert case.sink_reports[0].end is HandoffEnd.DONE
            assert case.sink_reports[0].num_bytes == case.source_reports[0].num_bytes
        for load, _ in case.takes:
            assert load.is_done
    assert not world.sink.num_handoffs
    for case in world.cases:
        if case.is_expected:
            with pytest.raises(InvalidChange, match="expected already, or was"):
                world.sink.expect(ref_to(ADDRESS, case.name), 1, world.now_s)
    for block, content in world.reused.items():
        assert world.here.get(block, KVPart.GLOBAL) == content, "written after it was given back"


def test_the_schedules_do_hand_over() -> None:
    """The random test is worth nothing if nothing ever arrives in it."""
    rng = random.Random(1)
    world = World(rng, reader=ProcessReader(), is_staged=False)
    world.meddle_share = 0.0
    for _ in range(4):
        world.begin()
    for case in world.cases:
        ref = ref_to(ADDRESS, case.name)
        world.source.offer(ref, case.plan, 0.0)
        world.sink.expect(ref, case.plan.num_tokens, 0.0)
        while case.num_rows_ready < len(case.plan.rows):
            world.compute_next(case)
        world.take(case)
    for _ in range(5000):
        world.carry()
    for case in world.cases:
        assert case.source_reports[0].end is HandoffEnd.DONE
        assert case.sink_reports[0].end is HandoffEnd.DONE
        assert case.takes[0][0].num_loaded


def test_a_greeting_that_is_lost_ends_the_connection_though_the_peer_lives() -> None:
    source = HandoffSource(contract_of(ToyMemory()), LIMITS, pid=os.getpid(), nonce=b"n" * 16)
    source.offer(ref_to(ADDRESS), plan_of(18), 0.0)
    now_s = 0.0
    while now_s < 2 * LIMITS.lease_s:
        now_s += LIMITS.alive_s
        source.heard(ADDRESS, wire.Alive(), now_s)
        source.tick(now_s)
    assert [report.end for report in source.poll()] == [HandoffEnd.FAILED]
    assert not source.addresses
