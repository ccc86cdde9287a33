"""Muon for matrices, Adam for the rest, shared by the processes of a run.

All state lies in flat float32 tensors in shared memory: weights, momentum, squares; each
process adds its gradient to a row of its own, and moves the parameters that are its part.
A model's own parameters are bfloat16 or float32 copies.

Muon (K. Jordan et al., 2024) moves a matrix along the nearest orthogonal matrix to its
momentum, found by Newton-Schulz steps; experts of a layer are a batch of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)

MATRIX_RATE = 0.02
TABLE_RATE = 4e-3
VECTOR_RATE = 3e-3
MOMENTUM = 0.95
DECAY = 0.01


def orthogonal(update: Tensor, steps: int = 5) -> Tensor:
    """[..., m, n] with singular values near one."""
    a, b, c = _COEFFICIENTS
    is_tall = update.shape[-2] > update.shape[-1]
    x = (update.mT if is_tall else update).to(torch.bfloat16)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.mT if is_tall else x
    return result


@dataclass(frozen=True, slots=True)
class Shared:
    """State of a run with P parameters and R processes, in shared memory."""

    weights: Tensor  # float32 [P]
    momentum: Tensor  # float32 [P]
    squares: Tensor  # float32 [P], of those that Adam moves
    gradients: Tensor  # bfloat16 [R, P]
    biases: Tensor  # float32 [layers, experts], of the routers
    loads: Tensor  # float32 [R, layers, experts], tokens per expert of the last step
    clock: Tensor  # float64 [4]: steps, trained seconds, whether to end, tokens

    @classmethod
    def of(cls, model: nn.Module, num_layers: int, num_experts: int, num_processes: int) -> Shared:
        """For ``model``, with its weights."""
        flat = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        zeros = torch.zeros_like(flat)
        shared = cls(
            weights=flat,
            momentum=zeros.clone(),
            squares=zeros.clone(),
            gradients=torch.zeros(num_processes, len(flat), dtype=torch.bfloat16),
            biases=torch.zeros(num_layers, num_experts),
            loads=torch.zeros(num_processes, num_layers, num_experts),
            clock=torch.zeros(4, dtype=torch.float64),
        )
        for tensor in shared.kept().values():
            tensor.share_memory_()
        shared.gradients.share_memory_()
        shared.loads.share_memory_()
        return shared

    def kept(self) -> dict[str, Tensor]:
        """What a saved run consists of."""
        return {
            "weights": self.weights,
            "momentum": self.momentum,
            "squares": self.squares,
            "biases": self.biases,
            "clock": self.clock,
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.kept().items():
            tensor.copy_(state[name])


class Optimiser:
    """Moves one process's part of the parameters."""

    def __init__(self, model: nn.Module, shared: Shared, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._parameters = list(model.named_parameters())
        self._slices: list[slice] = []
        begin = 0
        for _, parameter in self._parameters:
            self._slices.append(slice(begin, begin + parameter.numel()))
            begin += parameter.numel()
        # Each to the process that has least so far.
        num_processes = shared.gradients.shape[0]
        loads, self._own = [0] * num_processes, list[int]()
        for i in sorted(range(len(self._slices)), key=lambda i: -self._parameters[i][1].numel()):
            target = min(range(num_processes), key=loads.__getitem__)
            loads[target] += self._parameters[i][1].numel()
            if target == rank:
                self._own.append(i)

    @torch.no_grad()
    def give(self) -> None:
        """This process's gradients to where all can read them."""
        for (_, parameter), part in zip(self._parameters, self._slices, strict=True):
            assert parameter.grad is not None
            self._shared.gradients[self._rank, part].copy_(parameter.grad.flatten())
            parameter.grad = None

    @torch.no_grad()
    def step(self, rate: float, num_steps: int) -> None:
        """Move this process's part by the mean gradient; ``num_steps`` counts from 1."""
        shared = self._shared
        for i in self._own:
            name, parameter = self._parameters[i]
            part = self._slices[i]
            grad = shared.gradients[:, part].float().mean(dim=0).view_as(parameter)
            weights = shared.weights[part].view_as(parameter)
            momentum = shared.momentum[part].view_as(parameter)
            if parameter.ndim >= 2 and name != "embed" and not name.endswith(".gate"):
                momentum.lerp_(grad, 1 - MOMENTUM)
                update = orthogonal(grad.lerp(momentum, MOMENTUM))
                weights.mul_(1 - rate * MATRIX_RATE * DECAY)
                shape = max(1.0, weights.shape[-2] / weights.shape[-1]) ** 0.5
                weights.add_(update, alpha=-rate * MATRIX_RATE * shape)
            else:
                squares = shared.squares[part].view_as(parameter)
                momentum.lerp_(grad, 0.1)
                squares.lerp_(grad.square(), 0.02)
                divisor = (squares / (1 - 0.98**num_steps)).sqrt_().add_(1e-8)
                own_rate = rate * (TABLE_RATE if name == "embed" else VECTOR_RATE)
                weights.addcdiv_(momentum / (1 - 0.9**num_steps), divisor, value=-own_rate)

    @torch.no_grad()
    def take(self) -> None:
        """The shared weights into the model."""
        for (_, parameter), part in zip(self._parameters, self._slices, strict=True):
            parameter.copy_(self._shared.weights[part].view_as(parameter))
