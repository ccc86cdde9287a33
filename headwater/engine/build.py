"""A loaded model and some memory become an engine.

Asks how much memory is free, plans and allocates KV, and writes down what is
served. Called by ``app`` once per worker process, after ``model.load``.
"""

from __future__ import annotations

import logging

from headwater.core.errors import ConfigError
from headwater.core.ports import Clock
from headwater.core.request import ModelInfo, replay_tokens
from headwater.engine.kv_cache import (
    alignment,
    allocate_kv,
    kept_groups,
    kv_bytes_per_token,
    served_groups,
    window_tokens,
)
from headwater.engine.kv_plan import KVLimits, plan_kv
from headwater.engine.memory import available_bytes
from headwater.engine.page_ahead import PagesAhead
from headwater.engine.runner import ModelEngine
from headwater.model.family import CacheGroup, ModelPart
from headwater.model.load import LoadedModel
from headwater.numerics.ops import KVFormat, Ops, WeightFormat

log = logging.getLogger("headwater.engine")

# Memory for so many more tokens is asked for ahead of use: a long prompt's.
AHEAD_TOKENS = 4096


def build_engine(
    loaded: LoadedModel,
    *,
    ops: Ops,
    weight_format: WeightFormat,
    kv_format: KVFormat,
    limits: KVLimits,
    clock: Clock,
    served_name: str | None = None,
    free_bytes: int | None = None,
    decoder_replay: bool = True,
) -> ModelEngine:
    """``ops`` and ``weight_format`` are those that ``loaded`` was loaded with.

    ``served_name`` is what callers call the model, its own name if None.
    ``free_bytes`` stands in for the device's free memory. ``decoder_replay``: of a prompt the
    late layers, where the model has any, compute the last tokens only. Raises ConfigError
    when the KV that ``limits`` ask for does not fit.
    """
    groups = served_groups(loaded.model.cache_plan, decoder_replay=decoder_replay)
    late_tokens = _decoder_replay_tokens(loaded, groups) if decoder_replay else None
    if loaded.part is ModelPart.EARLY and late_tokens is None:
        raise ConfigError(
            "a worker with only the early layers' weights needs decoder replay; "
            "turn it on, or load all weights"
        )
    plan = plan_kv(
        limits,
        bytes_per_token=kv_bytes_per_token(ops, groups, kv_format),
        model_context_tokens=loaded.config.context_tokens,
        available_bytes=available_bytes(ops.device) if free_bytes is None else free_bytes,
    )
    log.info("kv: %s", plan.reason)
    try:
        kv = allocate_kv(ops, plan, groups, kv_format)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"cannot allocate {plan.kv_bytes} bytes of KV ({plan.reason}); lower engine.kv_bytes"
        ) from error
    info = ModelInfo(
        model_id=served_name or loaded.model_id,
        family=loaded.config.family,
        fingerprint=loaded.fingerprint,
        vocab_size=loaded.config.vocab_size,
        context_tokens=plan.context_tokens,
        block_tokens=plan.block_tokens,
        num_blocks=plan.num_blocks,
        kv_bytes_per_token=kv_bytes_per_token(ops, kept_groups(groups), kv_format),
        weights_format=weight_format.value,
        weights_bytes=loaded.weights_bytes,
        numerics=ops.name,
        device=str(ops.device),
        kernels=ops.kernels(),
        window_tokens=window_tokens(groups),
        layout=kv.layout,
        alignment=alignment(groups),
        decoder_replay_tokens=late_tokens,
        saved_weights_bytes=loaded.full_weights_bytes - loaded.weights_bytes,
    )
    pages = PagesAhead(ops, kv, AHEAD_TOKENS // plan.block_tokens)
    pages.reach(-1)  # beside what a start has still to do
    return ModelEngine(
        model=loaded.model, kv=kv, info=info, device=ops.device, clock=clock, pages=pages
    )


def _decoder_replay_tokens(loaded: LoadedModel, groups: tuple[CacheGroup, ...]) -> int | None:
    has_late = loaded.part is ModelPart.EARLY or any(group.is_late for group in groups)
    window = window_tokens(groups)
    return replay_tokens(window) if has_late and window is not None else None
