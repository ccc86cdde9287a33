"""Logits against transformers, float32 within 1e-4, on a tiny random model of each variant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from model_harness import all_logits, reference_ops
from torch import Tensor

from headwater.model.catalogue import FolderLocation
from headwater.model.load import LoadedModel, load_model
from headwater.numerics.ops import WeightFormat

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

SHAPE: Mapping[str, object] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name: (config class, changes, tokens compared)
VARIANTS: Mapping[str, tuple[str, Mapping[str, object], int]] = {
    "llama": ("LlamaConfig", {}, 60),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}, 60),
    "biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, 60),
    "one kv head": ("LlamaConfig", {"num_key_value_heads": 1}, 60),
    "all kv heads": ("LlamaConfig", {"num_key_value_heads": 4}, 60),
    "head_dim": ("LlamaConfig", {"head_dim": 24}, 60),
    "theta": ("LlamaConfig", {"rope_parameters": {"rope_theta": 5e5}}, 60),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}, 60),
    "qwen2": ("Qwen2Config", {}, 60),
    "qwen2 tied": ("Qwen2Config", {"tie_word_embeddings": True}, 60),
    "qwen3": ("Qwen3Config", {"head_dim": 32}, 60),
    "qwen3 biases": ("Qwen3Config", {"head_dim": 32, "attention_bias": True}, 60),
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 64),
    # As many tokens as the served context, where the fixed table is the published one.
    "dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 256),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN}, 200),
    "yarn, own factor": (
        "Qwen2Config",
        {"rope_parameters": {**YARN, "attention_factor": 1.5}},
        200,
    ),
    "yarn, ends": (
        "Qwen3Config",
        {"head_dim": 32, "rope_parameters": {**YARN, "beta_fast": 8.0, "truncate": False}},
        200,
    ),
    "yarn, mscale": (
        "LlamaConfig",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}},
        200,
    ),
    "llama3": (
        "LlamaConfig",
        {"rope_parameters": LLAMA3, "max_position_embeddings": 256},
        200,
    ),
}


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    module: ModuleType = pytest.importorskip("transformers")
    return module


def tokens_of(length: int) -> list[int]:
    return [(11 * i * i + 5 * i + 2) % 96 for i in range(length)]


def saved_oracle(
    transformers: ModuleType, folder: Path, variant: str, **save: object
) -> tuple[list[int], Tensor]:
    """Saves the variant to ``folder``; (tokens, the oracle's logits after each)."""
    config_class, changes, num_tokens = VARIANTS[variant]
    torch.manual_seed(len(variant))
    # Some configs need their context beside the rotary settings, so both are always given.
    values = {"rope_parameters": {"rope_type": "default"}, **SHAPE, **changes}
    rope = {"rope_theta": 10000.0, **dict(values["rope_parameters"])}  # type: ignore[call-overload]
    config = getattr(transformers, config_class)(**{**values, "rope_parameters": rope})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # biases and norms are born 0 and 1, which would hide mistakes
            torch.nn.init.normal_(parameter, mean=float(name.endswith("norm.weight")), std=0.2)
    model.save_pretrained(folder, **save)
    (folder / "tokenizer.json").write_text("{}")
    tokens = tokens_of(num_tokens)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return tokens, logits


def loaded(folder: Path) -> LoadedModel:
    return load_model(FolderLocation(path=folder, model_id="m"), reference_ops(), WeightFormat.FP32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_oracles(transformers: ModuleType, tmp_path: Path, variant: str) -> None:
    tokens, expected = saved_oracle(transformers, tmp_path, variant)
    found = all_logits(loaded(tmp_path).model, reference_ops(), tokens)
    assert expected.std() > 0.3  # logits that are all alike would prove nothing
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_logits_of_a_sharded_checkpoint_equal_the_oracles(
    transformers: ModuleType, tmp_path: Path
) -> None:
    tokens, expected = saved_oracle(transformers, tmp_path, "qwen3", max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    found = all_logits(loaded(tmp_path).model, reference_ops(), tokens)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["theta", "linear", "dynamic", "yarn", "llama3"])
def test_the_older_spelling_of_rotary_settings_is_the_same_model(
    transformers: ModuleType, tmp_path: Path, variant: str
) -> None:
    saved_oracle(transformers, tmp_path, variant)
    newer = loaded(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    settings = values.pop("rope_parameters")
    values["rope_theta"] = settings.pop("rope_theta")
    values["rope_scaling"] = None if settings["rope_type"] == "default" else settings
    path.write_text(json.dumps(values))
    older = loaded(tmp_path)
    assert older.config == newer.config
    assert older.fingerprint == newer.fingerprint
