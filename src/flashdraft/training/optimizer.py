"""AdamW or Muon on fp32 masters of a network that computes in another precision.

The compute network's gradients are added up in the masters' precision, batch by batch; after a step
the masters are copied back. All state is named tensors, so a checkpoint is one safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

from ..drafters.dflash import DFlashNetwork
from .config import TrainConfig


def learning_rate(step: int, num_steps: int, config: TrainConfig) -> float:
    """Share of the full rate at a step (counted from 0): warm-up, then cosine or stable and decay."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    floor = config.final_lr_share
    if config.schedule == "cosine":
        done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
    start = num_steps * (1 - config.decay_share)
    done = min(1.0, max(0.0, (step - start) / max(1.0, num_steps - start)))
    return 1 - (1 - floor) * done


class Masters:
    """Full-precision weights, their gradients, optimizer moments and running mean.

    Args:
        network: computes; its weights are overwritten by `publish`.
        weights: where the masters start, by name.
        copied: names that get `lr_copied`.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        weights: Mapping[str, torch.Tensor],
        copied: Collection[str],
        config: TrainConfig,
    ) -> None:
        self._network, self._config = network, config
        self._computing = dict(network.named_parameters())
        device = next(iter(self._computing.values())).device
        self.weights = {name: weights[name].detach().clone().to(device) for name in self._computing}
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        self.means = {k: v.clone() for k, v in self.weights.items()} if config.ema is not None else {}
        self._muon = Muon() if config.optimizer == "muon" else None
        groups = []
        for rate, names in self._groups(copied):
            matrices = [self.weights[n] for n in names if self.weights[n].ndim > 1]
            vectors = [self.weights[n] for n in names if self.weights[n].ndim == 1]
            if self._muon is not None:
                self._muon.add(matrices, rate, config.weight_decay)
                matrices = []
            groups += [
                {"params": part, "lr": rate, "rate": rate, "weight_decay": decay}
                for part, decay in ((matrices, config.weight_decay), (vectors, 0.0))
                if part
            ]
        self._adam = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=1e-8, fused=True)
        self.publish()

    def _groups(self, copied: Collection[str]) -> list[tuple[float, list[str]]]:
        slow = self._config.lr_copied if self._config.lr_copied is not None else self._config.lr
        return [
            (self._config.lr, [name for name in self.weights if name not in copied]),
            (slow, [name for name in self.weights if name in copied]),
        ]

    def gather(self) -> None:
        """Add the compute network's gradients to the masters', and clear them."""
        for name, parameter in self._computing.items():
            if parameter.grad is not None:
                self.weights[name].grad.add_(parameter.grad)  # type: ignore[union-attr]
                parameter.grad = None

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [weight.grad for weight in self.weights.values() if weight.grad is not None]

    def step(self, share: float) -> float:
        """One AdamW step at that share of the rates; returns the gradient's norm before clipping."""
        norm = float(torch.nn.utils.clip_grad_norm_(self.weights.values(), self._config.clip))
        for group in self._adam.param_groups:
            group["lr"] = group["rate"] * share
        self._adam.step()
        if self._muon is not None:
            self._muon.step(share)
        for gradient in self.gradients:
            gradient.zero_()
        if self._config.ema is not None:
            torch._foreach_lerp_(list(self.means.values()), list(self.weights.values()), 1 - self._config.ema)
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the compute network."""
        for name, parameter in self._computing.items():
            parameter.copy_(self.weights[name])

    @property
    def best_weights(self) -> dict[str, torch.Tensor]:
        """What to validate and export: the running mean if there is one."""
        return self.means or self.weights

    def state(self) -> dict[str, torch.Tensor]:
        """Everything a resumed run needs, as named tensors."""
        tensors = {f"weights.{k}": v.detach() for k, v in self.weights.items()}
        tensors |= {f"means.{k}": v for k, v in self.means.items()}
        for name, weight in self.weights.items():
            for key, value in self._adam.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value
            if self._muon is not None and weight in self._muon.momenta:
                tensors[f"momentum.{name}"] = self._muon.momenta[weight]
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self.weights.items():
            weight.copy_(tensors[f"weights.{name}"])
            if self.means:
                self.means[name].copy_(tensors[f"means.{name}"])
            if self._muon is not None and f"momentum.{name}" in tensors:
                self._muon.momenta[weight].copy_(tensors[f"momentum.{name}"])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors]
            if keys:
                self._adam.state[weight] = {
                    key: tensors[f"{key}.{name}"].clone().to("cpu" if key == "step" else weight.device) for key in keys
                }
        self.publish()


class Muon:
    """Momentum whose matrix is orthogonalised (Jordan et al. 2024), scaled to AdamW's usual step size
    (Liu et al., arXiv 2502.16982), so that rates mean the same."""

    momentum = 0.95

    def __init__(self) -> None:
        self.momenta: dict[torch.Tensor, torch.Tensor] = {}
        self._settings: list[tuple[torch.Tensor, float, float]] = []

    def add(self, matrices: list[torch.Tensor], rate: float, decay: float) -> None:
        self.momenta |= {matrix: torch.zeros_like(matrix) for matrix in matrices}
        self._settings += [(matrix, rate, decay) for matrix in matrices]

    @torch.no_grad()
    def step(self, share: float) -> None:
        for matrix, rate, decay in self._settings:
            assert matrix.grad is not None
            momentum = self.momenta[matrix].lerp_(matrix.grad, 1 - self.momentum)
            update = orthogonalise(matrix.grad.lerp(momentum, self.momentum))
            matrix.mul_(1 - rate * share * decay)
            matrix.add_(update, alpha=-rate * share * 0.2 * max(matrix.shape) ** 0.5)


def orthogonalise(matrix: torch.Tensor) -> torch.Tensor:
    """About U V^T of its U S V^T: a Newton-Schulz iteration of degree 5 in bfloat16."""
    x = matrix / (matrix.norm() + 1e-7)
    x = (x if x.shape[0] <= x.shape[1] else x.T).to(torch.bfloat16)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    found: torch.Tensor = x if matrix.shape[0] <= matrix.shape[1] else x.T
    return found.to(matrix.dtype)
