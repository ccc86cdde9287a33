"""Writes tiny checkpoints to disk: Hugging Face folders and GGUF files, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFWriter, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from headwater.model.config import ModelConfig
from headwater.model.hf_config import config_from_hf
from headwater.model.load import FAMILIES

LLAMA: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


GEMMA3: Mapping[str, object] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def llama_values(**changes: object) -> dict[str, object]:
    """A config.json; a change to None removes the field."""
    return {name: v for name, v in {**LLAMA, **changes}.items() if v is not None}


def gemma3_values(**changes: object) -> dict[str, object]:
    """A config.json; a change to None removes the field."""
    return {name: v for name, v in {**GEMMA3, **changes}.items() if v is not None}


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # gemma3's checkpoints store how far a norm's weight is from one.
    norm_mean = 0.0 if config.family == "gemma3" else 1.0
    return {
        name: torch.randn(shape, generator=generator) * 0.2
        + norm_mean * name.endswith("norm.weight")
        for name, shape in FAMILIES[config.family].expected_tensors(config).items()
    }


def write_folder(
    folder: Path,
    values: Mapping[str, object],
    tensors: Mapping[str, Tensor] | None = None,
    num_shards: int = 1,
) -> dict[str, Tensor]:
    """A folder with config, weights and an empty tokenizer; returns its tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.json").write_text("{}")
    if tensors is None:
        tensors = random_tensors(config_from_hf(values, "test"))
    tensors = dict(tensors)
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for i in range(num_shards):
        shard = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::num_shards]}
        save_file(part, folder / shard)
        weight_map.update(dict.fromkeys(part, shard))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def interleaved(rows: Tensor, num_heads: int) -> Tensor:
    """What conversion to the GGUF llama architecture does to query and key rows:
    row i of a head's first half and row i of its second become neighbours."""
    heads = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return torch.stack([heads[:, 0], heads[:, 1]], dim=2).reshape(rows.shape)


def gguf_name(name: str, config: ModelConfig) -> str:
    """The GGUF name of a Hugging Face tensor, by the package's own table."""
    # Qwen3's table: those of the others and the names of its norms.
    architecture = MODEL_ARCH.GEMMA3 if config.family == "gemma3" else MODEL_ARCH.QWEN3
    table = get_tensor_name_map(architecture, config.num_layers)
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert isinstance(found, str)
    return found


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    architecture: str = "llama",
    quantization: str = "F32",
    metadata: Mapping[str, int | float | str | bool] | None = None,
    extra: Mapping[str, Tensor] | None = None,
    stored_extra: Mapping[str, tuple[npt.NDArray[np.uint8], GGMLQuantizationType]] | None = None,
) -> None:
    """``tensors`` under Hugging Face names; matrices are stored as ``quantization``.

    ``extra`` and ``stored_extra`` (already quantised rows) go under GGUF names.
    """
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.mlp_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)
    if config.window is not None:
        writer.add_sliding_window(config.window.window_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(config.vocab_size - 1)] + ["<|im_end|>"])
    writer.add_token_types([1] * (config.vocab_size - 1) + [3])
    writer.add_token_merges(["t o", "to k"])
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    kind = GGMLQuantizationType[quantization]
    for name, tensor in tensors.items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
            tensor = interleaved(tensor, heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1.0
        values = tensor.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name, config), values)
        else:
            writer.add_tensor(
                gguf_name(name, config), quants.quantize(values, kind), raw_dtype=kind
            )
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy().astype(np.float32))
    for name, (stored, stored_kind) in (stored_extra or {}).items():
        writer.add_tensor(name, stored, raw_dtype=stored_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
