"""A random model made from a seed: no download, loads in milliseconds, any shape.

Its text is noise, but a deterministic one: equal options give equal weights,
whatever else was loaded before. Its tokenizer maps ids 0..255 to the bytes and
keeps a few control ids above. For tests and first steps; named ``toy`` in the
catalogue. With ``family=gemma3`` most layers have a window, of a few tokens if wanted;
``family=ced`` is a small encoder and decoder with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.core.randomness import keyed_bits
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.ced_config import HF_ARCHITECTURE as CED_ARCHITECTURE
from headwater.model.ced_config import ced_from_hf
from headwater.model.config import ModelConfig, NoScaling, WindowLayers
from headwater.model.fields import Fields
from headwater.model.gemma3_config import window_layers
from headwater.model.weights import TensorInfo

NUM_BYTES = 256
# Where recipe's byte tokenizer has its control ids; the rest up to VOCAB_SIZE is spare.
TEXT_START, TURN_START, TURN_END = range(NUM_BYTES, NUM_BYTES + 3)
VOCAB_SIZE = NUM_BYTES + 8


_LLAMA, _GEMMA3, _CED = _FAMILIES = "llama", "gemma3", "ced"
# Options that not every family has, and other defaults than those below.
_ONLY: Mapping[str, tuple[str, ...]] = {
    "kv_heads": (_LLAMA, _GEMMA3),
    "window": (_GEMMA3, _CED),
    "global_every": (_GEMMA3,),
    **dict.fromkeys(("encoder_layers", "ratio", "experts", "top", "shared"), (_CED,)),
}
_DEFAULTS: Mapping[str, Mapping[str, int]] = {_CED: {"layers": 6, "window": 16, "mlp": 64}}
_MAY_BE_ZERO = ("seed", "shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyOptions:
    """The toy's shape; the catalogue spells it ``toy:seed=3,layers=4``."""

    family: str = _LLAMA  # or gemma3, ced
    seed: int = 0
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 128  # ced: of one expert
    context: int = 4096
    # gemma3: all layers but each ``global_every``-th see the last ``window`` tokens.
    # ced: every layer has such a window.
    window: int = 64
    global_every: int = 2
    # ced: the second layer is a source with this ratio, the first one behind the encoder the
    # last source.
    encoder_layers: int | None = None  # half of them if None
    ratio: int = 2
    experts: int = 4
    top: int = 2  # experts of a token
    shared: int = 1

    @staticmethod
    def parse(text: str) -> ToyOptions:
        """``name=value`` pairs with commas between; empty for the defaults."""
        numbers = [field.name for field in fields(ToyOptions) if field.name != "family"]
        family, chosen = _LLAMA, dict[str, int]()
        for pair in filter(None, text.split(",")):
            name, _, value = pair.partition("=")
            if name == "family" and value in _FAMILIES:
                family = value
            elif name in numbers and value.isdecimal():
                chosen[name] = int(value)
            else:
                raise ModelError(
                    f"toy model: option {pair!r} is not name=integer with a name of "
                    f"{', '.join(numbers)}, nor family=" + " or family=".join(_FAMILIES)
                )
        options = ToyOptions(family=family, **{**_DEFAULTS.get(family, {}), **chosen})
        for name, number in chosen.items():
            if number < 1 and name not in _MAY_BE_ZERO:
                raise ModelError(f"toy model: {name} must be at least 1")
            if family not in _ONLY.get(name, _FAMILIES):
                only = " or ".join(f"family={one}" for one in _ONLY[name])
                raise ModelError(f"toy model: {name} is only for {only}")
        if options.hidden % options.heads:
            raise ModelError(
                f"toy model: hidden={options.hidden} is not a multiple of heads={options.heads}"
            )
        return options

    def config(self) -> ModelConfig:
        """Raises ModelError where the options contradict each other."""
        if self.family == _CED:
            config = ced_from_hf(Fields(self._ced_values(), "toy model"))
            return replace(config, architecture="toy")
        return ModelConfig(
            family=self.family,
            architecture="toy",
            hidden_size=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            mlp_size=self.mlp,
            vocab_size=VOCAB_SIZE,
            rms_eps=1e-5,
            rope_theta=10_000.0,
            rope_scaling=NoScaling(),
            qkv_bias=False,
            output_bias=False,
            mlp_bias=False,
            qk_norm=self.family == _GEMMA3,
            # A random tied head would mostly repeat the last token.
            tied_head=False,
            context_tokens=self.context,
            bos_token_id=TEXT_START,
            eos_token_ids=frozenset({TURN_END}),
            window=WindowLayers(
                layers=window_layers(self.layers, self.global_every),
                window_tokens=self.window,
                rope_theta=10_000.0,
            )
            if self.family == _GEMMA3
            else None,
        )

    def _ced_values(self) -> dict[str, object]:
        """As a config.json says it."""
        encoder = self.encoder_layers or self.layers // 2
        first = min(1, encoder)
        head_dim = self.hidden // self.heads
        return {
            "architectures": [CED_ARCHITECTURE],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_encoder_layers": encoder,
            "num_attention_heads": self.heads,
            "head_dim": head_dim,
            "qk_rope_head_dim": head_dim // 2,
            "q_lora_rank": self.hidden // 2,
            "o_groups": 2 if self.heads % 2 == 0 else 1,
            "o_lora_rank": self.hidden // 2,
            "sliding_window": self.window,
            "compress_ratios": [0] * first
            + [self.ratio] * (encoder - first)
            + [1] * (self.layers - encoder),
            "kv_source_layer_ids": sorted({first, encoder}),
            "rope_theta": 10_000.0,
            "compress_rope_theta": 160_000.0,
            "n_routed_experts": self.experts,
            "n_shared_experts": self.shared,
            "num_experts_per_tok": self.top,
            "moe_intermediate_size": self.mlp,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 1.0,
            "swiglu_limit": 10.0,
            "rms_norm_eps": 1e-5,
            "vocab_size": VOCAB_SIZE,
            # A random tied head would mostly repeat the last token.
            "tie_word_embeddings": False,
            "max_position_embeddings": self.context,
            "bos_token_id": TEXT_START,
            "eos_token_id": TURN_END,
        }


class ToySource:
    """Tensors drawn from the seed and their own name, so in any order the same."""

    def __init__(self, options: ToyOptions, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._options = options
        self._shapes = shapes

    @property
    def where(self) -> str:
        return f"toy model (seed {self._options.seed})"

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(shape, "F32") for name, shape in self._shapes.items()}

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        is_gemma3 = self._options.family == _GEMMA3
        if name.endswith("norm.weight"):
            # gemma3's checkpoints store how far a norm is from one.
            return torch.zeros(shape) if is_gemma3 else torch.ones(shape)
        generator = torch.Generator().manual_seed(keyed_bits(self._options.seed, 0, name) >> 1)
        noise = torch.randn(shape, generator=generator)
        if name.endswith("gate.bias"):  # enough to change some choices of experts
            return noise * 0.1
        # Unit variance in, unit variance out. So has the table, but gemma3's, whose rows
        # are scaled by hidden ** 0.5 when they are looked up.
        is_table = name.endswith(("embed_tokens.weight", "embed.weight"))
        return noise if is_table and not is_gemma3 else noise * shape[-1] ** -0.5

    def stored_bytes(self, name: str) -> memoryview:
        return memoryview(self.read(name).numpy().tobytes())

    def close(self) -> None:
        """Nothing is open."""


def toy_tokenizer(model_id: str) -> TokenizerSource:
    return TokenizerSource(
        kind="byte",
        bos_token_id=TEXT_START,
        end_token_ids=frozenset({TURN_END}),
        vocab_size=VOCAB_SIZE,
        model_id=model_id,
    )
