"""Random traffic over random fleets with deaths, hangs, broken handoffs, strangers and aborts:
every accepted request ends exactly once, with the right tokens or a proper error, and
nothing is kept of it anywhere."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from router_workers import INFO, FakeLauncher, FakeWorker, ask, expected_ids

from headwater.core.errors import NotReady, Overloaded, WorkerLost
from headwater.core.fleet import Role
from headwater.core.request import FinishReason, Request
from headwater.router.policy import AdmissionLimits
from headwater.router.service import Router, RouterConfig

FLEETS = [
    (Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.PREFILL, Role.DECODE),
    (Role.PREFILL, Role.DECODE, Role.DECODE),
    (Role.BOTH, Role.BOTH),
    (Role.BOTH, Role.PREFILL, Role.DECODE),
    (Role.BOTH,),
]
NUM_ACTIONS = 60


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


@dataclass(slots=True)
class Client:
    """What one caller heard."""

    request: Request
    ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, FinishReason] = field(default_factory=dict)
    num_reports: int = 0
    aborted: set[int] = field(default_factory=set)
    has_left: bool = False
    error: Exception | None = None

    async def run(self, router: Router) -> None:
        try:
            async for output in router.generate(self.request):
                assert output.index not in self.ends, "a choice goes on after its end"
                self.ids.setdefault(output.index, []).extend(t.token_id for t in output.tokens)
                self.num_reports += output.prompt is not None
                if output.finish is not None:
                    self.ends[output.index] = output.finish
        except (WorkerLost, NotReady, Overloaded) as error:
            self.error = error

    def check(self) -> None:
        expected = expected_ids(self.request)
        for index, ids in self.ids.items():
            assert ids == expected[index][: len(ids)], "a token is lost, doubled or strange"
        assert self.num_reports <= self.request.num_choices
        if self.error is not None or self.has_left:
            return
        assert set(self.ends) == set(expected), "it ended before all its choices"
        for index, end in self.ends.items():
            if end is FinishReason.ABORTED:
                assert index in self.aborted
            else:
                assert self.ids[index] == expected[index]


class Chaos:
    """One run of one schedule."""

    def __init__(self, roles: tuple[Role, ...], random: Random) -> None:
        self.random = random
        self.clock = ManualClock()
        self.launcher = FakeLauncher(self._first_word)
        self.is_calm = True
        config = RouterConfig(
            roles=roles,
            limits=AdmissionLimits(max_running_sequences=4, max_waiting_sequences=12),
            backoff_first_s=0.0,
            backoff_max_s=0.0,
            watch_every_s=0.0,
            stuck_after_s=10.0,
            lost_after_s=20.0,
            recover_within_s=1e6,
            max_attempts=6,
        )
        self.router = Router(self.launcher, config, self.clock)
        self.clients: list[tuple[Client, asyncio.Task[None]]] = []
        self.aborting: list[asyncio.Task[None]] = []

    def _first_word(self, worker: FakeWorker) -> None:
        if self.is_calm or self.random.random() < 0.7:
            worker.hello()
        elif self.random.random() < 0.8:
            worker.die()
        else:
            worker.hello(replace(INFO, fingerprint="stranger"))

    async def run(self) -> None:
        running = asyncio.create_task(self.router.run())
        try:
            await asyncio.wait_for(self.router.wait_ready(), 2.0)
            self.is_calm = False
            for _ in range(NUM_ACTIONS):
                self._act()
                for _ in range(self.random.randrange(6)):
                    await asyncio.sleep(0)
                self.router.audit()
            self.is_calm = True
            await self._calm_down()
            for client, task in self.clients:
                if not (task.cancelled() and client.has_left):
                    task.result()
                client.check()
            self._check_nothing_is_left()
        finally:
            for _, task in self.clients:
                task.cancel()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        assert all(worker.is_closed for worker in self.launcher.workers)

    def _act(self) -> None:
        alive = self.launcher.alive
        kind = self.random.choices(
            ("ask", "step", "die", "hang", "break", "leave", "abort", "time"),
            (30, 60, 4, 2, 6, 6, 6, 4),
        )[0]
        if kind == "ask":
            request = ask(
                f"r{len(self.clients)}",
                num_prompt=self.random.choice((3, 20, 300)),
                num_output=self.random.randrange(1, 6),
                num_choices=self.random.choice((1, 1, 3)),
                tenant=self.random.choice("ab"),
            )
            client = Client(request)
            self.clients.append((client, asyncio.create_task(client.run(self.router))))
        elif kind in ("leave", "abort") and self.clients:
            client, task = self.random.choice(self.clients)
            if task.done():
                return
            if kind == "leave":
                client.has_left = True
                task.cancel()
            else:
                index = self.random.randrange(client.request.num_choices)
                client.aborted.add(index)
                aborting = asyncio.create_task(self.router.abort_choice(client.request, index))
                self.aborting.append(aborting)
        elif kind == "time":
            self.clock.time_s += self.random.choice((1.0, 11.0))
        elif alive:
            self._disturb(kind, self.random.choice(alive))

    def _disturb(self, kind: str, worker: FakeWorker) -> None:
        if kind == "step":
            worker.step()
        elif kind == "die":
            worker.die()
        elif kind == "hang":
            worker.hangs = True
        elif kind == "break":
            waiting = [key for key, job in worker.jobs.items() if not job.is_ready]
            if waiting:
                worker.fail_handoff(self.random.choice(waiting))

    async def _calm_down(self) -> None:
        """Everybody who hangs is replaced, everybody else works until all is done."""
        for worker in self.launcher.alive:
            if worker.hangs:
                worker.die()
        for _ in range(2000):
            if all(task.done() for _, task in self.clients):
                break
            for worker in self.launcher.alive:
                worker.step()
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert all(task.done() for _, task in self.clients), "somebody waits for ever"
        await asyncio.wait_for(asyncio.gather(*self.aborting), 1.0)

    def _check_nothing_is_left(self) -> None:
        self.router.audit()
        status = self.router.status()
        assert status.num_in_flight == 0
        assert not any(bucket.num_waiting for bucket in status.buckets)
        assert not any(worker.num_in_flight for worker in status.workers)
        assert not any(worker.jobs for worker in self.launcher.alive if not worker.hangs)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(roles=st.sampled_from(FLEETS), seed=st.integers(0, 2**32))
def test_every_accepted_request_ends_once_with_the_right_tokens_or_a_proper_error(
    roles: tuple[Role, ...], seed: int
) -> None:
    asyncio.run(Chaos(roles, Random(seed)).run())
