"""J09: after many short requests of every kind, both processes are as large as before."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from journey_server import Served, serving

PLATEAU_MIB = 24.0

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="resident size is read from /proc"
)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    flags = ("--model=toy", "--numerics=reference", "--num-blocks=128", "--no-access-log")
    with serving(tmp_path, *flags) as made:
        yield made


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def ask(client: httpx.AsyncClient, number: int) -> None:
    """Finished, streamed, refused or broken off, by ``number``; every prompt is new."""
    body: dict[str, object] = {"prompt": f"request {number}", "max_tokens": 1 + number % 3}
    match number % 5:
        case 0:
            response = await client.post("/v1/completions", json=body | {"stream": True})
            assert response.status_code == 200
        case 1:
            response = await client.post("/v1/completions", json=body | {"temperature": -1})
            assert response.status_code == 400
        case 2:
            async with client.stream(
                "POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 200}
            ) as response:
                await anext(response.aiter_bytes())
        case _:
            messages = [{"role": "user", "content": f"request {number}"}]
            response = await client.post(
                "/v1/chat/completions", json={"messages": messages, "max_tokens": 2, "n": 2}
            )
            assert response.status_code == 200


async def ask_many(served: Served, numbers: range) -> None:
    waiting = iter(numbers)
    async with httpx.AsyncClient(base_url=served.root, timeout=60, trust_env=False) as client:

        async def one_after_another() -> None:
            for number in waiting:
                await ask(client, number)

        await asyncio.gather(*(one_after_another() for _ in range(8)))


async def test_j09_memory_is_the_same_after_many_requests_and_nothing_is_held(
    served: Served,
) -> None:
    pids = [served.process.pid, *served.worker_pids()]
    await ask_many(served, range(600))
    before = [resident_mib(pid) for pid in pids]
    await ask_many(served, range(600, 2400))
    after = [resident_mib(pid) for pid in pids]
    for name, old, new in zip(("front", "worker"), before, after, strict=True):
        assert new - old < PLATEAU_MIB, f"{name} grew from {old:.0f} to {new:.0f} MiB"
    await asyncio.to_thread(served.wait_until, "idle", lambda: served.num_held_blocks == 0, 10)
    assert served.metric("headwater_requests_in_flight") == 0
