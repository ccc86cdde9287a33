"""A prompt's KV from one process to another, beside the seconds that its prefill takes.

    python -m bench.handoff [--tokens 1800] [--rounds 7] [--no-prefill]

Blocks are those of SmolLM2-135M in bf16 (60 pieces of 12 kB each, in torch tensors). The other
process holds a prompt that is computed; ours takes it, straight from that process's memory and
in frames over a socket, by turns. Seconds are from the offer to the last block; the first round
of each way, which pays for memory that nobody has touched, is shown apart. With the model
installed, the same number of tokens is then computed here, by one worker with all cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from headwater.core.blocks import BlockId, CacheIdentity
from headwater.core.cache import KVPart
from headwater.core.fleet import HandoffEnd, HandoffRef, HandoffReport
from headwater.core.ports import RecordMove
from headwater.transfer.handoff_plan import HandoffPlan, plan_handoff
from headwater.transfer.handoff_receiver import HandoffReceiver
from headwater.transfer.handoff_sender import HandoffSender
from headwater.transfer.peer import FleetKeys, PeerContract

BLOCK_TOKENS = 32
NUM_PIECES, PIECE_BYTES = 60, 12_288
KEYS = FleetKeys.of(b"a secret for this benchmark alone")
IDENTITY = CacheIdentity("smollm2", "bench")
LIMIT_S = 60.0


class Clock:
    def now_s(self) -> float:
        return time.perf_counter()


class TensorBlocks:
    """``core.ports.BlockMemory`` with the shapes of SmolLM2's: a tensor per layer's K and V."""

    def __init__(self, num_blocks: int) -> None:
        self._pieces = [
            torch.zeros(num_blocks * PIECE_BYTES, dtype=torch.uint8).numpy().data
            for _ in range(NUM_PIECES)
        ]

    def part_bytes(self, part: KVPart) -> int:
        return NUM_PIECES * PIECE_BYTES if part is KVPart.GLOBAL else 0

    def write_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        start = block * PIECE_BYTES
        return [piece[start : start + PIECE_BYTES] for piece in self._pieces]

    def written(self, block: BlockId, part: KVPart) -> None:
        """The buffers are the block itself."""

    def read_buffers(self, block: BlockId, part: KVPart) -> Sequence[memoryview]:
        return self.write_buffers(block, part)

    def copy(self, source: BlockId, target: BlockId) -> None:
        pieces = zip(
            self.write_buffers(target, KVPart.GLOBAL),
            self.read_buffers(source, KVPart.GLOBAL),
            strict=True,
        )
        for ours, theirs in pieces:
            ours[:] = theirs

    def fill(self, value: int) -> None:
        for piece in self._pieces:
            piece[:] = bytes((value,)) * len(piece)

    def is_filled(self, value: int, num_blocks: int) -> bool:
        size = num_blocks * PIECE_BYTES
        return all(piece[:size] == bytes((value,)) * size for piece in self._pieces)


def contract() -> PeerContract:
    return PeerContract(
        model_fingerprint="smollm2",
        layout="bench",
        block_tokens=BLOCK_TOKENS,
        window_tokens=None,
        global_bytes=NUM_PIECES * PIECE_BYTES,
        window_bytes=0,
    )


def plan_of(num_tokens: int) -> HandoffPlan:
    return plan_handoff(
        range(num_tokens + 1), IDENTITY, block_tokens=BLOCK_TOKENS, window_tokens=None
    )


def give(address: str, num_tokens: int) -> None:
    """The other process: offers the prompt once for each line that it reads."""
    plan = plan_of(num_tokens)
    memory = TensorBlocks(len(plan.rows))
    sender = HandoffSender(contract(), memory, KEYS, Clock())
    table = [BlockId(i) for i in range(len(plan.rows))]
    print("here", flush=True)
    for line in sys.stdin:
        handoff_id, value = line.split()
        memory.fill(int(value))
        print("go", flush=True)
        sender.offer(HandoffRef(handoff_id=handoff_id, peer_id="", address=address), plan)
        sender.ready(handoff_id, table, num_tokens)
        while not sender.poll():
            time.sleep(0.001)
    sender.close()


class Taker:
    """Our side of one way, with a process to take from."""

    def __init__(self, num_tokens: int, *, may_read: bool) -> None:
        self.plan = plan_of(num_tokens)
        self.memory = TensorBlocks(len(self.plan.rows))
        self.receiver = HandoffReceiver(contract(), self.memory, KEYS, Clock(), may_read=may_read)
        self.peer = subprocess.Popen(
            [
                sys.executable, "-m", "bench.handoff",
                "--give", self.receiver.address, "--tokens", str(num_tokens),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        self.num_taken = 0
        self._hear()

    def _hear(self) -> None:
        assert self.peer.stdout is not None
        self.peer.stdout.readline()

    def take(self) -> HandoffReport:
        self.num_taken += 1
        name, value = f"h{self.num_taken}", self.num_taken
        self.receiver.expect(
            HandoffRef(handoff_id=name, peer_id="", address=""), self.plan.num_tokens
        )
        moves = [RecordMove(row.record, BlockId(i)) for i, row in enumerate(self.plan.rows)]
        self.receiver.take(name, moves)
        assert self.peer.stdin is not None
        self.peer.stdin.write(f"{name} {value}\n")
        self.peer.stdin.flush()
        self._hear()
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            for event in self.receiver.poll():
                if isinstance(event, HandoffReport):
                    assert event.end is HandoffEnd.DONE, event.reason
                    assert self.memory.is_filled(value, len(moves)), "wrong bytes"
                    return event
            time.sleep(0.001)
        raise SystemExit("the handoff did not end")

    def close(self) -> None:
        assert self.peer.stdin is not None
        self.peer.stdin.close()
        self.peer.wait(LIMIT_S)
        self.receiver.close()


def prefill_seconds(num_tokens: int) -> float:
    """Of the same number of tokens, computed by one worker of this machine; median of two."""
    from headwater.app.assemble import build_worker
    from headwater.app.groups import CacheSettings
    from headwater.app.settings import Settings, set_thread_environment, usable_cores
    from headwater.core.request import Request, RequestId, SamplingParams, StopParams

    set_thread_environment(usable_cores())
    parts = build_worker(Settings(cache=CacheSettings(cache_dir=None)), Clock())
    seconds = []
    for number in range(3):
        request = Request(
            request_id=RequestId(str(number)),
            prompt_tokens=tuple((number * 7919 + i) % 40_000 for i in range(num_tokens)),
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_output_tokens=0),
        )
        start_s = time.perf_counter()
        parts.scheduler.submit(request)
        while parts.scheduler.has_work:
            parts.scheduler.take_ready()
            plan = parts.scheduler.plan()
            if plan is not None:
                parts.scheduler.apply(plan, parts.engine.run(plan))
        seconds.append(time.perf_counter() - start_s)
    parts.close()
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1800)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--give", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--no-prefill", action="store_true")
    arguments = parser.parse_args()
    if arguments.give:
        give(arguments.give, arguments.tokens)
        return
    takers = {
        "from its memory": Taker(arguments.tokens, may_read=True),
        "in frames": Taker(arguments.tokens, may_read=False),
    }
    reports: dict[str, list[HandoffReport]] = {way: [] for way in takers}
    for _ in range(arguments.rounds):
        for way, taker in takers.items():
            reports[way].append(taker.take())
    for taker in takers.values():
        taker.close()
    prefill_s = None if arguments.no_prefill else prefill_seconds(arguments.tokens)
    num_bytes = reports["in frames"][0].num_bytes
    print(f"{arguments.tokens} tokens of KV, {num_bytes / 1e6:.1f} MB; {os.cpu_count()} cores")
    for way, all_reports in reports.items():
        seconds = statistics.median(report.seconds for report in all_reports[1:])
        line = (
            f"{way:16} {1000 * seconds:7.1f} ms  {num_bytes / seconds / 1e9:5.2f} GB/s"
            f"  first {1000 * all_reports[0].seconds:7.1f} ms"
        )
        if prefill_s is not None:
            line += f"  {seconds / prefill_s:6.1%} of the prefill"
        print(line)
    if prefill_s is not None:
        print(f"prefill          {1000 * prefill_s:7.1f} ms")


if __name__ == "__main__":
    main()
