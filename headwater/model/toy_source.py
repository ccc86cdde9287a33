"""A random model made from a seed: no download, loads in milliseconds, any shape.

Its text is noise, but a deterministic one: equal options give equal weights,
whatever else was loaded before. Its tokenizer maps ids 0..255 to the bytes and
keeps a few control ids above. For tests and first steps; named ``toy`` in the
catalogue. With ``family=gemma3`` most layers have a window, of a few tokens if wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.core.randomness import keyed_bits
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.config import ModelConfig, NoScaling, WindowLayers
from headwater.model.gemma3_config import window_layers
from headwater.model.weights import TensorInfo

NUM_BYTES = 256
# Where recipe's byte tokenizer has its control ids; the rest up to VOCAB_SIZE is spare.
TEXT_START, TURN_START, TURN_END = range(NUM_BYTES, NUM_BYTES + 3)
VOCAB_SIZE = NUM_BYTES + 8


_LLAMA, _GEMMA3 = "llama", "gemma3"
_ONLY_GEMMA3 = ("window", "global_every")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyOptions:
    """The toy's shape; the catalogue spells it ``toy:seed=3,layers=4``."""

    family: str = _LLAMA  # or gemma3
    seed: int = 0
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 128
    context: int = 4096
    # gemma3: all layers but each ``global_every``-th see the last ``window`` tokens.
    window: int = 64
    global_every: int = 2

    @staticmethod
    def parse(text: str) -> ToyOptions:
        """``name=value`` pairs with commas between; empty for the defaults."""
        numbers = [field.name for field in fields(ToyOptions) if field.name != "family"]
        family, chosen = _LLAMA, dict[str, int]()
        for pair in filter(None, text.split(",")):
            name, _, value = pair.partition("=")
            if name == "family" and value in (_LLAMA, _GEMMA3):
                family = value
            elif name in numbers and value.isdecimal():
                chosen[name] = int(value)
            else:
                raise ModelError(
                    f"toy model: option {pair!r} is not name=integer with a name of "
                    f"{', '.join(numbers)}, nor family={_LLAMA} or family={_GEMMA3}"
                )
        options = ToyOptions(family=family, **chosen)
        for name in numbers:
            if name != "seed" and getattr(options, name) < 1:
                raise ModelError(f"toy model: {name} must be at least 1")
            if name in _ONLY_GEMMA3 and name in chosen and family != _GEMMA3:
                raise ModelError(f"toy model: {name} is only for family={_GEMMA3}")
        if options.hidden % options.heads:
            raise ModelError(
                f"toy model: hidden={options.hidden} is not a multiple of heads={options.heads}"
            )
        return options

    def config(self) -> ModelConfig:
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
        # Unit variance in, unit variance out. So has the table, but gemma3's, whose rows
        # are scaled by hidden ** 0.5 when they are looked up.
        is_plain_table = name.endswith("embed_tokens.weight") and not is_gemma3
        scale = 1.0 if is_plain_table else shape[-1] ** -0.5
        return torch.randn(shape, generator=generator) * scale

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
