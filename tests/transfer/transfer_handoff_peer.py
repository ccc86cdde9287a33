"""One side of a handoff in a process of its own, told what to do line by line; for tests.

    python transfer_handoff_peer.py send ADDRESS | take MAY_READ

``send``: offer ID, ready ID NUM_TOKENS    ``take``: expect ID, take ID
Either prints what it finds: address ..., taken ID NUM, done ID, failed ID REASON.
"""

from __future__ import annotations

import sys
import threading
from queue import Empty, SimpleQueue

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
)

from headwater.core.fleet import HandoffEnd, HandoffReport
from headwater.transfer.handoff_load import HandoffLoad
from headwater.transfer.handoff_receiver import HandoffReceiver
from headwater.transfer.handoff_sender import HandoffSender

NUM_TOKENS, NUM_ROWS = 22, 6
POLL_S = 0.005


def plan_for(handoff_id: str) -> tuple[int, int]:
    """Its seed and its first block: each has its own."""
    number = int(handoff_id[1:])
    return number, number * NUM_ROWS


def tell(*words: object) -> None:
    print(*words, flush=True)


def tell_report(report: HandoffReport) -> None:
    if report.end is HandoffEnd.DONE:
        tell("done", report.handoff_id, report.num_bytes)
    else:
        tell("failed", report.handoff_id, report.reason)


def main() -> None:
    role, setting = sys.argv[1:]
    orders: SimpleQueue[str] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line)
        orders.put("")

    threading.Thread(target=read, daemon=True).start()
    memory = ToyMemory(64)
    contract, clock = contract_of(memory), RealClock()
    if role == "send":
        send(HandoffSender(contract, memory, KEYS, clock, QUICK), memory, setting, orders)
    else:
        receiver = HandoffReceiver(
            contract, memory, KEYS, clock, QUICK, may_read=setting == "direct"
        )
        take(receiver, memory, orders)


def next_order(orders: SimpleQueue[str]) -> list[str] | None:
    """None at the end; nothing when there is none now."""
    try:
        line = orders.get(timeout=POLL_S)
    except Empty:
        return []
    return line.split() or None


def send(sender: HandoffSender, memory: ToyMemory, address: str, orders: SimpleQueue[str]) -> None:
    tell("ready")
    while (order := next_order(orders)) is not None:
        match order:
            case ["offer", handoff_id]:
                seed, place = plan_for(handoff_id)
                plan = plan_of(NUM_TOKENS, seed)
                compute(memory, plan, blocks(place, NUM_ROWS))
                sender.offer(ref_to(address, handoff_id), plan)
            case ["ready", handoff_id, num_tokens]:
                _, place = plan_for(handoff_id)
                sender.ready(handoff_id, blocks(place, NUM_ROWS), int(num_tokens))
        for report in sender.poll():
            tell_report(report)
    sender.close()


def take(receiver: HandoffReceiver, memory: ToyMemory, orders: SimpleQueue[str]) -> None:
    tell("address", receiver.address)
    loads: dict[str, HandoffLoad] = {}
    told: dict[str, int] = {}
    while (order := next_order(orders)) is not None:
        match order:
            case ["expect", handoff_id]:
                receiver.expect(ref_to(receiver.address, handoff_id), NUM_TOKENS)
            case ["take", handoff_id]:
                seed, place = plan_for(handoff_id)
                moves = moves_of(plan_of(NUM_TOKENS, seed), blocks(place, NUM_ROWS))
                loads[handoff_id] = receiver.take(handoff_id, moves)
        for handoff_id, load in loads.items():
            if (num := load.num_loaded) > told.get(handoff_id, 0):
                assert_right(memory, load.moves[:num])
                told[handoff_id] = num
                tell("taken", handoff_id, num)
        for event in receiver.poll():
            if isinstance(event, HandoffReport):
                tell_report(event)
    receiver.close()


if __name__ == "__main__":
    main()
