"""A worker's real parts with real tiers, in this process: no loop, no channel, no launcher."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headwater.app.assemble import WorkerParts, build_worker
from headwater.app.groups import CacheSettings, EngineSettings, ModelSettings
from headwater.app.settings import Settings
from headwater.core.blocks import PrefixKey
from headwater.core.cache import (
    CacheReport,
    MissReason,
    RecordMeta,
    Retention,
    RetentionClass,
    StoredRecord,
    StoreStats,
)
from headwater.core.ports import BlockMemory, Clock, RecordStore
from headwater.core.request import (
    FinishReason,
    ModelInfo,
    PromptReport,
    Request,
    RequestId,
    SamplingParams,
    StopParams,
)
from headwater.core.step import StepPlan
from headwater.disk.host import HostStore
from headwater.disk.store import DiskConfig, DiskStore
from headwater.disk.tiers import Tiers

LIMIT_S = 60.0
MIB = 2**20
WEEK = Retention(RetentionClass.CHAT, 7 * 86400.0)
BLOCK = 16


class RealClock:
    def now_s(self) -> float:
        return time.monotonic()


class StoreAround:
    """A store that does what ``inner`` does; tests override what shall go wrong."""

    def __init__(self, inner: RecordStore) -> None:
        self.inner = inner

    def find(self, keys: Sequence[PrefixKey]) -> list[StoredRecord | None]:
        return self.inner.find(keys)

    def children(self, parent: PrefixKey, limit: int) -> list[StoredRecord]:
        return self.inner.children(parent, limit)

    def put(self, meta: RecordMeta, data: Sequence[memoryview], retention: Retention) -> bool:
        return self.inner.put(meta, data, retention)

    def read(self, meta: RecordMeta, into: Sequence[memoryview]) -> None:
        self.inner.read(meta, into)

    def touch(self, keys: Sequence[PrefixKey], retention: Retention) -> None:
        self.inner.touch(keys, retention)

    def remove(self, keys: Sequence[PrefixKey]) -> None:
        self.inner.remove(keys)

    def absence(self, key: PrefixKey) -> MissReason:
        return self.inner.absence(key)

    def stats(self) -> StoreStats:
        return self.inner.stats()

    def close(self) -> None:
        self.inner.close()


@dataclass
class Answers:
    """What came for each choice."""

    ids: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    prompts: dict[str, PromptReport] = field(default_factory=dict)

    def cache(self, name: str) -> CacheReport:
        report = self.prompts[name].cache
        assert report is not None
        assert report.num_hit_tokens == self.prompts[name].num_hit_tokens
        return report


def request(name: str, prompt: Sequence[int], num_output: int = 12, *, tenant: str = "") -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_output_tokens=num_output, ignore_end=True),
        tenant=tenant,
        retention=WEEK,
    )


def tokens(seed: int, num_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(num_tokens)]


@contextlib.contextmanager
def worker(
    folder: Path | None,
    *,
    model: str = "toy",
    num_blocks: int = 256,
    host_bytes: int = 0,
    window_kv: str = "checkpoint",
    decoder_replay: bool = True,
    context_tokens: int = 512,
    max_step_tokens: int = 512,
    around: Callable[[RecordStore], RecordStore] = lambda store: store,
    is_orderly: bool = True,
) -> Iterator[WorkerParts]:
    """``folder`` None: no tiers at all. ``around`` wraps the disk store."""

    def open_tiers(
        settings: Settings, info: ModelInfo, memory: BlockMemory, clock: Clock
    ) -> Tiers | None:
        if folder is None:
            return None
        config = DiskConfig(folder=folder, max_bytes=64 * MIB, reserve_bytes=0)
        return Tiers(
            memory,
            block_tokens=info.block_tokens,
            clock=clock,
            host=HostStore(max_bytes=host_bytes, clock=clock) if host_bytes else None,
            disk=around(DiskStore(config, time.time)),
        )

    settings = Settings(
        model=ModelSettings(model=model, numerics="reference", context_tokens=context_tokens),
        engine=EngineSettings(
            threads=1, block_tokens=BLOCK, num_blocks=num_blocks, max_running=32,
            max_step_tokens=max_step_tokens,
            max_mixed_prefill_tokens=min(128, max_step_tokens),
            decoder_replay="on" if decoder_replay else "off",
        ),
        cache=CacheSettings(window_kv="replay" if window_kv == "replay" else "checkpoint"),
    )  # fmt: skip
    parts = build_worker(settings, RealClock(), open_tiers)
    try:
        yield parts
        if is_orderly:
            parts.scheduler.close()
    finally:
        parts.close()


def run(
    parts: WorkerParts,
    requests: Sequence[Request],
    *,
    to_idle: bool = True,
    slowness: float = 10_000.0,
    seen: list[StepPlan] | None = None,
) -> Answers:
    """All at once, to their end; ``to_idle``: and until every copy out of the device is done.
    ``seen`` takes the steps.

    Steps claim to take ``slowness`` times as long as they do: a toy computes so fast that
    loading would never be worth it."""
    scheduler, engine = parts.scheduler, parts.engine
    answers = Answers()
    for asked in requests:
        scheduler.submit(asked)
    deadline_s = time.monotonic() + LIMIT_S
    while scheduler.has_work or scheduler.is_awaiting or (to_idle and scheduler.is_keeping):
        assert time.monotonic() < deadline_s
        outputs = scheduler.take_ready()
        plan = scheduler.plan()
        outputs += scheduler.take_reports()
        if plan is None:
            time.sleep(0.0005)
        else:
            result = engine.run(plan)
            if seen is not None:
                seen.append(plan)
            result = replace(result, forward_s=result.forward_s * slowness)
            outputs += scheduler.apply(plan, result)
        for output in outputs:
            key = (str(output.request_id), output.index)
            answers.ids.setdefault(key, []).extend(token.token_id for token in output.tokens)
            if output.prompt is not None:
                answers.prompts[key[0]] = output.prompt
            assert output.finish in (None, FinishReason.LENGTH)
    scheduler.audit()
    if to_idle:
        assert scheduler.load().num_held_blocks == 0
    return answers
