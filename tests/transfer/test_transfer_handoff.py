"""Handing KV over between two ends with sockets and threads, in one process: what arrives,
who may connect, and what one bad handoff does to the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zmq
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

from headwater.core.cache import CacheReport, KVPart, MissReason
from headwater.core.errors import ConfigError
from headwater.core.fleet import HandoffEnd, HandoffReport
from headwater.transfer import handoff_wire as wire
from headwater.transfer.handoff_load import HandoffLoad
from headwater.transfer.handoff_receiver import HandoffReceiver
from headwater.transfer.handoff_sender import HandoffSender
from headwater.transfer.handoff_states import HandoffLimits
from headwater.transfer.handoff_taking import PromptTold
from headwater.transfer.peer import FleetKeys, PeerContract

CLOCK = RealClock()
WAYS = pytest.mark.parametrize("may_read", [True, False], ids=["direct", "framed"])


@dataclass
class Ends:
    there: ToyMemory
    here: ToyMemory
    sender: HandoffSender
    receiver: HandoffReceiver
    sent: dict[str, HandoffReport]
    taken: dict[str, HandoffReport]
    prompts: dict[str, PromptTold]

    def poll(self) -> bool:
        """True, so that a condition may begin with it."""
        for report in self.sender.poll():
            assert report.handoff_id not in self.sent
            self.sent[report.handoff_id] = report
        for event in self.receiver.poll():
            if isinstance(event, PromptTold):
                self.prompts[event.handoff_id] = event
            else:
                assert event.handoff_id not in self.taken
                self.taken[event.handoff_id] = event
        return True

    def wait(self, *handoff_ids: str, limit_s: float = 10.0) -> None:
        """Until both sides have reported all of them."""

        def are_over() -> bool:
            self.poll()
            return all(i in self.sent and i in self.taken for i in handoff_ids)

        wait_until(are_over, limit_s)


@contextmanager
def both_ends(
    *,
    may_read: bool = True,
    is_staged: bool = False,
    pieces: tuple[int, ...] = (48, 20),
    window_tokens: int | None = None,
    limits: HandoffLimits = QUICK,
    keys: FleetKeys = KEYS,
    contract: PeerContract | None = None,
    bind: str = "tcp://127.0.0.1:*",
) -> Iterator[Ends]:
    """``keys`` and ``contract`` are the prefill side's, if they differ."""
    window_pieces = (16, 16) if window_tokens else ()
    there, here = (
        ToyMemory(64, pieces=pieces, window_pieces=window_pieces, is_staged=is_staged)
        for _ in range(2)
    )
    ours = contract_of(here, window_tokens)
    receiver = HandoffReceiver(ours, here, KEYS, CLOCK, limits, bind=bind, may_read=may_read)
    sender = HandoffSender(contract or ours, there, keys, CLOCK, limits)
    try:
        yield Ends(there, here, sender, receiver, {}, {}, {})
    finally:
        sender.close()
        receiver.close()


def hand_over(ends: Ends, name: str, *, seed: int = 0, place: int = 0) -> HandoffLoad:
    """A prompt of 5 rows, computed before it is offered."""
    plan = plan_of(18, seed)
    own = blocks(place, 5)
    compute(ends.there, plan, own)
    ref = ref_to(ends.receiver.address, name)
    ends.receiver.expect(ref, plan.num_tokens)
    load = ends.receiver.take(name, moves_of(plan, own))
    ends.sender.offer(ref, plan)
    ends.sender.ready(name, own, plan.num_tokens)
    return load


@WAYS
@pytest.mark.parametrize("is_staged", [False, True], ids=["in place", "staged"])
@pytest.mark.parametrize("window_tokens", [None, 6])
def test_rows_travel_while_later_ones_are_computed(
    may_read: bool, is_staged: bool, window_tokens: int | None
) -> None:
    with both_ends(may_read=may_read, is_staged=is_staged, window_tokens=window_tokens) as ends:
        plan = plan_of(18, window_tokens=window_tokens)
        there, here = blocks(3, 5), blocks(20, 5)
        ref = ref_to(ends.receiver.address)
        ends.sender.offer(ref, plan)
        ends.sender.told_prompt("h", 7, CacheReport(num_device_tokens=7))
        ends.receiver.expect(ref, plan.num_tokens)
        moves = moves_of(plan, here)
        load = ends.receiver.take("h", moves)
        for num_rows in range(1, 6):
            assert load.num_loaded < len(moves)
            compute(ends.there, replace(plan, rows=plan.rows[:num_rows]), there[:num_rows])
            ends.sender.ready("h", there, min(4 * num_rows, plan.num_tokens))
            num_moves = len(moves_of(replace(plan, rows=plan.rows[:num_rows]), here[:num_rows]))
            wait_until(lambda n=num_moves: load.num_loaded == n)  # type: ignore[misc]
        ends.wait("h")
        assert load.is_done
        assert load.failure is None
        assert_right(ends.here, moves)
        assert ends.prompts["h"].num_hit_tokens == 7
        assert ends.prompts["h"].cache == CacheReport(num_device_tokens=7)
        num_bytes = sum(ends.here.part_bytes(move.meta.part) for move in moves)
        for report in (ends.sent["h"], ends.taken["h"]):
            assert report.end is HandoffEnd.DONE
            assert (report.num_tokens, report.num_bytes) == (18, num_bytes)


@WAYS
def test_parts_larger_than_a_frame_and_the_credit_arrive_whole(may_read: bool) -> None:
    limits = replace(QUICK, max_untaken_bytes=wire.FRAME_BYTES)
    pieces = (wire.FRAME_BYTES - 5, 700_000, 900_000)
    with both_ends(may_read=may_read, pieces=pieces, limits=limits) as ends:
        load = hand_over(ends, "h")
        ends.wait("h")
        assert load.failure is None
        assert_right(ends.here, moves_of(plan_of(18), blocks(0, 5)))


@WAYS
def test_what_decode_has_already_is_not_sent(may_read: bool) -> None:
    with both_ends(may_read=may_read) as ends:
        plan = plan_of(18)
        compute(ends.there, plan, blocks(0, 5))
        ref = ref_to(ends.receiver.address)
        ends.receiver.expect(ref, plan.num_tokens)
        moves = moves_of(plan, blocks(8, 2), first_row=3)
        ends.receiver.take("h", moves)
        before = [ends.here.get(block, KVPart.GLOBAL) for block in blocks(0, 8)]
        ends.sender.offer(ref, plan)
        ends.sender.ready("h", blocks(0, 5), 18)
        ends.wait("h")
        assert_right(ends.here, moves)
        assert ends.taken["h"].num_bytes == 2 * ends.here.part_bytes(KVPart.GLOBAL)
        assert [ends.here.get(block, KVPart.GLOBAL) for block in blocks(0, 8)] == before


def test_a_prompt_that_decode_has_whole_ends_the_prefill_at_once() -> None:
    with both_ends() as ends:
        ref = ref_to(ends.receiver.address)
        ends.receiver.expect(ref, 18)
        ends.receiver.nothing_lacks("h")
        ends.poll()
        assert ends.taken["h"].end is HandoffEnd.DONE
        ends.sender.offer(ref, plan_of(18))  # it heard of it later
        ends.wait("h")
        assert ends.sent["h"].end is HandoffEnd.DONE
        assert ends.sent["h"].num_bytes == 0


@WAYS
def test_a_taker_that_gave_way_takes_the_rest_later(may_read: bool) -> None:
    with both_ends(may_read=may_read) as ends:
        plan, there = plan_of(18), blocks(0, 5)
        compute(ends.there, plan, there)
        ref = ref_to(ends.receiver.address)
        ends.sender.offer(ref, plan)
        ends.sender.ready("h", there, 9)
        ends.receiver.expect(ref, plan.num_tokens)
        first = ends.receiver.take("h", moves_of(plan, blocks(10, 5)))
        wait_until(lambda: first.num_loaded == 2)
        first.cancel()
        wait_until(lambda: first.is_done)
        assert first.failure is MissReason.SLOW
        ends.poll()
        assert not ends.taken
        ends.sender.ready("h", there, 18)
        moves = moves_of(plan, blocks(30, 3), first_row=2)
        second = ends.receiver.take("h", moves)
        ends.wait("h")
        assert second.failure is None
        assert first.num_loaded == 2
        assert_right(ends.here, moves)


def test_blocks_given_up_and_computed_anew_arrive_right() -> None:
    with both_ends() as ends:
        plan = plan_of(18)
        compute(ends.there, plan, blocks(0, 5))
        ref = ref_to(ends.receiver.address)
        ends.sender.offer(ref, plan)
        ends.sender.ready("h", blocks(0, 5), 9)
        ends.sender.retract("h")
        for block in blocks(0, 5):
            ends.there.put(block, KVPart.GLOBAL, b"x" * ends.there.part_bytes(KVPart.GLOBAL))
        ends.receiver.expect(ref, plan.num_tokens)
        moves = moves_of(plan, blocks(10, 5))
        ends.receiver.take("h", moves)
        compute(ends.there, plan, blocks(40, 5))
        ends.sender.ready("h", blocks(40, 5), 18)
        ends.wait("h")
        assert_right(ends.here, moves)


@WAYS
@pytest.mark.parametrize("side", ["read", "write"])
def test_d05_one_bad_handoff_of_ten_fails_alone(may_read: bool, side: str) -> None:
    with both_ends(may_read=may_read) as ends:
        memory = ends.there if side == "read" else ends.here
        memory.fails = lambda block: block // 5 == 3
        loads = [hand_over(ends, f"h{i}", seed=i, place=5 * i) for i in range(10)]
        ends.wait(*(f"h{i}" for i in range(10)))
        for i, load in enumerate(loads):
            end = HandoffEnd.FAILED if i == 3 else HandoffEnd.DONE
            assert ends.sent[f"h{i}"].end is end
            assert ends.taken[f"h{i}"].end is end
            assert load.is_done
            assert (load.failure is None) == (i != 3)
        assert "on fire" in ends.taken["h3"].reason
        assert "on fire" in ends.sent["h3"].reason


@pytest.mark.parametrize("is_offered", [True, False])
def test_d03_an_abort_on_the_prefill_side_ends_the_decode_side_at_once(is_offered: bool) -> None:
    with both_ends(limits=replace(QUICK, lease_s=20, offer_s=20, stall_s=20)) as ends:
        plan = plan_of(18)
        for i in range(50):
            ref = ref_to(ends.receiver.address, f"h{i}")
            ends.sender.offer(ref, plan)
            if is_offered:
                ends.receiver.expect(ref, 18)
                ends.receiver.take(ref.handoff_id, moves_of(plan, blocks(0, 5)))
        time.sleep(0.05)  # so that some are known there, and some are not
        start_s = time.monotonic()
        for i in range(50):
            ends.sender.abort(f"h{i}", "its caller left")
            if not is_offered:
                ends.receiver.expect(ref_to(ends.receiver.address, f"h{i}"), 18)

        def are_over() -> bool:
            ends.poll()
            return len(ends.taken) == 50

        wait_until(are_over)
        assert time.monotonic() - start_s < 5  # no lease was waited for
        assert {r.reason for r in ends.taken.values()} == {"its caller left"}
        assert not ends.sent  # who aborts knows


def test_d03_an_abort_on_the_decode_side_ends_the_prefill_side_at_once() -> None:
    with both_ends(limits=replace(QUICK, lease_s=20, offer_s=20, stall_s=20)) as ends:
        plan, ref = plan_of(18), ref_to(ends.receiver.address)
        ends.receiver.expect(ref, 18)
        load = ends.receiver.take("h", moves_of(plan, blocks(0, 5)))
        ends.sender.offer(ref, plan)
        ends.receiver.forget("h", "its caller left")
        wait_until(lambda: load.is_done)

        def is_over() -> bool:
            ends.poll()
            return "h" in ends.sent

        wait_until(is_over)
        assert ends.sent["h"].reason == "its caller left"
        assert not ends.taken


def test_d01_a_side_that_was_told_alone_gives_up_in_bounded_time() -> None:
    with both_ends() as ends:
        ref = ref_to(ends.receiver.address, "told")
        ends.receiver.expect(ref, 18)
        load = ends.receiver.take("told", moves_of(plan_of(18), blocks(0, 5)))
        ends.sender.offer(ref_to(ends.receiver.address, "offered"), plan_of(18))

        def are_over() -> bool:
            ends.poll()
            return "told" in ends.taken and "offered" in ends.sent

        wait_until(are_over)
        assert "prefill side was never told" in ends.taken["told"].reason
        assert "decode side was never told" in ends.sent["offered"].reason
        assert load.is_done
        assert load.failure is MissReason.UNAVAILABLE


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("block_tokens", 16),
        ("layout", "kv1/fp32"),
        ("model_fingerprint", "other weights"),
        ("window_tokens", 128),
        ("protocol", 7),
        ("global_bytes", 1),
        ("alignment", 2),
        ("decoder_replay_tokens", 140),
    ],
)
def test_d06_peers_that_differ_are_refused_with_both_values(field: str, theirs: object) -> None:
    ours = contract_of(ToyMemory(64, pieces=(48, 20)))
    other = replace(ours, **{field: theirs})  # type: ignore[arg-type]
    with both_ends(contract=other) as ends:
        load = hand_over(ends, "h")
        ends.wait("h")
        reason = ends.sent["h"].reason
        assert str(theirs) in reason
        assert str(getattr(ours, field)) in reason
        assert load.failure is MissReason.UNAVAILABLE
        # And so is the next one, without a new attempt to connect.
        ends.sender.offer(ref_to(ends.receiver.address, "next"), plan_of(18))
        ends.poll()
        assert ends.sent["next"].reason == reason


def test_a_peer_without_the_secret_cannot_say_a_word() -> None:
    other = FleetKeys.of(b"the secret of another fleet")
    with both_ends(keys=other) as ends:
        load = hand_over(ends, "h")
        ends.wait("h")
        assert "did not answer, or has another secret" in ends.sent["h"].reason
        assert load.failure is MissReason.UNAVAILABLE


def test_a_secret_that_could_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 bytes"):
        FleetKeys.of(b"short")


def test_an_address_that_cannot_be_listened_on_is_refused() -> None:
    memory = ToyMemory()
    with both_ends() as ends, pytest.raises(ConfigError, match="cannot take KV at"):
        HandoffReceiver(contract_of(memory), memory, KEYS, CLOCK, bind=ends.receiver.address)


def test_an_address_that_is_none_fails_its_handoff_and_no_other() -> None:
    with both_ends() as ends:
        ends.sender.offer(ref_to("tcp://nowhere", "bad"), plan_of(18))
        hand_over(ends, "good")
        ends.wait("good")
        assert ends.taken["good"].end is HandoffEnd.DONE
        wait_until(lambda: ends.poll() and "bad" in ends.sent)
        assert "nothing can be sent" in ends.sent["bad"].reason


GARBAGE = [
    b"",
    b"\x00",
    b"\x80\x04.",  # a pickle's beginning
    wire.encode(wire.Alive())[:-1],
    b"\x82\xa4type\xa5Offer\xaahandoff_id\x07",
    wire.encode(wire.Offer(handoff_id="x" * 1000)),
    wire.encode(wire.Done(handoff_id="good", num_bytes=1)),  # the other direction's
]


@pytest.mark.parametrize("greets", [True, False])
def test_i08_malformed_messages_hurt_only_who_sends_them(greets: bool) -> None:
    with both_ends() as ends:
        plan = plan_of(18)
        compute(ends.there, plan, blocks(0, 5))
        ref = ref_to(ends.receiver.address, "good")
        ends.receiver.expect(ref, 18)
        ends.sender.offer(ref, plan)
        moves = moves_of(plan, blocks(10, 5))
        load = ends.receiver.take("good", moves)
        ends.sender.ready("good", blocks(0, 5), 9)
        wait_until(lambda: load.num_loaded == 2)
        with zmq.Context() as context, context.socket(zmq.DEALER) as bad:
            bad.setsockopt(zmq.LINGER, 1000)
            KEYS.join(bad)
            bad.connect(ends.receiver.address)
            if greets:
                contract = contract_of(ends.here)
                bad.send(
                    wire.encode(
                        wire.Greet(contract=contract, pid=1, nonce_address=0, nonce=b"n" * 16)
                    )
                )
                assert bad.poll(2000)
                assert isinstance(wire.decode_from_decode([bad.recv()]), wire.Welcome)
            for frame in GARBAGE:
                bad.send(frame)
                bad.send_multipart([frame, b"more"])
                bad.send_multipart([frame, b"more", b"and more"])
            # Well formed, of a handoff that is not its own.
            bad.send(wire.encode(wire.Abort(handoff_id="good", reason="malice")))
            bad.send(wire.encode(wire.Offer(handoff_id="good")))
            if not greets:
                assert bad.poll(2000)
                welcome = wire.decode_from_decode([bad.recv()])
                assert isinstance(welcome, wire.Welcome)
                assert "not understood" in (welcome.refusal or "")
            ends.sender.ready("good", blocks(0, 5), 18)
            ends.wait("good")
        assert ends.taken["good"].end is HandoffEnd.DONE
        assert_right(ends.here, moves)


def _frame(plan_key: bytes, **changes: object) -> list[bytes]:
    values: dict[str, object] = {
        "handoff_id": "h", "attempt": 1, "row": 0, "part": KVPart.GLOBAL,
        "key": plan_key, "offset": 0,
    }  # fmt: skip
    message = wire.Frame(**(values | changes))  # type: ignore[arg-type]
    return [wire.encode(message), b"\0" * 68]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"row": 3}, "out of its turn"),
        ({"row": 77}, "out of its turn"),
        ({"part": KVPart.WINDOW}, "bytes up to 68 of a part of 0"),
        ({"key": b"another"}, "other tokens or another model"),
        ({"offset": 1}, "bytes up to 69 of a part of 68"),
        ({"offset": -4}, "bytes up to 64 of a part of 68"),
    ],
)
def test_frames_that_do_not_fit_end_their_handoff(
    changes: dict[str, object], complaint: str
) -> None:
    with both_ends(may_read=False) as ends:
        plan = plan_of(18)
        ends.receiver.expect(ref_to(ends.receiver.address), 18)
        load = ends.receiver.take("h", moves_of(plan, blocks(0, 5)))
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.setsockopt(zmq.LINGER, 1000)
            KEYS.join(peer)
            peer.connect(ends.receiver.address)
            greet = wire.Greet(
                contract=contract_of(ends.here), pid=1, nonce_address=0, nonce=b"n" * 16
            )
            for message in (greet, wire.Offer(handoff_id="h")):
                peer.send(wire.encode(message))
            peer.send_multipart(_frame(plan.rows[0].record.key, **changes))
            wait_until(lambda: load.is_done)
            ends.poll()
        assert complaint in ends.taken["h"].reason
        assert load.num_loaded == 0


def test_closing_leaves_no_thread_and_no_file_descriptor() -> None:
    def held() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    for may_read in (True, False):
        with both_ends(may_read=may_read) as ends:
            hand_over(ends, "h")
            ends.wait("h")
            hand_over(ends, "in the middle", seed=1, place=8)
    wait_until(lambda: held() == before)


def test_closing_one_side_ends_what_is_under_way_on_the_other() -> None:
    with both_ends(limits=replace(QUICK, lease_s=20, offer_s=20, stall_s=20)) as ends:
        plan, ref = plan_of(18), ref_to(ends.receiver.address)
        ends.receiver.expect(ref, 18)
        load = ends.receiver.take("h", moves_of(plan, blocks(0, 5)))
        ends.sender.offer(ref, plan)
        ends.sender.ready("h", blocks(0, 5), 9)
        wait_until(lambda: load.num_loaded == 2)
        ends.sender.close()
        wait_until(lambda: load.is_done)
        ends.poll()
        assert "this prefill worker ends" in ends.taken["h"].reason
