"""``headwater pools``: how busy a running fleet is, and which one its traffic asks for.

Looks twice at the front's ``/pools`` and shows what lies between, or, with no time between,
all since the front's start.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit, urlunsplit

import httpx
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwater.api.pools import PATH, PoolsBody
from headwater.app.target import Target
from headwater.core.errors import ConfigError
from headwater.core.fleet import Holding, Role
from headwater.core.ports import BucketStatus, WorkerStatus
from headwater.router.pools_policy import PoolBalance, pool_balance

EXIT_OK = 0
EXIT_NOT_READY = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The fleet now, and what it did meanwhile."""

    now: PoolsBody
    over_s: float  # 0: since the front's start
    balance: PoolBalance


def run(target: Target, *, over_s: float, as_json: bool) -> int:
    """Print what two looks ``over_s`` apart show; exit code 1 while the fleet is not ready."""
    found = look(target, over_s)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        show(found, Console())
    return EXIT_OK if found.now.ready else EXIT_NOT_READY


def look(target: Target, over_s: float) -> Look:
    """Raises ConfigError when no front of ours answers there."""
    before: tuple[WorkerStatus, ...] = ()
    with httpx.Client(timeout=min(target.timeout_s, 30.0), headers=target.headers) as client:
        if over_s > 0:
            before = _fetch(client, target).workers
            time.sleep(over_s)
        now = _fetch(client, target)
    return Look(now=now, over_s=over_s, balance=pool_balance(before, now.workers, now.buckets))


def _fetch(client: httpx.Client, target: Target) -> PoolsBody:
    parts = urlsplit(target.base_url)
    url = urlunsplit((parts.scheme, parts.netloc, PATH, "", ""))
    try:
        answer = client.get(url)
    except httpx.HTTPError as error:
        raise ConfigError(f"no server answers at {url}: {error}") from None
    if answer.status_code != 200:
        raise ConfigError(
            f"{url} answered {answer.status_code}; is it a Headwater that is up, and --api-key "
            "one of its keys?"
        )
    try:
        return msgspec.json.decode(answer.content, type=PoolsBody)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{url} is of another version than this command: {error}") from None


def show(found: Look, console: Console) -> None:
    """Tables of workers, pools and buckets, and a last line with the ratio."""
    now, balance = found.now, found.balance
    console.print(_workers(now.workers))
    when = f"over {found.over_s:g} s" if found.over_s else "since the start"
    table = _table(f"pools, {when}", "pool", "workers", "busy", "prefill s", "decode s", "queue s")
    for use in balance.pools:
        table.add_row(
            use.role.value, str(use.num_workers), f"{use.utilisation:.0%}",
            f"{use.prefill_s:.2f}", f"{use.decode_s:.2f}", f"{use.queue_s:.2f}",
        )  # fmt: skip
    console.print(table)
    console.print(_buckets(now.buckets))
    totals = now.handoffs
    console.print(
        f"{now.num_in_flight} requests in flight, {now.num_resumed} went on elsewhere; "
        f"{totals.num_done} handoffs done, {totals.num_failed} failed, {totals.num_tokens} tokens"
    )
    console.print(_advice(balance))
    for worker in now.workers:
        if worker.reason:
            console.print(Text(f"{worker.worker_id} is {worker.state}: {worker.reason}"))
    if not now.ready:
        console.print(Text(f"not ready: {now.reason}", style="bold red"))


def _advice(balance: PoolBalance) -> str:
    asked = f"the traffic asks {balance.prefill_share:.0%} of the time for prompts"
    if not balance.num_prefill:
        return f"{asked}; one worker does it all"
    return f"{asked}: prefill : decode = {balance.num_prefill} : {balance.num_decode}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=0)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _workers(workers: tuple[WorkerStatus, ...]) -> Table:
    table = _table(
        "workers", "worker", "role", "state", "weights", "requests", "waiting", "running", "KV",
        "queue s", "restarts",
    )  # fmt: skip
    for worker in workers:
        role = worker.role.value
        if worker.role is Role.BOTH and worker.acting is not Role.BOTH:
            role += f" as {worker.acting.value}"
        waiting = running = held = "-"
        if (load := worker.load) is not None:
            waiting = str(load.num_waiting + load.num_loading)
            running = str(load.num_prefilling + load.num_decoding)
            num_blocks = load.num_free_blocks + load.num_cached_blocks + load.num_held_blocks
            held = f"{load.num_held_blocks / num_blocks:.0%}" if num_blocks else "-"
        table.add_row(
            worker.worker_id, role, worker.state.value, _weights(worker), str(worker.num_in_flight),
            waiting, running, held, f"{worker.queue_s:.2f}", str(worker.num_restarts),
        )  # fmt: skip
    return table


def _weights(worker: WorkerStatus) -> str:
    """MiB that it holds, of those of its model where that is more."""
    if not worker.weights_bytes:
        return "-"
    held = f"{worker.weights_bytes / 2**20:.0f}"
    if worker.holds is Holding.ALL:
        return held
    whole_bytes = worker.weights_bytes + worker.saved_weights_bytes
    return f"{held}/{whole_bytes / 2**20:.0f}"


def _buckets(buckets: tuple[BucketStatus, ...]) -> Table:
    table = _table("queue in the front", "miss tokens", "waiting", "queue s", "oldest s")
    for bucket in buckets:
        bound = "the rest" if bucket.max_miss_tokens is None else f"< {bucket.max_miss_tokens}"
        table.add_row(
            bound, str(bucket.num_waiting), f"{bucket.queue_s:.2f}", f"{bucket.oldest_s:.2f}"
        )
    return table
