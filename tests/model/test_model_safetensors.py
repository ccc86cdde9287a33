"""Hugging Face folders: whole ones load, damaged ones are named before weights are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_files import LLAMA, llama_values, random_tensors, write_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.model.catalogue import FolderLocation
from headwater.model.hf_config import config_from_hf
from headwater.model.load import open_model
from headwater.model.safetensors_source import SafetensorsSource


def opened(folder: Path) -> None:
    open_model(FolderLocation(path=folder, model_id="test")).source.close()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_tensors_come_back_bit_for_bit(tmp_path: Path, num_shards: int) -> None:
    tensors = write_folder(tmp_path, LLAMA, num_shards=num_shards)
    source = SafetensorsSource(tmp_path)
    assert set(source.tensors()) == set(tensors)
    for name, tensor in tensors.items():
        assert source.tensors()[name].shape == tensor.shape
        assert torch.equal(source.read(name), tensor)
        assert bytes(source.stored_bytes(name)) == tensor.numpy().tobytes()
    source.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(config_from_hf(LLAMA, "c"))
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    write_folder(tmp_path, LLAMA, tensors)
    source = SafetensorsSource(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(source.read(name), tensors[name])
    source.close()


def test_a_read_tensor_outlives_its_file(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path, LLAMA)
    source = SafetensorsSource(tmp_path)
    tensor = source.read("model.norm.weight")
    source.close()
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert torch.equal(tensor, tensors["model.norm.weight"])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003.safetensors is missing"):
        opened(tmp_path)


def test_a_shard_without_an_indexed_tensor_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, num_shards=3)
    first, second = (tmp_path / f"model-0000{i}-of-00003.safetensors" for i in (1, 2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003.safetensors does not hold tensor"):
        opened(tmp_path)


def test_an_index_cannot_reach_out_of_its_folder(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}}))
    with pytest.raises(ModelError, match=r"'../other.safetensors' is not the name of a file"):
        opened(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 100, -1, -1000])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_truncated_file_is_named(tmp_path: Path, kept: int, num_shards: int) -> None:
    write_folder(tmp_path, LLAMA, num_shards=num_shards)
    [path, *_] = sorted(tmp_path.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=rf"{path.name} is truncated or damaged"):
        opened(tmp_path)


def without_norm(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.input_layernorm.weight"]


def wrong_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 31)


def unknown_tensor(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(2, 2)


def unknown_dtype(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_norm, r"1 of \d+ tensors are missing: model.layers.1.input_layernorm.weight"),
        (wrong_shape, r"up_proj.weight has shape \[48, 31\], the config asks for \[48, 32\]"),
        (unknown_tensor, r"no place in this architecture: model.layers.1.mlp.gate.weight"),
        (unknown_dtype, r"up_proj.weight has dtype F8_E4M3; supported: F32, F16, BF16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    write_folder(tmp_path, LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        opened(tmp_path)


def test_a_tied_head_and_old_rotary_tables_may_be_in_the_file_and_are_not_read(
    tmp_path: Path,
) -> None:
    values = llama_values(tie_word_embeddings=True)
    tensors = random_tensors(config_from_hf(values, "c"))
    tensors["lm_head.weight"] = torch.zeros(64, 32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    write_folder(tmp_path, values, tensors)
    opened(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "holds an adapter, not a model"),
        ("pytorch_model.bin", "pickled weights"),
        ("notes.txt", "has neither model.safetensors nor model.safetensors.index.json"),
    ],
)
def test_a_folder_without_safetensors_says_what_it_is(
    tmp_path: Path, file: str, message: str
) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config.json (is not valid JSON|must hold)"):
        opened(tmp_path)


def test_a_folder_without_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="it has no config"):
        opened(tmp_path)


def test_a_folder_with_only_a_gguf_file_says_to_pass_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=r"pass the .gguf file inside it"):
        opened(tmp_path)


def test_a_config_that_cannot_run_is_refused_without_opening_weights(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(b"never looked at")
    values = llama_values(quantization_config={"quant_method": "awq"})
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="quantization_config"):
        opened(tmp_path)


def test_a_folder_without_tokenizer_json_says_how_to_get_one(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        opened(tmp_path)
