"""A random model made from a seed: no download, loads in milliseconds, any shape.

Its text is noise, but a deterministic one: equal options give equal weights,
whatever else was loaded before. Its tokenizer maps ids 0..255 to the bytes and
keeps a few control ids above. For tests and first steps; named ``toy`` in the
catalogue.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.core.randomness import keyed_bits
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.config import ModelConfig, NoScaling
from headwater.model.weights import TensorInfo

NUM_BYTES = 256
# Where recipe's byte tokenizer has its control ids; the rest up to VOCAB_SIZE is spare.
TEXT_START, TURN_START, TURN_END = range(NUM_BYTES, NUM_BYTES + 3)
VOCAB_SIZE = NUM_BYTES + 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyOptions:
    """The toy's shape; the catalogue spells it ``toy:seed=3,layers=4``."""

    seed: int = 0
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 128
    context: int = 4096

    @staticmethod
    def parse(text: str) -> ToyOptions:
        """``name=value`` pairs with commas between; empty for the defaults."""
        known = [field.name for field in fields(ToyOptions)]
        chosen: dict[str, int] = {}
        for pair in filter(None, text.split(",")):
            name, _, value = pair.partition("=")
            if name not in known or not value.isdecimal():
                raise ModelError(
                    f"toy model: option {pair!r} is not name=integer with a name of "
                    f"{', '.join(known)}"
                )
            chosen[name] = int(value)
        options = ToyOptions(**chosen)
        for field in fields(ToyOptions):
            if field.name != "seed" and getattr(options, field.name) < 1:
                raise ModelError(f"toy model: {field.name} must be at least 1")
        if options.hidden % options.heads:
            raise ModelError(
                f"toy model: hidden={options.hidden} is not a multiple of heads={options.heads}"
            )
        return options

    def config(self) -> ModelConfig:
        return ModelConfig(
            family="llama",
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
            qk_norm=False,
            # A random tied head would mostly repeat the last token.
            tied_head=False,
            context_tokens=self.context,
            bos_token_id=TEXT_START,
            eos_token_ids=frozenset({TURN_END}),
        )


class ToySource:
    """Tensors drawn from ``seed`` and their own name, so in any order the same."""

    def __init__(self, seed: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._seed = seed
        self._shapes = shapes

    @property
    def where(self) -> str:
        return f"toy model (seed {self._seed})"

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(shape, "F32") for name, shape in self._shapes.items()}

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(keyed_bits(self._seed, 0, name) >> 1)
        # Unit variance in, unit variance out; the table itself has unit variance.
        scale = 1.0 if name.endswith("embed_tokens.weight") else shape[-1] ** -0.5
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
