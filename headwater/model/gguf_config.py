"""Reads GGUF metadata into a ModelConfig, or refuses it by key.

Keys are those of github.com/ggml-org/ggml/blob/master/docs/gguf.md, under the
architecture's prefix. Runs before any tensor is read, except that Llama 3.1
scaling comes as a small tensor, handed in as ``rope_divisors``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.core.errors import ModelError
from headwater.model.config import (
    DivisorScaling,
    LinearScaling,
    ModelConfig,
    NoScaling,
    RopeScaling,
    YarnScaling,
    longest_context_tokens,
)
from headwater.model.fields import Fields
from headwater.model.gemma3_config import GGUF_ARCHITECTURE as GEMMA3
from headwater.model.gemma3_config import gemma3_from_gguf
from headwater.model.hf_config import yarn_magnitude

ARCHITECTURES = ("llama", "qwen2", "qwen3", GEMMA3)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a GGUF file says by its tensors and not by its metadata."""

    names: frozenset[str]
    vocab_size: int
    rope_divisors: tuple[float, ...] | None


def config_from_gguf(metadata: Mapping[str, object], facts: TensorFacts, where: str) -> ModelConfig:
    """The config of the GGUF file ``where``; raises ModelError naming the key."""
    fields = Fields(metadata, where)
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise fields.refuse("general.architecture", ", ".join(ARCHITECTURES))
    if fields.values.get("split.count", 0) not in (0, 1):
        raise fields.refuse("split.count", "1; merge the parts with gguf-split --merge")
    if fields.values.get(f"{name}.expert_count", 0) != 0:
        raise fields.refuse(f"{name}.expert_count", "0 (dense)")
    if name == GEMMA3:
        return gemma3_from_gguf(
            fields,
            vocab_size=facts.vocab_size,
            tied_head="output.weight" not in facts.names,
            has_rope_divisors=facts.rope_divisors is not None,
        )

    hidden_size = fields.positive_int(f"{name}.embedding_length")
    num_heads = fields.positive_int(f"{name}.attention.head_count")
    context_tokens = fields.positive_int(f"{name}.context_length")
    head_dim = _head_dim(fields, name, hidden_size, num_heads)
    window_tokens = fields.values.get(f"{name}.attention.sliding_window", 0)
    if isinstance(window_tokens, int) and 0 < window_tokens < context_tokens:
        raise fields.refuse(f"{name}.attention.sliding_window", "none: full attention")
    scaling = _rope_scaling(fields, name, context_tokens, facts.rope_divisors)

    def has(tensor: str) -> bool:
        return tensor in facts.names

    return ModelConfig(
        family="llama",
        architecture=name,
        hidden_size=hidden_size,
        num_layers=fields.positive_int(f"{name}.block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.positive_int(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_size=fields.positive_int(f"{name}.feed_forward_length"),
        vocab_size=facts.vocab_size,
        rms_eps=fields.positive_float(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.positive_float(f"{name}.rope.freq_base", 10_000.0),
        rope_scaling=scaling,
        # The file has no keys for biases: their tensors are there or not.
        qkv_bias=has("blk.0.attn_q.bias"),
        output_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_gate.bias"),
        qk_norm=name == "qwen3",
        tied_head=not has("output.weight"),
        context_tokens=longest_context_tokens(context_tokens, scaling),
        bos_token_id=fields.token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=fields.token_ids("tokenizer.ggml.eos_token_id"),
    )


def _head_dim(fields: Fields, name: str, hidden_size: int, num_heads: int) -> int:
    if not fields.has(f"{name}.attention.key_length") and hidden_size % num_heads:
        raise ModelError(
            f"{fields.where}: {name}.embedding_length = {hidden_size} is not a multiple of "
            f"{name}.attention.head_count = {num_heads}, and key_length is not given"
        )
    head_dim = fields.positive_int(f"{name}.attention.key_length", hidden_size // num_heads)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if fields.positive_int(key, head_dim) != head_dim:
            raise fields.refuse(key, f"the head size, {head_dim}")
    return head_dim


def _rope_scaling(
    fields: Fields, name: str, context_tokens: int, divisors: tuple[float, ...] | None
) -> RopeScaling:
    prefix = f"{name}.rope.scaling"
    if fields.has(f"{name}.rope.scale_linear"):  # older spelling
        kind, factor_key = "linear", f"{name}.rope.scale_linear"
    else:
        kind, factor_key = fields.text(f"{prefix}.type", "none"), f"{prefix}.factor"
    if divisors is not None:
        if kind != "none":
            raise fields.refuse(f"{prefix}.type", "none beside the tensor rope_freqs.weight")
        return DivisorScaling(divisors=divisors)
    for key in ("alpha", "yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor"):
        if fields.has(f"{prefix}.{key}"):
            raise fields.refuse(f"{prefix}.{key}", "files without this key")
    match kind:
        case "none":
            return NoScaling()
        case "linear":
            return LinearScaling(factor=fields.positive_float(factor_key))
        case "yarn":
            factor = fields.positive_float(factor_key)
            # attn_factor multiplies the recommended magnitude instead of replacing it.
            weight = fields.positive_float(f"{prefix}.attn_factor", 1.0)
            return YarnScaling(
                factor=factor,
                original_context_tokens=fields.positive_int(
                    f"{prefix}.original_context_length", context_tokens
                ),
                attention_factor=weight * yarn_magnitude(factor),
                beta_fast=fields.positive_float(f"{prefix}.yarn_beta_fast", 32.0),
                beta_slow=fields.positive_float(f"{prefix}.yarn_beta_slow", 1.0),
            )
        case _:
            raise fields.refuse(f"{prefix}.type", "none, linear, yarn")
