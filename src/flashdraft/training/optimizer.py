"""AdamW or Muon on fp32 masters of a network that computes in another precision.

The compute network's gradients are added up in the masters' precision, batch by batch; after a step
the masters are copied back. All state is named tensors, so a checkpoint is one safetensors file.

With `shard` each process keeps the masters, moments and running mean of its own share of the weights,
by whole tensors: gradients are summed at their owner, who makes the step and gives the weights back.
That is what there is to save: 12 bytes a weight (16 with a mean), where the compute network has 2 and
is small beside the target that every process holds; its gradient, summed over batches, stays whole too. torch's fully_shard (FSDP2) shards the compute
network, at a gather for each layer and pass; it wants as many passes in every process, and weights used
in `forward` alone, while `project_context` uses those of all layers before any of them runs. Whole
tensors, because Muon needs the matrix. A shard's numbers are those it would have without shards, and a
checkpoint is the same file, which any number of processes reads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import nn

from .config import TrainConfig
from .parallel import Group, share_out


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
        network: computes; its weights are overwritten by `publish`. Those without gradients are left alone.
        weights: where the masters start, by name.
        copied: names that get `lr_copied`.
        group: the processes that train together; None is this one alone.

    Attributes:
        weights, means: with shards, those that this process owns.
    """

    def __init__(
        self,
        network: nn.Module,
        weights: Mapping[str, torch.Tensor],
        copied: Collection[str],
        config: TrainConfig,
        group: Group | None = None,
    ) -> None:
        self._config, self._group = config, group
        self._computing = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self._owners: dict[str, int] | None = None  # of shards
        if group is not None and group.world > 1 and config.shard:
            self._owners = share_out({name: p.numel() for name, p in self._computing.items()}, group.world)
        device = next(iter(self._computing.values())).device
        self.weights = {name: weights[name].detach().clone().to(device) for name in self._computing if self._owns(name)}
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight)
        self._type = weights[next(iter(self._computing))].dtype
        self._others = {  # gradients of weights that other processes own, until the end of a step
            name: torch.zeros_like(parameter, dtype=self._type)
            for name, parameter in self._computing.items()
            if not self._owns(name)
        }
        self._stepped = False
        self._collected: dict[str, torch.Tensor] = {}
        self.means = {k: v.clone() for k, v in self.weights.items()} if config.ema is not None else {}
        self._muon = Muon() if config.optimizer == "muon" else None
        groups = []
        for rate, names in self._groups(copied):
            if self._muon is not None:
                self._muon.add([self.weights[n] for n in names if self._by_muon(n)], rate, config.weight_decay)
            names = [n for n in names if not self._by_muon(n)]
            matrices = [self.weights[n] for n in names if self.weights[n].ndim > 1]
            vectors = [self.weights[n] for n in names if self.weights[n].ndim == 1]
            groups += [
                {"params": part, "lr": rate, "rate": rate, "weight_decay": decay}
                for part, decay in ((matrices, config.weight_decay), (vectors, 0.0))
                if part
            ]
        # a shard of Muon's may have matrices alone
        self._adam = (
            torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=1e-8, fused=True) if groups else None
        )
        self.publish()

    def _owns(self, name: str) -> bool:
        return self._owners is None or self._group is None or self._owners[name] == self._group.rank

    def _groups(self, copied: Collection[str]) -> list[tuple[float, list[str]]]:
        slow = self._config.lr_copied if self._config.lr_copied is not None else self._config.lr
        heads = [name for name in self.weights if _is_head(name)]
        rest = [name for name in self.weights if not _is_head(name)]
        return [
            (self._config.lr, [name for name in rest if name not in copied]),
            (slow, [name for name in rest if name in copied]),
            (self._config.lr if self._config.lr_head is None else self._config.lr_head, heads),
        ]

    def _by_muon(self, name: str) -> bool:
        return self._muon is not None and self._computing[name].ndim > 1 and not _is_head(name)

    def gather(self) -> None:
        """Add the compute network's gradients to the masters', and clear them."""
        for name, parameter in self._computing.items():
            if parameter.grad is not None:
                self._gradient(name).add_(parameter.grad)
                parameter.grad = None

    def _gradient(self, name: str) -> torch.Tensor:
        found = self.weights[name].grad if name in self.weights else self._others[name]
        assert found is not None
        return found

    def reduce(self) -> None:
        """Add the gradients up over all processes; with shards, at their owners."""
        if self._group is not None:
            owners = None if self._owners is None else [self._owners[name] for name in self._computing]
            self._group.sum([self._gradient(name) for name in self._computing], owners)

    def step(self, share: float) -> float:
        """One step at that share of the rates; returns the gradient's norm before clipping."""
        norm = self._norm()
        torch.nn.utils.clip_grads_with_norm_(self.weights.values(), self._config.clip, norm)
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = group["rate"] * share
            self._adam.step()
        if self._muon is not None:
            self._muon.step(share)
        self._stepped = True
        for name in self._computing:
            self._gradient(name).zero_()
        if self._config.ema is not None and self.means:
            torch._foreach_lerp_(list(self.means.values()), list(self.weights.values()), 1 - self._config.ema)
        self.publish()
        return float(norm)

    def _norm(self) -> torch.Tensor:
        """Of the whole gradient, from one number a tensor: the same bits with and without shards."""
        first = next(iter(self._computing.values()))
        norms = torch.zeros(len(self._computing), dtype=self._type, device=first.device)
        own = [i for i, name in enumerate(self._computing) if name in self.weights]
        if own:
            gradients = [self._gradient(name) for name in self._computing if name in self.weights]
            norms[own] = torch.stack(torch._foreach_norm(gradients))
        if self._owners is not None and self._group is not None:
            self._group.sum([norms])
        norm: torch.Tensor = torch.linalg.vector_norm(norms)
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the compute network, in every process."""
        for name, weight in self.weights.items():
            self._computing[name].copy_(weight)
        if self._owners is not None and self._group is not None:
            self._group.spread(list(self._computing.values()), [self._owners[name] for name in self._computing])

    @property
    def best_weights(self) -> dict[str, torch.Tensor]:
        """What to validate and export: the running mean if there is one. With shards, of the last
        `collect`, on the first process."""
        if self._owners is not None:
            return self._collected
        return self.means or self.weights

    @torch.no_grad()
    def collect(self) -> None:
        """All processes call this before the first of them uses `best_weights`."""
        if self._owners is None:
            return
        self._collected = {}
        for name, parameter in self._computing.items():
            if self._config.ema is None:  # the network has them all, as rounded as they are exported
                self._collected[name] = parameter.detach()
            else:
                mean = self._whole(name, self.means.get(name), parameter, self._type)
                if mean is not None:
                    self._collected[name] = mean.to(parameter)

    def _whole(
        self, name: str, own: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """An owner's tensor, on the first process; `like` has its shape."""
        assert self._owners is not None and self._group is not None
        tensor = own if own is not None else torch.empty_like(like, dtype=dtype)
        return self._group.hand_over(tensor, self._owners[name])

    def state(self) -> dict[str, torch.Tensor]:
        """Everything a resumed run needs, as named tensors. With shards all processes call it, and
        the first has them all."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._computing.items():
            for key in self._keys(name):
                own = self._state_tensor(key, name) if name in self.weights else None
                if self._owners is not None:
                    like = torch.zeros((), device=parameter.device) if key == "step" else parameter
                    own = self._whole(name, own, like, torch.float32 if key == "step" else self._type)
                if own is not None:
                    tensors[f"{key}.{name}"] = own.detach()
        return tensors

    def _keys(self, name: str) -> list[str]:
        """What is kept of a weight, the same in every process."""
        keys = ["weights", *(["means"] if self._config.ema is not None else [])]
        if self._by_muon(name):
            return [*keys, "momentum"]
        return [*keys, "step", "exp_avg", "exp_avg_sq"] if self._stepped else keys

    def _state_tensor(self, key: str, name: str) -> torch.Tensor:
        weight = self.weights[name]
        if key == "weights":
            return weight
        if key == "means":
            return self.means[name]
        if key == "momentum":
            assert self._muon is not None
            return self._muon.momenta[weight]
        assert self._adam is not None
        found: torch.Tensor = self._adam.state[weight][key]
        return found

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, weight in self.weights.items():
            for key in ("weights", "means", "momentum"):
                if key in self._keys(name):
                    self._state_tensor(key, name).copy_(tensors[f"{key}.{name}"])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in tensors]
            if keys and self._adam is not None:
                self._adam.state[weight] = {key: tensors[f"{key}.{name}"].clone().to(weight.device) for key in keys}
        self._stepped = any(key.startswith("step.") for key in tensors)
        self.publish()


def _is_head(name: str) -> bool:
    """A projection to the vocabulary: its rows are words, not directions, and AdamW's."""
    return "lm_head" in name


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
