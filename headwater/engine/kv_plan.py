"""How many KV blocks an engine allocates, and which context that can hold.

Pure: integers in, a frozen plan out. Called when an engine is built; the
simulator and the doctor command may ask the same question.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.blocks import blocks_for
from headwater.core.errors import ConfigError

GIB = 2**30

# A step's block tables need a block to be in; two leave room for a prompt and an answer.
_MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLimits:
    """What the settings say. At most one of ``kv_bytes`` and ``num_blocks`` is set;
    with neither, the size is the least of ``memory_share`` of the free memory,
    ``default_cap_bytes`` and what ``max_running`` full contexts need."""

    block_tokens: int = 32
    kv_bytes: int | None = None
    num_blocks: int | None = None
    context_tokens: int | None = None  # None: the model's own, or less if KV is short
    max_running: int = 64
    memory_share: float = 0.25
    default_cap_bytes: int | None = 4 * GIB  # None: no cap

    def __post_init__(self) -> None:
        for name in ("block_tokens", "kv_bytes", "num_blocks", "context_tokens", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine.{name} must be >= 1, got {value}")
        if self.kv_bytes is not None and self.num_blocks is not None:
            raise ConfigError("engine.kv_bytes and engine.num_blocks are both set; set one of them")
        if not 0.0 < self.memory_share <= 1.0:
            raise ConfigError(f"engine.memory_share must be in (0, 1], got {self.memory_share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """``context_tokens`` always fits in ``num_blocks``: one sequence can run to its end
    whatever else waits, so preemption always makes progress."""

    num_blocks: int
    block_tokens: int
    context_tokens: int
    kv_bytes: int
    reason: str  # for the start-up log: where the numbers come from

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_tokens


def plan_kv(
    limits: KVLimits,
    *,
    bytes_per_token: int,
    model_context_tokens: int,
    available_bytes: int,
) -> KVPlan:
    """Raises ConfigError when what was asked for cannot hold one sequence of the
    context asked for, or does not fit in memory. A context that nobody asked for
    is lowered instead, and ``reason`` says so.

    ``bytes_per_token`` is over all layers.

    >>> plan = plan_kv(
    ...     KVLimits(kv_bytes=2**20), bytes_per_token=1024, model_context_tokens=512,
    ...     available_bytes=2**30,
    ... )
    >>> plan.num_blocks, plan.context_tokens
    (32, 512)
    """
    block_bytes = bytes_per_token * limits.block_tokens
    wanted_tokens = limits.context_tokens or model_context_tokens
    if wanted_tokens > model_context_tokens:
        raise ConfigError(
            f"model.context_tokens is {wanted_tokens}, but the model's own context is "
            f"{model_context_tokens}; lower it"
        )
    num_blocks, origin = _num_blocks(limits, block_bytes, wanted_tokens, available_bytes)
    if num_blocks < _MIN_BLOCKS:
        raise ConfigError(
            f"KV of {num_blocks} blocks ({origin}) is too small: a block of "
            f"{limits.block_tokens} tokens takes {block_bytes} bytes and at least {_MIN_BLOCKS} "
            "are needed; raise engine.kv_bytes or free memory"
        )
    kv_bytes = num_blocks * block_bytes
    if kv_bytes > available_bytes:
        raise ConfigError(
            f"KV of {num_blocks} blocks ({origin}) takes {kv_bytes} bytes, but only "
            f"{available_bytes} are free; lower engine.kv_bytes or engine.num_blocks"
        )
    num_tokens = num_blocks * limits.block_tokens
    reason = (
        f"{num_blocks} blocks of {limits.block_tokens} tokens, {kv_bytes / GIB:.2f} GiB: {origin}"
    )
    if num_tokens < wanted_tokens:
        if limits.context_tokens is not None:
            needed_bytes = blocks_for(wanted_tokens, limits.block_tokens) * block_bytes
            raise ConfigError(
                f"KV of {num_blocks} blocks ({origin}) holds {num_tokens} tokens, less than one "
                f"context of {wanted_tokens} (model.context_tokens); lower that, or give "
                f"engine.kv_bytes at least {needed_bytes}"
            )
        reason += (
            f"; context lowered from {wanted_tokens} to {num_tokens} tokens, "
            "which is what this KV can hold"
        )
    return KVPlan(
        num_blocks=num_blocks,
        block_tokens=limits.block_tokens,
        context_tokens=min(wanted_tokens, num_tokens),
        kv_bytes=kv_bytes,
        reason=reason,
    )


def _num_blocks(
    limits: KVLimits, block_bytes: int, context_tokens: int, available_bytes: int
) -> tuple[int, str]:
    """How many blocks, and whose wish that is."""
    if limits.num_blocks is not None:
        return limits.num_blocks, f"engine.num_blocks = {limits.num_blocks}"
    if limits.kv_bytes is not None:
        return limits.kv_bytes // block_bytes, f"engine.kv_bytes = {limits.kv_bytes}"
    most = limits.max_running * blocks_for(context_tokens, limits.block_tokens)
    choices = [
        (
            int(available_bytes * limits.memory_share) // block_bytes,
            f"{limits.memory_share:.0%} of {available_bytes / GIB:.1f} GiB free",
        ),
        (most, f"{limits.max_running} full contexts"),
    ]
    if limits.default_cap_bytes is not None:
        choices.append((limits.default_cap_bytes // block_bytes, "default limit"))
    return min(choices)
