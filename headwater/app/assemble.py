"""Builds a worker's parts from settings: numerics, model, KV, engine, scheduler, loop.

The one place where the rooms of a worker meet. The process (``worker_process``)
and the tests' thread call it; it opens no socket. Threads compile output constraints,
from the first one on, and work for the KV tiers, where there are any.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headwater.app.fleet_plan import plan_holding
from headwater.app.groups import GIB
from headwater.app.handovers import open_handovers
from headwater.app.settings import Settings, cache_folder, is_default_cache, worker_threads
from headwater.core.blocks import CacheIdentity
from headwater.core.cache import KVPart, WindowKV
from headwater.core.errors import ConfigError, StoreError
from headwater.core.fleet import Holding, Role
from headwater.core.ports import BlockMemory, Clock, WorkerPort
from headwater.core.request import ModelInfo
from headwater.core.tokenizer_source import TokenizerSource
from headwater.disk.capacity_plan import DAY_S, format_bytes
from headwater.disk.host import HostStore
from headwater.disk.store import DiskConfig, DiskStore
from headwater.disk.tiers import Tiers
from headwater.engine.block_memory import block_memory
from headwater.engine.build import build_engine
from headwater.engine.kv_plan import KVLimits
from headwater.engine.runner import ModelEngine
from headwater.kv.manager import KVGroup, KVManager
from headwater.model.catalogue import resolve
from headwater.model.family import ModelPart
from headwater.model.load import load_model
from headwater.numerics.ops import KVFormat, WeightFormat
from headwater.numerics.select import select_ops
from headwater.recipe.constraints import GrammarCompiler
from headwater.worker.compiling import CompileQueue
from headwater.worker.cost_book import CostBook
from headwater.worker.cost_profile import profile
from headwater.worker.handover import HandoverParts
from headwater.worker.limits import SchedulerConfig
from headwater.worker.loop import WorkerLoop
from headwater.worker.scheduler import Scheduler
from headwater.worker.tiering import TierParts

log = logging.getLogger("headwater.worker")

# One more than needed: a slow grammar does not hold up the next request's.
NUM_COMPILE_THREADS = 2
# Of one machine, for KV that nobody gave a size.
DEFAULT_KV_SHARE = 0.25
DEFAULT_KV_BYTES = 4 * GIB
DEFAULT_HOST_CACHE_BYTES = 4 * GIB
# With what the loop stores last, less than a worker has to end (``worker_process``).
CLOSE_TIERS_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """A worker that is ready to run, less its channel."""

    engine: ModelEngine
    scheduler: Scheduler
    tokenizer: TokenizerSource
    tiers: Tiers | None
    cost_book: CostBook
    role: Role
    holds: Holding
    handovers: HandoverParts | None

    def close(self) -> None:
        """Let go of the tiers and the doors to other workers. The loop has done it already
        where it ended in order."""
        if self.handovers is not None:
            self.handovers.close()
        if self.tiers is not None:
            self.tiers.close()

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
            cost_book=self.cost_book,
            role=self.role,
            handoff_address=self.handoff_address,
            holds=self.holds,
        )

    @property
    def handoff_address(self) -> str:
        """Where it takes KV; empty: nowhere."""
        receiver = self.handovers.receiver if self.handovers is not None else None
        return receiver.address if receiver is not None else ""


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
    """Sizes that nobody chose are divided between the workers of the machine."""
    num_workers = settings.worker.machine_workers
    return KVLimits(
        block_tokens=settings.engine.block_tokens,
        kv_bytes=settings.engine.kv_bytes,
        num_blocks=settings.engine.num_blocks,
        context_tokens=settings.model.context_tokens,
        max_running=settings.engine.max_running,
        memory_share=DEFAULT_KV_SHARE / num_workers,
        default_cap_bytes=DEFAULT_KV_BYTES // num_workers,
    )


OpenTiers = Callable[[Settings, ModelInfo, BlockMemory, Clock], Tiers | None]


def build_worker(
    settings: Settings,
    clock: Clock,
    open_tiers: OpenTiers | None = None,
    role: Role = Role.BOTH,
) -> WorkerParts:
    """Load the model and build everything around it. Raises ModelError or ConfigError.

    ``open_tiers`` stands in for what this file's would open."""
    weights = weight_format(settings)
    ops = select_ops(
        settings.model.device,
        settings.model.numerics,
        weights,
        worker_threads(settings),
    )
    start_s = clock.now_s()
    loaded = load_model(
        resolve(settings.model.model),
        ops,
        weights,
        context_tokens=settings.model.context_tokens,
        part=model_part(settings, role),
    )
    loaded_s = clock.now_s()
    holds = Holding.EARLY if loaded.part is ModelPart.EARLY else Holding.ALL
    engine = build_engine(
        loaded,
        ops=ops,
        weight_format=weights,
        kv_format=kv_format(settings),
        limits=kv_limits(settings),
        clock=clock,
        served_name=settings.model.served_name,
        decoder_replay=settings.engine.decoder_replay == "on",
    )
    ops.warm_up(loaded.model.needs)
    log.info(
        "loaded %s in %.1f s, kernels ready %.1f s later",
        loaded.model_id,
        loaded_s - start_s,
        clock.now_s() - loaded_s,
    )
    log.info(
        "a %s worker: it holds %.1f MB of the model's %.1f MB of weights, %.1f MB are saved",
        role,
        loaded.weights_bytes / 1e6,
        loaded.full_weights_bytes / 1e6,
        (loaded.full_weights_bytes - loaded.weights_bytes) / 1e6,
    )
    info = engine.info
    compiler = GrammarCompiler.from_source(loaded.tokenizer_source)
    compile_threads = ThreadPoolExecutor(NUM_COMPILE_THREADS, thread_name_prefix="constraints")
    memory = block_memory(ops, engine.kv, engine.kv.groups)
    cost_book = _profiled(settings, engine, clock, holds)
    tiers = (open_tiers or _open_tiers)(settings, info, memory, clock)
    layout = info.layout
    if info.window_tokens is not None:
        # Both keep the same global KV, but a hit means something else.
        layout += f"/{settings.cache.window_kv}"
    handovers = open_handovers(settings, role, info, layout, memory, clock, holds)
    scheduler = Scheduler(
        KVManager(
            KVGroup(
                num_blocks=info.num_blocks,
                block_tokens=info.block_tokens,
                alignment=info.alignment,
            ),
            window_tokens=info.window_tokens,
        ),
        SchedulerConfig(
            context_tokens=info.context_tokens,
            max_step_tokens=settings.engine.max_step_tokens,
            max_mixed_prefill_tokens=settings.engine.max_mixed_prefill_tokens,
            max_running_sequences=settings.engine.max_running,
            decoder_replay_tokens=info.decoder_replay_tokens,
        ),
        lambda tenant: CacheIdentity(loaded.fingerprint, layout, tenant),
        CompileQueue(compiler, compile_threads),
        TierParts(
            memory=memory,
            clock=clock,
            tiers=tiers,
            window_kv=WindowKV(settings.cache.window_kv),
        ),
        cost_book,
        handovers,
    )
    return WorkerParts(
        engine=engine,
        scheduler=scheduler,
        tokenizer=loaded.tokenizer_source,
        tiers=tiers,
        cost_book=cost_book,
        role=role,
        holds=holds,
        handovers=handovers,
    )


def model_part(settings: Settings, role: Role) -> ModelPart:
    """What to load where the model has late layers; of others it is all."""
    holding = plan_holding(
        role,
        settings.worker.prefill_weights,
        decoder_replay=settings.engine.decoder_replay == "on",
    )
    return ModelPart.EARLY if holding is Holding.EARLY else ModelPart.ALL


def _profiled(settings: Settings, engine: ModelEngine, clock: Clock, holds: Holding) -> CostBook:
    budget_ms = settings.engine.step_budget_ms
    book = CostBook(
        window_tokens=engine.info.window_tokens,
        counts_late=engine.info.decoder_replay_tokens is not None,
        budget_s=None if budget_ms is None else budget_ms / 1000,
    )
    start_s = clock.now_s()
    book.learn(profile(engine, clock, holds=holds))
    if book.cost is not None:
        log.info(
            "a step takes about %.1f ms + %.3f ms a token, says a profile of %.1f s",
            1000 * book.cost.base_s,
            1000 * book.cost.token_s,
            clock.now_s() - start_s,
        )
    return book


def _open_tiers(
    settings: Settings, info: ModelInfo, memory: BlockMemory, clock: Clock
) -> Tiers | None:
    """The host and disk tiers that the settings ask for; None: neither.

    Raises ConfigError where a disk tier that somebody chose cannot be opened.
    """
    disk = _open_disk(settings, info, memory)
    host_bytes = settings.cache.host_cache_bytes
    if host_bytes is None:
        default_bytes = DEFAULT_HOST_CACHE_BYTES // settings.worker.machine_workers
        host_bytes = 0 if info.device == "cpu" else default_bytes
    host = HostStore(max_bytes=host_bytes, clock=clock) if host_bytes else None
    if host is not None:
        log.info(
            "host kv: %s, room for %s tokens",
            format_bytes(host_bytes),
            f"{host_bytes // info.kv_bytes_per_token:,}",
        )
    if host is None and disk is None:
        return None
    return Tiers(
        memory,
        block_tokens=info.block_tokens,
        clock=clock,
        host=host,
        disk=disk,
        close_s=CLOSE_TIERS_S,
    )


def _open_disk(settings: Settings, info: ModelInfo, memory: BlockMemory) -> DiskStore | None:
    cache, folder = settings.cache, cache_folder(settings)
    if folder is None:
        log.info("disk kv: off, because cache.cache_dir is none")
        return None
    config = DiskConfig(
        folder=folder, max_bytes=cache.cache_max_bytes, reserve_bytes=cache.cache_reserve_bytes
    )
    try:
        store = DiskStore(config, time.time)
    except StoreError as error:
        if not is_default_cache(settings):
            raise ConfigError(f"{error} (or --cache-dir none keeps nothing on disk)") from error
        log.warning("disk kv: off, because the default folder cannot be used: %s", error)
        return None
    plan = store.describe(
        bytes_per_token=memory.part_bytes(KVPart.GLOBAL) // info.block_tokens,
        record_tokens=info.block_tokens,
        keep_s=cache.cache_chat_days * DAY_S,
    )
    log.info("disk kv: %s: %s", folder, plan)
    if not store.is_writable:
        log.warning("disk kv: %s can only be read: nothing new will be kept there", folder)
    return store
