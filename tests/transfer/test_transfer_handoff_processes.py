"""Handing KV over between two processes, and what becomes of it when one of them is killed,
stands still or is cut off, in each phase: the other side is free again within the lease.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_handoff_parts import (
    KEYS,
    QUICK,
    RealClock,
    ToyMemory,
    assert_right,
    blocks,
    compute,
    contract_of,
    moves_of,
    plan_of,
    ref_to,
    wait_until,
)
from transfer_handoff_peer import NUM_ROWS, NUM_TOKENS, plan_for

from headwater.core.cache import KVPart
from headwater.core.fleet import HandoffEnd, HandoffReport
from headwater.transfer.handoff_load import HandoffLoad
from headwater.transfer.handoff_receiver import HandoffReceiver
from headwater.transfer.handoff_sender import HandoffSender

PEER = Path(__file__).with_name("transfer_handoff_peer.py")
CLOCK = RealClock()
# The longest of the bounds that a silent peer is given, and as much again for a busy machine.
WITHIN_S = 2 * QUICK.offer_s + 4
WAYS = pytest.mark.parametrize("way", ["direct", "framed"])


class Peer:
    """The other process."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.split(" ", 2))

    def order(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def wait_for(self, *words: str, limit_s: float = 20.0) -> list[str]:
        """The next line that begins with ``words``; others are passed over."""
        end_s = time.monotonic() + limit_s
        while True:
            line = self.lines.get(timeout=max(end_s - time.monotonic(), 0.001))
            line = [word.strip() for word in line]
            if line[: len(words)] == list(words):
                return line

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait(20)
        self._reader.join(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Wire:
    """A way through to an address that can be cut without a word."""

    def __init__(self, address: str) -> None:
        self._target = int(address.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_cut = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        self._is_cut.set()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [near, far]
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(target=self._carry, args=(one, other), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not self._is_cut.is_set():
                    target.sendall(data)
        except OSError:
            return


class Taker:
    """This process takes; the other one computes and sends."""

    def __init__(self, way: str, *, through_wire: bool = False) -> None:
        self.memory = ToyMemory(64)
        self.receiver = HandoffReceiver(
            contract_of(self.memory), self.memory, KEYS, CLOCK, QUICK, may_read=way == "direct"
        )
        self.wire = Wire(self.receiver.address) if through_wire else None
        address = self.receiver.address if self.wire is None else self.wire.address
        self.peer = Peer("send", address)
        self.peer.wait_for("ready")
        self.loads: dict[str, HandoffLoad] = {}
        self.reports: dict[str, HandoffReport] = {}

    def begin(self, handoff_id: str, phase: str) -> None:
        """Bring a handoff into its phase."""
        seed, place = plan_for(handoff_id)
        if phase != "offered":
            self.receiver.expect(ref_to(self.receiver.address, handoff_id), NUM_TOKENS)
        if phase in ("accepted", "moving"):
            moves = moves_of(plan_of(NUM_TOKENS, seed), blocks(place, NUM_ROWS))
            self.loads[handoff_id] = self.receiver.take(handoff_id, moves)
        if phase != "expected":
            self.peer.order("offer", handoff_id)
        if phase == "moving":
            self.peer.order("ready", handoff_id, 12)
            wait_until(lambda: self.loads[handoff_id].num_loaded == 3)
        else:
            time.sleep(0.05)

    def wait(self, *handoff_ids: str) -> None:
        def are_over() -> bool:
            for event in self.receiver.poll():
                assert isinstance(event, HandoffReport)
                self.reports[event.handoff_id] = event
            return all(handoff_id in self.reports for handoff_id in handoff_ids)

        wait_until(are_over, WITHIN_S)

    def close(self) -> None:
        self.peer.close()
        self.receiver.close()
        if self.wire is not None:
            self.wire.close()


@pytest.fixture
def takers() -> Iterator[list[Taker]]:
    made: list[Taker] = []
    yield made
    for taker in made:
        taker.close()


@WAYS
def test_rows_travel_between_processes(way: str, takers: list[Taker]) -> None:
    taker = Taker(way)
    takers.append(taker)
    for number in range(4):
        taker.begin(f"h{number}", "moving")
    for number in range(4):
        taker.peer.order("ready", f"h{number}", NUM_TOKENS)
    taker.wait("h0", "h1", "h2", "h3")
    for number in range(4):
        assert taker.reports[f"h{number}"].end is HandoffEnd.DONE
        load = taker.loads[f"h{number}"]
        assert load.failure is None
        assert_right(taker.memory, load.moves)
        assert taker.peer.wait_for("done", f"h{number}")[2] == str(taker.reports["h0"].num_bytes)


@pytest.mark.parametrize("how", ["kill", "stop", "cut"])
@pytest.mark.parametrize("way", ["direct", "framed"])
def test_a_prefill_worker_that_is_gone_is_noticed_in_each_phase(
    how: str, way: str, takers: list[Taker]
) -> None:
    taker = Taker(way, through_wire=how == "cut")
    takers.append(taker)
    for number, phase in enumerate(("expected", "accepted", "moving")):
        taker.begin(f"h{number}", phase)
    if how == "cut":
        assert taker.wire is not None
        taker.wire.cut()
    else:
        taker.peer.signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    taker.wait("h0", "h1", "h2")
    for number in range(3):
        assert taker.reports[f"h{number}"].end is HandoffEnd.FAILED
    for load in taker.loads.values():
        assert load.is_done
        assert load.failure is not None
    assert taker.loads["h2"].num_loaded == 3  # what came still counts
    # Its blocks are somebody else's now: whatever the peer still sends, it stays out of them.
    for number in range(3):
        for block in blocks(number * NUM_ROWS, NUM_ROWS):
            for part in KVPart:
                taker.memory.put(block, part, b"z" * taker.memory.part_bytes(part))
    if how != "kill":
        if how == "stop":
            taker.peer.signal(signal.SIGCONT)
        for handoff_id in ("h1", "h2"):
            taker.peer.order("ready", handoff_id, NUM_TOKENS)
            assert taker.peer.wait_for("failed", handoff_id)
        for block in blocks(0, 3 * NUM_ROWS):
            for part in KVPart:
                assert taker.memory.get(block, part) == b"z" * taker.memory.part_bytes(part)
    if how == "stop":  # and it can work again
        taker.begin("h5", "moving")
        taker.peer.order("ready", "h5", NUM_TOKENS)
        taker.wait("h5")
        assert taker.reports["h5"].end is HandoffEnd.DONE


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("way", ["direct", "framed"])
def test_a_decode_worker_that_is_gone_is_noticed_in_each_phase(how: str, way: str) -> None:
    memory = ToyMemory(64)
    peer = Peer("take", way)
    address = peer.wait_for("address")[1]
    sender = HandoffSender(contract_of(memory), memory, KEYS, CLOCK, QUICK)
    reports: dict[str, HandoffReport] = {}

    def wait(*handoff_ids: str) -> None:
        def are_over() -> bool:
            reports.update({report.handoff_id: report for report in sender.poll()})
            return all(handoff_id in reports for handoff_id in handoff_ids)

        wait_until(are_over, WITHIN_S)

    def offer(handoff_id: str, num_tokens: int) -> None:
        seed, place = plan_for(handoff_id)
        plan = plan_of(NUM_TOKENS, seed)
        compute(memory, plan, blocks(place, NUM_ROWS))
        sender.offer(ref_to(address, handoff_id), plan)
        sender.ready(handoff_id, blocks(place, NUM_ROWS), num_tokens)

    try:
        peer.order("expect", "h1")
        peer.order("expect", "h2")
        peer.order("take", "h2")
        for handoff_id in ("h0", "h1", "h2"):
            offer(handoff_id, 12)
        peer.wait_for("taken", "h2", "3")
        peer.signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        wait("h0", "h1", "h2")
        assert {report.end for report in reports.values()} == {HandoffEnd.FAILED}
        if how == "stop":
            for block in blocks(0, 3 * NUM_ROWS):  # given up, so written by others
                for part in KVPart:
                    memory.put(block, part, b"z" * memory.part_bytes(part))
            peer.signal(signal.SIGCONT)
            for handoff_id in ("h1", "h2"):
                assert peer.wait_for("failed", handoff_id)
            peer.order("expect", "h5")
            peer.order("take", "h5")
            offer("h5", NUM_TOKENS)
            wait("h5")
            assert reports["h5"].end is HandoffEnd.DONE
            assert peer.wait_for("done", "h5")
    finally:
        peer.close()
        sender.close()
    assert peer.process.returncode == (-signal.SIGKILL if how == "kill" else 0)
