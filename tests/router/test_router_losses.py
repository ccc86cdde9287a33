"""Workers and handoffs that are lost in every phase: what it costs nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
from router_house import (
    SPLIT,
    House,
    house,
    lose_after_prompt,
    lose_before_anything,
    lose_in_decode,
    step_done,
)
from router_workers import INFO, FakeWorker, ask, expected_ids

from headwater.core.control import Abort, Submit
from headwater.core.errors import EngineFault, WorkerLost
from headwater.core.fleet import Role
from headwater.core.request import (
    FinishReason,
    RequestId,
    SampledToken,
    SequenceOutput,
)
from headwater.router.policy import AdmissionLimits


@pytest.mark.parametrize("lost", SPLIT)
@pytest.mark.parametrize("before", [lose_before_anything, lose_after_prompt, lose_in_decode])
async def test_d08_a_worker_lost_in_any_phase_loses_and_doubles_no_token(
    lost: Role, before: Callable[[House], None]
) -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a", num_choices=2))
        await h.settle()
        before(h)
        await h.settle()
        h.launcher.one(lost).die()
        await h.settle()
        assert await h.finish(task) == expected_ids(ask("a", num_choices=2))
        assert sum(output.prompt is not None for output in h.outputs["a"]) == 2
        # Prefill said that decode has taken all: its loss is no longer this request's.
        is_over = lost is Role.PREFILL and before is not lose_before_anything
        assert h.router.status().num_resumed == (0 if is_over else 1)
        await h.until(lambda: h.router.status().ready)
        await h.step_all()
        assert not any(worker.jobs for worker in h.launcher.alive)


async def test_a_prefill_worker_lost_after_the_handoff_changes_nothing() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a"))
        await h.settle()
        lose_in_decode(h)
        await h.settle()
        h.launcher.one(Role.PREFILL).die()
        await h.settle()
        await h.finish(task)
        assert h.router.status().num_resumed == 0


async def test_a_token_from_decode_is_as_good_as_its_report_that_it_took_the_prompt() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a"))
        await h.settle()
        token = SequenceOutput(request_id=RequestId("a"), index=0, tokens=(SampledToken(0),))
        h.launcher.one(Role.DECODE).words.put_nowait(step_done(token))
        await h.settle()
        h.launcher.one(Role.PREFILL).die()
        await h.settle()
        assert h.router.status().num_resumed == 0
        h.clock.time_s += 31.0
        assert "decode-0 stuck" in h.router.status().reason, "and it owes the rest"
        task.cancel()


async def test_a_lone_worker_fails_those_that_wait_in_the_front_with_those_it_held() -> None:
    async with house(Role.BOTH, limits=AdmissionLimits(max_running_sequences=1)) as h:
        tasks = [h.start(ask(str(number))) for number in range(12)]
        await h.settle()
        assert len(h.launcher.one(Role.BOTH).sent) < 12, "some wait in the front"
        h.launcher.one(Role.BOTH).die()
        for task in tasks:
            with pytest.raises(WorkerLost, match="send the request again"):
                await asyncio.wait_for(task, 1.0)


@pytest.mark.parametrize("side", SPLIT)
async def test_d05_a_failed_handoff_is_tried_again_and_both_sides_forget_the_first(
    side: Role,
) -> None:
    async with house(*SPLIT, Role.DECODE) as h:
        task = h.start(ask("a"))
        await h.settle()
        (worker,) = [w for w in h.launcher.workers if w.role is side and w.sent]
        first_decoder = next(w for w in h.launcher.workers if w.role is Role.DECODE and w.sent)
        worker.fail_handoff("a")
        await h.settle()
        assert Abort(request_id=RequestId("a")) in first_decoder.sent
        (other,) = [
            w for w in h.launcher.workers if w.role is Role.DECODE and w is not first_decoder
        ]
        assert other.sent, "another worker takes it"
        assert await h.finish(task) == expected_ids(ask("a"))
        status = h.router.status()
        assert (status.num_resumed, status.handoffs.num_failed) == (1, int(side is Role.DECODE))
        assert not any(w.jobs for w in h.launcher.alive)


async def test_d08_attempts_are_bounded_and_the_error_says_why() -> None:
    async with house(*SPLIT, max_attempts=3) as h:
        task = h.start(ask("a"))
        for number in range(3):
            await h.settle()
            key = "a" if number == 0 else f"a#{number + 1}"
            h.launcher.one(Role.DECODE).fail_handoff(key)
        with pytest.raises(WorkerLost, match="lost 3 times, last: handoff failed: cut off"):
            await asyncio.wait_for(task, 2.0)
        await h.settle()
        assert not any(worker.jobs for worker in h.launcher.alive)


async def test_d04_a_prompt_that_prefill_refuses_gives_no_stream_of_something_else() -> None:
    async with house(*SPLIT, max_attempts=1) as h:
        task = h.start(ask("a"))
        await h.settle()
        prefiller = h.launcher.one(Role.PREFILL)
        prefiller.words.put_nowait(
            step_done(
                SequenceOutput(
                    request_id=RequestId("a"), index=0, finish=FinishReason.FAILED,
                    error="prompt is too long",
                )
            )
        )  # fmt: skip
        with pytest.raises(WorkerLost, match="prompt is too long"):
            await asyncio.wait_for(task, 2.0)
        await h.settle()
        assert h.launcher.one(Role.DECODE).sent[-1] == Abort(request_id=RequestId("a"))
        assert h.outputs["a"] == []


async def test_a_step_that_fails_in_decode_ends_the_request_on_both_sides() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a"))
        await h.settle()
        h.launcher.one(Role.DECODE).words.put_nowait(
            step_done(
                SequenceOutput(
                    request_id=RequestId("a"), index=0, finish=FinishReason.FAILED, error="bad step"
                )
            )
        )
        with pytest.raises(EngineFault, match="bad step"):
            await asyncio.wait_for(task, 2.0)
        await h.settle()
        assert h.launcher.one(Role.PREFILL).sent[-1] == Abort(request_id=RequestId("a"))


async def test_d03_e06_leaving_aborts_at_every_worker_that_holds_a_part() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a"))
        await h.settle()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for worker in h.launcher.workers:
            assert worker.sent[-1] == Abort(request_id=RequestId("a"))
            assert not worker.jobs
        assert h.router.status().num_in_flight == 0


async def test_a_choice_aborted_while_its_worker_is_lost_is_not_resumed() -> None:
    async with house(*SPLIT) as h:
        asked = ask("a", num_choices=2)
        task = h.start(asked)
        await h.settle()
        lose_in_decode(h)
        await h.settle()
        decoder = h.launcher.one(Role.DECODE)
        decoder.hangs = True
        await h.router.abort_choice(asked, 0)
        decoder.die()
        ids = await h.finish(task)
        assert ids[1] == expected_ids(asked)[1]
        ends = [o.finish for o in h.outputs["a"] if o.index == 0 and o.finish is not None]
        assert ends == [FinishReason.ABORTED]
        submits = [m for m in h.launcher.one(Role.DECODE).sent if isinstance(m, Submit)]
        assert [part.index for part in submits[-1].resume] == [1]


async def test_a_choice_aborted_while_the_request_waits_is_answered_at_once() -> None:
    async with house(*SPLIT) as h:
        asked = ask("a", num_choices=2)
        task = h.start(asked)
        await h.settle()
        h.launcher.one(Role.DECODE).die()
        await h.settle()
        await h.router.abort_choice(asked, 0)
        await h.router.abort_choice(asked, 1)
        assert await asyncio.wait_for(task, 1.0) == {0: [], 1: []}


async def test_what_finished_before_a_loss_stays_finished() -> None:
    async with house(*SPLIT) as h:
        asked = ask("a", num_choices=2)
        task = h.start(asked)
        await h.settle()
        h.launcher.one(Role.DECODE).words.put_nowait(
            step_done(SequenceOutput(request_id=RequestId("a"), index=1, finish=FinishReason.STOP))
        )
        await h.settle()
        h.launcher.one(Role.DECODE).die()
        assert await h.finish(task) == {0: expected_ids(asked)[0], 1: []}


async def test_a_worker_lost_before_its_hello_is_started_again_and_the_request_waits() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a"))
        await h.settle()
        firsts = iter([FakeWorker.die, FakeWorker.die, FakeWorker.hello])
        h.launcher.first = lambda worker: next(firsts)(worker)
        h.launcher.one(Role.PREFILL).die()
        assert await h.finish(task) == expected_ids(ask("a"))
        assert h.router.status().num_worker_restarts == 3


async def test_nobody_waits_for_workers_that_are_not_started_again() -> None:
    async with house(*SPLIT) as h:
        task = h.start(ask("a"))
        await h.settle()
        h.launcher.first = lambda worker: worker.hello(replace(INFO, fingerprint="g"))
        h.launcher.one(Role.DECODE).die()
        with pytest.raises(WorkerLost, match=r"no worker will go on with it.*fingerprint g"):
            await asyncio.wait_for(task, 2.0)


async def test_waiting_for_a_worker_to_come_back_is_bounded() -> None:
    async with house(*SPLIT, recover_within_s=50.0) as h:
        task = h.start(ask("a"))
        await h.settle()
        h.launcher.first = lambda worker: None
        h.launcher.one(Role.DECODE).die()
        await asyncio.sleep(0.05)
        assert not task.done()
        h.clock.time_s += 51.0
        with pytest.raises(WorkerLost, match="no worker came back"):
            await asyncio.wait_for(task, 2.0)


@pytest.mark.parametrize("hung", SPLIT)
async def test_a_worker_that_hangs_is_replaced_and_its_requests_go_on(hung: Role) -> None:
    async with house(*SPLIT, stuck_after_s=10.0, lost_after_s=20.0) as h:
        task = h.start(ask("a"))
        await h.settle()
        if hung is Role.DECODE:
            lose_in_decode(h)
            await h.settle()
        worker = h.launcher.one(hung)
        worker.hangs = True
        h.clock.time_s += 21.0
        await h.until(lambda: worker.is_closed)
        assert await h.finish(task) == expected_ids(ask("a"))
