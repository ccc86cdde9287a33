"""A training run into a model folder: ``python -m tools.mini.export --run ... --out ...``.

Writes ``config.json``, ``model.safetensors`` (matrices in bfloat16, under DeepSeek's names) and
the tokenizer's two files. Training rotates a head's last entries as two halves; here they are
put into the neighbouring pairs of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.mini.model import Layer, Mini, Shape
from tools.mini.optimiser import Optimiser, Shared

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def pair_order(head_dim: int, rope_dim: int) -> Tensor:
    """Entry i of a head in the checkpoint is entry ``order[i]`` of the trained one.

    >>> pair_order(6, 4).tolist()
    [0, 1, 2, 4, 3, 5]
    """
    kept = head_dim - rope_dim
    halves = torch.arange(kept, head_dim).view(2, -1)
    return torch.cat((torch.arange(kept), halves.T.flatten()))


def checkpoint(model: Mini) -> dict[str, Tensor]:
    """All tensors of the checkpoint."""
    shape = model.shape
    order = pair_order(shape.head_dim, shape.qk_rope_head_dim)
    tensors: dict[str, Tensor] = {"embed.weight": model.embed, "norm.weight": model.norm}
    for layer in model.all_layers:
        tensors |= _layer(layer, shape, order)
    return {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}


def _layer(layer: Layer, shape: Shape, order: Tensor) -> dict[str, Tensor]:
    name, size = f"layers.{layer.index}", shape.moe_intermediate_size
    heads = order.repeat(shape.num_attention_heads, 1)
    heads = (heads + torch.arange(len(heads))[:, None] * shape.head_dim).flatten()
    in_group = heads[: layer.wo_a.shape[2]]
    tensors: dict[str, Tensor] = {
        "attn_norm.weight": layer.attn_norm,
        "ffn_norm.weight": layer.ffn_norm,
        "attn.wq_a.weight": layer.wq_a,
        "attn.q_norm.weight": layer.q_norm,
        "attn.wq_b.weight": layer.wq_b[heads],
        "attn.wkv.weight": layer.wkv[order],
        "attn.kv_norm.weight": layer.kv_norm[order],
        "attn.attn_sink": layer.sink,
        "attn.wo_a.weight": layer.wo_a[:, :, in_group].flatten(0, 1),
        "attn.wo_b.weight": layer.wo_b,
        "ffn.gate.weight": layer.gate,
        "ffn.gate.bias": layer.gate_bias,
        "ffn.shared_experts.w1.weight": layer.shared_w13[: size * shape.n_shared_experts],
        "ffn.shared_experts.w3.weight": layer.shared_w13[size * shape.n_shared_experts :],
        "ffn.shared_experts.w2.weight": layer.shared_w2,
    }
    if layer.is_source:
        tensors["attn.compressor.wkv.weight"] = layer.compress_wkv[order]
        tensors["attn.compressor.norm.weight"] = layer.compress_norm[order]
        if layer.ratio == 2:
            tensors["attn.compressor.wgate.weight"] = layer.compress_wgate[order]
    for expert in range(shape.n_routed_experts):
        tensors |= {
            f"ffn.experts.{expert}.w1.weight": layer.w13[expert, :size],
            f"ffn.experts.{expert}.w3.weight": layer.w13[expert, size:],
            f"ffn.experts.{expert}.w2.weight": layer.w2[expert],
        }
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def trained(run: Path) -> Mini:
    """The model of a run's last saved state."""
    shape = Shape()
    model = Mini(shape)
    shared = Shared.of(model, shape.num_hidden_layers, shape.n_routed_experts, 1)
    shared.load(load_file(run / "state.safetensors"))
    Optimiser(model, shared, 0).take()
    for layer, bias in zip(model.all_layers, shared.biases, strict=True):
        layer.gate_bias.copy_(bias)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = trained(args.run)
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint(model), args.out / "model.safetensors", metadata={"format": "pt"})
    tokenizer_config = json.loads((args.tokenizer / "tokenizer_config.json").read_text())
    vocabulary = json.loads((args.tokenizer / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in vocabulary}
    config = model.shape.config(
        bos_token_id=ids[tokenizer_config["bos_token"]],
        eos_token_id=ids[tokenizer_config["eos_token"]],
    )
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in TOKENIZER_FILES:
        shutil.copy(args.tokenizer / file, args.out / file)


if __name__ == "__main__":
    main()
