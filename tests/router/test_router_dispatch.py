"""The dispatcher's books: what a worker is thought to hold and to have ahead of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from router_sim import COST, sim_info, sim_request
from router_workers import LOAD, Fabric, FakeWorker, say_hello

from headwater.core.blocks import CacheIdentity, block_keys
from headwater.core.control import Stop
from headwater.core.errors import AuditError, WorkerLost
from headwater.core.fleet import KVEvents, Role
from headwater.core.request import ModelInfo, Request
from headwater.router.dispatch import RECENT_HALF_LIFE_S, Ask, DispatchConfig, Dispatcher, Placement
from headwater.router.link import Link

INFO = sim_info(num_blocks=100)  # of 32 tokens


class Desk:
    """A dispatcher with short ways to use it."""

    def __init__(self, *roles: Role, info: ModelInfo = INFO) -> None:
        self.dispatcher = Dispatcher(info, DispatchConfig())
        for number, role in enumerate(roles):
            self.dispatcher.join(f"w{number}", role, info, 0.0)
            self.told(f"w{number}", 0)

    def told(self, worker_id: str, num_held_blocks: int) -> None:
        load = replace(LOAD, num_held_blocks=num_held_blocks, cost=COST)
        self.dispatcher.told(worker_id, load)

    def add(self, request: Request, now_s: float = 0.0) -> None:
        ask = Ask(key=str(request.request_id), request=request, num_choices=request.num_choices)
        self.dispatcher.add(ask, now_s)

    def place(self, request: Request, now_s: float = 0.0) -> Placement | None:
        self.add(request, now_s)
        return self.dispatcher.next(now_s)


def prompt(name: str, num_tokens: int, *, num_output: int = 32, priority: int = 0) -> Request:
    start = 100_000 * (ord(name[0]) - 96)
    return sim_request(
        name, range(start, start + num_tokens), num_output=num_output, priority=priority
    )


def test_who_has_waited_long_for_room_gets_what_is_free_before_those_that_need_less() -> None:
    desk = Desk(Role.BOTH)
    assert desk.place(prompt("a", 1600))  # 51 of 100 blocks
    desk.dispatcher.prefilled("w0", "a")
    desk.add(prompt("b", 2400))
    assert desk.dispatcher.next(1.0) is None
    early = desk.place(prompt("c", 64), 2.0)
    assert early is not None
    assert early.key == "c", "at first others may still pass"
    desk.add(prompt("d", 64), 31.0)
    assert desk.dispatcher.next(31.0) is None, "now the room is kept for it"
    desk.dispatcher.ended("w0", "a")
    placed = [desk.dispatcher.next(32.0), desk.dispatcher.next(32.0)]
    assert {p.key for p in placed if p is not None} == {"b", "d"}


def test_what_waits_long_for_its_turn_only_holds_nobody_up() -> None:
    desk = Desk(Role.BOTH, info=sim_info())
    for name in "abc":
        desk.add(prompt(name, 1500, num_output=1))
    assert [desk.dispatcher.next(0.0) is not None for _ in "abc"] == [True, True, False]
    desk.add(prompt("d", 64, num_output=1), 50.0)
    short = desk.dispatcher.next(50.0)
    assert short is not None
    assert short.key == "d"


def test_workers_sort_by_the_callers_priority_then_by_bucket() -> None:
    desk = Desk(Role.BOTH)
    orders = []
    for name, num_tokens, priority in (("a", 64, 0), ("b", 1200, 0), ("c", 64, 1)):
        placement = desk.place(prompt(name, num_tokens, priority=priority))
        assert placement is not None
        orders.append(placement.priority)
    assert orders == [0, 2, 4]


def test_blocks_that_a_worker_holds_of_a_prompt_are_not_needed_again() -> None:
    request = prompt("b", 1600)
    for is_known in (False, True):
        desk = Desk(Role.BOTH)
        assert desk.place(prompt("a", 1800))
        desk.dispatcher.prefilled("w0", "a")
        if is_known:
            root = CacheIdentity(INFO.fingerprint, INFO.layout).root_key()
            keys = tuple(key for key, _ in block_keys(root, request.prompt_tokens, 32))
            desk.dispatcher.learned("w0", KVEvents(added=keys))
        assert (desk.place(request, 1.0) is not None) == is_known


def test_blocks_are_counted_as_promised_and_then_as_held_and_never_twice() -> None:
    desk = Desk(Role.BOTH)
    assert desk.place(prompt("a", 1600, num_output=320))  # 50 and 10 of growth
    book = desk.dispatcher.books["w0"]
    assert book.num_promised_blocks == 50 + 8, "an output of 256 tokens is expected"
    desk.told("w0", 50)
    desk.dispatcher.settled("w0", "a")
    desk.dispatcher.settled("w0", "a")
    assert book.num_promised_blocks == 8
    desk.dispatcher.grew("w0", "a", 64)
    assert book.num_promised_blocks == 6
    desk.dispatcher.grew("w0", "a", 1000)
    assert book.num_promised_blocks == 0
    desk.dispatcher.ended("w0", "a")
    desk.dispatcher.ended("w0", "a")
    assert (book.num_promised_blocks, book.num_active, book.queue_s) == (0, 0, 0.0)
    desk.dispatcher.audit(set(), set())


def test_tokens_of_a_step_are_booked_in_the_order_in_which_a_worker_computes() -> None:
    desk = Desk(Role.BOTH)
    assert desk.place(prompt("a", 1200, num_output=1))
    assert desk.place(prompt("b", 200, num_output=1), 1.0)
    book = desk.dispatcher.books["w0"]
    whole_s, short_s = book.queue_s, book.ahead_s(0)
    desk.dispatcher.computed("w0", 100)
    assert book.ahead_s(0) == pytest.approx(short_s / 2), "the short one goes first"
    desk.dispatcher.computed("w0", 100 + 600)
    assert book.queue_s == pytest.approx((whole_s - short_s) / 2)
    desk.dispatcher.prefilled("w0", "a")
    desk.dispatcher.prefilled("w0", "b")
    assert book.queue_s == 0.0


def test_recent_work_fades_and_newcomers_owe_none_of_it() -> None:
    desk = Desk(Role.BOTH, Role.BOTH)
    for name in "abcd":
        assert desk.place(prompt(name, 1000, num_output=1))
    books = desk.dispatcher.books
    before_s = [book.recent_s for book in books.values()]
    assert min(before_s) > 0
    desk.place(prompt("e", 1, num_output=0), RECENT_HALF_LIFE_S)
    assert min(b.recent_s for b in books.values()) == pytest.approx(min(before_s) / 2, rel=0.05)
    desk.dispatcher.join("new", Role.BOTH, INFO, RECENT_HALF_LIFE_S)
    assert books["new"].recent_s == min(books[name].recent_s for name in ("w0", "w1"))


def test_a_worker_that_is_shut_gets_nothing_until_it_is_not_or_comes_back() -> None:
    desk = Desk(Role.BOTH)
    desk.dispatcher.shut("w0", True)
    assert not desk.dispatcher.can_serve()
    assert desk.place(prompt("a", 64)) is None
    desk.dispatcher.leave("w0")
    desk.dispatcher.join("w0", Role.BOTH, INFO, 1.0)
    assert desk.dispatcher.can_serve()
    assert desk.dispatcher.next(1.0)


def test_what_is_expected_of_output_follows_what_was_seen() -> None:
    desk = Desk(Role.BOTH)
    for _ in range(500):
        desk.dispatcher.finished(10)
    assert desk.place(prompt("a", 320, num_output=1000))
    assert desk.dispatcher.books["w0"].num_promised_blocks == 11


def test_a_part_that_nobody_knows_of_is_found() -> None:
    desk = Desk(Role.BOTH)
    assert desk.place(prompt("a", 64))
    desk.dispatcher.audit({("w0", "a")}, set())
    with pytest.raises(AuditError, match="1 parts"):
        desk.dispatcher.audit(set(), set())
    with pytest.raises(AuditError, match="who waits"):
        desk.dispatcher.audit({("w0", "a")}, {"b"})


def test_more_choices_than_a_worker_runs_are_placed_when_it_is_idle() -> None:
    desk = Desk(Role.BOTH)
    request = sim_request("many", range(64), num_output=8, num_choices=80)
    assert desk.place(request) is not None


async def test_what_is_posted_to_a_lost_worker_goes_nowhere_and_nobody_waits_for_it() -> None:
    worker = FakeWorker("w", Role.BOTH, Fabric())
    link = Link("w", worker, say_hello(Role.BOTH), 0.0)
    worker.die()
    with pytest.raises(WorkerLost, match="signal 9"):
        await link.live(worker.messages(), lambda *_: None)
    link.post(Stop())
    await asyncio.wait_for(link.flush(), 1.0)
    assert worker.sent == []
