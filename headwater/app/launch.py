"""The front process: joins door, recipe and router, and starts the worker.

    front:  HttpServer <- Gate <- api <- recipe <- router <- ProcessLauncher
    worker: WorkerLoop <- Scheduler <- kv, ModelEngine <- model <- numerics

Knows how parts fit together and decides nothing itself; ``assemble`` does the same
for the worker. What only the door needs is imported once the worker is on its way:
the worker's start is the longer one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

from headwater import __version__
from headwater.app.processes import ProcessLauncher
from headwater.app.runtime import EXIT_FAILED, EXIT_OK, MonotonicClock, set_up_logging
from headwater.app.settings import (
    Settings,
    api_keys,
    describe_settings,
)
from headwater.core.errors import ConfigError, HeadwaterError
from headwater.core.ports import Clock
from headwater.core.request import ModelInfo
from headwater.router.policy import AdmissionLimits
from headwater.router.service import Router, RouterConfig

if TYPE_CHECKING:
    from headwater.api.config import ApiConfig
    from headwater.api.gate import Gate

log = logging.getLogger("headwater")


def serve(settings: Settings) -> int:
    """Run the front until SIGINT or SIGTERM. Returns the exit code."""
    set_up_logging(settings.server.log_level)
    log.info("headwater %s; settings: value (origin)", __version__)
    for line in describe_settings(settings):
        log.info("  %s", line)
    with (
        listen(settings.server.host, settings.server.port) as listener,
        asyncio.Runner(loop_factory=_event_loop) as runner,
    ):
        return runner.run(_serve(settings, listener))


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


async def _serve(settings: Settings, listener: socket.socket) -> int:
    clock = MonotonicClock()
    router = Router(ProcessLauncher(settings), _router_config(settings), clock)
    working = asyncio.create_task(router.run())
    # Give the worker's start a turn: it loads while the front imports its own parts.
    await asyncio.sleep(0)
    from headwater.api.gate import Gate
    from headwater.app.http_server import HttpServer

    gate = Gate(lambda: router.status().reason)
    server = HttpServer(gate, settings.server)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    opening = asyncio.create_task(_open(gate, router, settings, listener, clock))
    try:
        await asyncio.wait({working, opening, serving}, return_when=asyncio.FIRST_COMPLETED)
        if opening.done():
            opening.result()
            await asyncio.wait({working, serving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()  # raises what ended it
        return EXIT_OK
    except HeadwaterError as error:
        log.error("%s", error)
        return EXIT_FAILED
    finally:
        server.should_exit = True
        opening.cancel()
        await asyncio.gather(serving, opening, return_exceptions=True)
        await gate.close()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _open(
    gate: Gate, router: Router, settings: Settings, listener: socket.socket, clock: Clock
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
        create_app(router, recipe, _api_config(settings), clock, check_constraint=checker.check)
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
        info.weights_bytes / 1e6,
        info.device,
        info.context_tokens,
        info.num_blocks * info.block_tokens,
    )
    for job, kernel in info.kernels.items():
        log.info("  %s: %s", job, kernel)


def _router_config(settings: Settings) -> RouterConfig:
    return RouterConfig(
        limits=AdmissionLimits(
            max_running_sequences=settings.engine.max_running,
            max_waiting_sequences=settings.router.max_waiting_requests,
            max_waiting_tokens=settings.router.max_waiting_tokens,
        ),
        start_limit_s=settings.worker.start_timeout_s,
        stuck_after_s=settings.router.stuck_after_s,
        backoff_first_s=settings.worker.restart_backoff_s,
        backoff_max_s=settings.worker.restart_backoff_max_s,
    )


def _api_config(settings: Settings) -> ApiConfig:
    from headwater.api.config import ApiConfig, ApiKey

    server = settings.server
    return ApiConfig(
        keys=tuple(ApiKey.unnamed(key) for key in api_keys(server)),
        bound_host=server.host,
        allowed_hosts=server.allowed_hosts,
        strict=server.strict,
        normalise_agent_noise=settings.recipe.normalise_agent_noise,
        max_body_bytes=server.max_body_bytes,
        keepalive_s=server.keepalive_s,
        access_log=server.access_log,
    )
