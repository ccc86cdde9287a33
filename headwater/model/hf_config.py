"""Reads a Hugging Face ``config.json`` into a ModelConfig, or refuses it by field.

Runs before any weight is opened, so a model that cannot run costs nothing.
Accepts both spellings of rotary settings: ``rope_theta`` + ``rope_scaling`` and
the newer ``rope_parameters`` that transformers 5 writes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from headwater.core.errors import ModelError
from headwater.model.ced_config import HF_ARCHITECTURE as CED
from headwater.model.ced_config import HF_RELEASED as RELEASED_CED
from headwater.model.ced_config import RELEASED_NEEDS, ced_from_hf
from headwater.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoScaling,
    RopeScaling,
    YarnScaling,
    longest_context_tokens,
)
from headwater.model.fields import Fields
from headwater.model.gemma3_config import HF_ARCHITECTURE as GEMMA3
from headwater.model.gemma3_config import HF_WITH_IMAGES as GEMMA3_WITH_IMAGES
from headwater.model.gemma3_config import gemma3_from_hf


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    """What an architecture implies and its config.json does not say."""

    qkv_bias: bool | None  # None: both biases follow attention_bias
    qk_norm: bool = False
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "LlamaForCausalLM": _Architecture(qkv_bias=None),
    "MistralForCausalLM": _Architecture(qkv_bias=False),
    "Qwen2ForCausalLM": _Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": _Architecture(qkv_bias=None, qk_norm=True, default_head_dim=128),
}

ROPE_TYPES = "default, linear, dynamic, yarn, llama3"


def config_from_hf(values: Mapping[str, object], where: str) -> ModelConfig:
    """The config in ``values``, which were read from the file ``where``.

    Raises ModelError naming the field, its value and what is supported.
    """
    fields = Fields(values, where)
    name = _architecture(fields)
    if name == GEMMA3:
        return gemma3_from_hf(fields)
    if name == CED:
        return ced_from_hf(fields)
    architecture = _ARCHITECTURES[name]
    _refuse_what_cannot_run(fields)

    hidden_size = fields.positive_int("hidden_size")
    num_heads = fields.positive_int("num_attention_heads")
    max_position_tokens = fields.positive_int("max_position_embeddings")
    default_head_dim = architecture.default_head_dim or hidden_size // num_heads
    known_head_dim = fields.has("head_dim") or architecture.default_head_dim is not None
    if not known_head_dim and hidden_size % num_heads:
        raise ModelError(
            f"{where}: hidden_size = {hidden_size} is not a multiple of "
            f"num_attention_heads = {num_heads}, and head_dim is not given"
        )
    attention_bias = fields.flag("attention_bias", default=False)
    rope_theta, scaling = _rope(fields, max_position_tokens)
    return ModelConfig(
        family="llama",
        architecture=name,
        hidden_size=hidden_size,
        num_layers=fields.positive_int("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=fields.positive_int("head_dim", default_head_dim),
        mlp_size=fields.positive_int("intermediate_size"),
        vocab_size=fields.positive_int("vocab_size"),
        rms_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        qkv_bias=attention_bias if architecture.qkv_bias is None else architecture.qkv_bias,
        output_bias=attention_bias if architecture.qkv_bias is None else False,
        # The other architectures have no such field, and ignore it.
        mlp_bias=name == "LlamaForCausalLM" and fields.flag("mlp_bias", default=False),
        qk_norm=architecture.qk_norm,
        tied_head=fields.flag("tie_word_embeddings", default=False),
        context_tokens=longest_context_tokens(max_position_tokens, scaling),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
    )


def _architecture(fields: Fields) -> str:
    """One of ``_ARCHITECTURES``, or that of a family with a reader of its own."""
    known = [*_ARCHITECTURES, GEMMA3, CED]
    named = fields.values.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if name == GEMMA3_WITH_IMAGES:
        supported = f"{GEMMA3}, or a GGUF file of this model, which holds its text part alone"
        raise fields.refuse("architectures", supported)
    if name == RELEASED_CED:
        raise fields.refuse("architectures", RELEASED_NEEDS)
    if not isinstance(name, str) or name not in known:
        raise fields.refuse("architectures", ", ".join(known))
    return name


def _refuse_what_cannot_run(fields: Fields) -> None:
    if fields.has("quantization_config"):
        raise fields.refuse(
            "quantization_config",
            "weights stored as float32, float16 or bfloat16, or a GGUF file; "
            "for smaller weights pass --weights int8",
        )
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.refuse("hidden_act", "silu")
    if fields.has("layer_types"):
        kinds = fields.values["layer_types"]
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            raise fields.refuse("layer_types", "full_attention in every layer")
    elif _window_in_use(fields):
        raise fields.refuse("sliding_window", "null: full attention in every layer")
    if fields.positive_float("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor", "1.0")


def _window_in_use(fields: Fields) -> bool:
    """Whether any layer attends to less than the whole context."""
    if not fields.has("sliding_window") or not fields.flag("use_sliding_window", default=True):
        return False
    if fields.positive_int("sliding_window") >= fields.positive_int("max_position_embeddings"):
        return False
    # Qwen2: only layers from max_window_layers on have the window.
    if not fields.values.get("max_window_layers"):
        return True
    return fields.positive_int("max_window_layers") < fields.positive_int("num_hidden_layers")


def _rope(fields: Fields, max_position_tokens: int) -> tuple[float, RopeScaling]:
    settings = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    theta = fields.positive_float("rope_theta", 10_000.0)
    if settings is None:
        return theta, NoScaling()
    if any(isinstance(value, Mapping) for value in settings.values.values()):
        raise ModelError(
            f"{settings.where} differs between layer types "
            f"({', '.join(settings.values)}), which is not supported"
        )
    theta = settings.positive_float("rope_theta", theta)
    if settings.positive_float("partial_rotary_factor", 1.0) != 1.0:
        raise settings.refuse("partial_rotary_factor", "1.0")

    original_tokens = (
        fields.positive_int("original_max_position_embeddings")
        if fields.has("original_max_position_embeddings")
        else settings.positive_int("original_max_position_embeddings", max_position_tokens)
    )
    type_field = "rope_type" if settings.has("rope_type") else "type"
    match settings.text(type_field, "default"):
        case "default":
            return theta, NoScaling()
        case "linear":
            return theta, LinearScaling(factor=settings.positive_float("factor"))
        case "dynamic":
            return theta, DynamicScaling(
                factor=settings.positive_float("factor"),
                original_context_tokens=max_position_tokens,
            )
        case "yarn":
            return theta, _yarn(settings, max_position_tokens, original_tokens)
        case "llama3":
            return theta, _llama3(settings, original_tokens)
        case _:
            raise settings.refuse(type_field, ROPE_TYPES)


def _yarn(settings: Fields, max_position_tokens: int, original_tokens: int) -> YarnScaling:
    factor = settings.positive_float("factor", max_position_tokens / original_tokens)
    if settings.has("attention_factor"):
        attention_factor = settings.positive_float("attention_factor")
    elif settings.has("mscale") and settings.has("mscale_all_dim"):
        attention_factor = yarn_magnitude(
            factor, settings.positive_float("mscale")
        ) / yarn_magnitude(factor, settings.positive_float("mscale_all_dim"))
    else:
        attention_factor = yarn_magnitude(factor)
    return YarnScaling(
        factor=factor,
        original_context_tokens=original_tokens,
        attention_factor=attention_factor,
        beta_fast=settings.positive_float("beta_fast", 32.0),
        beta_slow=settings.positive_float("beta_slow", 1.0),
        truncate=settings.flag("truncate", default=True),
    )


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's recommended growth of q and k with the context: 0.1 ln(factor) + 1 (section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(settings: Fields, original_tokens: int) -> Llama3Scaling:
    low = settings.positive_float("low_freq_factor")
    high = settings.positive_float("high_freq_factor")
    if high <= low:
        raise ModelError(
            f"{settings.where}: high_freq_factor = {high} must be above low_freq_factor = {low}"
        )
    return Llama3Scaling(
        factor=settings.positive_float("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context_tokens=original_tokens,
    )
