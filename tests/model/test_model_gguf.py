"""GGUF files: every supported type, the conversion undone, damaged files named."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from model_files import (
    LLAMA,
    interleaved,
    llama_values,
    random_tensors,
    write_folder,
    write_gguf,
)
from model_harness import all_logits, reference_ops

from headwater.core.errors import ModelError
from headwater.model.catalogue import FolderLocation, GgufLocation
from headwater.model.config import DivisorScaling, LinearScaling, YarnScaling
from headwater.model.gguf_source import GgufSource
from headwater.model.hf_config import config_from_hf
from headwater.model.load import load_model, open_model
from headwater.numerics.ops import WeightFormat

CONFIG = config_from_hf(LLAMA, "config.json")
TOKENS = [5, 9, 60, 3, 3, 17, 40, 8, 1, 22]


def opened(path: Path) -> None:
    open_model(GgufLocation(path=path, model_id="test")).source.close()


@pytest.mark.parametrize(
    ("architecture", "gguf_architecture", "changes"),
    [
        ("LlamaForCausalLM", "llama", {}),
        ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
        ("LlamaForCausalLM", "llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", "qwen2", {}),
        ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16}),
    ],
)
def test_a_gguf_file_computes_what_its_checkpoint_does(
    tmp_path: Path, architecture: str, gguf_architecture: str, changes: dict[str, object]
) -> None:
    values = llama_values(architectures=[architecture], **changes)
    tensors = write_folder(tmp_path / "folder", values)
    write_gguf(
        tmp_path / "m.gguf",
        config_from_hf(values, "c"),
        tensors,
        architecture=gguf_architecture,
    )
    ops = reference_ops()
    folder = load_model(
        FolderLocation(path=tmp_path / "folder", model_id="a"), ops, WeightFormat.FP32
    )
    file = load_model(GgufLocation(path=tmp_path / "m.gguf", model_id="a"), ops, WeightFormat.FP32)
    torch.testing.assert_close(
        all_logits(file.model, ops, TOKENS), all_logits(folder.model, ops, TOKENS)
    )


def test_interleaving_moves_rows_as_the_conversion_does() -> None:
    rows = torch.arange(8).unsqueeze(1)  # two heads: (a0 a1 b0 b1)
    assert interleaved(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"])
def test_quantised_tensors_are_near_the_original(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(config_from_hf(llama_values(intermediate_size=64), "c"))
    config = config_from_hf(llama_values(intermediate_size=64), "c")
    write_gguf(tmp_path / "m.gguf", config, tensors, quantization=name)
    source = GgufSource(tmp_path / "m.gguf")
    tolerance = {"F32": 0.0, "F16": 1e-3, "BF16": 5e-3, "Q8_0": 5e-3}.get(name, 0.1)
    for tensor_name, tensor in tensors.items():
        read = source.read(tensor_name)
        assert read.dtype == torch.float32
        torch.testing.assert_close(read, tensor, atol=tolerance, rtol=tolerance)
        assert source.tensors()[tensor_name].shape == tensor.shape
    assert source.tensors()["lm_head.weight"].dtype == name
    source.close()


@pytest.mark.parametrize(
    ("name", "high_bytes"),  # of the float16 numbers in a block, to keep them finite
    [
        ("Q4_K", [1, 3]),
        ("Q5_K", [1, 3]),
        ("Q6_K", [209]),
        ("Q4_1", [1, 3]),
        ("Q5_0", [1]),
        ("Q8_0", [1]),
        ("BF16", [1]),
    ],
)
def test_large_tensors_equal_the_packages_dequantisation(
    tmp_path: Path, name: str, high_bytes: list[int]
) -> None:
    # More blocks than one chunk, and not a multiple of it.
    kind = GGMLQuantizationType[name]
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    num_rows, row_blocks = 1013, 512 // block_elements
    generator = np.random.default_rng(0)
    stored = generator.integers(0, 256, (num_rows, row_blocks, block_bytes), dtype=np.uint8)
    stored[:, :, high_bytes] &= 0x3F
    stored = stored.reshape(num_rows, -1)
    expected = quants.dequantize(stored, kind)
    assert np.isfinite(expected).all()

    values = llama_values(hidden_size=512, vocab_size=num_rows, num_hidden_layers=1)
    config = config_from_hf(values, "c")
    tensors = random_tensors(config)
    del tensors["lm_head.weight"]
    path = tmp_path / "m.gguf"
    write_gguf(path, config, tensors, stored_extra={"output.weight": (stored, kind)})
    source = GgufSource(path)
    assert torch.equal(source.read("lm_head.weight"), torch.from_numpy(expected))
    source.close()


def test_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    del tensors["lm_head.weight"]
    kind = GGMLQuantizationType.IQ4_NL
    stored = np.zeros((64, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    write_gguf(tmp_path / "m.gguf", CONFIG, tensors, stored_extra={"output.weight": (stored, kind)})
    with pytest.raises(ModelError, match=r"tensor output.weight has type IQ4_NL; supported: F32"):
        opened(tmp_path / "m.gguf")


def test_any_truncation_is_an_error_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG))
    whole = path.read_bytes()
    for kept in [0, 3, 10, 100, 1000, 2000, 5000, len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:kept])
        with pytest.raises(ModelError, match=r"m.gguf is truncated"):
            opened(path)


def test_random_damage_to_the_header_is_never_another_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG))
    whole = path.read_bytes()
    generator = np.random.default_rng(1)
    num_refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        position = int(generator.integers(0, 6000))
        damaged[position : position + 8] = generator.bytes(8)
        path.write_bytes(damaged)
        try:
            opened(path)
        except ModelError:
            num_refused += 1
    assert num_refused > 100


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="does not start with the GGUF magic"):
        opened(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, r"llama.expert_count = 8"),
        ({"llama.attention.sliding_window": 16}, r"sliding_window = 16"),
        ({"llama.rope.scaling.type": "longrope"}, r"rope.scaling.type = 'longrope'"),
        ({"llama.rope.dimension_count": 4}, r"rope.dimension_count = 4"),
        ({"split.count": 2}, r"split.count = 2"),
    ],
)
def test_metadata_that_cannot_be_run_is_refused_by_key(
    tmp_path: Path, metadata: dict[str, int | float | str | bool], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), metadata=metadata)
    with pytest.raises(ModelError, match=message):
        opened(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"general.architecture = 'mamba' .* llama, qwen2, qwen3"):
        opened(tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(CONFIG)
    checkpoint_name = {
        "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }[name]
    del tensors[checkpoint_name]
    write_gguf(tmp_path / "m.gguf", CONFIG, tensors)
    with pytest.raises(ModelError, match=rf"missing: {re.escape(checkpoint_name)}"):
        opened(tmp_path / "m.gguf")


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf",
        CONFIG,
        random_tensors(CONFIG),
        extra={"blk.0.ffn_gate_inp.weight": torch.zeros(2, 2)},
    )
    with pytest.raises(ModelError, match=r"no place in this architecture: blk.0.ffn_gate_inp"):
        opened(tmp_path / "m.gguf")


def test_rope_divisors_in_the_file_are_used(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    divisors = torch.tensor([1.0, 1.0, 2.0, 8.0])
    write_gguf(path, CONFIG, random_tensors(CONFIG), extra={"rope_freqs.weight": divisors})
    found = open_model(GgufLocation(path=path, model_id="test"))
    assert found.config.rope_scaling == DivisorScaling(divisors=(1.0, 1.0, 2.0, 8.0))
    found.source.close()
    write_gguf(path, CONFIG, random_tensors(CONFIG), extra={"rope_freqs.weight": divisors[:3]})
    with pytest.raises(ModelError, match="3 rotary divisors"):
        opened(path)


def test_linear_and_yarn_scaling_come_from_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    scaling: dict[str, int | float | str | bool] = {
        "llama.rope.scaling.type": "linear",
        "llama.rope.scaling.factor": 2.0,
    }
    write_gguf(path, CONFIG, random_tensors(CONFIG), metadata=scaling)
    found = open_model(GgufLocation(path=path, model_id="test"))
    assert found.config.rope_scaling == LinearScaling(factor=2.0)
    found.source.close()
    scaling["llama.rope.scaling.type"] = "yarn"
    scaling["llama.rope.scaling.original_context_length"] = 64
    write_gguf(path, CONFIG, random_tensors(CONFIG), metadata=scaling)
    found = open_model(GgufLocation(path=path, model_id="test"))
    assert isinstance(found.config.rope_scaling, YarnScaling)
    assert found.config.rope_scaling.attention_factor == pytest.approx(1.0693147)
    assert found.config.context_tokens == 128
    found.source.close()


def test_the_tokenizer_is_handed_over_as_plain_values(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(
        path,
        CONFIG,
        random_tensors(CONFIG),
        metadata={"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.bos_token_id": 7},
    )
    found = open_model(GgufLocation(path=path, model_id="test"))
    found.source.close()
    tokenizer = found.tokenizer_source
    assert tokenizer.kind == "gguf"
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.bos_token_id == 7
    assert tokenizer.end_token_ids == {2, 63}  # eos, and the control token <|im_end|>
    assert tokenizer.gguf_metadata["tokenizer.ggml.merges"] == ["t o", "to k"]
    assert tokenizer.vocab_size == 64
