"""The front process: joins door, recipe and router, and starts the worker.

    front:  HttpServer <- Gate <- api <- recipe <- router <- ProcessLauncher
    worker: WorkerLoop <- Scheduler <- kv, ModelEngine <- model <- numerics

Knows how parts fit together and decides nothing itself; ``assemble`` does the same
for the worker. What only the door needs is imported once the worker is on its way:
the worker's start is the longer one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from headwater import __version__
from headwater.app.ending import Ending, drain
from headwater.app.joiners import let_join
from headwater.app.processes import ProcessLauncher
from headwater.app.run_folder import RunFolder
from headwater.app.runtime import (
    EXIT_FAILED,
    EXIT_HURRIED,
    EXIT_OK,
    MonotonicClock,
    set_up_logging,
)
from headwater.app.settings import Settings, describe_settings, local_roles
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.ports import Clock
from headwater.core.request import ModelInfo
from headwater.router.elastic_policy import ElasticLimits
from headwater.router.policy import AdmissionLimits
from headwater.router.service import Router, RouterConfig

if TYPE_CHECKING:
    from headwater.api.calls import PromptRecorder
    from headwater.api.config import ApiConfig
    from headwater.api.gate import Gate
    from headwater.app.http_server import HttpServer

log = logging.getLogger("headwater")


def serve(settings: Settings) -> int:
    """Run the front until SIGINT or SIGTERM. Returns the exit code."""
    set_up_logging(settings.server.log_level)
    config = api_config(settings)  # first: a bad key file is known at once
    log.info("headwater %s; settings: value (origin)", __version__)
    for line in describe_settings(settings):
        log.info("  %s", line)
    with (
        open_recorder(settings) as recorder,
        listen(settings.server.host, settings.server.port) as listener,
        asyncio.Runner(loop_factory=_event_loop) as runner,
    ):
        return runner.run(_serve(settings, config, recorder, listener))


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, taken before the model loads: a port in use is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; "
            "choose another with --port, or stop what uses it"
        ) from None
    return listener


def _event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where it is installed (it does not exist for Windows)."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


@contextlib.contextmanager
def open_recorder(settings: Settings) -> Iterator[PromptRecorder | None]:
    """Takes note of prompts, if the operator named a file for that."""
    path = settings.server.record_requests
    if path is None:
        yield None
        return
    from headwater.api.recording import RequestRecorder

    with contextlib.closing(RequestRecorder.open(path)) as recorder:
        yield recorder


async def _serve(
    settings: Settings,
    config: ApiConfig,
    recorder: PromptRecorder | None,
    listener: socket.socket,
) -> int:
    clock, ending = MonotonicClock(), Ending()
    with contextlib.closing(RunFolder()) as folder:
        launcher = ProcessLauncher(settings, folder.path)
        router = Router(launcher, router_config(settings), clock)
        working = asyncio.create_task(router.run())
        # Give the workers' start a turn: they load while the front imports its own parts.
        await asyncio.sleep(0)
        from headwater.api.gate import Gate
        from headwater.app.http_server import HttpServer

        gate = Gate(lambda: router.status().reason)
        server = HttpServer(gate, settings.server)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        opening = asyncio.create_task(
            _open(gate, router, settings, config, recorder, listener, clock)
        )
        joining = asyncio.create_task(let_join(settings, router))
        asked = asyncio.create_task(ending.asked.wait())
        hurrying = asyncio.create_task(_hurry(ending, launcher, server))
        needed = {working, serving, opening, joining, asked}
        try:
            while not (asked.done() or working.done() or serving.done()):
                done, needed = await asyncio.wait(needed, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # raises what ended it
            if asked.done():
                await drain(router, ending, settings.server.drain_s)
            return EXIT_HURRIED if ending.hurried.is_set() else EXIT_OK
        except HeadwaterError as error:
            log.error("%s", error)
            return EXIT_FAILED
        finally:
            server.stop()
            ends = (opening, joining, asked, working)
            for task in ends:
                task.cancel()
            await asyncio.gather(serving, *ends, return_exceptions=True)
            hurrying.cancel()
            await gate.close()


async def _hurry(ending: Ending, launcher: ProcessLauncher, server: HttpServer) -> None:
    """Whatever is being waited for: at the second signal it is over."""
    await ending.hurried.wait()
    log.warning("ending at once")
    launcher.kill()
    server.stop(at_once=True)


async def _open(
    gate: Gate,
    router: Router,
    settings: Settings,
    config: ApiConfig,
    recorder: PromptRecorder | None,
    listener: socket.socket,
    clock: Clock,
) -> None:
    """Wait for the worker, then let requests in."""
    from headwater.api.app import create_app
    from headwater.app.grammar_check import GrammarChecker
    from headwater.recipe.load import load_recipe

    info, tokenizer = await router.wait_ready()
    recipe = await asyncio.to_thread(load_recipe, tokenizer, name=settings.recipe.recipe)
    # What a worker will compile, so that a bad schema is a 400. Starts nothing before the first.
    checker = GrammarChecker(info.vocab_size)
    await gate.open(
        create_app(router, recipe, config, clock, check_constraint=checker.check, recorder=recorder)
    )
    _log_model(info)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)


def _log_model(info: ModelInfo) -> None:
    log.info(
        "serving %s: %s, %s weights of %.0f MB on %s, context %d tokens, KV for %d tokens",
        info.model_id,
        info.family,
        info.weights_format,
        (info.weights_bytes + info.saved_weights_bytes) / 1e6,
        info.device,
        info.context_tokens,
        info.num_blocks * info.block_tokens,
    )
    for job, kernel in info.kernels.items():
        log.info("  %s: %s", job, kernel)


def router_config(settings: Settings) -> RouterConfig:
    router, fleet = settings.router, settings.fleet
    return RouterConfig(
        roles=local_roles(settings),
        elastic=ElasticLimits() if fleet.elastic else None,
        limits=AdmissionLimits(
            max_running_sequences=settings.engine.max_running,
            max_waiting_sequences=router.max_waiting_requests,
            max_waiting_tokens=router.max_waiting_tokens,
            max_queue_s=router.max_queue_s or math.inf,
        ),
        start_limit_s=settings.worker.start_timeout_s,
        stuck_after_s=router.stuck_after_s,
        lost_after_s=max(router.lost_after_s, router.stuck_after_s),
        backoff_first_s=settings.worker.restart_backoff_s,
        backoff_max_s=settings.worker.restart_backoff_max_s,
    )


def api_config(settings: Settings) -> ApiConfig:
    from headwater.api.config import ApiConfig
    from headwater.api.retention import DAY_S, KeepTimes
    from headwater.app.key_file import read_keys

    server, cache = settings.server, settings.cache
    return ApiConfig(
        keys=read_keys(server),
        keep=KeepTimes(
            agent_s=cache.cache_agent_days * DAY_S, chat_s=cache.cache_chat_days * DAY_S
        ),
        bound_host=server.host,
        allowed_hosts=server.allowed_hosts,
        strict=server.strict,
        normalise_agent_noise=settings.recipe.normalise_agent_noise,
        max_body_bytes=server.max_body_bytes,
        keepalive_s=server.keepalive_s,
        access_log=server.access_log,
    )
