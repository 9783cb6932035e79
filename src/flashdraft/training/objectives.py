"""The loss of draft logits and its gradient, a chunk of blocks at a time.

All terms need the draft's log-probabilities of a few tokens only: the label (cross-entropy) and the
target's likeliest tokens (KL, total variation). So the logits of a chunk live for one chunk, and
their gradient is known in closed form: scatter(g) - softmax * sum(g), g = dloss / dlogprobs.

The denominator is the sum of slot weights over the whole optimizer step, all batches and processes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .blocks import Blocks
from .config import TrainConfig
from .features import Features


@dataclass(frozen=True)
class Head:
    """The LM head as the draft uses it: rows of the draft vocabulary, bias, output shape. It is the
    target's, or the draft's own: a weight that wants a gradient is trained."""

    weight_VD: torch.Tensor
    bias_V: torch.Tensor | None = None
    multiplier: float = 1.0
    softcap: float | None = None

    @torch.no_grad()
    def logits(self, hidden_NLD: torch.Tensor) -> torch.Tensor:
        """fp32 (or fp64) logits [N, L, V]."""
        bare = self._product(hidden_NLD)
        wide = bare if bare.dtype == torch.float64 else bare.float()
        if self.multiplier != 1:
            wide = wide * self.multiplier
        return wide if self.softcap is None else torch.tanh(wide / self.softcap) * self.softcap

    @torch.no_grad()
    def gradient(self, grad_NLV: torch.Tensor, logits_NLV: torch.Tensor, hidden_NLD: torch.Tensor) -> torch.Tensor:
        """By the hidden states [N, L, D], from that by the logits; that by a trained weight is added to it."""
        if self.softcap is not None:
            grad_NLV = grad_NLV * (1 - (logits_NLV / self.softcap).square())
        if self.multiplier != 1:
            grad_NLV = grad_NLV * self.multiplier
        return self._back(grad_NLV, hidden_NLD)

    def _product(self, hidden_NLD: torch.Tensor) -> torch.Tensor:
        """Flat on the way: torch multiplies [N, L, D] @ [D, V] block by block, with a copy of the head
        for each, where it cannot see that one product would do."""
        flat = hidden_NLD.reshape(-1, hidden_NLD.shape[-1])
        return F.linear(flat, self.weight_VD, self.bias_V).view(*hidden_NLD.shape[:2], -1)

    def _back(self, grad_NLV: torch.Tensor, hidden_NLD: torch.Tensor) -> torch.Tensor:
        flat = grad_NLV.flatten(0, 1).to(self.weight_VD.dtype)
        _add_gradient(self.weight_VD, flat, hidden_NLD.reshape(-1, hidden_NLD.shape[-1]))
        return (flat @ self.weight_VD).view(*grad_NLV.shape[:2], -1)


@dataclass(frozen=True)
class SlotHeads(Head):
    """A head for every slot, as Medusa has them; weight_VD is that of the first."""

    weights: tuple[torch.Tensor, ...] = ()

    def _product(self, hidden_NLD: torch.Tensor) -> torch.Tensor:
        parts = zip(hidden_NLD.unbind(1), self.weights, strict=True)
        return torch.stack([F.linear(hidden, weight) for hidden, weight in parts], dim=1)

    def _back(self, grad_NLV: torch.Tensor, hidden_NLD: torch.Tensor) -> torch.Tensor:
        grads = []
        for grad, hidden, weight in zip(grad_NLV.unbind(1), hidden_NLD.unbind(1), self.weights, strict=True):
            grad = grad.to(weight.dtype)
            _add_gradient(weight, grad, hidden)
            grads.append(grad @ weight)
        return torch.stack(grads, dim=1)


def _add_gradient(weight_VD: torch.Tensor, grad_NV: torch.Tensor, hidden_ND: torch.Tensor) -> None:
    if weight_VD.requires_grad:
        product = grad_NV.T @ hidden_ND
        weight_VD.grad = product if weight_VD.grad is None else weight_VD.grad.add_(product)


@dataclass(frozen=True)
class Targets:
    """What the slots of a pass should say, in indices of the draft vocabulary, [A, L(, K)].

    known: the label is in the draft vocabulary. real: there is a label at all.
    """

    labels: torch.Tensor
    known: torch.Tensor
    real: torch.Tensor
    ids: torch.Tensor | None = None
    probs: torch.Tensor | None = None

    def part(self, blocks: slice) -> Targets:
        ids, probs = (None if t is None else t[blocks] for t in (self.ids, self.probs))
        return Targets(self.labels[blocks], self.known[blocks], self.real[blocks], ids, probs)


@dataclass(frozen=True)
class Outcome:
    """Of one pass: sum of the weighted losses over the denominator (fp64, still on the device, so that
    nobody has to wait for it), its gradient, what was right."""

    loss_sum: torch.Tensor
    grad_ALD: torch.Tensor
    correct_AL: torch.Tensor

    @property
    def loss(self) -> float:
        return float(self.loss_sum)


def make_targets(
    blocks: Blocks, features: Mapping[int, Features], index_of: torch.Tensor | None, with_distribution: bool
) -> Targets:
    """index_of [V]: index of a token in the draft vocabulary, or -1; None if that is all of it."""
    labels, real = blocks.labels_AL, blocks.labels_AL >= 0
    labels = labels.clamp(min=0)
    if index_of is not None:
        labels = index_of[labels]
    known = real & (labels >= 0)
    ids = probs = None
    if with_distribution:
        parts = []
        size = blocks.blocks_per_piece
        for piece, sequence in enumerate(blocks.sequences):
            found = features[sequence]
            assert found.ids_TK is not None and found.probs_TK is not None
            at = blocks.positions_AB[piece * size : (piece + 1) * size, 1:].clamp(max=len(found.ids_TK) - 1)
            parts.append((found.ids_TK[at], found.probs_TK[at]))
        ids, probs = (torch.cat(part) for part in zip(*parts, strict=True))
        ids = ids.long()
    return Targets(labels.clamp(min=0), known, real, ids, probs)


def decay_weights(num_labels: int, gamma: float) -> torch.Tensor:
    """exp(-(k - 1) / gamma) of slots k = 1.. (arXiv 2602.06036)."""
    return torch.exp(-torch.arange(num_labels, dtype=torch.float64) / gamma)


@functools.lru_cache(maxsize=16)
def _decay_weights_on(num_labels: int, gamma: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Kept, because a copy to a GPU waits for all that it has still to do."""
    return decay_weights(num_labels, gamma).to(dtype=dtype, device=device)


def dpace_weights(confidence_NL: torch.Tensor, real_NL: torch.Tensor, alpha: float) -> torch.Tensor:
    """D-PACE (arXiv 2605.18810, equations 7 and 8): suffix sums of the prefix products of
    q = (1 - alpha) * confidence + alpha; slots without a label take no part."""
    smoothed = (1 - alpha) * confidence_NL + alpha
    prefix = smoothed.cumprod(-1) * real_NL
    return prefix.flip(-1).cumsum(-1).flip(-1) * real_NL


def denominator(labels_AL: torch.Tensor, config: TrainConfig) -> float:
    """A batch's part of it: the decay weights of its labels, or for D-PACE its blocks."""
    real = labels_AL >= 0
    if config.dpace_alpha is not None:
        return float(real.any(-1).sum())
    return float((real.cpu() * decay_weights(real.shape[1], config.decay_gamma)).sum())


def head_loss(hidden_ALD: torch.Tensor, head: Head, targets: Targets, config: TrainConfig, total: float) -> Outcome:
    """Loss and its gradient by the hidden states.

    hidden_ALD is detached from the network; the caller goes on with `states.backward(grad)`.
    """
    grad = torch.zeros_like(hidden_ALD)
    correct = torch.zeros(hidden_ALD.shape[:2], dtype=torch.bool, device=hidden_ALD.device)
    loss = torch.zeros((), dtype=torch.float64, device=hidden_ALD.device)
    for first in range(0, len(hidden_ALD), config.loss_chunk):
        part = slice(first, first + config.loss_chunk)
        chunk = targets.part(part)
        if hidden_ALD.device.type == "cpu" and not chunk.real.any():  # filling; elsewhere asking would wait
            continue
        value, grad[part], correct[part] = _chunk_loss(hidden_ALD[part], head, chunk, config, total)
        loss += value
    return Outcome(loss, grad, correct)


def _chunk_loss(
    hidden: torch.Tensor, head: Head, targets: Targets, config: TrainConfig, total: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = head.logits(hidden)
    top = logits.max(-1, keepdim=True)
    correct = (top.indices[..., 0] == targets.labels) & targets.known
    ids = targets.labels[..., None]
    if targets.ids is not None:
        ids = torch.cat([ids, targets.ids], dim=-1)
    bare = logits.gather(-1, ids)
    probs = (logits - top.values).exp_()
    sums = probs.sum(-1, keepdim=True)
    logprobs = (bare - top.values - sums.log()).requires_grad_(True)
    loss = _slot_losses(logprobs, targets, config).sum() / max(total, 1e-12)
    (g,) = torch.autograd.grad(loss, logprobs)
    grad = probs.mul_(-g.sum(-1, keepdim=True) / sums)
    grad.scatter_add_(-1, ids, g)
    return loss.detach().double(), head.gradient(grad, logits, hidden), correct


def _slot_losses(logprobs: torch.Tensor, targets: Targets, config: TrainConfig) -> torch.Tensor:
    """Weighted loss of every slot [N, L]; logprobs of the label first, then of the target's ids."""
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    with torch.no_grad():
        if config.dpace_alpha is not None:
            confidence = torch.where(targets.known, logprobs[..., 0].exp(), zero)
            weights = dpace_weights(confidence, targets.real, config.dpace_alpha)
        else:
            place = (logprobs.dtype, logprobs.device)
            weights = _decay_weights_on(logprobs.shape[1], config.decay_gamma, *place) * targets.real
    losses = zero
    if config.ce_weight:
        losses = losses - config.ce_weight * torch.where(targets.known, logprobs[..., 0], zero)
    if targets.ids is not None and targets.probs is not None:
        p, logq = targets.probs, logprobs[..., 1:]
        if config.kl_weight:
            kept = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
            losses = losses + config.kl_weight * (torch.xlogy(kept, kept) - kept * logq).sum(-1)
        if config.tv_weight:
            losses = losses + config.tv_weight * (1 - torch.minimum(p.to(logq), logq.exp()).sum(-1))
    return losses * weights


def leading_runs(correct_AL: torch.Tensor, real_AL: torch.Tensor) -> torch.Tensor:
    """Per block, how many slots are right before the first wrong one: what decoding would accept."""
    return (correct_AL & real_AL).int().cumprod(-1).sum(-1)
