"""Builds a worker's parts from settings: numerics, model, KV, engine, scheduler, loop.

The one place where the rooms of a worker meet. The process (``worker_process``)
and the tests' thread call it; it opens no socket, and the only threads are those
that compile output constraints, from the first one on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headwater.app.settings import Settings, usable_cores
from headwater.core.blocks import CacheIdentity
from headwater.core.ports import Clock, WorkerPort
from headwater.core.tokenizer_source import TokenizerSource
from headwater.engine.build import build_engine
from headwater.engine.kv_plan import KVLimits
from headwater.engine.runner import ModelEngine
from headwater.kv.manager import KVGroup, KVManager
from headwater.model.catalogue import resolve
from headwater.model.load import load_model
from headwater.numerics.ops import KVFormat, WeightFormat
from headwater.numerics.select import select_ops
from headwater.recipe.constraints import GrammarCompiler
from headwater.worker.compiling import CompileQueue
from headwater.worker.limits import SchedulerConfig
from headwater.worker.loop import WorkerLoop
from headwater.worker.scheduler import Scheduler

log = logging.getLogger("headwater.worker")

# One more than needed: a slow grammar does not hold up the next request's.
NUM_COMPILE_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """A worker that is ready to run, less its channel."""

    engine: ModelEngine
    scheduler: Scheduler
    tokenizer: TokenizerSource

    def loop(
        self, worker_id: str, port: WorkerPort, clock: Clock, stopping: Callable[[], bool]
    ) -> WorkerLoop:
        return WorkerLoop(
            worker_id=worker_id,
            pid=os.getpid(),
            engine=self.engine,
            scheduler=self.scheduler,
            tokenizer=self.tokenizer,
            port=port,
            clock=clock,
            stopping=stopping,
        )


def weight_format(settings: Settings) -> WeightFormat:
    """``auto`` is what the numerics mode is made for."""
    if settings.model.weights != "auto":
        return WeightFormat(settings.model.weights)
    return WeightFormat.FP32 if settings.model.numerics == "reference" else WeightFormat.BF16


def kv_format(settings: Settings) -> KVFormat:
    if settings.model.kv != "auto":
        return KVFormat(settings.model.kv)
    return KVFormat.FP32 if settings.model.numerics == "reference" else KVFormat.BF16


def kv_limits(settings: Settings) -> KVLimits:
    return KVLimits(
        block_tokens=settings.engine.block_tokens,
        kv_bytes=settings.engine.kv_bytes,
        num_blocks=settings.engine.num_blocks,
        context_tokens=settings.model.context_tokens,
        max_running=settings.engine.max_running,
    )


def build_worker(settings: Settings, clock: Clock) -> WorkerParts:
    """Load the model and build everything around it. Raises ModelError or ConfigError."""
    weights = weight_format(settings)
    ops = select_ops(
        settings.model.device,
        settings.model.numerics,
        weights,
        settings.engine.threads or usable_cores(),
    )
    start_s = clock.now_s()
    loaded = load_model(
        resolve(settings.model.model), ops, weights, context_tokens=settings.model.context_tokens
    )
    loaded_s = clock.now_s()
    engine = build_engine(
        loaded,
        ops=ops,
        weight_format=weights,
        kv_format=kv_format(settings),
        limits=kv_limits(settings),
        clock=clock,
        served_name=settings.model.served_name,
    )
    ops.warm_up()
    log.info(
        "loaded %s in %.1f s, kernels ready %.1f s later",
        loaded.model_id,
        loaded_s - start_s,
        clock.now_s() - loaded_s,
    )
    info = engine.info
    compiler = GrammarCompiler.from_source(loaded.tokenizer_source)
    compile_threads = ThreadPoolExecutor(NUM_COMPILE_THREADS, thread_name_prefix="constraints")
    scheduler = Scheduler(
        KVManager(KVGroup(num_blocks=info.num_blocks, block_tokens=info.block_tokens)),
        SchedulerConfig(
            context_tokens=info.context_tokens,
            max_step_tokens=settings.engine.max_step_tokens,
            max_mixed_prefill_tokens=settings.engine.max_mixed_prefill_tokens,
            max_running_sequences=settings.engine.max_running,
        ),
        lambda tenant: CacheIdentity(loaded.fingerprint, engine.layout, tenant),
        CompileQueue(compiler, compile_threads),
    )
    return WorkerParts(engine=engine, scheduler=scheduler, tokenizer=loaded.tokenizer_source)
