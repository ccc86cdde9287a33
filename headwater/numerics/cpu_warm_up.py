"""Calls every kernel that a model needs once, so that no request waits for a compiler.

Compiling all kernels takes 20 s of one core, those that one model needs 10 to 14 s; after
that they are loaded from the disk in a fraction of a second. What no model named is compiled
when it is first called. Knows which op needs which shape to reach all of its kernels.
Used by ``cpu.py`` only.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from headwater.numerics.ops import KVFormat, Need, Ops, RaggedBatch, WeightFormat

# More rows than any hand-written kernel takes, rows for tiles, and a decode step's.
_MANY, _SOME = 288, 64
_NUM_TOKENS = (_MANY, _SOME, 1)
_DIM, _BLOCK_TOKENS = 64, 16
# Tiles take the first where there are any, and never the second.
_HEAD_DIMS = (64, 48)


def warm_up(ops: Ops, needs: Collection[Need]) -> None:
    """Every kernel behind the ops that all models call, and behind those of ``needs``."""
    _linear_and_norm(ops)
    for need in needs:
        match need:
            case Need.PAGED_KV:
                for head_dim in _HEAD_DIMS:
                    _paged_kv(ops, head_dim)
            case Need.ROWS:
                _rows(ops)
            case Need.PAIRED_ROWS:
                _paired_rows(ops)
            case Need.EXPERTS:
                _experts(ops)
            case Need.SILU:
                ops.silu_mul(_zeros(_MANY, _DIM))
            case Need.GELU:
                ops.gelu_mul(_zeros(_MANY, _DIM))
            case Need.POST_NORMS:
                x, weight = _zeros(_MANY, _DIM), torch.ones(_DIM)
                ops.scale(x, 1.0)
                ops.norm_add_norm(x, weight, x.clone(), weight, 1e-5)


def _zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _linear_and_norm(ops: Ops) -> None:
    x, weight = _zeros(_MANY, _DIM), torch.ones(_DIM)
    for weight_format in (WeightFormat.BF16, WeightFormat.INT8):
        packed = ops.pack_linear(torch.zeros(_DIM, _DIM), None, weight_format)
        for num_tokens in _NUM_TOKENS:
            ops.linear(x[:num_tokens], packed)
    ops.rms_norm(x, weight, 1e-5)
    ops.add_rms_norm(x, x.clone(), weight, 1e-5)


def _batch(num_tokens: int) -> RaggedBatch:
    """One row, whose last ``num_tokens`` tokens are new."""
    positions = torch.arange(_MANY - num_tokens, _MANY)
    return RaggedBatch(
        row_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([_MANY], dtype=torch.int32),
        block_tables=torch.arange(_MANY // _BLOCK_TOKENS, dtype=torch.int32)[None],
        positions=positions.int(),
        slots=positions,
        max_row_tokens=num_tokens,
        max_context=_MANY,
    )


def _paged_kv(ops: Ops, head_dim: int) -> None:
    kv = ops.allocate_kv(_MANY // _BLOCK_TOKENS, _BLOCK_TOKENS, 1, head_dim, KVFormat.BF16)
    angles = torch.zeros(_MANY, head_dim // 2)
    for num_tokens in (_MANY, 1):
        q, batch = _zeros(num_tokens, 1, head_dim), _batch(num_tokens)
        ops.rotate(q, q.clone(), angles, angles, batch.positions)
        ops.store_kv(q, q, kv, batch.slots)
        ops.attend(q, kv, batch, 1.0)


def _rows(ops: Ops) -> None:
    window = ops.allocate_rows(_MANY // _BLOCK_TOKENS, _BLOCK_TOKENS, _DIM, KVFormat.BF16)
    angles, sinks = torch.zeros(_MANY, _DIM // 2), torch.zeros(1)
    for num_tokens in (_MANY, 1):
        q, batch = _zeros(num_tokens, 1, _DIM), _batch(num_tokens)
        ops.rotate_pairs(q, angles, angles, batch.positions)
        ops.store_rows(q[:, 0], window, batch.slots)
        ops.attend_rows(q, window, window, sinks, batch, 1.0, _MANY // 2)


def _paired_rows(ops: Ops) -> None:
    kv = ops.allocate_rows(_MANY // _BLOCK_TOKENS, _BLOCK_TOKENS, _DIM, KVFormat.BF16, ratio=2)
    x, angles = _zeros(_MANY, _DIM), torch.zeros(_MANY, _DIM // 2)
    ops.compress(x, x, torch.ones(_DIM), angles, angles, kv, _batch(_MANY), 1e-5)


def _experts(ops: Ops) -> None:
    weight, gate = torch.zeros(2, _DIM, _DIM), torch.zeros(2, _DIM)
    experts = ops.pack_experts(weight.repeat(1, 2, 1), weight, WeightFormat.BF16)
    groups = ops.pack_groups(weight[:1], WeightFormat.BF16)
    for num_tokens in (_MANY, 1):
        x = _zeros(num_tokens, _DIM)
        ids, weights = ops.route(x, gate, torch.zeros(2), 2, 1.0)
        ops.experts(x, experts, ids, weights, 1.0)
        ops.linear_groups(x, groups)
        ops.silu_mul_clamped(x, 1.0)
