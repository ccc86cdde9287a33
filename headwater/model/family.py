"""What a family of models must provide, and what a loaded model can do.

A family turns a config and tensors into a Model; a Model turns token ids and
cached KV into logits. ``engine`` sees only this file's types; ``load`` picks
the family by ``ModelConfig.family``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from headwater.model.config import ModelConfig
from headwater.model.weights import ReadTensor
from headwater.numerics.ops import LayerKV, Need, Ops, RaggedBatch, WeightFormat


class CacheKind(StrEnum):
    """What a layer's attention sees, hence what of its KV must be kept."""

    GLOBAL = "global"  # every earlier token
    WINDOW = "window"  # the last ``window_tokens``
    DRAFT = "draft"  # a drafter's own layers


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers with KV of one kind and shape. ``layers`` index the ``kv`` given to forward."""

    kind: CacheKind
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window_tokens: int | None = None  # set exactly for WINDOW
    persisted: bool = True  # worth storing beyond the device
    # One row per token is key and value of every head (``Ops.allocate_rows``); then
    # ``num_kv_heads`` is 1. With ``ratio`` 2, one row for two tokens.
    is_rows: bool = False
    ratio: int = 1
    # Its layers compute a prompt's last tokens only, where decoder replay is on.
    is_late: bool = False


class ModelPart(StrEnum):
    """What of a model's weights is kept. Of a model without late layers: always all."""

    ALL = "all"
    EARLY = "early"  # what writes the KV that a whole prompt needs; gives no logits


class Model(Protocol):
    """A loaded model. Holds weights; KV belongs to the caller."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def cache_plan(self) -> tuple[CacheGroup, ...]:
        """Groups that together name every layer with KV once."""
        ...

    @property
    def needs(self) -> frozenset[Need]:
        """Every one whose ops ``forward`` calls."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights in memory."""
        ...

    @property
    def full_weights_bytes(self) -> int:
        """What they would be for ``ModelPart.ALL``, packed alike."""
        ...

    @property
    def step_weights_bytes(self) -> int:
        """Bytes of weights that one decode step reads: the bandwidth bound. Leaves out an
        embedding table of its own (a few rows are read). Of routed experts it counts those
        of one token, the least: more rows read more of them, and otherwise no more."""
        ...

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of the layers' linears for one token: two per
        multiply-add; without attention and without the output head. Of routed experts
        the chosen ones."""
        ...

    @property
    def late_flops_per_token(self) -> int:
        """The share of ``flops_per_token`` that a token outside ``RaggedBatch.late`` is spared."""
        ...

    def forward(self, ids: Tensor, batch: RaggedBatch, kv: Sequence[LayerKV]) -> Tensor:
        """int64 [T] -> hidden states after the final norm, [T, H] in ``act_dtype``.

        Writes the tokens' KV at ``batch.slots``, then attends over each row's blocks.
        Every position must be below ``config.context_tokens``. With ``batch.late`` the rows of
        other tokens hold what the last layer before the late ones gave: finite exactly when
        the KV that was written is, and good for nothing else. All rows are so where only
        ``ModelPart.EARLY`` was built.
        """
        ...

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """[R, H], rows of ``forward``'s result -> float32 [R, V]. Raises ModelError where only
        ``ModelPart.EARLY`` was built."""
        ...


class Family(Protocol):
    """How to check and build one family of models."""

    @property
    def name(self) -> str: ...

    def expected_tensors(
        self, config: ModelConfig, part: ModelPart = ModelPart.ALL
    ) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that ``build`` keeps for ``part``, with its shape."""
        ...

    def unused_tensors(self, config: ModelConfig) -> frozenset[str]:
        """Tensors that checkpoints of this config may carry although nothing reads them."""
        ...

    def cache_plan(
        self, config: ModelConfig, part: ModelPart = ModelPart.ALL
    ) -> tuple[CacheGroup, ...]:
        """``Model.cache_plan`` of what ``build`` will give."""
        ...

    def build(
        self,
        config: ModelConfig,
        read: ReadTensor,
        ops: Ops,
        weight_format: WeightFormat,
        part: ModelPart = ModelPart.ALL,
    ) -> Model:
        """Read every expected tensor once, in the order of the forward pass."""
        ...
