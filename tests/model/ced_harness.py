"""Random configs of the family ced, and a model with KV of its own that runs rows of a step."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.model.ced import CedFamily, CedModel
from headwater.model.config import ModelConfig
from headwater.model.family import CacheKind, ModelPart
from headwater.model.hf_config import config_from_hf
from headwater.numerics.ops import (
    KVFormat,
    LateTokens,
    LayerKV,
    Ops,
    RaggedBatch,
    WeightFormat,
)

CED: Mapping[str, object] = {
    "architectures": ["HeadwaterCedForCausalLM"],
    "model_type": "headwater_ced",
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_encoder_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 6,
    "compress_ratios": [0, 2, 2, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": None,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 48,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
}
BLOCK_TOKENS = 8


def ced_values(**changes: object) -> dict[str, object]:
    """A config.json; a change to None removes the field."""
    return {name: v for name, v in {**CED, **changes}.items() if v is not None}


def random_config(rng: random.Random) -> ModelConfig:
    """Any shape that is allowed, tiny."""
    num_encoder, num_decoder = rng.randint(1, 4), rng.randint(1, 3)
    sources = sorted({*rng.sample(range(num_encoder), rng.randint(0, num_encoder)), num_encoder})
    ratio, ratios = 0, []
    for layer in range(num_encoder + num_decoder):
        if layer in sources:
            ratio = 1 if layer == num_encoder else rng.choice((1, 2))
        # A layer behind a source may do without it.
        ratios.append(ratio if layer in sources or rng.random() < 0.8 else 0)
    o_groups, experts = rng.choice((1, 2, 4)), rng.randint(1, 5)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return config_from_hf(
        ced_values(
            hidden_size=rng.choice((16, 24)),
            num_hidden_layers=num_encoder + num_decoder,
            num_encoder_layers=num_encoder,
            num_attention_heads=o_groups * rng.choice((1, 2)),
            head_dim=rng.choice((8, 12)),
            qk_rope_head_dim=rng.choice((4, 8)),
            q_lora_rank=rng.choice((8, 12)),
            o_groups=o_groups,
            o_lora_rank=rng.choice((4, 6)),
            sliding_window=rng.choice((1, 3, 6, 8, 11)),
            compress_ratios=ratios,
            kv_source_layer_ids=sources,
            rope_scaling=rng.choice((None, yarn)),
            n_routed_experts=experts,
            n_shared_experts=rng.randint(0, 2),
            num_experts_per_tok=rng.randint(1, experts),
            moe_intermediate_size=rng.choice((6, 10)),
            swiglu_limit=rng.choice((0.5, 10.0)),
            tie_word_embeddings=rng.random() < 0.5,
        ),
        "random",
    )


def ced_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Sinks and biases that matter, norms that are not one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in CedFamily().expected_tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1.0 + 0.2 * noise
        elif name.endswith("gate.bias"):
            tensors[name] = 0.2 * noise
        elif name.endswith(("attn_sink", "embed.weight")):
            tensors[name] = noise
        else:
            tensors[name] = noise * 1.5 * shape[-1] ** -0.5
    return tensors


def built(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    ops: Ops,
    part: ModelPart = ModelPart.ALL,
    weight_format: WeightFormat = WeightFormat.FP32,
) -> CedModel:
    def read(name: str) -> Tensor:
        return tensors[name].clone()

    return CedFamily().build(config, read, ops, weight_format, part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """As ``core.step.StepRow``; sequence s has the blocks that ``Machine.tables[s]`` says."""

    sequence: int
    start: int
    tokens: Sequence[int]
    window_start: int = 0
    num_replayed: int = 0
    late_start: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Machine:
    """A model, KV for some sequences in scattered blocks, and steps of them."""

    def __init__(
        self,
        model: CedModel,
        ops: Ops,
        num_sequences: int,
        max_tokens: int,
        kv_format: KVFormat = KVFormat.FP32,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.model, self.ops, self.block_tokens = model, ops, block_tokens
        width = -(-max_tokens // block_tokens)
        num_blocks = num_sequences * width
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(num_blocks))
        self.tables = order.view(num_sequences, width)
        kv: dict[int, LayerKV] = {
            layer: ops.allocate_rows(
                num_blocks, block_tokens, group.head_dim, kv_format, group.ratio
            )
            for group in model.cache_plan
            for layer in group.layers
        }
        self.kv = tuple(kv[layer] for layer in sorted(kv))

    def run(self, rows: Sequence[Row], *, has_late: bool = False) -> list[Tensor]:
        """Each row's hidden states, in one step. ``has_late``: with decoder replay."""
        late = None
        if has_late:
            starts = torch.tensor([0, *(len(row.tokens) for row in rows)]).cumsum(0).tolist()
            begins = [max(row.late_start - row.start, 0) for row in rows]
            kept = [
                Row(
                    sequence=row.sequence,
                    start=row.start + begin,
                    tokens=row.tokens[begin:],
                    window_start=max(row.window_start, row.late_start),
                    num_replayed=max(row.num_replayed - begin, 0),
                )
                for row, begin in zip(rows, begins, strict=True)
                if begin < len(row.tokens)
            ]
            indices = [
                index
                for first, row, begin in zip(starts, rows, begins, strict=False)
                for index in range(first + begin, first + len(row.tokens))
            ]
            late = LateTokens(
                indices=torch.tensor(indices, dtype=torch.int64),
                batch=self._batch(kept, None) if kept else None,
            )
        ids = torch.tensor([token for row in rows for token in row.tokens])
        with torch.inference_mode():
            hidden = self.model.forward(ids, self._batch(rows, late), self.kv)
        return list(hidden.split([len(row.tokens) for row in rows]))

    def logits(self, rows: Sequence[Row], *, has_late: bool = False) -> list[Tensor]:
        """Of each row's late tokens."""
        late = [
            hidden[max(row.late_start - row.start, 0) :]
            for row, hidden in zip(rows, self.run(rows, has_late=has_late), strict=True)
        ]
        vocab_size = self.model.config.vocab_size
        return [self.model.logits(one) if len(one) else torch.empty(0, vocab_size) for one in late]

    def layers(self, kind: CacheKind) -> list[LayerKV]:
        return [
            self.kv[layer]
            for group in self.model.cache_plan
            if group.kind is kind
            for layer in group.layers
        ]

    def blocks(self, sequence: int, num_tokens: int) -> list[int]:
        used: list[int] = self.tables[sequence, : -(-num_tokens // self.block_tokens)].tolist()
        return used

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """All KV of ``source``'s first tokens to ``target``'s own blocks."""
        pairs = zip(self.blocks(source, num_tokens), self.blocks(target, num_tokens), strict=True)
        for here, there in pairs:
            for layer in self.kv:
                self.ops.copy_kv_block(layer, here, there)

    def spoil(self, layers: Sequence[LayerKV], blocks: Sequence[int]) -> None:
        """Not a number in every place."""
        for layer in layers:
            for block in blocks:
                for buffer in self.ops.kv_buffers(layer, block) or ():
                    buffer[:] = b"\xff" * len(buffer)

    def bytes_in(self, layers: Sequence[LayerKV], blocks: Sequence[int]) -> list[bytes]:
        return [
            bytes(buffer)
            for layer in layers
            for block in blocks
            for buffer in self.ops.kv_buffers(layer, block) or ()
        ]

    def _batch(self, rows: Sequence[Row], late: LateTokens | None) -> RaggedBatch:
        lengths = torch.tensor([len(row.tokens) for row in rows])
        positions = torch.cat([torch.arange(row.start, row.end) for row in rows])
        tables = self.tables[torch.tensor([row.sequence for row in rows])]
        blocks = tables.repeat_interleave(lengths, 0).gather(
            1, (positions // self.block_tokens)[:, None]
        )
        slots = blocks[:, 0] * self.block_tokens + positions % self.block_tokens
        replay_ends = torch.tensor([row.start + row.num_replayed for row in rows])
        is_replayed = positions < replay_ends.repeat_interleave(lengths)
        return RaggedBatch(
            row_starts=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
            context_lens=torch.tensor([row.end for row in rows], dtype=torch.int32),
            block_tables=tables.int(),
            positions=positions.int(),
            slots=slots,
            max_row_tokens=int(lengths.max()),
            max_context=max(row.end for row in rows),
            window_starts=torch.tensor([row.window_start for row in rows], dtype=torch.int32),
            global_slots=torch.where(is_replayed, -1, slots),
            late=late,
        )
