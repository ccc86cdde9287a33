"""A prefill and a decode scheduler with scripted engines, joined in one thread, and as much of
a router as it takes to begin again elsewhere. Bytes and messages travel by the real handoff
code, one piece at a time, when the test says so.
"""

from __future__ import annotations

import os
import random
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from worker_fake_tiers import TICK_S, FakeTiers, ManualClock, Record
from worker_late_engine import LateEngine
from worker_scripted_engine import GARBAGE, Content, Driver, ScriptedEngine, make_scheduler

from headwater.core.blocks import BlockId, PrefixKey
from headwater.core.cache import CacheReport, KVPart, Tier
from headwater.core.fleet import HandoffEnd, HandoffRef, HandoffReport, Holding, Phase, Resume
from headwater.core.ports import Load, RecordMove
from headwater.core.request import FinishReason, PromptReport, Request, RequestId
from headwater.transfer import handoff_wire as wire
from headwater.transfer.handoff_memory import ProcessReader
from headwater.transfer.handoff_plan import HandoffPlan
from headwater.transfer.handoff_sink import HandoffSink
from headwater.transfer.handoff_source import HandoffSource
from headwater.transfer.handoff_states import HandoffLimits
from headwater.transfer.handoff_taking import PromptTold
from headwater.transfer.peer import PeerContract
from headwater.worker.handover import HandoverParts
from headwater.worker.tiering import TierParts

LIMITS = HandoffLimits(lease_s=0.2, offer_s=0.4, stall_s=2.0)
NOTHING = b"\xff" * 16


class EngineBytes:
    """``core.ports.BlockMemory`` of a scripted engine: its digests as bytes."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self._staging: dict[tuple[BlockId, KVPart], memoryview] = {}

    def part_bytes(self, part: KVPart) -> int:
        if part is KVPart.WINDOW and self._engine.window_tokens is None:
            return 0
        return 16 * self._engine.block_tokens

    def write_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        self._engine.fill(block, part, (GARBAGE,) * self._engine.block_tokens)
        self._staging[block, part] = memoryview(bytearray(self.part_bytes(part)))
        return [self._staging[block, part]]

    def written(self, block: BlockId, part: KVPart) -> None:
        data = bytes(self._staging.pop((block, part)))
        slots = [data[i : i + 16] for i in range(0, len(data), 16)]
        content: Content = tuple(
            None if slot == NOTHING else struct.unpack("<QQ", slot) for slot in slots
        )
        self._engine.fill(block, part, content)

    def read_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        content = self._engine.content(block, part)
        packed = b"".join(
            NOTHING if slot is None or slot == GARBAGE else struct.pack("<QQ", *slot)
            for slot in content
        )
        return [memoryview(bytearray(packed))]

    def copy(self, source: BlockId, target: BlockId) -> None:
        self._engine.copy(source, target)


class Giver:
    """What a worker needs of a sender, over the core of one."""

    def __init__(self, contract: PeerContract, clock: ManualClock, rng: random.Random) -> None:
        self.core = HandoffSource(contract, LIMITS, pid=os.getpid(), nonce=rng.randbytes(16))
        self._clock = clock

    def offer(self, ref: HandoffRef, plan: HandoffPlan) -> None:
        self.core.offer(ref, plan, self._clock.now_s())

    def told_prompt(self, handoff_id: str, num_hit_tokens: int, cache: CacheReport) -> None:
        self.core.told_prompt(handoff_id, num_hit_tokens, cache)

    def ready(self, handoff_id: str, block_table: Sequence[BlockId], num_computed: int) -> None:
        self.core.ready(handoff_id, block_table, num_computed)

    def retract(self, handoff_id: str) -> None:
        self.core.retract(handoff_id)

    def abort(self, handoff_id: str, reason: str) -> None:
        self.core.abort(handoff_id, reason, self._clock.now_s())

    def poll(self) -> list[HandoffReport]:
        return self.core.poll()

    def close(self) -> None:
        """There is no thread."""


class Taker:
    """The same of a receiver."""

    address = "decode"

    def __init__(self, contract: PeerContract, clock: ManualClock) -> None:
        self.core = HandoffSink(contract, LIMITS, threading.Lock(), ProcessReader())
        self._clock = clock

    def expect(self, ref: HandoffRef, num_tokens: int) -> None:
        self.core.expect(ref, num_tokens, self._clock.now_s())

    def take(self, handoff_id: str, moves: Sequence[RecordMove]) -> Load:
        return self.core.take(handoff_id, moves, self._clock.now_s())

    def nothing_lacks(self, handoff_id: str) -> None:
        self.core.nothing_lacks(handoff_id, self._clock.now_s())

    def forget(self, handoff_id: str, reason: str) -> None:
        self.core.forget(handoff_id, reason, self._clock.now_s())

    def poll(self) -> list[PromptTold | HandoffReport]:
        return self.core.poll()

    def close(self) -> None:
        """There is no thread."""


@dataclass
class Shape:
    """Of one worker."""

    num_blocks: int = 64
    max_step_tokens: int = 64
    max_mixed_prefill_tokens: int = 16
    reserve_blocks_per_sequence: int = 1
    max_running_sequences: int = 8


@dataclass
class Call:
    """What a caller asked, and has."""

    request: Request
    tokens: dict[int, list[int]]
    finishes: dict[int, FinishReason | None] = field(default_factory=dict)
    prompt: PromptReport | None = None
    num_attempts: int = 0
    is_handed: bool = False

    @property
    def key(self) -> str:
        return f"{self.request.request_id}#{self.num_attempts}"

    @property
    def is_over(self) -> bool:
        return len(self.finishes) == self.request.num_choices


class Fleet:
    """Two workers that hand over, or be it one that does not."""

    def __init__(
        self,
        rng: random.Random,
        *,
        prefill: Shape | None = None,
        decode: Shape | None = None,
        block_tokens: int = 4,
        window_tokens: int | None = None,
        has_tiers: bool = False,
        replay_tokens: int | None = None,
        alignment: int = 1,
        holds: Holding = Holding.ALL,
    ) -> None:
        """``has_tiers``: both keep on one disk what is worth keeping. With ``replay_tokens``
        the model has late layers, of which the prefill side need not hold the weights."""
        self._replay_tokens, self._alignment, self._holds = replay_tokens, alignment, holds
        self._has_tiers = has_tiers
        self._kept: dict[Tier, dict[PrefixKey, Record]] = {Tier.HOST: {}, Tier.DISK: {}}
        self.rng = rng
        self.clock = ManualClock()
        self.shapes = (prefill or Shape(), decode or Shape())
        self._block_tokens, self._window_tokens = block_tokens, window_tokens
        self.calls: dict[str, Call] = {}
        self.wholes: dict[str, Request] = {}
        self.reports: list[tuple[str, HandoffReport]] = []
        self.link = b"link"
        self.num_links = 0
        self.is_cut = False
        self.to_sink: deque[list[bytes]] = deque()
        self.to_source: deque[list[bytes]] = deque()
        self.start_prefill()
        self.start_decode()

    # Workers

    def _contract(self, memory: EngineBytes) -> PeerContract:
        return PeerContract(
            model_fingerprint="model",
            layout="layout",
            block_tokens=self._block_tokens,
            window_tokens=self._window_tokens,
            global_bytes=memory.part_bytes(KVPart.GLOBAL),
            window_bytes=memory.part_bytes(KVPart.WINDOW),
            alignment=self._alignment,
            decoder_replay_tokens=self._replay_tokens,
        )

    def _engine(self, holds: Holding) -> ScriptedEngine:
        if self._replay_tokens is None:
            return ScriptedEngine(self._block_tokens, self._window_tokens)
        return LateEngine(self._block_tokens, self._window_tokens, holds)

    def start_prefill(self) -> None:
        engine = self._engine(self._holds)
        self.there = EngineBytes(engine)
        self.giver = Giver(self._contract(self.there), self.clock, self.rng)
        self.prefill = self._worker(engine, self.shapes[0], self.there, giver=self.giver)
        self.to_sink.clear()
        self.to_source.clear()
        self.num_links += 1
        self.link = b"link%d" % self.num_links

    def start_decode(self) -> None:
        engine = self._engine(Holding.ALL)
        self.here = EngineBytes(engine)
        self.taker = Taker(self._contract(self.here), self.clock)
        self.decode = self._worker(engine, self.shapes[1], self.here, taker=self.taker)
        self.to_sink.clear()
        self.to_source.clear()

    def _worker(
        self,
        engine: ScriptedEngine,
        shape: Shape,
        memory: EngineBytes,
        *,
        giver: Giver | None = None,
        taker: Taker | None = None,
    ) -> Driver:
        tiers = FakeTiers(engine, self.clock, kept=self._kept) if self._has_tiers else None
        scheduler = make_scheduler(
            num_blocks=shape.num_blocks,
            block_tokens=self._block_tokens,
            max_step_tokens=shape.max_step_tokens,
            max_mixed_prefill_tokens=shape.max_mixed_prefill_tokens,
            reserve_blocks_per_sequence=shape.reserve_blocks_per_sequence,
            max_running_sequences=shape.max_running_sequences,
            window_tokens=self._window_tokens,
            alignment=self._alignment,
            decoder_replay_tokens=self._replay_tokens,
            tier_parts=TierParts(memory=memory, clock=self.clock, tiers=tiers),
            handover_parts=HandoverParts(
                part_bytes=memory.part_bytes,
                sender=giver,
                receiver=taker,
                holds=Holding.ALL if giver is None else self._holds,
                alignment=self._alignment,
                decoder_replay_tokens=self._replay_tokens,
            ),
        )
        tick = (lambda: None) if tiers is None else tiers.tick
        return Driver(scheduler, engine=engine, tick=tick)

    # The router

    def submit(self, request: Request) -> None:
        call = Call(request, {index: [] for index in range(request.num_choices)})
        self.calls[str(request.request_id)] = call
        self.place(call)

    def place(self, call: Call) -> None:
        """Its next attempt, from where it is."""
        call.num_attempts += 1
        call.is_handed = False
        assert call.num_attempts < 40, "it never gets anywhere"
        request = replace(call.request, request_id=RequestId(call.key))
        resume: tuple[Resume, ...] = ()
        if any(call.tokens.values()) or call.finishes:
            resume = tuple(
                Resume(index=index, tokens=tuple(tokens))
                for index, tokens in call.tokens.items()
                if index not in call.finishes
            )
        ref = HandoffRef(handoff_id=call.key, peer_id="peer", address=Taker.address)
        order = [Phase.PREFILL, Phase.DECODE]
        self.rng.shuffle(order)
        for phase in order:
            if phase is Phase.DECODE:
                self.decode.scheduler.submit(request, phase=phase, handoff=ref, resume=resume)
            else:
                self.prefill.scheduler.submit(request, phase=phase, handoff=ref)

    def abort(self, name: str, index: int | None = None) -> None:
        call = self.calls[name]
        self.decode.abort(call.key, index)
        self._hear_decode()
        if call.is_over:
            self.prefill.abort(call.key)

    def again(self, call: Call) -> None:
        for driver in (self.decode, self.prefill):
            driver.scheduler.abort(RequestId(call.key))
        self.place(call)

    def submit_whole(self, request: Request) -> None:
        """To the prefill side, which then does both: it may have to take blocks away."""
        self.wholes[str(request.request_id)] = request
        self.prefill.submit(request)

    def kill_prefill(self) -> None:
        self.wholes.clear()
        self.start_prefill()
        for call in self.calls.values():
            if not call.is_over and not call.is_handed:
                self.again(call)

    def kill_decode(self) -> None:
        self._hear_decode()
        self.start_decode()
        for call in self.calls.values():
            if not call.is_over:
                self.again(call)

    def cut(self) -> None:
        """No message passes until the giving side has given the connection up."""
        self.is_cut = True
        self.to_sink.clear()
        self.to_source.clear()

    def _hear_decode(self) -> None:
        by_key = {call.key: call for call in self.calls.values()}
        decode = self.decode
        for (key, index), ids in list(decode.ids.items()):
            call = by_key.get(key)
            if call is None:
                continue
            call.tokens[index] += ids
            call.is_handed |= bool(ids)
            ids.clear()
            if (
                prompt := decode.prompts.pop((key, index), None)
            ) is not None and call.prompt is None:
                call.prompt = prompt
            if (last := decode.finishes.pop((key, index), None)) is not None:
                call.finishes[index] = last.finish

    def _hear_reports(self) -> None:
        by_key = {call.key: call for call in self.calls.values()}
        for name, driver in (("prefill", self.prefill), ("decode", self.decode)):
            for report in driver.scheduler.take_handoffs():
                assert "worker sent" not in report.reason, "one takes the other for a liar"
                self.reports.append((name, report))
                call = by_key.get(report.handoff_id)
                if call is None or call.is_over:
                    continue
                if report.end is HandoffEnd.DONE:
                    call.is_handed |= name == "decode"
                elif not call.is_handed and (name == "decode" or self.rng.random() < 0.5):
                    self.again(call)  # else the decode side has to find out by itself

    # Time

    def turn(self) -> bool:
        """One thing of each kind; False when all is still."""
        self.clock.time_s += TICK_S
        now_s = self.clock.now_s()
        self.giver.core.tick(now_s)
        self.taker.core.tick(now_s)
        for _ in range(self.rng.randrange(4)):
            self._carry(now_s)
        is_busy = False
        for driver in (self.prefill, self.decode):
            if self.rng.random() < 0.7:
                is_busy |= driver.step()
            is_busy |= driver.is_busy
        self._hear_decode()
        self._hear_reports()
        return is_busy

    def _carry(self, now_s: float) -> None:
        give, take = self.giver.core, self.taker.core
        job = give.next_job()
        if job is not None:
            give.finish(job, *job.run(self.there))
        copy = take.next_job(now_s)
        if copy is not None:
            take.finish(copy, copy.run(self.here, ProcessReader()), now_s)
        while give.outbox:
            out = give.outbox.popleft()
            if not self.is_cut:
                self.to_sink.append([wire.encode(out.message)])
        while take.outbox:
            said = take.outbox.popleft()
            if not self.is_cut and said.link == self.link:
                self.to_source.append([wire.encode(said.message)])
        if self.is_cut and not give.addresses:
            self.is_cut = False
            self.num_links += 1
            self.link = b"link%d" % self.num_links
        for _ in range(min(len(self.to_sink), self.rng.randrange(1, 4))):
            message, payload = wire.decode_from_prefill(self.to_sink.popleft())
            take.heard(self.link, message, payload, now_s)
        for _ in range(min(len(self.to_source), self.rng.randrange(1, 4))):
            give.heard(Taker.address, wire.decode_from_decode(self.to_source.popleft()), now_s)

    def run(self, max_turns: int = 60_000) -> None:
        """Until every call is over and both workers are still; the blocks are all back."""
        for _ in range(max_turns):
            if not self.turn() and all(call.is_over for call in self.calls.values()):
                break
        else:
            raise AssertionError(f"not finished after {max_turns} turns")
        for driver in (self.prefill, self.decode):
            driver.scheduler.audit()
            assert driver.scheduler.load().num_held_blocks == 0
            assert driver.scheduler.load().num_waiting == 0
