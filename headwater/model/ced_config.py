"""The config.json of the family ``ced``: DeepSeek-V4.1's shape at any size.

Field names are DeepSeek's. ``PLACES`` lists what the published models have besides and this
family does not compute yet: each is refused by name when a file asks for it, so the field is
where a later version begins. Called by ``hf_config``, and by ``toy_source`` for its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.errors import ModelError
from headwater.model.config import (
    EncoderDecoder,
    ModelConfig,
    NoScaling,
    RopeScaling,
    YarnScaling,
)
from headwater.model.fields import Fields

FAMILY = "ced"
HF_ARCHITECTURE = "HeadwaterCedForCausalLM"
HF_MODEL_TYPE = "headwater_ced"
# The published checkpoints' architecture, for a refusal that says what they need.
HF_RELEASED = "DeepseekV41ForCausalLM"
RELEASED_NEEDS = (
    f"{HF_ARCHITECTURE}; a released DeepSeek-V4.1 checkpoint also needs hyper-connections, n-gram "
    "memory, the top-k index, draft layers and 4 and 8 bit weights, which are not served yet"
)

_RATIOS = (0, 1, 2)  # of ``compress_ratios``: tokens in one row of a layer's source; 0: no source
_LEAST_ROPE_DIM = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Fields that are not served: ``field``, or all that begin with it where it ends with ``*``.
    Values in ``absent`` ask for nothing, and so does null."""

    field: str
    what: str
    absent: tuple[object, ...] = ()

    def names_in(self, fields: Fields) -> list[str]:
        if not self.field.endswith("*"):
            return [self.field]
        return [name for name in fields.values if name.startswith(self.field[:-1])]


PLACES = (
    Place(field="hc_mult", what="hyper-connections: one residual stream", absent=(1,)),
    Place(field="engram_*", what="n-gram memory", absent=([],)),
    Place(field="index_*", what="a top-k index: every row is attended", absent=([],)),
    Place(field="candidate_*", what="candidates of a top-k index", absent=([],)),
    Place(field="num_nextn_predict_layers", what="draft layers", absent=(0,)),
    Place(field="dspark_*", what="draft layers", absent=([],)),
    Place(field="num_hash_layers", what="experts chosen by token id", absent=(0,)),
    Place(field="n_group", what="groups of experts: one group", absent=(1,)),
    Place(field="topk_group", what="groups of experts: one group", absent=(1,)),
    Place(field="vision_config", what="images"),
    Place(field="quantization_config", what="weights of 4 or 8 bits in files; see --weights int8"),
    Place(field="expert_dtype", what="experts of 4 or 8 bits in files; see --weights int8"),
    Place(field="attention_bias", what="biases in attention", absent=(False,)),
)

# Fields with one served value, which a file must name.
_FIXED = (("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"))


def ced_from_hf(fields: Fields) -> ModelConfig:
    """The config of a ``HeadwaterCedForCausalLM``; raises ModelError naming the field."""
    _refuse_what_cannot_run(fields)
    num_layers = fields.positive_int("num_hidden_layers")
    num_heads = fields.positive_int("num_attention_heads")
    head_dim = fields.positive_int("head_dim")
    context_tokens = fields.positive_int("max_position_embeddings")
    encoder_decoder = _encoder_decoder(fields, num_layers, num_heads, head_dim)
    return ModelConfig(
        family=FAMILY,
        architecture=HF_ARCHITECTURE,
        hidden_size=fields.positive_int("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=head_dim,
        mlp_size=encoder_decoder.expert_size,
        vocab_size=fields.positive_int("vocab_size"),
        rms_eps=fields.positive_float("rms_norm_eps"),
        rope_theta=fields.positive_float("rope_theta"),
        rope_scaling=_scaling(fields, context_tokens),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_head=fields.flag("tie_word_embeddings", default=False),
        context_tokens=context_tokens,
        bos_token_id=fields.token_id("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        encoder_decoder=encoder_decoder,
    )


def _refuse_what_cannot_run(fields: Fields) -> None:
    if fields.has("model_type") and fields.text("model_type") != HF_MODEL_TYPE:
        raise fields.refuse("model_type", HF_MODEL_TYPE)
    for place in PLACES:
        for name in place.names_in(fields):
            if fields.has(name) and fields.values[name] not in place.absent:
                others = "".join(f" or {value}" for value in place.absent)
                raise fields.refuse(name, f"null{others} ({place.what})")
    for name, served in _FIXED:
        if fields.text(name) != served:
            raise fields.refuse(name, served)
    if not fields.flag("norm_topk_prob", default=True):
        raise fields.refuse("norm_topk_prob", "true")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", "silu")


def _encoder_decoder(
    fields: Fields, num_layers: int, num_heads: int, head_dim: int
) -> EncoderDecoder:
    num_encoder_layers = fields.positive_int("num_encoder_layers")
    if num_encoder_layers >= num_layers:
        raise fields.refuse("num_encoder_layers", f"fewer than num_hidden_layers = {num_layers}")
    ratios = fields.counts("compress_ratios")
    sources = fields.counts("kv_source_layer_ids")
    _check_ratios(fields, ratios, num_layers)
    _check_sources(fields, sources, ratios, num_encoder_layers)
    rope_head_dim = fields.positive_int("qk_rope_head_dim")
    if rope_head_dim % 2 or not _LEAST_ROPE_DIM <= rope_head_dim <= head_dim:
        raise fields.refuse(
            "qk_rope_head_dim", f"an even number from {_LEAST_ROPE_DIM} to head_dim = {head_dim}"
        )
    o_groups = fields.positive_int("o_groups")
    if num_heads % o_groups:
        raise fields.refuse("o_groups", f"a divisor of num_attention_heads = {num_heads}")
    num_experts = fields.positive_int("n_routed_experts")
    if fields.positive_int("num_experts_per_tok") > num_experts:
        raise fields.refuse("num_experts_per_tok", f"at most n_routed_experts = {num_experts}")
    return EncoderDecoder(
        num_encoder_layers=num_encoder_layers,
        kv_source_layers=sources,
        compress_ratios=ratios,
        window_tokens=fields.positive_int("sliding_window"),
        rope_head_dim=rope_head_dim,
        compress_rope_theta=fields.positive_float("compress_rope_theta"),
        q_rank=fields.positive_int("q_lora_rank"),
        o_groups=o_groups,
        o_rank=fields.positive_int("o_lora_rank"),
        num_experts=num_experts,
        num_experts_per_token=fields.positive_int("num_experts_per_tok"),
        num_shared_experts=fields.count("n_shared_experts"),
        expert_size=fields.positive_int("moe_intermediate_size"),
        routed_scaling=fields.positive_float("routed_scaling_factor"),
        swiglu_limit=fields.positive_float("swiglu_limit"),
    )


def _check_ratios(fields: Fields, ratios: Sequence[int], num_layers: int) -> None:
    if len(ratios) != num_layers or not set(ratios) <= set(_RATIOS):
        raise fields.refuse("compress_ratios", f"0, 1 or 2 for each of {num_layers} layers")


def _check_sources(
    fields: Fields, sources: Sequence[int], ratios: Sequence[int], num_encoder_layers: int
) -> None:
    name = "kv_source_layer_ids"
    if list(sources) != sorted(set(sources)) or not sources or sources[-1] != num_encoder_layers:
        raise fields.refuse(
            name, f"ascending layers, the last one num_encoder_layers = {num_encoder_layers}"
        )
    # Its rows must need no pairing with tokens that its later part skips.
    if ratios[sources[-1]] != 1:
        raise _refuse_ratio(fields, sources[-1], "1, as it is the last source layer")
    for layer, ratio in enumerate(ratios):
        source = max((s for s in sources if s <= layer), default=None)
        if source is None and ratio:
            raise _refuse_ratio(fields, layer, f"0, as it is before the first of {name}")
        if source == layer and not ratio:
            raise _refuse_ratio(fields, layer, f"1 or 2, as it is one of {name}")
        if source is not None and ratio not in (0, ratios[source]):
            raise _refuse_ratio(
                fields, layer, f"0 or {ratios[source]}, the ratio of its source, layer {source}"
            )


def _refuse_ratio(fields: Fields, layer: int, supported: str) -> ModelError:
    return fields.refuse("compress_ratios", f"for layer {layer} {supported}")


def _scaling(fields: Fields, context_tokens: int) -> RopeScaling:
    """Of the layers with a source; ``max_position_embeddings`` is the extended context."""
    settings = fields.nested("rope_scaling")
    if settings is None:
        return NoScaling()
    type_field = "rope_type" if settings.has("rope_type") else "type"
    if settings.text(type_field) != "yarn":
        raise settings.refuse(type_field, "yarn")
    # The output is turned back by the same table, so a factor on it would be there twice.
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if settings.positive_float(name, 1.0) != 1.0:
            raise settings.refuse(name, "1.0")
    scaling = YarnScaling(
        factor=settings.positive_float("factor"),
        original_context_tokens=settings.positive_int("original_max_position_embeddings"),
        attention_factor=1.0,
        beta_fast=settings.positive_float("beta_fast", 32.0),
        beta_slow=settings.positive_float("beta_slow", 1.0),
    )
    reached = int(scaling.factor * scaling.original_context_tokens)
    if reached < context_tokens:
        raise fields.refuse("max_position_embeddings", f"at most what yarn reaches, {reached}")
    return scaling
