"""Reading config.json: what is understood, and what is refused by field."""

from __future__ import annotations

import pytest
from model_files import llama_values

from headwater.core.errors import ModelError
from headwater.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    YarnScaling,
)
from headwater.model.hf_config import config_from_hf


def test_a_llama_config_is_read_whole() -> None:
    config = config_from_hf(llama_values(), "config.json")
    assert (config.hidden_size, config.mlp_size, config.num_layers) == (32, 48, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 8)
    assert config.rope_scaling == NoScaling()
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert config.bos_token_id == 1
    assert config.eos_token_ids == {2, 3}
    assert config.context_tokens == 64


def test_key_value_heads_default_to_the_query_heads() -> None:
    assert config_from_hf(llama_values(num_key_value_heads=None), "c").num_kv_heads == 4


def test_biases_and_norms_follow_the_architecture() -> None:
    qwen2 = config_from_hf(llama_values(architectures=["Qwen2ForCausalLM"]), "c")
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = config_from_hf(llama_values(architectures=["Qwen3ForCausalLM"], head_dim=16), "c")
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert qwen3.head_dim == 16
    llama = config_from_hf(llama_values(attention_bias=True, mlp_bias=True), "c")
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


def test_qwen3_without_head_dim_has_128() -> None:
    assert config_from_hf(llama_values(architectures=["Qwen3ForCausalLM"]), "c").head_dim == 128


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_field", ["rope_type", "type"])
def test_both_spellings_of_rotary_settings_mean_the_same(spelling: str, type_field: str) -> None:
    settings = {type_field: "linear", "factor": 4.0}
    if spelling == "rope_parameters":
        values = llama_values(rope_theta=None, rope_parameters={**settings, "rope_theta": 5e5})
    else:
        values = llama_values(rope_theta=5e5, rope_scaling=settings)
    config = config_from_hf(values, "c")
    assert config.rope_theta == 5e5
    assert config.rope_scaling == LinearScaling(factor=4.0)


def test_dynamic_and_yarn_scaling_extend_the_served_context() -> None:
    dynamic = config_from_hf(llama_values(rope_scaling={"type": "dynamic", "factor": 2.0}), "c")
    assert dynamic.rope_scaling == DynamicScaling(factor=2.0, original_context_tokens=64)
    assert dynamic.context_tokens == 128
    yarn_settings = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    yarn = config_from_hf(llama_values(rope_scaling=yarn_settings), "c")
    assert isinstance(yarn.rope_scaling, YarnScaling)
    assert yarn.rope_scaling.attention_factor == pytest.approx(1.1386294)
    assert yarn.context_tokens == 128


def test_llama3_scaling_keeps_the_stated_context() -> None:
    settings = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = config_from_hf(llama_values(rope_scaling=settings), "c")
    assert config.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=16
    )
    assert config.context_tokens == 64


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["architectures", "Mamba", "Qwen3ForCausalLM"]),
        ({"architectures": None}, ["architectures"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"sliding_window": 16}, ["sliding_window", "16"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding"]),
        ({"rope_scaling": {"type": "longrope"}}, ["type", "longrope", "yarn"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor is missing"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "an object"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["layer types"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"num_hidden_layers": None}, ["num_hidden_layers is missing"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "positive integer", "0"]),
        ({"vocab_size": "64"}, ["vocab_size", "'64'"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"num_attention_heads": 5}, ["hidden_size = 32", "num_attention_heads = 5"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 key/value heads"]),
        ({"head_dim": 7}, ["head_dim = 7"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "yes"]),
    ],
)
def test_what_cannot_be_run_is_refused_by_field_and_value(
    changes: dict[str, object], named: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf(llama_values(**changes), "folder/config.json")
    message = str(caught.value)
    assert [part for part in named if part not in message] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
            "sliding_window": 16,
            "max_window_layers": 1,
        },
        {
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
    ],
)
def test_a_window_that_no_layer_uses_is_no_window(changes: dict[str, object]) -> None:
    config_from_hf(llama_values(**changes), "c")
