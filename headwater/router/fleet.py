"""The workers' lives: launched, compared, listened to, lost, launched again.

    launch -> Hello -> compare -> [ live ] -> lost -> pause -> launch
                         |
                         +-- refused, a few times: not launched again

One slot per worker that was asked for; a worker that somebody else started joins through
:meth:`Fleet.add_worker` and leaves its slot when it is lost. Knows nothing of requests:
``service`` is told who joins, speaks and leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from headwater.core.control import FromWorker, Hello, StepDone, WorkerLoad
from headwater.core.errors import ConfigError, HeadwaterError, WorkerLost
from headwater.core.fleet import Holding, Role
from headwater.core.ports import Clock, WorkerChannel, WorkerLauncher, WorkerState, WorkerStatus
from headwater.router.link import Link
from headwater.router.peer_policy import model_mismatch, protocol_mismatch, role_mismatch

log = logging.getLogger("headwater.router")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """``roles``: one worker of each is kept alive. ``max_refusals``: so often in a row may a
    worker say that it serves something else before it is not started again."""

    roles: tuple[Role, ...] = (Role.BOTH,)
    start_limit_s: float = 600.0  # from launch to Hello; over it the worker is given up
    backoff_first_s: float = 0.5
    backoff_max_s: float = 30.0
    max_refusals: int = 3

    def __post_init__(self) -> None:
        roles = set(self.roles)
        if Role.BOTH not in roles and len(roles) == 1:
            other = Role.DECODE if Role.PREFILL in roles else Role.PREFILL
            raise ConfigError(
                f"the fleet has {len(self.roles)} {self.roles[0]} workers and no {other} worker; "
                "a request needs both"
            )


class Refused(WorkerLost):
    """The worker serves something else than the front; another like it would, too."""


class FleetEars(Protocol):
    """Who is told what becomes of the workers."""

    def joined(self, link: Link) -> None: ...
    def heard(self, slot: Slot, link: Link, message: StepDone) -> None: ...
    def left(self, link: Link, error: HeadwaterError) -> None: ...


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one worker after another."""

    worker_id: str
    role: Role
    state: WorkerState = WorkerState.STARTING
    reason: str = "starting: the worker is loading the model"
    link: Link | None = None
    load: WorkerLoad | None = None  # as told last
    was_up: bool = False
    num_restarts: int = 0
    num_refusals: int = 0  # in a row
    up_s: float = 0.0  # of lives that ended
    prefill_s: float = 0.0
    decode_s: float = 0.0

    def status(self, now_s: float, stuck_after_s: float) -> WorkerStatus:
        state, reason, up_s, num_in_flight = self.state, self.reason, self.up_s, 0
        holds, num_held_bytes, num_saved_bytes = Holding.ALL, 0, 0
        if self.link is not None:
            holds, info = self.link.hello.holds, self.link.hello.info
            num_held_bytes, num_saved_bytes = info.weights_bytes, info.saved_weights_bytes
            num_in_flight = len(self.link.keys)
            up_s += now_s - self.link.up_since_s
            silent_s = self.link.silent_s(now_s)
            if state is WorkerState.UP and silent_s > stuck_after_s:
                state = WorkerState.STUCK
                reason = f"stuck: work is pending and no step ended for {silent_s:.0f} s"
        return WorkerStatus(
            worker_id=self.worker_id,
            role=self.role,
            state=state,
            reason="" if state is WorkerState.UP else reason,
            load=self.load,
            num_restarts=self.num_restarts,
            num_in_flight=num_in_flight,
            up_s=up_s,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            acting=self.role,
            holds=holds,
            weights_bytes=num_held_bytes,
            saved_weights_bytes=num_saved_bytes,
        )


class Fleet:
    """Use :meth:`run` as a task."""

    def __init__(
        self, launcher: WorkerLauncher, config: FleetConfig, clock: Clock, ears: FleetEars
    ) -> None:
        self._launcher = launcher
        self._config = config
        self._clock = clock
        self._ears = ears
        self._guests: set[asyncio.Task[None]] = set()
        self._num_guests = 0
        self.first: Hello | None = None  # what every other worker is compared with
        self.slots: list[Slot] = []
        for role in config.roles:
            number = sum(slot.role is role for slot in self.slots)
            self.slots.append(Slot(f"{role}-{number}", role))

    @property
    def is_expecting(self) -> bool:
        """Whether a worker is on its way up, or will be after a pause."""
        return any(
            slot.link is None and slot.state is not WorkerState.REFUSED for slot in self.slots
        )

    async def run(self) -> None:
        """Keep the workers alive until cancelled. A worker that cannot even start the first
        time ends it with its error: nothing would get better by waiting."""
        tasks = [asyncio.create_task(self._keep(slot)) for slot in self.slots]
        try:
            await asyncio.gather(*tasks)
            await asyncio.Event().wait()  # all were refused: that stays so
        finally:
            tasks.extend(self._guests)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def add_worker(self, channel: WorkerChannel) -> str:
        """Take in a worker that somebody else started: its Hello is the channel's next message.

        Gives the name it has here. Raises WorkerLost, with the channel closed, when it serves
        something else or says nothing. It is not started again when it is lost.
        """
        messages = channel.messages()
        try:
            hello = await self._first_word(messages)
            self._num_guests += 1
            slot = Slot(f"{hello.role}-guest-{self._num_guests}", hello.role)
            link = self._welcome(slot, channel, hello)
        except BaseException:
            await channel.close()
            raise
        self.slots.append(slot)
        guest = asyncio.create_task(self._host(slot, link, channel, messages))
        self._guests.add(guest)
        guest.add_done_callback(self._guests.discard)
        return slot.worker_id

    async def _host(
        self, slot: Slot, link: Link, channel: WorkerChannel, messages: AsyncIterator[FromWorker]
    ) -> None:
        try:
            await self._live(slot, link, messages)
        except HeadwaterError as error:
            log.warning("worker %s lost (%s)", slot.worker_id, error)
        finally:
            self.slots.remove(slot)
            await channel.close()

    async def _keep(self, slot: Slot) -> None:
        backoff_s = self._config.backoff_first_s
        while True:
            channel: WorkerChannel | None = None
            try:
                channel = await self._launcher.launch(slot.role)
                messages = channel.messages()
                link = self._welcome(slot, channel, await self._first_word(messages))
                backoff_s = self._config.backoff_first_s
                await self._live(slot, link, messages)
            except HeadwaterError as error:
                if not slot.was_up:
                    slot.state, slot.reason = WorkerState.DOWN, str(error)
                    raise
                slot.num_refusals += isinstance(error, Refused)
                slot.state, slot.reason = WorkerState.DOWN, f"restarting: {error}"
            finally:
                if channel is not None:
                    await channel.close()
            if slot.num_refusals >= self._config.max_refusals:
                slot.state = WorkerState.REFUSED
                slot.reason = slot.reason.replace("restarting: ", "refused: ", 1)
                log.error("worker %s is not started again (%s)", slot.worker_id, slot.reason)
                return
            log.warning(
                "worker %s lost (%s); starting another in %.1f s",
                slot.worker_id, slot.reason, backoff_s,
            )  # fmt: skip
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, self._config.backoff_max_s)
            slot.num_restarts += 1

    async def _live(self, slot: Slot, link: Link, messages: AsyncIterator[FromWorker]) -> None:
        """From Hello to loss; raises what ended it, after all were told."""

        def hear(link: Link, message: FromWorker) -> None:
            if isinstance(message, StepDone):
                slot.load = message.load
                self._ears.heard(slot, link, message)

        slot.link = link
        error: HeadwaterError = WorkerLost("the server is ending")
        self._ears.joined(link)
        try:
            await link.live(messages, hear)
        except HeadwaterError as loss:
            error = loss
            raise
        finally:
            slot.link = None
            slot.state, slot.reason = WorkerState.DOWN, f"restarting: {error}"
            slot.up_s += self._clock.now_s() - link.up_since_s
            self._ears.left(link, error)

    async def _first_word(self, messages: AsyncIterator[FromWorker]) -> Hello:
        limit_s = self._config.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                message = await anext(messages)
        except TimeoutError:
            raise WorkerLost(
                f"the worker did not load its model within {limit_s:.0f} s; "
                "raise worker.start_timeout_s if it needs longer"
            ) from None
        if not isinstance(message, Hello):
            raise WorkerLost("the worker did not say Hello first; start both from one installation")
        return message

    def _welcome(self, slot: Slot, channel: WorkerChannel, hello: Hello) -> Link:
        """Raises Refused for a worker that does not belong here."""
        why = protocol_mismatch(hello) or role_mismatch(hello, slot.role)
        if why is None and self.first is not None:
            why = model_mismatch(hello, self.first)
        if why is not None:
            raise Refused(why)
        if self.first is None:
            self.first = hello
        slot.load = None
        slot.was_up, slot.num_refusals = True, 0
        slot.state, slot.reason = WorkerState.UP, ""
        return Link(slot.worker_id, channel, hello, self._clock.now_s())
