"""Time every kernel on a random stack of SmolLM2-135M's shape, beside the machine's limits.

    OMP_WAIT_POLICY=PASSIVE python bench/kernels.py [--threads 2] [--weights bf16 int8] [--quick]

Prints the limits, then microseconds per op, milliseconds per decode step at batch
1, 4 and 16 with 256 tokens of context, and a prefill of 2,048 tokens, each with its
share of the bound (bytes of weights over read rate; FLOPs over the bf16 GEMM rate).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwater.numerics.cpu import CpuOps
from headwater.numerics.ops import KVFormat, LayerKV, PackedLinear, RaggedBatch, WeightFormat
from headwater.numerics.probe import MachineLimits, machine_limits, read_gb_per_s

LAYERS, HIDDEN, INNER, VOCAB = 30, 576, 1536, 49_152
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
BLOCK_TOKENS = 16
QUERY, KEY = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    norm: Tensor
    kv: LayerKV


class Stack:
    """A llama-shaped model with random weights, written in Ops like the real one."""

    def __init__(self, ops: CpuOps, weight_format: WeightFormat, num_blocks: int) -> None:
        self.ops = ops

        def packed(rows: int, columns: int) -> PackedLinear:
            weight = torch.randn(rows, columns) * columns**-0.5
            return ops.pack_linear(weight, None, weight_format)

        self.layers = [
            Layer(
                qkv=packed(QUERY + 2 * KEY, HIDDEN),
                out=packed(HIDDEN, QUERY),
                gate_up=packed(2 * INNER, HIDDEN),
                down=packed(HIDDEN, INNER),
                norm=torch.ones(HIDDEN),
                kv=ops.allocate_kv(num_blocks, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, KVFormat.BF16),
            )
            for _ in range(LAYERS)
        ]
        self.kv = tuple(layer.kv for layer in self.layers)
        self.head = packed(VOCAB, HIDDEN)
        angles = torch.outer(torch.arange(4096.0), 10_000.0 ** -(torch.arange(0, 1, 2 / HEAD_DIM)))
        self.cos, self.sin = angles.cos(), angles.sin()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one step reads."""
        per_layer = sum(
            part.weight_bytes
            for layer in self.layers
            for part in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return per_layer + self.head.weight_bytes

    def step(self, ids: Tensor, batch: RaggedBatch) -> Tensor:
        x = self.ops.replay(self.layers_pass, self.ops.embed(ids, self.head), self.kv, batch)
        last = batch.row_starts[1:].long() - 1
        return self.ops.logits(x[last], self.head)

    def layers_pass(self, residual: Tensor, batch: RaggedBatch) -> Tensor:
        ops, eps = self.ops, 1e-5
        x = ops.rms_norm(residual, self.layers[0].norm, eps)
        for layer in self.layers:
            qkv = ops.linear(x, layer.qkv)
            q = qkv[:, :QUERY].view(-1, HEADS, HEAD_DIM)
            k = qkv[:, QUERY : QUERY + KEY].view(-1, KV_HEADS, HEAD_DIM)
            v = qkv[:, QUERY + KEY :].view(-1, KV_HEADS, HEAD_DIM)
            ops.rotate(q, k, self.cos, self.sin, batch.positions)
            ops.store_kv(k, v, layer.kv, batch.slots)
            attended = ops.attend(q, layer.kv, batch, HEAD_DIM**-0.5)
            x = ops.linear(attended.view(-1, QUERY), layer.out)
            x, residual = ops.add_rms_norm(x, residual, layer.norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
            x, residual = ops.add_rms_norm(x, residual, layer.norm, eps)
        return x


def batch_of(rows: list[tuple[int, int]]) -> RaggedBatch:
    """Rows of (new tokens, context) with blocks of their own."""
    widest = max(-(-context // BLOCK_TOKENS) for _, context in rows)
    tables = torch.zeros(len(rows), widest, dtype=torch.int32)
    starts, next_block = [0], 0
    positions: list[int] = []
    slots: list[int] = []
    for row, (num_new, context) in enumerate(rows):
        num_blocks = -(-context // BLOCK_TOKENS)
        tables[row, :num_blocks] = torch.arange(next_block, next_block + num_blocks)
        starts.append(starts[-1] + num_new)
        positions += range(context - num_new, context)
        slots += [next_block * BLOCK_TOKENS + p for p in range(context - num_new, context)]
        next_block += num_blocks
    return RaggedBatch(
        row_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in rows], dtype=torch.int32),
        block_tables=tables,
        positions=torch.tensor(positions, dtype=torch.int32),
        slots=torch.tensor(slots),
        max_row_tokens=max(num_new for num_new, _ in rows),
        max_context=max(context for _, context in rows),
    )


def timed_ms(work: Callable[[], object], num_runs: int) -> tuple[float, float]:
    """(best, median) milliseconds of ``num_runs`` runs after one to warm up."""
    work()
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times), statistics.median(times)


def report_ops(ops: CpuOps, stack: Stack, num_tokens: int) -> None:
    """Microseconds of each op, each layer's weights in turn so that no cache holds them."""
    x = torch.randn(num_tokens, HIDDEN).to(torch.bfloat16)
    residual = torch.randn(num_tokens, HIDDEN).to(torch.bfloat16)
    inner = torch.randn(num_tokens, 2 * INNER).to(torch.bfloat16)
    qkv = torch.randn(num_tokens, QUERY + 2 * KEY).to(torch.bfloat16)
    q = qkv[:, :QUERY].view(-1, HEADS, HEAD_DIM)
    k = qkv[:, QUERY : QUERY + KEY].view(-1, KV_HEADS, HEAD_DIM)
    batch = batch_of([(1, 256)] * num_tokens)
    half = inner[:, :INNER].contiguous()
    works: dict[str, Callable[[Layer], object]] = {
        "linear qkv": lambda layer: ops.linear(x, layer.qkv),
        "linear out": lambda layer: ops.linear(x, layer.out),
        "linear gate_up": lambda layer: ops.linear(x, layer.gate_up),
        "linear down": lambda layer: ops.linear(half, layer.down),
        "add_rms_norm": lambda layer: ops.add_rms_norm(x, residual, layer.norm, 1e-5),
        "rotate": lambda layer: ops.rotate(q, k, stack.cos, stack.sin, batch.positions),
        "store_kv": lambda layer: ops.store_kv(k, k, layer.kv, batch.slots),
        "attend 256": lambda layer: ops.attend(q, layer.kv, batch, HEAD_DIM**-0.5),
        "silu_mul": lambda layer: ops.silu_mul(inner),
    }
    cells = []
    for name, work in works.items():
        best_ms, _ = timed_ms(lambda work=work: [work(layer) for layer in stack.layers], 8)  # type: ignore[misc]
        cells.append(f"{name} {1e3 * best_ms / LAYERS:.1f}")
    best_ms, _ = timed_ms(lambda: ops.logits(x, stack.head), 8)
    print(
        f"    us per op, {num_tokens} rows: " + ", ".join(cells) + f", logits {1e3 * best_ms:.0f}"
    )


def report_stack(
    ops: CpuOps, weight_format: WeightFormat, limits: MachineLimits, num_runs: int
) -> None:
    stack = Stack(ops, weight_format, num_blocks=320)
    bound_ms = stack.weight_bytes / limits.read_gb_per_s / 1e6
    print(f"{weight_format}: {stack.weight_bytes / 1e6:.0f} MB, read bound {bound_ms:.2f} ms")
    for num_rows in (1, 4, 16):
        report_ops(ops, stack, num_rows)
        batch = batch_of([(1, 256)] * num_rows)
        ids = torch.arange(num_rows)
        best, median = timed_ms(lambda batch=batch, ids=ids: stack.step(ids, batch), num_runs)  # type: ignore[misc]
        print(
            f"  decode, {num_rows:2d} rows at 256: best {best:.2f} ms, median {median:.2f} ms; "
            f"{bound_ms / best:.2f} of the read bound; {1e3 * num_rows / best:.0f} tokens/s"
        )
    # 106 M weights in the layers; causal attention counts half its square.
    tokens = 2_048
    layer_weights = HIDDEN * (2 * QUERY + 2 * KEY) + 3 * HIDDEN * INNER
    gflop = LAYERS * (2 * layer_weights * tokens + 2 * QUERY * tokens**2) / 1e9
    batch = batch_of([(tokens, tokens)])
    best, median = timed_ms(lambda: stack.step(torch.arange(tokens), batch), max(3, num_runs // 8))
    rate = gflop / best * 1e3
    print(
        f"  prefill {tokens}: best {best:.0f} ms, median {median:.0f} ms; {rate:.0f} GFLOP/s, "
        f"{rate / limits.gemm_bf16_gflop_per_s:.2f} of the bf16 GEMM rate"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", nargs="+", default=["bf16", "int8"])
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    options = parser.parse_args()
    limits = machine_limits(options.threads)
    print(
        f"read {read_gb_per_s(1):.1f} GB/s by 1 thread, {limits.read_gb_per_s:.1f} by "
        f"{options.threads}; GEMM fp32 {limits.gemm_fp32_gflop_per_s:.0f}, "
        f"bf16 {limits.gemm_bf16_gflop_per_s:.0f} GFLOP/s, "
        f"int8 {limits.gemm_int8_gop_per_s:.0f} GOP/s"
    )
    ops = CpuOps(num_threads=options.threads)
    for name, kernel in ops.kernels().items():
        print(f"  {name}: {kernel}")
    for weights in options.weights:
        report_stack(ops, WeightFormat(weights), limits, 6 if options.quick else 30)
    ops.close()


if __name__ == "__main__":
    main()
