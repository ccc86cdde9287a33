"""The service: requests come in, are placed on workers, go on elsewhere when one is lost.

    generate -> admitted -> waiting --placed--> Submit -> outputs -> finished
                               ^                  |
                               +-- worker or handoff lost: again, from what was told

The Generator. Each accepted request ends exactly once: finished, aborted by its caller, or
failed. Knows messages; which worker is for ``dispatch``, the workers' lives for ``fleet``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import replace

from headwater.core.control import NO_TIME, Abort, StepDone, StepTiming
from headwater.core.errors import (
    AuditError,
    EngineFault,
    HeadwaterError,
    NotReady,
    Overloaded,
    PromptTooLong,
    WorkerLost,
)
from headwater.core.fleet import HandoffEnd, HandoffReport, Role
from headwater.core.ports import (
    Clock,
    HandoffTotals,
    ServiceStatus,
    WorkerChannel,
    WorkerLauncher,
    WorkerStatus,
)
from headwater.core.request import FinishReason, ModelInfo, Request, RequestId, SequenceOutput
from headwater.core.tokenizer_source import TokenizerSource
from headwater.router.call import Attempt, Call
from headwater.router.calls import Calls
from headwater.router.config import RouterConfig
from headwater.router.dispatch import Ask, Dispatcher, Placement
from headwater.router.elastic import Elastic
from headwater.router.fleet import Fleet, Slot
from headwater.router.fleet_policy import decide_readiness, phase_seconds, total_load, with_report
from headwater.router.link import Link
from headwater.router.policy import InFlight, RefuseBusy, RefuseSize, decide_admission
from headwater.router.submits import decode_submit, prefill_submit, whole_submit

__all__ = ["Router", "RouterConfig"]

log = logging.getLogger("headwater.router")

LOOK_EVERY_S = 0.001  # for places, while there are none


class Router:
    """The front's traffic control. Use :meth:`run` as a task."""

    def __init__(self, launcher: WorkerLauncher, config: RouterConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._fleet = Fleet(launcher, config.fleet, clock, self)
        self._dispatcher: Dispatcher | None = None  # from the first Hello on
        self._links: dict[str, Link] = {}
        self._calls = Calls()
        self._elastic = Elastic(config.elastic) if config.elastic is not None else None
        self._complete = asyncio.Event()  # a request could have been served once
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._will_pump = False
        self._is_full = False  # somebody waits and could not be placed
        self._missing_since_s: float | None = None  # no workers for a request since then
        self._step_totals = NO_TIME
        self._handoffs = HandoffTotals()
        self._num_resumed = 0

    # What api sees

    @property
    def info(self) -> ModelInfo | None:
        return self._fleet.first.info if self._fleet.first else None

    async def wait_ready(self) -> tuple[ModelInfo, TokenizerSource]:
        """What the fleet serves, once it has come up, and how to speak to it."""
        await self._complete.wait()
        assert self._fleet.first is not None
        return self._fleet.first.info, self._fleet.first.tokenizer

    def status(self) -> ServiceStatus:
        now_s = self._clock.now_s()
        workers = tuple(self._worker_status(slot, now_s) for slot in self._fleet.slots)
        ready, reason = decide_readiness(workers)
        if self._is_draining:
            ready, reason = False, "draining: the server is stopping"
        return ServiceStatus(
            ready=ready,
            reason=reason,
            num_in_flight=len(self._calls),
            num_worker_restarts=sum(worker.num_restarts for worker in workers),
            load=total_load([worker.load for worker in workers if worker.load is not None]),
            step_totals=self._step_totals,
            workers=workers,
            buckets=self._dispatcher.buckets(now_s) if self._dispatcher else (),
            handoffs=self._handoffs,
            num_resumed=self._num_resumed,
        )

    def _worker_status(self, slot: Slot, now_s: float) -> WorkerStatus:
        status = slot.status(now_s, self._config.stuck_after_s)
        book = self._dispatcher.books.get(slot.worker_id) if self._dispatcher else None
        if book is None:
            return status
        return replace(status, queue_s=book.queue_s, acting=book.acting)

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        call = self._admit(request)
        try:
            self._pump()
            while call.num_open or call.arrived:
                while not call.arrived:
                    if call.error is not None:
                        raise call.error
                    await call.wake.wait()
                    call.wake.clear()
                outputs, call.arrived = call.arrived, []
                for output in outputs:
                    if output.finish is FinishReason.FAILED:
                        raise EngineFault(output.error or "the step failed")
                    yield output
        finally:
            await self._leave(call)

    async def abort_choice(self, request: Request, index: int) -> None:
        call = self._calls.get(request.request_id)
        if call is None or call.choices[index].is_finished:
            return
        attempt = call.attempt
        if attempt is None:
            self._calls.end_choice(call, index)
            if not call.num_open:
                self._stop_waiting(call)
            return
        call.choices[index].is_aborting = True
        told = [self._links[attempt.decode_id]]
        told[0].post(Abort(request_id=RequestId(attempt.key), index=index))
        if attempt.prefill_id is not None and all(
            choice.is_finished or choice.is_aborting for choice in call.choices
        ):
            told.append(self._links[attempt.prefill_id])
            self._end_prefill(attempt, is_abort=True)
        for link in told:
            await link.flush()

    async def run(self) -> None:
        """Keep the fleet alive until cancelled; see ``Fleet.run`` for when it ends itself."""
        watch = asyncio.create_task(self._watch())
        try:
            await self._fleet.run()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def add_worker(self, channel: WorkerChannel) -> str:
        """Take in a worker that somebody else started; see ``Fleet.add_worker``."""
        return await self._fleet.add_worker(channel)

    async def drain(self, limit_s: float) -> int:
        """Take nothing new from now on, and wait until all that was accepted has ended. What
        has not within ``limit_s`` ends with NotReady; gives how many (J03)."""
        self._is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            cut = list(self._calls)
            for call in cut:
                self._drop(call)
                call.fail(
                    NotReady("the server stopped before it had finished; send the request again")
                )
            return len(cut)
        return 0

    def audit(self) -> None:
        """Raises AuditError if a request, or a part of one, is kept that nobody asks for."""
        self._calls.audit()
        attempts = [call.attempt for call in self._calls if call.attempt is not None]
        placed = {(worker_id, a.key) for a in attempts for worker_id in a.worker_ids}
        held = {(link.worker_id, key) for link in self._links.values() for key in link.keys}
        if placed != held:
            raise AuditError(f"{len(placed ^ held)} parts of requests are held wrongly")
        if self._dispatcher is not None:
            waiting = {c.waiting_key for c in self._calls.waiting if c.waiting_key is not None}
            self._dispatcher.audit(placed, waiting)

    # A request's way in and out

    def _admit(self, request: Request) -> Call:
        dispatcher = self._dispatcher
        if self._is_draining or dispatcher is None or not dispatcher.can_serve():
            raise NotReady(f"the server cannot take requests now ({self.status().reason})")
        roles = [link.hello.role for link in self._links.values()]
        num_prefill = sum(role is not Role.DECODE for role in roles)
        in_flight = InFlight(
            num_sequences=self._calls.num_sequences,
            num_waiting_tokens=self._calls.num_waiting_tokens,
            queue_s=dispatcher.queue_s / max(num_prefill, 1),
            num_decode_workers=sum(role is not Role.PREFILL for role in roles),
        )
        limits, info = self._config.limits, dispatcher.fleet_info()
        match decide_admission(request, in_flight, limits, info):
            case RefuseBusy(message=message, retry_after_s=retry_after_s):
                raise Overloaded(message, retry_after_s=retry_after_s)
            case RefuseSize(limit_tokens=limit_tokens):
                raise PromptTooLong(request.num_prompt_tokens, limit_tokens)
        call = self._calls.open(request)
        self._idle.clear()
        self._queue(call)
        return call

    def _queue(self, call: Call, avoid: frozenset[str] = frozenset()) -> None:
        """Let it wait for a place: the first in its bucket, later ones before all buckets."""
        ask = Ask(
            key=call.next_key(),
            request=call.request,
            num_choices=call.num_open,
            num_resumed_tokens=call.num_resumed_tokens,
            avoid=avoid,
        )
        self._calls.wait(call, ask.key)
        if call.num_attempts == 1:
            self._desk.add(ask, self._clock.now_s())
        else:
            self._desk.add_again(ask)

    async def _leave(self, call: Call) -> None:
        """The caller is done with the request, one way or another; the workers must be, too."""
        told = self._drop(call)
        self._calls.close(call)
        if not len(self._calls):
            self._idle.set()
        self._pump_soon()
        for link in told:
            await link.flush()

    def _stop_waiting(self, call: Call) -> None:
        key = self._calls.stop_waiting(call)
        if key is not None:
            self._desk.remove(key)

    def _drop(self, call: Call) -> list[Link]:
        """Nobody works on it or waits for it any more. Gives the workers that were told so."""
        self._stop_waiting(call)
        attempt = self._calls.unplace(call)
        if attempt is None:
            return []
        told = []
        for worker_id in attempt.worker_ids:
            self._end_part(worker_id, attempt.key)
            link = self._links.get(worker_id)
            if link is not None:
                link.post(Abort(request_id=RequestId(attempt.key)))
                told.append(link)
        return told

    # Placing

    @property
    def _desk(self) -> Dispatcher:
        """There is one as soon as there are workers, and so before any request."""
        assert self._dispatcher is not None
        return self._dispatcher

    def _pump_soon(self) -> None:
        """Once for all the messages of this turn of the loop; where the last look found no
        place for those that wait, for all of the next moment."""
        if self._will_pump or self._dispatcher is None or not self._dispatcher.has_waiting:
            return
        self._will_pump = True
        pause_s = LOOK_EVERY_S if self._is_full else 0.0
        asyncio.get_running_loop().call_later(pause_s, self._pump)

    def _pump(self) -> None:
        self._will_pump = False
        now_s = self._clock.now_s()
        while (placement := self._desk.next(now_s)) is not None:
            self._submit(placement, now_s)
        self._is_full = self._desk.has_waiting

    def _submit(self, placement: Placement, now_s: float) -> None:
        key, prefill_id = placement.key, placement.prefill_id
        call = self._calls.place(
            Attempt(key=key, decode_id=placement.decode_id, prefill_id=prefill_id)
        )
        decoder = self._links[placement.decode_id]
        decoder.keys.add(key)
        if prefill_id is None:
            decoder.post(whole_submit(call, placement))
            decoder.expect(key, now_s)
        else:
            prefiller = self._links[prefill_id]
            prefiller.keys.add(key)
            prefiller.expect(key, now_s)
            pair = {"prefiller": prefiller.hello, "decoder": decoder.hello}
            decoder.post(decode_submit(call, placement, **pair))
            prefiller.post(prefill_submit(call, placement, decoder=decoder.hello))

    # What workers say

    def joined(self, link: Link) -> None:
        hello = link.hello
        if self._dispatcher is None:
            self._dispatcher = Dispatcher(hello.info, self._config.dispatch)
        self._links[link.worker_id] = link
        self._desk.join(
            link.worker_id, hello.role, hello.info, self._clock.now_s(),
            takes_kv=bool(hello.handoff_address), holds=hello.holds,
        )  # fmt: skip
        if self._desk.can_serve():
            self._complete.set()
        self._pump_soon()

    def heard(self, slot: Slot, link: Link, message: StepDone) -> None:
        link.progress_s = self._clock.now_s()
        self._desk.shut(link.worker_id, False)
        self._desk.told(link.worker_id, message.load)
        if message.kv_events is not None:
            self._desk.learned(link.worker_id, message.kv_events)
        if message.timing is not None:
            self._count_step(slot, message.timing)
        for output in message.outputs:
            self._hear_output(link, output)
        for report in message.handoffs:
            self._hear_report(link, report)
        self._pump_soon()

    def _count_step(self, slot: Slot, timing: StepTiming) -> None:
        self._step_totals += timing
        self._desk.computed(slot.worker_id, timing.num_prefill_tokens)
        prefill_s, decode_s = phase_seconds(timing, self._desk.books[slot.worker_id].acting)
        slot.prefill_s += prefill_s
        slot.decode_s += decode_s
        if self._elastic is not None:
            self._elastic.worked(prefill_s, decode_s)

    def _hear_output(self, link: Link, output: SequenceOutput) -> None:
        call = self._calls.placed(str(output.request_id))
        if call is None:  # its caller has left, or it goes on elsewhere by another name
            return
        attempt, desk = call.attempt, self._desk
        assert attempt is not None
        if link.worker_id != attempt.decode_id:
            if output.finish is FinishReason.FAILED and not attempt.is_handed:
                self._go_on(call, output.error or "the prompt could not be computed")
            return
        desk.settled(link.worker_id, attempt.key)
        if output.tokens:
            attempt.is_handed = True
            link.expect(attempt.key, self._clock.now_s())
            desk.prefilled(link.worker_id, attempt.key)
        num_open = call.num_open
        new = self._calls.take(call, output)
        if new:
            desk.grew(link.worker_id, attempt.key, len(new))
        if call.num_open < num_open and output.finish in (FinishReason.STOP, FinishReason.LENGTH):
            desk.finished(len(call.choices[output.index].tokens))
        if not call.num_open:
            self._retire(call, attempt)

    def _retire(self, call: Call, attempt: Attempt) -> None:
        """All choices are finished."""
        if attempt.prefill_id is not None:
            self._end_prefill(attempt, is_abort=True)
        self._end_part(attempt.decode_id, attempt.key)
        self._calls.unplace(call)

    def _hear_report(self, link: Link, report: HandoffReport) -> None:
        call = self._calls.placed(report.handoff_id)
        if call is None:
            return
        attempt = call.attempt
        assert attempt is not None
        is_done = report.end is HandoffEnd.DONE
        if link.worker_id == attempt.decode_id:
            self._handoffs = with_report(self._handoffs, report)
            attempt.is_handed |= is_done
            if is_done:
                self._desk.arrived(link.worker_id, attempt.key)
        if is_done or attempt.is_handed:
            if link.worker_id == attempt.prefill_id:
                self._end_prefill(attempt, is_abort=False)
            # It has all it needs from others.
            self._links[attempt.decode_id].expect(attempt.key, self._clock.now_s())
        else:
            self._go_on(call, f"handoff failed: {report.reason}")

    def _end_prefill(self, attempt: Attempt, *, is_abort: bool) -> None:
        """The prefill side has nothing more to do for it."""
        assert attempt.prefill_id is not None
        self._end_part(attempt.prefill_id, attempt.key)
        if is_abort:
            self._links[attempt.prefill_id].post(Abort(request_id=RequestId(attempt.key)))
        attempt.prefill_id = None

    def _end_part(self, worker_id: str, key: str) -> None:
        self._desk.ended(worker_id, key)
        link = self._links.get(worker_id)
        if link is not None:
            link.forget(key)

    # Losses

    def left(self, link: Link, error: HeadwaterError) -> None:
        del self._links[link.worker_id]
        self._desk.leave(link.worker_id)
        for key in sorted(link.keys):
            call = self._calls.placed(key)
            if call is None or call.attempt is None:
                continue
            attempt = call.attempt
            if link.worker_id == attempt.prefill_id and attempt.is_handed:
                attempt.prefill_id = None
            else:
                self._go_on(call, str(error))
        if not self._may_resume:
            self._fail_waiting("the worker that computed this request died")
        self._pump_soon()

    @property
    def _may_resume(self) -> bool:
        """Whether there are, or will soon be, others to go on."""
        return len(self._config.roles) != 1 or len(self._fleet.slots) > 1

    def _go_on(self, call: Call, reason: str) -> None:
        """Its attempt came to nothing: let it go on elsewhere from what its caller was told."""
        attempt = call.attempt
        assert attempt is not None
        self._drop(call)
        for index, choice in enumerate(call.choices):
            if choice.is_aborting:
                self._calls.end_choice(call, index)
        if not call.num_open:
            return
        if not self._may_resume:
            call.fail(
                WorkerLost("the worker that computed this request died; send the request again")
            )
        elif call.num_attempts >= self._config.max_attempts:
            call.fail(
                WorkerLost(
                    f"the request was lost {call.num_attempts} times, last: {reason}; "
                    "send the request again"
                )
            )
        else:
            log.info("a request goes on elsewhere (%s)", reason)
            self._num_resumed += 1
            self._queue(call, frozenset(attempt.worker_ids))
            self._pump_soon()

    def _fail_waiting(self, reason: str) -> None:
        for call in self._calls.waiting:
            self._stop_waiting(call)
            call.fail(WorkerLost(f"{reason}; send the request again"))

    # What only time shows

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._config.watch_every_s)
            self._look(self._clock.now_s())

    def _look(self, now_s: float) -> None:
        """Workers that owe a word for too long, and requests that nobody will ever serve."""
        dispatcher = self._dispatcher
        if dispatcher is None:
            return
        if self._may_resume:
            for link in list(self._links.values()):
                silent_s = link.silent_s(now_s)
                dispatcher.shut(link.worker_id, silent_s > self._config.stuck_after_s)
                if silent_s > self._config.lost_after_s:
                    link.give_up(f"it had work and said nothing for {silent_s:.0f} s")
        if self._elastic is not None:
            self._elastic.look(dispatcher, now_s)
        if dispatcher.can_serve():
            self._missing_since_s = None
        elif self._config.roles and not self._fleet.is_expecting:
            self._fail_waiting(f"no worker will go on with it ({self.status().reason})")
        elif self._missing_since_s is None:
            self._missing_since_s = now_s
        elif now_s - self._missing_since_s > self._config.recover_within_s:
            self._fail_waiting("no worker came back to go on with it")
        self._pump_soon()
