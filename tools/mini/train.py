"""Train headwater-mini: ``python -m tools.mini.train --run build/mini --tokenizer ... --hours 2``.

One process for each core, each with its own rows and one thread: small products gain nothing
from two. Rows grow from 256 to 4,096 tokens as training goes on. How far training is, is its
share of ``--hours`` of its own time; a run that was ended goes on where it was saved (every
``--save-minutes`` and at SIGTERM). The folder of the run holds ``state.safetensors`` and
``log.jsonl``, a line for every 100 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import spawn

from tools.mini.kernels import loss_and_gradient
from tools.mini.mixture import rows
from tools.mini.model import Mini, Shape
from tools.mini.optimiser import Optimiser, Shared
from tools.mini.text import Texts

STEP_TOKENS = 2048  # of each process, or one row where rows are longer
# (share of training after which rows have so many tokens)
ROW_TOKENS = ((0.0, 256), (0.2, 512), (0.36, 1024), (0.56, 2048), (0.8, 4096))
STRETCH = 0.02  # share of training with one row length and one difficulty
WARMUP_STEPS = 60
COOLING = 0.35  # share of training in which the rate falls to its end
LAST_RATE = 0.05
BIAS_STEP = 1e-3
BORDERS_FROM = 0.35  # share of training after which windows are cut off now and then
LOG_STEPS = 100
_KEY_WEIGHT = 1.5  # tokens with at least this weight are answers that can be known


def row_tokens(share: float) -> int:
    """How long rows are after ``share`` of training."""
    return [tokens for start, tokens in ROW_TOKENS if share >= start][-1]


def rate(share: float, num_steps: int) -> float:
    """What every learning rate is multiplied by."""
    warm = min(1.0, (num_steps + 1) / WARMUP_STEPS)
    left = min(1.0, max(0.0, (1.0 - share) / COOLING))
    scale: float = warm * (LAST_RATE + (1.0 - LAST_RATE) * left)
    return scale


def borders(chosen: random.Random, share: float, num_tokens: int) -> tuple[int, ...]:
    """Where windows are cut off in one step, for one half of the layers."""
    if share < BORDERS_FROM or chosen.random() < 0.5:
        return ()
    count = chosen.randint(1, max(1, num_tokens // 512))
    return tuple(sorted(chosen.sample(range(16, num_tokens), count)))


class Trainer:
    """One process of a run."""

    def __init__(self, rank: int, args: argparse.Namespace, shared: Shared, meet: Barrier) -> None:
        self._rank, self._args, self._shared, self._meet = rank, args, shared, meet
        self._folder: Path = args.run
        self._budget_s: float = args.hours * 3600
        self._texts = Texts.load(teacher=args.teacher, prose=args.prose)
        self._model = Mini(Shape())
        self._optimiser = Optimiser(self._model, shared, rank)
        self._take()

    @property
    def num_steps(self) -> int:
        return int(self._shared.clock[0])

    @property
    def share(self) -> float:
        trained_s = float(self._shared.clock[1])
        return min(1.0, trained_s / self._budget_s)

    def train(self) -> None:
        # Between two meetings nobody changes the clock, so all of them decide alike.
        saved_s = float(self._shared.clock[1])
        while self.share < 1.0 and not self._shared.clock[2]:
            stretch = int(self.share / STRETCH)
            length = row_tokens(self.share)
            seed = (self.num_steps + 1) * self._args.processes + self._rank
            stream = rows(
                self._args.tokenizer, self._texts, row_tokens=length, stage=self.share, seed=seed
            )
            chosen = random.Random(seed)
            seen = _Seen()
            step_tokens = max(STEP_TOKENS, length) * self._args.processes
            while int(self.share / STRETCH) == stretch and not self._shared.clock[2]:
                began = time.monotonic()
                batch = [next(stream) for _ in range(max(1, STEP_TOKENS // length))]
                ids = torch.from_numpy(np.stack([row.ids for row in batch]).astype(np.int64))
                weights = torch.from_numpy(np.stack([row.weights for row in batch]))
                self._step(ids, weights, chosen, seen)
                if self._rank == 0:
                    self._shared.clock[0] += 1
                    self._shared.clock[3] += step_tokens
                    self._shared.clock[1] += time.monotonic() - began
                    if self.num_steps % LOG_STEPS == 0:
                        self._log(seen, length)
                        seen = _Seen()
                    if float(self._shared.clock[1]) - saved_s > 60 * self._args.save_minutes:
                        saved_s = float(self._shared.clock[1])
                        self.save()
                self._meet.wait()
        if self._rank == 0:
            self.save()

    def save(self) -> None:
        part = self._folder / "state.safetensors.part"
        save_file(self._shared.kept(), part)
        part.replace(self._folder / "state.safetensors")

    def _take(self) -> None:
        self._optimiser.take()
        for layer, bias in zip(self._model.all_layers, self._shared.biases, strict=True):
            layer.gate_bias.copy_(bias)

    def _step(self, ids: Tensor, weights: Tensor, chosen: random.Random, seen: _Seen) -> None:
        shared, model, optimiser = self._shared, self._model, self._optimiser
        num_tokens = ids.shape[1] - 1
        share, num_steps = self.share, self.num_steps
        early = borders(chosen, share, num_tokens)
        late = borders(chosen, share, num_tokens)
        hidden = model(ids[:, :-1], early, late)
        targets, flat = ids[:, 1:].flatten(), weights.flatten()
        with torch.no_grad():
            loss, right, grad_hidden, grad_embed = loss_and_gradient(
                hidden.detach(), model.embed.detach(), targets, flat / flat.sum()
            )
        hidden.backward(grad_hidden)
        assert model.embed.grad is not None
        model.embed.grad += grad_embed.to(model.embed.grad.dtype)
        optimiser.give()
        for number, layer in enumerate(model.all_layers):
            shared.loads[self._rank, number] = layer.load
        seen.add(loss, right, flat, shared.loads[self._rank])
        self._meet.wait()
        optimiser.step(rate(share, num_steps), num_steps + 1)
        if self._rank == 0:
            load = shared.loads.sum(dim=0)
            shared.biases.add_((load.mean(dim=1, keepdim=True) - load).sign(), alpha=BIAS_STEP)
        self._meet.wait()
        self._take()

    def _log(self, seen: _Seen, length: int) -> None:
        line = {
            "steps": self.num_steps,
            "tokens": int(self._shared.clock[3]),
            "seconds": round(float(self._shared.clock[1]), 1),
            "share": round(self.share, 4),
            "row_tokens": length,
            **seen.summary(),
        }
        with (self._folder / "log.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")


class _Seen:
    """Sums since the last line of the log."""

    def __init__(self) -> None:
        self._loss = self._weight = 0.0
        self._right = self._keys = 0.0
        self._most_loaded = 0.0

    def add(self, loss: Tensor, right: Tensor, weights: Tensor, loads: Tensor) -> None:
        self._loss += float((loss * weights).sum())
        self._weight += float(weights.sum())
        is_key = weights >= _KEY_WEIGHT
        self._right += float(right[is_key].sum())
        self._keys += float(is_key.sum())
        self._most_loaded = float((loads / loads.mean(dim=1, keepdim=True)).max())

    def summary(self) -> dict[str, float]:
        loss = self._loss / max(self._weight, 1e-9)
        if not math.isfinite(loss):
            raise RuntimeError("the loss is not a number: go back to an earlier state")
        return {
            "loss": round(loss, 4),
            "answers_right": round(self._right / max(self._keys, 1.0), 4),
            "most_loaded_expert": round(self._most_loaded, 2),
        }


def _process(rank: int, args: argparse.Namespace, shared: Shared, meet: Barrier) -> None:
    torch.set_num_threads(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the parent tells
    try:
        Trainer(rank, args, shared, meet).train()
    except BaseException:
        meet.abort()  # the others must not wait for this one
        raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--teacher", type=Path, default=None)
    parser.add_argument("--prose", type=Path, default=None)
    parser.add_argument("--hours", type=float, default=3.0)
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    args.run.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    shape = Shape()
    shared = Shared.of(Mini(shape), shape.num_hidden_layers, shape.n_routed_experts, args.processes)
    if (args.run / "state.safetensors").exists():
        shared.load(load_file(args.run / "state.safetensors"))

    def end(_signal: int, _frame: object) -> None:
        shared.clock[2] = 1.0

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    shared.clock[2] = 0.0
    context = get_context("spawn")
    meet = context.Barrier(args.processes, timeout=600)
    spawn(_process, args=(args, shared, meet), nprocs=args.processes)


if __name__ == "__main__":
    main()
