"""Gemma 3's config, from ``config.json`` and from GGUF metadata.

Apart from the dense readers because most of what they ask is settled here by the
architecture, and what this one adds is in no other file: layers with a window
among layers without, two rotary bases, a scale for attention of its own. Called by
``hf_config`` and ``gguf_config``.
"""

from __future__ import annotations

from headwater.core.errors import ModelError
from headwater.model.config import (
    LinearScaling,
    ModelConfig,
    NoScaling,
    RopeScaling,
    WindowLayers,
)
from headwater.model.fields import Fields

FAMILY = "gemma3"
HF_ARCHITECTURE = "Gemma3ForCausalLM"
GGUF_ARCHITECTURE = "gemma3"
# The checkpoint that also sees images; its text part has other tensor names.
HF_WITH_IMAGES = "Gemma3ForConditionalGeneration"

_GLOBAL_EVERY = 6  # layers: five with a window, then one without
_GLOBAL_THETA = 1_000_000.0
_WINDOW_THETA = 10_000.0
_SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_WINDOW, _GLOBAL = "sliding_attention", "full_attention"
# A GGUF file does not say by what attention is scaled; the 27B model, told by its
# depth, uses hidden_size / num_heads where the others use head_dim.
_LAYERS_OF_27B = 62


def gemma3_from_hf(fields: Fields) -> ModelConfig:
    """The config of a ``Gemma3ForCausalLM``; raises ModelError naming the field.

    Accepts the spelling of transformers 4 (``rope_theta``, ``rope_local_base_freq``,
    ``rope_scaling``, ``sliding_window_pattern``) and that of 5 (``rope_parameters`` by
    kind of layer, ``layer_types``).
    """
    _refuse_what_cannot_run(fields)
    num_layers = fields.positive_int("num_hidden_layers")
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = fields.positive_int("head_dim", 256)
    theta, scaling, window_theta = _hf_rope(fields)
    return ModelConfig(
        family=FAMILY,
        architecture=HF_ARCHITECTURE,
        hidden_size=fields.positive_int("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.positive_int("num_key_value_heads", num_heads),
        head_dim=head_dim,
        mlp_size=fields.positive_int("intermediate_size"),
        vocab_size=fields.positive_int("vocab_size"),
        rms_eps=fields.positive_float("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        tied_head=fields.flag("tie_word_embeddings", default=True),
        context_tokens=fields.positive_int("max_position_embeddings", 131_072),
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        window=WindowLayers(
            layers=_hf_window_layers(fields, num_layers),
            window_tokens=fields.positive_int("sliding_window"),
            rope_theta=window_theta,
        ),
        attention_scale=_scale(fields.positive_float("query_pre_attn_scalar", 256.0), head_dim),
    )


def gemma3_from_gguf(
    fields: Fields, *, vocab_size: int, tied_head: bool, has_rope_divisors: bool
) -> ModelConfig:
    """The config of a GGUF file of this architecture; raises ModelError naming the key."""
    name = GGUF_ARCHITECTURE
    for cap in _SOFT_CAPS:
        if fields.has(f"{name}.{cap}"):
            raise fields.refuse(f"{name}.{cap}", "files without this key")
    if has_rope_divisors:
        raise ModelError(f"{fields.where}: the tensor rope_freqs.weight has no place in {name}")
    num_layers = fields.positive_int(f"{name}.block_count")
    num_heads = fields.positive_int(f"{name}.attention.head_count")
    hidden_size = fields.positive_int(f"{name}.embedding_length")
    head_dim = fields.positive_int(f"{name}.attention.key_length", 256)
    for key in (f"{name}.attention.value_length", f"{name}.rope.dimension_count"):
        if fields.positive_int(key, head_dim) != head_dim:
            raise fields.refuse(key, f"the head size, {head_dim}")
    every = fields.positive_int(f"{name}.attention.sliding_window_pattern", _GLOBAL_EVERY)
    return ModelConfig(
        family=FAMILY,
        architecture=name,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.positive_int(f"{name}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        mlp_size=fields.positive_int(f"{name}.feed_forward_length"),
        vocab_size=vocab_size,
        rms_eps=fields.positive_float(f"{name}.attention.layer_norm_rms_epsilon"),
        rope_theta=fields.positive_float(f"{name}.rope.freq_base", _GLOBAL_THETA),
        rope_scaling=_gguf_scaling(fields, name),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=True,
        tied_head=tied_head,
        context_tokens=fields.positive_int(f"{name}.context_length"),
        bos_token_id=fields.token_id("tokenizer.ggml.bos_token_id"),
        eos_token_ids=fields.token_ids("tokenizer.ggml.eos_token_id"),
        window=WindowLayers(
            layers=window_layers(num_layers, every),
            window_tokens=fields.positive_int(f"{name}.attention.sliding_window"),
            rope_theta=fields.positive_float(f"{name}.rope.freq_base_swa", _WINDOW_THETA),
        ),
        attention_scale=_scale(
            hidden_size / num_heads if num_layers == _LAYERS_OF_27B else head_dim, head_dim
        ),
    )


def window_layers(num_layers: int, global_every: int) -> tuple[int, ...]:
    """The layers with a window where each ``global_every``-th has none.

    >>> window_layers(7, 3)
    (0, 1, 3, 4, 6)
    """
    return tuple(layer for layer in range(num_layers) if (layer + 1) % global_every)


def _scale(divided_by: float, head_dim: int) -> float | None:
    """For ``ModelConfig.attention_scale``: logits are divided by the root of ``divided_by``."""
    return None if divided_by == head_dim else divided_by**-0.5


def _refuse_what_cannot_run(fields: Fields) -> None:
    if fields.has("quantization_config"):
        raise fields.refuse(
            "quantization_config",
            "weights stored as float32, float16 or bfloat16, or a GGUF file; "
            "for smaller weights pass --weights int8",
        )
    activation = fields.text("hidden_activation", "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise fields.refuse("hidden_activation", "gelu_pytorch_tanh")
    for flag in ("attention_bias", "use_bidirectional_attention"):
        if fields.flag(flag, default=False):
            raise fields.refuse(flag, "false")
    for cap in _SOFT_CAPS:
        if fields.has(cap):
            raise fields.refuse(cap, "null: logits without a soft cap")


def _hf_window_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    if not fields.has("layer_types"):
        # Written with and without the underscore, by different versions.
        every = fields.positive_int("_sliding_window_pattern", _GLOBAL_EVERY)
        return window_layers(num_layers, fields.positive_int("sliding_window_pattern", every))
    kinds = fields.values["layer_types"]
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(kind not in (_WINDOW, _GLOBAL) for kind in kinds)
    ):
        raise fields.refuse("layer_types", f"{_WINDOW} or {_GLOBAL} for each of {num_layers}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _WINDOW)


def _hf_rope(fields: Fields) -> tuple[float, RopeScaling, float]:
    """(base and scaling of the global layers, base of the window layers)."""
    theta = fields.positive_float("rope_theta", _GLOBAL_THETA)
    window_theta = fields.positive_float("rope_local_base_freq", _WINDOW_THETA)
    by_kind = fields.nested("rope_parameters")
    if by_kind is None:
        return theta, _hf_scaling(fields.nested("rope_scaling")), window_theta
    of_global, of_window = by_kind.nested(_GLOBAL), by_kind.nested(_WINDOW)
    if of_window is not None:
        if _hf_scaling(of_window) != NoScaling():
            raise by_kind.refuse(_WINDOW, "rope_type default")
        window_theta = of_window.positive_float("rope_theta", window_theta)
    if of_global is not None:
        theta = of_global.positive_float("rope_theta", theta)
    return theta, _hf_scaling(of_global), window_theta


def _hf_scaling(settings: Fields | None) -> RopeScaling:
    if settings is None:
        return NoScaling()
    type_field = "rope_type" if settings.has("rope_type") else "type"
    match settings.text(type_field, "default"):
        case "default":
            return NoScaling()
        case "linear":
            return LinearScaling(factor=settings.positive_float("factor"))
        case _:
            raise settings.refuse(type_field, "default, linear")


def _gguf_scaling(fields: Fields, name: str) -> RopeScaling:
    match fields.text(f"{name}.rope.scaling.type", "none"):
        case "none":
            return NoScaling()
        case "linear":
            return LinearScaling(factor=fields.positive_float(f"{name}.rope.scaling.factor"))
        case _:
            raise fields.refuse(f"{name}.rope.scaling.type", "none, linear")
