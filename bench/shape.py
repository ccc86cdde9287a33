"""What a model's step must read and compute at least, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.model.catalogue import resolve
from headwater.model.config import ModelConfig
from headwater.model.load import open_model

BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class ModelShape:
    config: ModelConfig

    @property
    def layer_params(self) -> int:
        """Weights of all layers' linears."""
        c = self.config
        attention = c.hidden_size * (2 * c.query_size + 2 * c.kv_size)
        return c.num_layers * (attention + 3 * c.hidden_size * c.mlp_size)

    @property
    def bf16_step_bytes(self) -> int:
        """Bytes of bf16 weights that one decode step reads: every linear and the head, once."""
        return BF16_BYTES * (self.layer_params + self.config.vocab_size * self.config.hidden_size)

    def prefill_flops(self, num_tokens: int) -> float:
        """Linears and causal attention of the layers; two operations per multiply-add."""
        c = self.config
        pairs = num_tokens * (num_tokens + 1) / 2
        attention = c.num_layers * 4 * c.query_size * pairs
        return 2.0 * self.layer_params * num_tokens + attention


def model_shape(model: str) -> ModelShape:
    opened = open_model(resolve(model))
    opened.source.close()
    return ModelShape(opened.config)
