"""A model's shape and arithmetic as one frozen value, whatever file it came from.

``hf_config`` and ``gguf_config`` fill it; a family builds the forward pass from
it. It says nothing about where the weights lie or how they are stored.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from headwater.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class NoScaling:
    """Plain rotary embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicScaling:
    """NTK-aware base change for contexts beyond ``original_context_tokens``."""

    factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): slow frequencies interpolated, fast ones kept, a ramp between.

    ``attention_factor`` multiplies cos and sin, so attention logits by its square.
    """

    factor: float
    original_context_tokens: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round the ramp's ends to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, smooth between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisorScaling:
    """Each frequency divided by its own number: GGUF's form of Llama 3.1 scaling."""

    divisors: tuple[float, ...]


RopeScaling = (
    NoScaling | LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | DivisorScaling
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLayers:
    """The layers whose tokens see the last ``window_tokens`` only, their own included.

    They rotate with a base of their own and without scaling.
    """

    layers: tuple[int, ...]  # ascending; at least one layer of the model is not among them
    window_tokens: int
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoder:
    """DeepSeek-V4.1's shape: what the family ``ced`` has besides the fields of ModelConfig.

    Layers [0, num_encoder_layers) are the causal encoder. ``compress_ratios`` are 0 (window
    only), 1 or 2, one per layer; a layer with r > 0 reads the rows of the nearest source layer
    at or below it, which has the same ratio. Places for what a later version computes:
    ``ced_config`` refuses hyper-connections, n-gram memory, a top-k index and draft layers.
    """

    num_encoder_layers: int
    kv_source_layers: tuple[int, ...]  # ascending; the last one is num_encoder_layers
    compress_ratios: tuple[int, ...]
    window_tokens: int
    rope_head_dim: int  # the last entries of a head; the rest is not rotated
    compress_rope_theta: float  # of layers with r > 0, which alone scale (``rope_scaling``)
    q_rank: int
    o_groups: int
    o_rank: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    expert_size: int  # inner size of one expert; a shared one has the same
    routed_scaling: float
    swiglu_limit: float

    @property
    def cut(self) -> int:
        """The last source layer: it and the layers behind it are *late*. Its KV is written for
        every token, the rest of it and of them is computed where it is needed."""
        return self.kv_source_layers[-1]

    def source_of(self, layer: int) -> int | None:
        """The layer whose rows ``layer`` attends to beside its window; None: it has none."""
        if not self.compress_ratios[layer]:
            return None
        return max(source for source in self.kv_source_layers if source <= layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder. Raises ModelError when the shapes contradict each other."""

    family: str
    architecture: str  # as the file names it
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool  # RMS norm over each query and key head before rotation
    tied_head: bool  # the output head is the embedding table
    context_tokens: int  # served context: prompt and output together
    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    window: WindowLayers | None = None  # None: every layer sees every token
    attention_scale: float | None = None  # of q k; None: head_dim ** -0.5
    encoder_decoder: EncoderDecoder | None = None  # exactly for the family ced

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.architecture}: {self.num_heads} attention heads cannot share "
                f"{self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2 or self.head_dim < 4:
            raise ModelError(
                f"{self.architecture}: head_dim = {self.head_dim} is not supported; "
                "rotary embedding needs an even number of at least 4"
            )
        scaling = self.rope_scaling
        if isinstance(scaling, DivisorScaling) and len(scaling.divisors) != self.head_dim // 2:
            raise ModelError(
                f"{self.architecture}: {len(scaling.divisors)} rotary divisors for head_dim = "
                f"{self.head_dim}; expected {self.head_dim // 2}"
            )
        if self.window is not None:
            self._check_window(self.window.layers)

    def _check_window(self, layers: tuple[int, ...]) -> None:
        if not layers or not set(layers) < set(range(self.num_layers)):
            raise ModelError(
                f"{self.architecture}: layers {list(layers)} of {self.num_layers} have a window; "
                "supported: some of the layers and not all"
            )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def query_scale(self) -> float:
        """What attention logits are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    def arithmetic_json(self) -> str:
        """What the forward pass depends on, as canonical JSON, for the fingerprint.

        Ids that end a text and the served context are left out: KV does not
        depend on them. The rotary table, which may depend on the context, is
        hashed beside this. Fields that only some families have are left out while
        they are not set, so that they change no other model's fingerprint.
        """
        values = asdict(self)
        for name in ("bos_token_id", "eos_token_ids", "context_tokens"):
            del values[name]
        for name in ("window", "attention_scale", "encoder_decoder"):
            if values[name] is None:
                del values[name]
        values["rope_scaling"]["kind"] = type(self.rope_scaling).__name__
        return json.dumps(values, sort_keys=True)


def longest_context_tokens(max_position_tokens: int, scaling: RopeScaling) -> int:
    """The context a model can be served with.

    YaRN and dynamic scaling extend an original length by their factor. Files
    with linear, llama3 or divisor scaling already state the extended length.
    """
    match scaling:
        case DynamicScaling(factor=factor, original_context_tokens=original):
            return int(original * factor)
        case YarnScaling(factor=factor, original_context_tokens=original):
            return int(original * factor)
        case _:
            return max_position_tokens
