"""gemma3: its config in every spelling, its windows, and what a replay writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from model_files import GEMMA3, gemma3_values, random_tensors, write_folder, write_gguf
from model_harness import BLOCK_TOKENS, SideBySide, all_logits, greedy, reference_ops
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.model.catalogue import FolderLocation, GgufLocation, resolve
from headwater.model.config import LinearScaling, NoScaling
from headwater.model.family import CacheKind
from headwater.model.gemma3_config import window_layers
from headwater.model.gguf_config import TensorFacts, config_from_gguf
from headwater.model.hf_config import config_from_hf
from headwater.model.load import LoadedModel, load_model
from headwater.numerics.ops import LayerKV, Ops, RaggedBatch, WeightFormat

CONFIG = config_from_hf(GEMMA3, "config.json")
TOKENS = [(7 * i * i + 3) % 64 for i in range(40)]
ROPE_BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def toy(options: str = "window=16,layers=6,global_every=3") -> LoadedModel:
    return load_model(resolve(f"toy:family=gemma3,{options}"), reference_ops(), WeightFormat.FP32)


# -- config ----------------------------------------------------------------------------


def test_a_gemma3_config_is_read_whole() -> None:
    assert (CONFIG.family, CONFIG.architecture) == ("gemma3", "Gemma3ForCausalLM")
    assert (CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim) == (4, 2, 16)
    assert (CONFIG.rope_theta, CONFIG.rope_scaling) == (1e6, NoScaling())
    assert CONFIG.qk_norm
    assert CONFIG.tied_head  # by default
    assert CONFIG.eos_token_ids == {2, 3}
    assert CONFIG.query_scale == 0.25
    assert CONFIG.window is not None
    assert CONFIG.window.layers == (0, 1, 3, 4)
    assert (CONFIG.window.window_tokens, CONFIG.window.rope_theta) == (8, 1e4)


def test_every_sixth_layer_is_global_by_default() -> None:
    values = gemma3_values(sliding_window_pattern=None, num_hidden_layers=13)
    config = config_from_hf(values, "c")
    assert config.window is not None
    assert set(range(13)) - set(config.window.layers) == {5, 11}
    assert window_layers(18, 6) == (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16)


def test_both_spellings_of_the_config_mean_the_same() -> None:
    older = gemma3_values(rope_scaling={"rope_type": "linear", "factor": 8.0})
    without = dict.fromkeys(("rope_theta", "rope_local_base_freq", "sliding_window_pattern"))
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    newer = gemma3_values(**without, rope_parameters=ROPE_BY_KIND, layer_types=[*kinds, *kinds[:2]])
    config = config_from_hf(newer, "c")
    assert config == config_from_hf(older, "c")
    assert config.rope_scaling == LinearScaling(factor=8.0)
    underscored = {**without, "rope_theta": 1e6, "_sliding_window_pattern": 3}
    assert config_from_hf(gemma3_values(**underscored), "c") == CONFIG


def test_a_scale_of_its_own_is_kept_and_the_usual_one_is_not_a_field() -> None:
    assert CONFIG.attention_scale is None
    config = config_from_hf(gemma3_values(query_pre_attn_scalar=64), "c")
    assert config.query_scale == config.attention_scale == 0.125


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, ["architectures", "GGUF"]),
        ({"hidden_activation": "silu"}, ["hidden_activation", "silu", "gelu_pytorch_tanh"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ({"sliding_window": None}, ["sliding_window is missing"]),
        ({"sliding_window_pattern": 0}, ["sliding_window_pattern", "0"]),
        ({"sliding_window_pattern": 1}, ["layers []", "some of the layers"]),
        ({"num_hidden_layers": 2}, ["layers [0, 1] of 2", "not all"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "each of 5"]),
        ({"layer_types": ["chunked_attention"] * 5}, ["layer_types", "chunked_attention"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type", "yarn", "linear"]),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            ["sliding_attention", "default"],
        ),
    ],
)
def test_what_cannot_be_run_is_refused_by_field(
    changes: dict[str, object], named: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf(gemma3_values(**changes), "folder/config.json")
    message = str(caught.value)
    assert [part for part in named if part not in message] == []


# -- GGUF ------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"rope_scaling": {"type": "linear", "factor": 8.0}}])
def test_a_gguf_file_is_the_model_of_its_checkpoint(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    values = gemma3_values(sliding_window_pattern=None, num_hidden_layers=7, **changes)
    tensors = write_folder(tmp_path / "folder", values)
    config = config_from_hf(values, "c")
    scaling: dict[str, int | float | str | bool] = (
        {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0} if changes else {}
    )
    write_gguf(tmp_path / "m.gguf", config, tensors, architecture="gemma3", metadata=scaling)
    ops = reference_ops()
    folder = load_model(
        FolderLocation(path=tmp_path / "folder", model_id="a"), ops, WeightFormat.FP32
    )
    file = load_model(GgufLocation(path=tmp_path / "m.gguf", model_id="a"), ops, WeightFormat.FP32)
    # Numbers of a GGUF file are float32, and end ids come with the tokenizer there.
    assert file.config.rms_eps == pytest.approx(config.rms_eps)
    assert file.config == replace(
        config,
        architecture="gemma3",
        rms_eps=file.config.rms_eps,
        bos_token_id=None,
        eos_token_ids=frozenset({2}),
    )
    torch.testing.assert_close(
        all_logits(file.model, ops, TOKENS), all_logits(folder.model, ops, TOKENS)
    )


def test_the_27b_model_is_told_by_its_depth() -> None:
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 62,
        "gemma3.embedding_length": 5376,
        "gemma3.attention.head_count": 32,
        "gemma3.attention.head_count_kv": 16,
        "gemma3.attention.key_length": 128,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.attention.sliding_window": 1024,
        "gemma3.feed_forward_length": 21_504,
        "gemma3.context_length": 131_072,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    facts = TensorFacts(names=frozenset(), vocab_size=262_208, rope_divisors=None)
    config = config_from_gguf(metadata, facts, "m.gguf")
    assert config.query_scale == 168**-0.5  # 5376 / 32, where head_dim is 128
    assert config.rope_scaling == LinearScaling(factor=8.0)
    smaller = config_from_gguf({**metadata, "gemma3.block_count": 48}, facts, "m.gguf")
    assert smaller.query_scale == 128**-0.5


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"gemma3.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"gemma3.rope.scaling.type": "yarn"}, "rope.scaling.type = 'yarn'"),
        ({"gemma3.rope.dimension_count": 8}, "rope.dimension_count = 8"),
        ({"gemma3.attention.sliding_window_pattern": 9}, "layers .* of 5 have a window"),
        ({"gemma3.expert_count": 4}, "expert_count = 4"),
    ],
)
def test_gguf_metadata_that_cannot_be_run_is_refused_by_key(
    tmp_path: Path, metadata: dict[str, int | float | str | bool], message: str
) -> None:
    every = {"gemma3.attention.sliding_window_pattern": 3}
    write_gguf(
        tmp_path / "m.gguf",
        CONFIG,
        random_tensors(CONFIG),
        architecture="gemma3",
        metadata={**every, **metadata},
    )
    with pytest.raises(ModelError, match=message):
        load_model(
            GgufLocation(path=tmp_path / "m.gguf", model_id="a"),
            reference_ops(),
            WeightFormat.FP32,
        )


# -- the forward pass ------------------------------------------------------------------


def test_the_cache_plan_names_every_layer_once_by_its_kind() -> None:
    of_global, of_window = toy().model.cache_plan
    assert (of_global.kind, of_global.layers) == (CacheKind.GLOBAL, (2, 5))
    assert (of_window.kind, of_window.layers) == (CacheKind.WINDOW, (0, 1, 3, 4))
    assert (of_global.window_tokens, of_window.window_tokens) == (None, 16)
    assert of_global.persisted
    assert of_window.persisted


def test_counts_of_bytes_and_operations_follow_from_the_shapes() -> None:
    model = toy("layers=3").model  # hidden 64, 4 heads of 16, 2 kv heads, mlp 128, vocab 264
    per_layer = 64 * (64 + 2 * 32) + 64 * 64 + 64 * 256 + 128 * 64
    assert model.flops_per_token == 3 * 2 * per_layer
    norms = 3 * (4 * 64 + 2 * 16) + 64
    table = 264 * 64
    assert model.step_weights_bytes == 4 * (3 * per_layer + table + norms)
    assert model.weights_bytes == 4 * (3 * per_layer + 2 * table + norms)


def test_the_toy_does_not_repeat_itself_at_once() -> None:
    chosen = greedy(toy("layers=6").model, reference_ops(), [list(b"a river rises")], 40)[0]
    assert len(set(chosen)) > 10


@pytest.mark.parametrize("chunk", [1, 3, 7, 8, 25])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"sliding_window": 1}])
def test_a_prompt_in_chunks_gives_the_logits_of_one_pass(
    tmp_path: Path, chunk: int, changes: dict[str, object]
) -> None:
    write_folder(tmp_path, gemma3_values(**changes))
    ops = reference_ops()
    model = load_model(FolderLocation(path=tmp_path, model_id="a"), ops, WeightFormat.FP32).model
    torch.testing.assert_close(
        all_logits(model, ops, TOKENS, chunk), all_logits(model, ops, TOKENS), atol=1e-5, rtol=1e-5
    )


def test_a_token_sees_exactly_its_window_when_no_layer_is_global_before_it() -> None:
    """In the first layer a change outside the window of a token cannot reach it."""
    ops = reference_ops()
    model = toy("window=4,layers=2,global_every=2").model  # layer 0 window, layer 1 global
    changed = [9, *TOKENS[1:]]
    sides = [SideBySide(model, ops, 1, len(TOKENS)) for _ in range(2)]
    for side, tokens in zip(sides, (TOKENS, changed), strict=True):
        side.run([tokens])
    # What layer 1 stores at a position comes from layer 0's output there.
    ours, theirs = (token_bytes(ops, side.kv[1], 6) for side in sides)
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [False] * 4 + [True] * 2


def token_bytes(ops: Ops, kv: LayerKV, num_tokens: int) -> list[bytes]:
    """The stored key and value of the first tokens in block 0, one after the other."""
    buffers = ops.kv_buffers(kv, 0)
    assert buffers is not None
    size = [len(buffer) // BLOCK_TOKENS for buffer in buffers]
    return [
        b"".join(bytes(b[i * n : (i + 1) * n]) for b, n in zip(buffers, size, strict=True))
        for i in range(num_tokens)
    ]


def block_bytes(ops: Ops, layers: Sequence[LayerKV], block: int) -> list[bytes]:
    found = []
    for kv in layers:
        buffers = ops.kv_buffers(kv, block)
        assert buffers is not None
        found.append(b"".join(bytes(buffer) for buffer in buffers))
    return found


def spoil(ops: Ops, layers: Sequence[LayerKV], blocks: range) -> None:
    """Not a number in every place."""
    for kv in layers:
        for block in blocks:
            for buffer in ops.kv_buffers(kv, block) or ():
                buffer[:] = b"\xff" * len(buffer)


def test_window_layers_never_look_before_the_window() -> None:
    ops = reference_ops()
    model = toy().model  # window 16, blocks of 8
    of_window = model.cache_plan[1].layers
    whole, cut = (SideBySide(model, ops, 1, 48) for _ in range(2))
    for side in (whole, cut):
        side.run([TOKENS])
    # Token 40 sees window positions [25, 40]: blocks 0, 1 and 2 hold [0, 24).
    spoil(ops, [cut.kv[layer] for layer in of_window], range(3))
    assert torch.equal(cut.feed([[5]]), whole.feed([[5]]))


def replay_batch(side_tokens: int, first: int) -> RaggedBatch:
    """The tokens [first, side_tokens) of a sequence with blocks 0, 1, ..., all replayed."""
    positions = torch.arange(first, side_tokens)
    return RaggedBatch(
        row_starts=torch.tensor([0, len(positions)], dtype=torch.int32),
        context_lens=torch.tensor([side_tokens], dtype=torch.int32),
        block_tables=torch.arange(-(-side_tokens // BLOCK_TOKENS), dtype=torch.int32)[None],
        positions=positions.int(),
        slots=positions,
        max_row_tokens=len(positions),
        max_context=side_tokens,
        window_starts=torch.tensor([first], dtype=torch.int32),
        global_slots=torch.full_like(positions, -1),
    )


def test_a_replay_writes_window_kv_only_and_needs_none_from_before_it() -> None:
    ops = reference_ops()
    model = toy().model
    of_global, of_window = (group.layers for group in model.cache_plan)
    side, untouched = (SideBySide(model, ops, 1, 48) for _ in range(2))
    for one in (side, untouched):
        one.run([TOKENS])
    global_before = block_bytes(ops, [side.kv[layer] for layer in of_global], 4)
    window_kv = [side.kv[layer] for layer in of_window]
    spoil(ops, window_kv, range(5))
    first = len(TOKENS) - 16
    hidden: Tensor = model.forward(
        torch.tensor(TOKENS[first:]), replay_batch(len(TOKENS), first), side.kv
    )
    assert torch.isfinite(hidden).all()
    assert block_bytes(ops, [side.kv[layer] for layer in of_global], 4) == global_before
    # The first layer's KV depends on the token alone, so its replay is exact.
    assert block_bytes(ops, side.kv[:1], 4) == block_bytes(ops, untouched.kv[:1], 4)
    # Deeper layers saw less than a whole window at the replay's begin: near, not equal.
    replayed, cold = side.feed([[5]])[0], untouched.feed([[5]])[0]
    assert not torch.equal(replayed, cold)
    assert torch.corrcoef(torch.stack([replayed, cold]))[0, 1] > 0.9
