"""A running router over fake workers, and what tests do with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from router_workers import LOAD, FakeLauncher

from headwater.core.control import StepDone
from headwater.core.fleet import HandoffReport, Role
from headwater.core.request import (
    Request,
    SequenceOutput,
)
from headwater.router.service import Router, RouterConfig

SPLIT = (Role.PREFILL, Role.DECODE)


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


class House:
    """A running router over fake workers."""

    def __init__(self, config: RouterConfig, launcher: FakeLauncher) -> None:
        self.launcher = launcher
        self.clock = ManualClock()
        self.router = Router(launcher, config, self.clock)
        self.outputs: dict[str, list[SequenceOutput]] = {}

    def start(self, request: Request) -> asyncio.Task[dict[int, list[int]]]:
        return asyncio.create_task(self._collect(request))

    async def _collect(self, request: Request) -> dict[int, list[int]]:
        heard = self.outputs.setdefault(str(request.request_id), [])
        ids: dict[int, list[int]] = {index: [] for index in range(request.num_choices)}
        async for output in self.router.generate(request):
            heard.append(output)
            assert output.request_id == request.request_id
            ids[output.index] += [token.token_id for token in output.tokens]
        return ids

    async def settle(self) -> None:
        for _ in range(12):
            await asyncio.sleep(0)

    async def step_all(self) -> None:
        for worker in self.launcher.alive:
            worker.step()
        await self.settle()

    async def finish(self, task: asyncio.Task[dict[int, list[int]]]) -> dict[int, list[int]]:
        """Step everybody until it is done."""
        async with asyncio.timeout(5.0):
            while not task.done():
                await self.step_all()
                await asyncio.sleep(0.001)
        return task.result()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5.0):
            while not is_so():
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def house(
    *roles: Role, launcher: FakeLauncher | None = None, **settings: object
) -> AsyncIterator[House]:
    config = RouterConfig(
        roles=roles, backoff_first_s=0.01, watch_every_s=0.005, **settings  # type: ignore[arg-type]
    )  # fmt: skip
    made = House(config, launcher or FakeLauncher())
    task = asyncio.create_task(made.router.run())
    await asyncio.wait_for(made.router.wait_ready(), 2.0)
    yield made
    made.router.audit()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert all(worker.is_closed for worker in made.launcher.workers)


def step_done(*outputs: SequenceOutput, report: HandoffReport | None = None) -> StepDone:
    return StepDone(outputs=outputs, load=LOAD, handoffs=(report,) if report else ())


def lose_before_anything(h: House) -> None:
    """Queued: the worker has heard of it and done nothing."""


def lose_after_prompt(h: House) -> None:
    """Between handoff and first token: prefill has sent all."""
    h.launcher.one(Role.PREFILL).step()


def lose_in_decode(h: House) -> None:
    for _ in range(2):
        for role in SPLIT:
            h.launcher.one(role).step()
