"""The config.json of the family ced: read whole, and refused field by field."""

from __future__ import annotations

import pytest
from ced_harness import CED, ced_values

from headwater.core.errors import ModelError
from headwater.model.ced_config import PLACES
from headwater.model.config import EncoderDecoder, NoScaling, YarnScaling
from headwater.model.hf_config import config_from_hf

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_a_ced_config_is_read_whole() -> None:
    config = config_from_hf(CED, "config.json")
    assert (config.family, config.architecture) == ("ced", "HeadwaterCedForCausalLM")
    assert (config.hidden_size, config.num_layers, config.vocab_size) == (32, 5, 48)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 1, 16)
    assert (config.rope_theta, config.rope_scaling) == (10_000.0, NoScaling())
    assert config.query_scale == 0.25
    assert config.rms_eps == 1e-6
    assert config.tied_head
    assert config.context_tokens == 256
    assert (config.bos_token_id, config.eos_token_ids) == (0, frozenset({1, 2}))
    assert config.encoder_decoder == EncoderDecoder(
        num_encoder_layers=3,
        kv_source_layers=(1, 3),
        compress_ratios=(0, 2, 2, 1, 1),
        window_tokens=6,
        rope_head_dim=8,
        compress_rope_theta=160_000.0,
        q_rank=16,
        o_groups=2,
        o_rank=12,
        num_experts=4,
        num_experts_per_token=2,
        num_shared_experts=1,
        expert_size=16,
        routed_scaling=1.5,
        swiglu_limit=10.0,
    )
    assert config.encoder_decoder.cut == 3


def test_a_layer_reads_the_rows_of_the_nearest_source_at_or_below_it() -> None:
    config = config_from_hf(
        ced_values(compress_ratios=[2, 0, 2, 1, 1], kv_source_layer_ids=[0, 2, 3]), "c"
    )
    assert config.encoder_decoder is not None
    assert [config.encoder_decoder.source_of(layer) for layer in range(5)] == [0, None, 2, 3, 3]


@pytest.mark.parametrize("type_field", ["type", "rope_type"])
def test_yarn_is_for_layers_with_a_source_and_scales_no_numbers(type_field: str) -> None:
    scaling = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
    scaling[type_field] = scaling.pop("type")
    assert config_from_hf(ced_values(rope_scaling=scaling), "c").rope_scaling == YarnScaling(
        factor=4.0, original_context_tokens=64, attention_factor=1.0
    )


def test_values_that_ask_for_nothing_are_read_over() -> None:
    nothing = {
        "hc_mult": 1,
        "engram_layer_ids": [],
        "index_topk": None,
        "index_source_layer_ids": [],
        "candidate_source_layer_id": None,
        "num_nextn_predict_layers": 0,
        "quantization_config": None,
        "n_group": 1,
        "attention_bias": False,
        "transformers_version": "5.0",
    }
    assert config_from_hf({**CED, **nothing}, "c") == config_from_hf(CED, "c")


# Fields of PLACES, each with a value that asks for something, and what a person reads.
PLACES_ASKED = [
    ("hc_mult", 4, "hyper-connections"),
    ("engram_layer_ids", [1, 14], "n-gram memory"),
    ("engram_max_ngram", 4, "n-gram memory"),
    ("index_topk", 512, "top-k index"),
    ("index_source_layer_ids", [1, 3], "top-k index"),
    ("index_n_heads", 32, "top-k index"),
    ("candidate_source_layer_id", 3, "candidates of a top-k index"),
    # Layer 0 is a layer like any other.
    ("candidate_source_layer_id", 0, "candidates of a top-k index"),
    ("candidate_topk_blocks", 2048, "candidates of a top-k index"),
    ("num_nextn_predict_layers", 3, "draft layers"),
    ("dspark_n_routed_experts", 128, "draft layers"),
    ("num_hash_layers", 3, "by token id"),
    ("n_group", 8, "one group"),
    ("topk_group", 4, "one group"),
    ("vision_config", {"depth": 32}, "images"),
    ("quantization_config", {"quant_method": "fp8"}, "--weights int8"),
    ("expert_dtype", "fp4", "--weights int8"),
    ("attention_bias", True, "biases"),
]


@pytest.mark.parametrize(("field", "value", "what"), PLACES_ASKED)
def test_what_has_only_a_place_yet_is_refused_by_its_name(
    field: str, value: object, what: str
) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf(ced_values(**{field: value}), "folder/config.json")
    message = str(caught.value)
    assert f"folder/config.json: {field} = {value!r} is not supported; supported: null" in message
    assert what in message


def test_every_place_is_in_the_test_above() -> None:
    asked = {field: None for field, _, _ in PLACES_ASKED}
    for place in PLACES:
        prefix = place.field.removesuffix("*")
        assert any(name.startswith(prefix) for name in asked), place.field


def test_a_released_checkpoint_is_refused_saying_what_it_needs() -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf({"architectures": ["DeepseekV41ForCausalLM"], "hc_mult": 4}, "c")
    message = str(caught.value)
    for needed in (
        *("DeepseekV41ForCausalLM", "HeadwaterCedForCausalLM", "hyper-connections"),
        *("n-gram memory", "top-k index", "draft layers", "4 and 8 bit", "not served yet"),
    ):
        assert needed in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "deepseek_v41"}, ["model_type", "headwater_ced"]),
        ({"scoring_func": "softmax"}, ["scoring_func", "softmax", "sqrtsoftplus"]),
        ({"scoring_func": None}, ["scoring_func is missing"]),
        ({"topk_method": "greedy"}, ["topk_method", "noaux_tc"]),
        ({"norm_topk_prob": False}, ["norm_topk_prob", "true"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "silu"]),
        ({"num_encoder_layers": 5}, ["num_encoder_layers = 5", "fewer than", "5"]),
        ({"num_encoder_layers": 0}, ["num_encoder_layers", "positive"]),
        ({"num_encoder_layers": 2}, ["kv_source_layer_ids = [1, 3]", "num_encoder_layers = 2"]),
        ({"kv_source_layer_ids": [3, 1]}, ["kv_source_layer_ids", "ascending"]),
        ({"kv_source_layer_ids": [1, 1, 3]}, ["kv_source_layer_ids", "ascending"]),
        ({"kv_source_layer_ids": []}, ["kv_source_layer_ids", "the last one"]),
        ({"kv_source_layer_ids": [1]}, ["kv_source_layer_ids = [1]", "num_encoder_layers = 3"]),
        ({"kv_source_layer_ids": [1, 3, 4]}, ["kv_source_layer_ids", "num_encoder_layers = 3"]),
        ({"kv_source_layer_ids": 3}, ["kv_source_layer_ids must be a list"]),
        ({"kv_source_layer_ids": [-1, 3]}, ["kv_source_layer_ids must be a list", "least 0"]),
        ({"compress_ratios": None}, ["compress_ratios is missing"]),
        ({"compress_ratios": [0, 2, 2, 1]}, ["compress_ratios", "each of 5 layers"]),
        ({"compress_ratios": [0, 4, 4, 1, 1]}, ["compress_ratios", "0, 1 or 2"]),
        ({"compress_ratios": [0, 2, 2, 2, 2]}, ["layer 3", "1, as it is the last source"]),
        ({"compress_ratios": [0, 2, 2, 0, 1]}, ["layer 3", "1, as it is the last source"]),
        ({"compress_ratios": [2, 2, 2, 1, 1]}, ["layer 0", "0, as it is before the first"]),
        ({"compress_ratios": [0, 0, 2, 1, 1]}, ["layer 1", "1 or 2, as it is one of"]),
        ({"compress_ratios": [0, 2, 1, 1, 1]}, ["layer 2", "0 or 2", "its source, layer 1"]),
        ({"compress_ratios": [0, 2, 2, 1, 2]}, ["layer 4", "0 or 1", "its source, layer 3"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim = 7", "even"]),
        ({"qk_rope_head_dim": 2}, ["qk_rope_head_dim = 2", "from 4"]),
        ({"qk_rope_head_dim": 18}, ["qk_rope_head_dim = 18", "head_dim = 16"]),
        ({"head_dim": None}, ["head_dim is missing"]),
        ({"o_groups": 3}, ["o_groups = 3", "num_attention_heads = 4"]),
        ({"num_experts_per_tok": 5}, ["num_experts_per_tok = 5", "n_routed_experts = 4"]),
        ({"n_shared_experts": -1}, ["n_shared_experts", "at least 0"]),
        ({"n_shared_experts": True}, ["n_shared_experts", "at least 0"]),
        ({"n_routed_experts": 0}, ["n_routed_experts", "positive"]),
        ({"sliding_window": 0}, ["sliding_window", "positive"]),
        ({"swiglu_limit": 0}, ["swiglu_limit", "positive"]),
        ({"routed_scaling_factor": None}, ["routed_scaling_factor is missing"]),
        ({"rope_theta": None}, ["rope_theta is missing"]),
        ({"compress_rope_theta": None}, ["compress_rope_theta is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling: type", "yarn"]),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, ["mscale = 0.7", "1.0"]),
        ({"rope_scaling": {**YARN, "attention_factor": 1.2}}, ["attention_factor = 1.2", "1.0"]),
        ({"rope_scaling": {**YARN, "factor": 2.0}}, ["max_position_embeddings = 256", "128"]),
        ({"architectures": ["CedForCausalLM"]}, ["architectures", "HeadwaterCedForCausalLM"]),
    ],
)
def test_what_contradicts_itself_or_is_not_served_is_refused_by_field(
    changes: dict[str, object], named: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        config_from_hf(ced_values(**changes), "folder/config.json")
    message = str(caught.value)
    assert message.startswith("folder/config.json")
    assert [part for part in named if part not in message] == []


@pytest.mark.parametrize("field", sorted(CED.keys() - {"rope_scaling"}))
def test_every_field_is_either_asked_for_or_has_a_plain_default(field: str) -> None:
    """What is left out of a file never becomes a shape by guessing."""
    plain = {"model_type", "norm_topk_prob", "tie_word_embeddings", "bos_token_id", "eos_token_id"}
    if field in plain:
        assert config_from_hf(ced_values(**{field: None}), "c").family == "ced"
    else:
        with pytest.raises(ModelError, match=field):
            config_from_hf(ced_values(**{field: None}), "c")
