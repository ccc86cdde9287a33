"""Several workers by role behind one router: what is sent where, who may join, who is ready."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from router_house import (
    SPLIT,
    ManualClock,
    house,
    lose_in_decode,
    step_done,
)
from router_workers import (
    INFO,
    LOAD,
    Fabric,
    FakeLauncher,
    FakeWorker,
    ask,
    expected_ids,
    say_hello,
)

from headwater.core.blocks import CacheIdentity, block_keys
from headwater.core.control import StepDone, Submit
from headwater.core.errors import ConfigError, NotReady, WorkerLost
from headwater.core.fleet import HandoffEnd, HandoffReport, Holding, KVEvents, Phase, Role
from headwater.core.ports import WorkerState
from headwater.core.request import (
    RequestId,
)
from headwater.router.elastic_policy import ElasticLimits
from headwater.router.policy import AdmissionLimits
from headwater.router.service import Router, RouterConfig


async def test_both_sides_are_told_of_one_handoff_and_the_output_comes_from_decode() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a", num_choices=2))
        await h.settle()
        prefiller, decoder = h.launcher.one(Role.PREFILL), h.launcher.one(Role.DECODE)
        (to_prefill,), (to_decode,) = prefiller.sent, decoder.sent
        assert isinstance(to_prefill, Submit)
        assert isinstance(to_decode, Submit)
        assert (to_prefill.phase, to_decode.phase) == (Phase.PREFILL, Phase.DECODE)
        assert to_prefill.handoff is not None
        assert to_decode.handoff is not None
        assert to_prefill.handoff.handoff_id == to_decode.handoff.handoff_id
        assert to_prefill.handoff.peer_id == decoder.worker_id
        assert to_decode.handoff.peer_id == prefiller.worker_id
        assert to_prefill.handoff.address == f"kv://{decoder.worker_id}"
        assert to_prefill.request.num_choices == 1
        assert await h.finish(task) == expected_ids(ask("a", num_choices=2))
        assert len(prefiller.sent) == 1, "nobody aborts what ended by itself"
        assert h.router.status().handoffs.num_done == 1


async def test_a_fleet_of_both_computes_whole_requests_and_spreads_them() -> None:
    async with house(Role.BOTH, Role.BOTH) as h:
        tasks = [h.start(ask(str(number))) for number in range(6)]
        await h.settle()
        assert [len(worker.sent) for worker in h.launcher.workers] == [3, 3]
        for number, task in enumerate(tasks):
            assert await h.finish(task) == expected_ids(ask(str(number)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fingerprint", "g"), ("layout", "k"), ("block_tokens", 32), ("window_tokens", 128),
        ("context_tokens", 99), ("weights_format", "f32"), ("kv_bytes_per_token", 8),
        ("numerics", "fast"), ("vocab_size", 10), ("alignment", 2), ("decoder_replay_tokens", 140),
    ],
)  # fmt: skip
async def test_d06_a_peer_that_differs_is_refused_with_both_values_named(
    field: str, value: str | int
) -> None:
    other = replace(INFO, **{field: value})  # type: ignore[arg-type]
    launcher = FakeLauncher(lambda w: w.hello(other if w.role is Role.DECODE else INFO))
    router = Router(launcher, RouterConfig(roles=SPLIT), ManualClock())
    with pytest.raises(WorkerLost, match=f"{value}.*{getattr(INFO, field)}"):
        await asyncio.wait_for(router.run(), 2.0)
    assert not router.status().ready
    assert all(worker.is_closed for worker in launcher.workers)


async def test_d06_a_restarted_peer_that_differs_is_not_started_for_ever() -> None:
    async with house(*SPLIT) as h:
        other = replace(INFO, fingerprint="g")
        h.launcher.first = lambda worker: worker.hello(other)
        h.launcher.one(Role.DECODE).die()
        await h.until(lambda: h.router.status().workers[1].state is WorkerState.REFUSED)
        num_launched = len(h.launcher.workers)
        await asyncio.sleep(0.1)
        assert len(h.launcher.workers) == num_launched == 2 + 3
        status = h.router.status()
        assert not status.ready
        assert "no decode worker is up" in status.reason
        assert "serves model fingerprint g, the front serves f" in status.reason
        with pytest.raises(NotReady, match="fingerprint g"):
            await asyncio.wait_for(h.start(ask("a")), 1.0)


async def test_d06_two_workers_of_one_role_are_no_fleet() -> None:
    with pytest.raises(ConfigError, match="2 prefill workers and no decode worker"):
        Router(FakeLauncher(), RouterConfig(roles=(Role.PREFILL, Role.PREFILL)), ManualClock())


async def test_a_worker_of_another_role_than_was_launched_is_refused() -> None:
    def first(worker: FakeWorker) -> None:
        worker.role = Role.BOTH
        worker.hello()

    router = Router(FakeLauncher(first), RouterConfig(roles=SPLIT), ManualClock())
    with pytest.raises(WorkerLost, match="has role both, the front wants prefill"):
        await asyncio.wait_for(router.run(), 2.0)


async def test_j01_a_stuck_worker_of_the_only_one_of_its_role_makes_the_fleet_not_ready() -> None:
    async with house(*SPLIT, stuck_after_s=10.0, lost_after_s=1000.0) as h:
        task = h.start(ask("a"))
        await h.settle()
        h.clock.time_s += 11.0
        status = h.router.status()
        assert not status.ready
        assert "prefill-0 stuck: work is pending and no step ended for 11 s" in status.reason
        assert status.workers[1].state is WorkerState.UP, "decode waits for prefill"
        h.launcher.one(Role.PREFILL).step()
        await h.settle()
        assert h.router.status().ready, "progress heals it"
        await h.finish(task)


async def test_j01_a_decode_worker_that_has_the_prompt_and_says_nothing_is_stuck() -> None:
    async with house(*SPLIT, stuck_after_s=10.0, lost_after_s=1000.0) as h:
        task = h.start(ask("a"))
        await h.settle()
        h.launcher.one(Role.PREFILL).step()
        await h.settle()
        h.clock.time_s += 11.0
        assert "decode-0 stuck" in h.router.status().reason
        await h.until(lambda: h.router.status().buckets != ())
        await asyncio.sleep(0.02)
        with pytest.raises(NotReady, match="decode-0 stuck"):
            await asyncio.wait_for(h.start(ask("b")), 1.0)
        h.launcher.one(Role.DECODE).step()
        await h.settle()
        assert h.router.status().ready
        h.clock.time_s += 11.0
        assert "decode-0 stuck" in h.router.status().reason, "it has output to go on with"
        h.launcher.one(Role.DECODE).step()
        await h.settle()
        assert await h.finish(h.start(ask("c"))) == expected_ids(ask("c")), "it is used again"
        await h.finish(task)


async def test_a_stuck_worker_gets_nothing_new_while_others_can_take_it() -> None:
    async with house(Role.BOTH, Role.BOTH, stuck_after_s=10.0, lost_after_s=1000.0) as h:
        first = h.start(ask("a"))
        await h.settle()
        h.clock.time_s += 11.0
        await asyncio.sleep(0.02)
        tasks = [h.start(ask(name)) for name in "bcdefg"]
        await h.settle()
        assert [len(worker.sent) for worker in h.launcher.workers] == [1, 6]
        for task in (first, *tasks):
            await h.finish(task)


async def test_seconds_up_are_counted_over_restarts_and_refusals_only_in_a_row() -> None:
    async with house(Role.BOTH, Role.BOTH) as h:
        other = replace(INFO, fingerprint="g")
        for _ in range(3):
            firsts = iter([other, other, INFO])
            h.launcher.first = lambda worker, firsts=firsts: worker.hello(next(firsts))  # type: ignore[misc]
            h.clock.time_s += 10.0
            number = h.router.status().num_worker_restarts
            h.launcher.alive[-1].die()
            await h.until(lambda n=number: h.router.status().num_worker_restarts == n + 3)  # type: ignore[misc]
            await h.until(lambda: all(w.state is WorkerState.UP for w in h.router.status().workers))
        assert sum(w.up_s for w in h.router.status().workers) == pytest.approx(60.0)


async def test_j01_one_of_two_lost_leaves_the_fleet_ready() -> None:
    async with house(Role.BOTH, Role.BOTH) as h:
        h.launcher.first = lambda worker: None
        h.launcher.workers[0].die()
        await h.settle()
        status = h.router.status()
        assert status.ready
        assert status.workers[0].state is WorkerState.DOWN
        assert "signal 9" in status.workers[0].reason
        assert await h.finish(h.start(ask("a"))) == expected_ids(ask("a"))


async def test_j03_draining_refuses_new_requests_and_lets_running_ones_finish() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a"))
        await h.settle()
        draining = asyncio.create_task(h.router.drain(5.0))
        await h.settle()
        status = h.router.status()
        assert not status.ready
        assert "draining" in status.reason
        with pytest.raises(NotReady, match="draining"):
            await asyncio.wait_for(h.start(ask("b")), 1.0)
        assert await h.finish(task) == expected_ids(ask("a"))
        assert await asyncio.wait_for(draining, 1.0) == 0


async def test_j03_what_outlasts_the_drain_ends_with_an_error_and_frees_its_workers() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a"))
        await h.settle()
        lose_in_decode(h)
        await h.settle()
        assert await h.router.drain(0.01) == 1
        with pytest.raises(NotReady, match="stopped before it had finished"):
            await asyncio.wait_for(task, 1.0)
        await h.settle()
        assert not any(worker.jobs for worker in h.launcher.alive)


async def test_a_worker_started_by_somebody_else_joins_works_and_leaves() -> None:
    async with house(Role.BOTH) as h:
        guest = FakeWorker("guest", Role.BOTH, h.launcher.fabric)
        guest.hello()
        name = await h.router.add_worker(guest)
        tasks = [h.start(ask(str(number))) for number in range(4)]
        await h.settle()
        assert [w.worker_id for w in h.router.status().workers] == ["both-0", name]
        assert sum(isinstance(m, Submit) for m in guest.sent) == 2
        guest.die()
        for number, task in enumerate(tasks):
            assert await h.finish(task) == expected_ids(ask(str(number)))
        assert [w.worker_id for w in h.router.status().workers] == ["both-0"]
        assert guest.is_closed


async def test_d06_a_strange_guest_is_turned_away_and_its_channel_closed() -> None:
    async with house(Role.BOTH) as h:
        guest = FakeWorker("guest", Role.BOTH, Fabric())
        guest.hello(replace(INFO, block_tokens=32))
        with pytest.raises(WorkerLost, match="block_tokens 32, the front serves 16"):
            await h.router.add_worker(guest)
        assert guest.is_closed
        assert len(h.router.status().workers) == 1


async def test_a_prompt_goes_where_a_worker_says_that_it_holds_its_prefix() -> None:
    async with house(Role.BOTH, Role.BOTH) as h:
        asked = replace(ask("a", num_prompt=200), tenant="t")
        root = CacheIdentity(INFO.fingerprint, INFO.layout, "t").root_key()
        keys = tuple(key for key, _ in block_keys(root, asked.prompt_tokens, 16))
        second = h.launcher.workers[1]
        second.words.put_nowait(StepDone(outputs=(), load=LOAD, kv_events=KVEvents(added=keys)))
        await h.settle()
        task = h.start(asked)
        await h.settle()
        assert second.sent
        await h.finish(task)
        stranger = h.start(replace(asked, request_id=RequestId("b"), tenant="u"))
        await h.settle()
        assert h.launcher.workers[0].sent, "another tenant's prefix is another prefix"
        await h.finish(stranger)


async def test_the_status_shows_who_waits_and_who_works() -> None:
    async with house(Role.BOTH, limits=AdmissionLimits(max_running_sequences=1)) as h:
        tasks = [h.start(ask(str(number), num_prompt=300)) for number in range(12)]
        await h.settle()
        status = h.router.status()
        (worker,) = status.workers
        assert worker.num_in_flight + sum(b.num_waiting for b in status.buckets) == 12
        assert worker.num_in_flight > 0
        assert [b.max_miss_tokens for b in status.buckets] == [256, 512, 1024, None]
        assert status.buckets[1].num_waiting > 0
        assert status.buckets[1].queue_s > 0
        assert worker.queue_s > 0
        for task in tasks:
            await h.finish(task)
        status = h.router.status()
        assert not any(b.queue_s for b in status.buckets)
        assert status.workers[0].queue_s == 0


async def test_the_late_tokens_of_a_prompt_wait_in_the_decode_worker_once_their_kv_is_there() -> (
    None
):
    info = replace(INFO, window_tokens=32, decoder_replay_tokens=44, saved_weights_bytes=5)
    whole = replace(info, weights_bytes=6, saved_weights_bytes=0)
    launcher = FakeLauncher(lambda w: w.hello(info if w.role is Role.PREFILL else whole))
    async with house(*SPLIT, launcher=launcher) as h:
        asked = ask("a", num_prompt=300)
        task = h.start(asked)
        await h.settle()
        prefill, decode = h.router.status().workers
        assert prefill.queue_s > 0
        assert decode.queue_s == 0
        assert (prefill.weights_bytes, prefill.saved_weights_bytes) == (1, 5)
        assert (decode.weights_bytes, decode.saved_weights_bytes) == (6, 0)
        done = HandoffReport(handoff_id="a", end=HandoffEnd.DONE)
        h.launcher.one(Role.DECODE).words.put_nowait(step_done(report=done))
        await h.settle()
        assert h.router.status().workers[1].queue_s > 0
        assert await h.finish(task) == expected_ids(asked)
        assert h.router.status().workers[1].queue_s == 0
        short = h.start(ask("b", num_prompt=59))  # 15 tokens would be handed over, a block is 16
        await h.settle()
        assert len(h.launcher.one(Role.PREFILL).sent) == 1
        assert await h.finish(short) == expected_ids(ask("b"))


async def test_a_decode_worker_with_the_early_part_alone_is_refused() -> None:
    def first(worker: FakeWorker) -> None:
        hello = say_hello(worker.role, worker.worker_id)
        worker.words.put_nowait(replace(hello, holds=Holding.EARLY))

    router = Router(FakeLauncher(first), RouterConfig(roles=SPLIT), ManualClock())
    with pytest.raises(WorkerLost, match="decode and holds only the early part"):
        await asyncio.wait_for(router.run(), 2.0)


async def test_elastic_workers_that_do_both_divide_the_phases_between_them() -> None:
    async with house(Role.BOTH, Role.BOTH, elastic=ElasticLimits()) as h:
        await h.until(
            lambda: [w.acting for w in h.router.status().workers] == [Role.PREFILL, Role.DECODE]
        )
        task = h.start(ask("a"))
        await h.settle()
        phases = [m.phase for w in h.launcher.workers for m in w.sent if isinstance(m, Submit)]
        assert phases == [Phase.PREFILL, Phase.DECODE]
        assert await h.finish(task) == expected_ids(ask("a"))
        h.launcher.first = lambda worker: None
        h.launcher.workers[1].die()
        await h.settle()
        alone = h.start(ask("b"))
        await h.settle()
        assert await h.finish(alone) == expected_ids(ask("b")), "one that can does both"


async def test_what_a_decode_worker_holds_but_for_less_than_a_block_it_computes_itself() -> None:
    async with house(*SPLIT) as h:
        asked = ask("a", num_prompt=200)
        root = CacheIdentity(INFO.fingerprint, INFO.layout).root_key()
        keys = tuple(key for key, _ in block_keys(root, asked.prompt_tokens, 16))
        decoder = h.launcher.one(Role.DECODE)
        decoder.words.put_nowait(StepDone(outputs=(), load=LOAD, kv_events=KVEvents(added=keys)))
        await h.settle()
        tasks = [h.start(asked), h.start(ask("short", num_prompt=16))]
        await h.settle()
        assert not h.launcher.one(Role.PREFILL).sent
        for task, request in zip(tasks, (asked, ask("short")), strict=True):
            assert await h.finish(task) == expected_ids(request)


async def test_prompt_logprobs_are_asked_of_who_decodes() -> None:
    async with house(*SPLIT) as h:
        asked = replace(ask("a"), num_prompt_logprobs=1)
        task = h.start(asked)
        await h.settle()
        assert not h.launcher.one(Role.PREFILL).sent
        (submit,) = h.launcher.one(Role.DECODE).sent
        assert isinstance(submit, Submit)
        assert (submit.phase, submit.handoff) == (Phase.WHOLE, None)
        assert await h.finish(task) == expected_ids(asked)


async def test_a_fleet_of_guests_only_waits_for_both_phases() -> None:
    launcher = FakeLauncher()
    router = Router(launcher, RouterConfig(roles=(), watch_every_s=0.005), ManualClock())
    running = asyncio.create_task(router.run())
    ready = asyncio.create_task(router.wait_ready())
    for role in SPLIT:
        await asyncio.sleep(0.02)
        assert not ready.done()
        guest = FakeWorker(f"guest-{role}", role, launcher.fabric)
        guest.hello()
        await router.add_worker(guest)
    await asyncio.wait_for(ready, 1.0)
    assert router.status().ready
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_a_report_for_a_request_that_is_over_is_ignored() -> None:
    async with house(*SPLIT) as h:
        await h.finish(h.start(ask("a")))
        for end in HandoffEnd:
            h.launcher.one(Role.DECODE).words.put_nowait(
                step_done(report=HandoffReport(handoff_id="a", end=end))
            )
        await h.settle()
        assert h.router.status().ready
