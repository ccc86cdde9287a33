"""KV of every kind of layer: what is allocated, how it is counted, and what it is called."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.core.errors import ConfigError
from headwater.core.ports import Clock
from headwater.engine.build import build_engine
from headwater.engine.kv_cache import (
    alignment,
    allocate_kv,
    kept_groups,
    kv_bytes_per_token,
    kv_layout,
    served_groups,
)
from headwater.engine.kv_plan import KVLimits, KVPlan
from headwater.engine.runner import ModelEngine
from headwater.model.catalogue import resolve
from headwater.model.family import CacheGroup, CacheKind, ModelPart
from headwater.model.load import load_model
from headwater.numerics.ops import KVFormat, WeightFormat
from headwater.numerics.reference import ReferenceOps
from headwater.numerics.reference_rows import PlainRows

DIM = 16
WINDOW = CacheGroup(
    kind=CacheKind.WINDOW,
    layers=(0, 1, 2),
    num_kv_heads=1,
    head_dim=DIM,
    window_tokens=6,
    is_rows=True,
)
LATE = replace(WINDOW, layers=(3, 4), is_late=True)
WHOLE = CacheGroup(kind=CacheKind.GLOBAL, layers=(6,), num_kv_heads=1, head_dim=DIM, is_rows=True)
POOLED = replace(WHOLE, layers=(5,), ratio=2)
GROUPS = (WINDOW, LATE, WHOLE, POOLED)
KEYS_AND_VALUES = CacheGroup(kind=CacheKind.GLOBAL, layers=(0,), num_kv_heads=2, head_dim=DIM)
TOY = "toy:family=ced,layers=5,encoder_layers=3,window=6"


class NoClock:
    def now_s(self) -> float:
        return 0.0


def plan_of(block_tokens: int) -> KVPlan:
    return KVPlan(
        num_blocks=4, block_tokens=block_tokens, context_tokens=8, kv_bytes=0, reason="test"
    )


def test_layers_come_in_the_order_of_their_numbers_with_the_rows_of_their_group() -> None:
    kv = allocate_kv(ReferenceOps(), plan_of(8), GROUPS, KVFormat.FP32)
    assert len(kv.layers) == 7
    shapes = []
    for layer in kv.layers:
        assert isinstance(layer, PlainRows)
        shapes.append((layer.ratio, layer.block_rows, layer.rows.shape[1]))
    assert shapes == [(1, 8, DIM)] * 5 + [(2, 4, DIM), (1, 8, DIM)]
    assert kv.groups == GROUPS


def test_a_token_s_bytes_are_those_of_rows_where_rows_are_keys_and_values() -> None:
    ops = ReferenceOps()
    row, pooled = (ops.row_bytes_per_token(DIM, KVFormat.FP32, ratio) for ratio in (1, 2))
    assert (row, pooled < row) == (4 * DIM, True)
    total = kv_bytes_per_token(ops, GROUPS, KVFormat.FP32)
    assert total == 6 * row + pooled
    assert allocate_kv(ops, plan_of(8), GROUPS, KVFormat.FP32).bytes_per_token == total
    assert kv_bytes_per_token(ops, [KEYS_AND_VALUES], KVFormat.FP32) == 2 * 2 * 4 * DIM


@pytest.mark.parametrize("block_tokens", [1, 7])
def test_a_block_that_cannot_hold_whole_rows_is_refused(block_tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"block_tokens is {block_tokens}; .* multiple of that"):
        allocate_kv(ReferenceOps(), plan_of(block_tokens), GROUPS, KVFormat.FP32)
    groups = (WINDOW, LATE, WHOLE)
    assert alignment(groups) == 1
    assert allocate_kv(ReferenceOps(), plan_of(block_tokens), groups, KVFormat.FP32).layers


def test_a_prefix_is_kept_where_a_row_of_every_layer_ends() -> None:
    assert alignment(GROUPS) == 2
    assert alignment([KEYS_AND_VALUES]) == 1


def test_late_windows_are_not_kept_with_decoder_replay() -> None:
    with_replay = served_groups(GROUPS, decoder_replay=True)
    assert with_replay == (WINDOW, replace(LATE, persisted=False), WHOLE, POOLED)
    assert served_groups(GROUPS, decoder_replay=False) == GROUPS
    assert kept_groups(with_replay) == (WINDOW, WHOLE, POOLED)
    never = replace(KEYS_AND_VALUES, persisted=False)
    assert served_groups([never], decoder_replay=False) == (never,)


def test_the_layout_names_rows_and_their_ratio_and_what_is_kept() -> None:
    layout = kv_layout("k", GROUPS, KVFormat.BF16, 32)
    assert layout == (
        "kv1/k/bf16/block32/window6:3xrow16+window6:2xrow16+global:1xrow16+global:1xrow16/2"
    )
    with_replay = served_groups(GROUPS, decoder_replay=True)
    assert kv_layout("k", with_replay, KVFormat.BF16, 32) == (
        "kv1/k/bf16/block32/window6:3xrow16+global:1xrow16+global:1xrow16/2"
    )
    assert kv_layout("k", [KEYS_AND_VALUES], KVFormat.BF16, 32) == (
        "kv1/k/bf16/block32/global:1x2x16"
    )


# -- an engine of it -------------------------------------------------------------------


def engine(
    part: ModelPart = ModelPart.ALL, *, decoder_replay: bool = True, name: str = TOY
) -> ModelEngine:
    ops = ReferenceOps()
    clock: Clock = NoClock()
    return build_engine(
        load_model(resolve(name), ops, WeightFormat.FP32, part=part),
        ops=ops,
        weight_format=WeightFormat.FP32,
        kv_format=KVFormat.FP32,
        limits=KVLimits(num_blocks=8, block_tokens=8, context_tokens=32),
        clock=clock,
        free_bytes=2**30,
        decoder_replay=decoder_replay,
    )


def test_an_engine_says_how_many_tokens_late_layers_compute() -> None:
    with_replay, without = engine(), engine(decoder_replay=False)
    assert with_replay.info.decoder_replay_tokens == 6 + 2 * 6
    assert without.info.decoder_replay_tokens is None
    assert with_replay.info.alignment == without.info.alignment == 2
    # Late windows leave the device only without it.
    assert with_replay.info.kv_bytes_per_token < without.info.kv_bytes_per_token
    assert with_replay.kv.bytes_per_token == without.kv.bytes_per_token
    assert engine(name="toy:family=gemma3").info.decoder_replay_tokens is None


def test_an_engine_of_the_early_part_gives_its_kv_to_one_of_the_whole_model() -> None:
    part, whole = engine(ModelPart.EARLY), engine()
    for field in (
        *("fingerprint", "layout", "kv_bytes_per_token", "block_tokens", "window_tokens"),
        *("alignment", "decoder_replay_tokens", "context_tokens"),
    ):
        assert getattr(part.info, field) == getattr(whole.info, field), field
    assert part.info.saved_weights_bytes == whole.info.weights_bytes - part.info.weights_bytes > 0
    assert whole.info.saved_weights_bytes == 0
    # It has no late windows at all.
    assert part.kv.bytes_per_token < whole.kv.bytes_per_token


def test_the_early_part_without_decoder_replay_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs decoder replay"):
        engine(ModelPart.EARLY, decoder_replay=False)
