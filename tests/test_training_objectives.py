"""Loss and gradient in chunks against plain autograd; weights, denominators, the metric."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashdraft.training.blocks import Blocks
from flashdraft.training.config import TrainConfig, make_config
from flashdraft.training.features import Features
from flashdraft.training.objectives import (
    Head,
    Targets,
    decay_weights,
    denominator,
    dpace_weights,
    head_loss,
    leading_runs,
    make_targets,
)

BLOCKS, SLOTS, WIDTH, VOCAB = 7, 5, 6, 11


def config(**changes: Any) -> TrainConfig:
    return make_config({"run": "r", "target": "t", "data": ["d"], "block_size": SLOTS + 1, "loss_chunk": 3, **changes})


def example(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Targets, torch.Tensor]:
    """(hidden, head weight, targets with distributions over all ids, full distribution)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(BLOCKS, SLOTS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (BLOCKS, SLOTS), generator=generator)
    real = torch.arange(SLOTS) < torch.tensor([5, 5, 3, 1, 0, 5, 2])[:, None]
    known = real & (torch.rand(BLOCKS, SLOTS, generator=generator) < 0.8)
    full = torch.randn(BLOCKS, SLOTS, VOCAB, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    top = full.topk(VOCAB, dim=-1)
    return hidden, weight, Targets(labels, known, real, top.indices, top.values), full


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, targets: Targets, full: torch.Tensor, cfg: TrainConfig, head: Head
) -> torch.Tensor:
    logits = hidden @ weight.T * head.multiplier
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    logq = logits.log_softmax(-1)
    label_logq = logq.gather(-1, targets.labels[..., None])[..., 0]
    ce = torch.where(targets.known, -label_logq, 0.0)
    kl = F.kl_div(logq, full, reduction="none").sum(-1)
    tv = 0.5 * (logq.exp() - full).abs().sum(-1)
    slot = cfg.ce_weight * ce + cfg.kl_weight * kl + cfg.tv_weight * tv
    if cfg.dpace_alpha is None:
        weights = torch.exp(-torch.arange(SLOTS).double() / cfg.decay_gamma) * targets.real
    else:
        weights = torch.zeros(BLOCKS, SLOTS, dtype=torch.float64)
        q = torch.where(targets.known, label_logq.exp(), 0.0).detach()
        smooth = (1 - cfg.dpace_alpha) * q + cfg.dpace_alpha
        for b in range(BLOCKS):
            n = int(targets.real[b].sum())
            for j in range(n):
                weights[b, j] = sum(math.prod(smooth[b, : m + 1].tolist()) for m in range(j, n))
    return (slot * weights).sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gamma": 2.0},
        {"ce_weight": 0.0, "kl_weight": 1.0},
        {"ce_weight": 0.0, "tv_weight": 1.0},
        {"ce_weight": 0.3, "kl_weight": 0.7, "tv_weight": 0.2, "dpace_alpha": 0.5},
    ],
    ids=["ce", "gamma", "kl", "tv", "all with D-PACE"],
)
@pytest.mark.parametrize("shape", [{}, {"softcap": 2.0, "multiplier": 0.7}], ids=["bare", "capped"])
def test_loss_and_gradient_equal_plain_autograd(changes: dict[str, Any], shape: dict[str, Any]) -> None:
    cfg = config(**changes)
    hidden, weight, targets, full = example()
    head = Head(weight, **shape)
    found = head_loss(hidden, head, targets, cfg, total=3.0)
    leaf = hidden.clone().requires_grad_(True)
    expected = naive(leaf, weight, targets, full, cfg, head) / 3.0
    (gradient,) = torch.autograd.grad(expected, leaf)
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert torch.allclose(found.grad_ALD, gradient, rtol=0, atol=1e-12)


def test_chunks_do_not_matter() -> None:
    hidden, weight, targets, _ = example()
    whole = head_loss(hidden, Head(weight), targets, config(loss_chunk=100, kl_weight=1.0), 2.0)
    parts = head_loss(hidden, Head(weight), targets, config(loss_chunk=1, kl_weight=1.0), 2.0)
    assert whole.loss == pytest.approx(parts.loss, rel=1e-12)
    assert torch.allclose(whole.grad_ALD, parts.grad_ALD, rtol=0, atol=1e-12)
    assert torch.equal(whole.correct_AL, parts.correct_AL)


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_a_batch_without_labels_is_finite(alpha: float | None) -> None:
    """T6: NaN when a sample has no anchor. No label at all: loss and gradient are 0, not NaN."""
    hidden, weight, targets, _ = example()
    none = torch.zeros_like(targets.real)
    cfg = config(dpace_alpha=alpha, kl_weight=1.0)
    found = head_loss(hidden, Head(weight), Targets(targets.labels, none, none, targets.ids, targets.probs), cfg, 0.0)
    assert found.loss == 0.0 and (found.grad_ALD == 0).all() and not found.correct_AL.any()
    assert denominator(torch.full((4, SLOTS), -1), cfg) == 0.0


def test_the_metric_is_a_joint_run() -> None:
    """T14: "simulated acceptance length" that was an accuracy, or a product of marginals. By hand:
    runs of 2, 0, 3, 1 and 0 leading right slots, so 1 + 6 / 5 = 2.2; the accuracy is 10 of 14
    and the product of marginals says something else."""
    correct = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 1]], dtype=torch.bool)
    real = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    runs = leading_runs(correct, real)
    assert runs.tolist() == [2, 0, 3, 1, 0]
    assert 1 + float(runs.sum()) / 5 == pytest.approx(2.2)
    marginals = (correct & real).sum(0) / real.sum(0)
    assert abs(float(1 + marginals.cumprod(0).sum()) - 2.2) > 0.1


def test_labels_outside_the_draft_vocabulary_count_as_wrong() -> None:
    """They have no cross-entropy, but the metric must not skip them."""
    blocks = Blocks(torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([[5, 7, 9]]), (0,), 1, (0,))
    index_of = torch.full((10,), -1)
    index_of[torch.tensor([5, 9])] = torch.arange(2)
    targets = make_targets(blocks, {}, index_of, with_distribution=False)
    assert targets.real.tolist() == [[True, True, True]]
    assert targets.known.tolist() == [[True, False, True]]
    weight = torch.zeros(2, 3, dtype=torch.float64)
    found = head_loss(torch.zeros(1, 3, 3, dtype=torch.float64), Head(weight), targets, config(block_size=4), 1.0)
    assert found.correct_AL.tolist() == [[True, False, False]]  # index 0 everywhere: only the first is right


def test_distributions_are_those_at_the_label(tmp_path: Any) -> None:
    """Slot k of anchor p is compared with the target's distribution for position p + k."""
    blocks = Blocks(torch.zeros(1, 4), torch.tensor([[3, 4, 5, 6]]), torch.tensor([[1, 1, -1]]), (8,), 1, (3,))
    ids = torch.arange(7)[:, None] * 10
    features = Features(torch.zeros(64, 1), ids, ids.double() / 100)
    targets = make_targets(blocks, {8: features}, None, with_distribution=True)
    assert targets.ids is not None and targets.ids[0, :, 0].tolist() == [40, 50, 60]


def test_weights_by_hand() -> None:
    assert torch.allclose(decay_weights(3, 4.0), torch.tensor([1.0, math.exp(-0.25), math.exp(-0.5)]).double())
    # confidence 0.5, 0, 1 with alpha 0.5: q = 0.75, 0.5, 1; prefix 0.75, 0.375, 0.375
    weights = dpace_weights(torch.tensor([[0.5, 0.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool), 0.5)
    assert weights.tolist() == [[1.5, 0.75, 0.375]]
    assert {b: config(block_size=b).decay_gamma for b in (16, 10, 8, 6)} == {16: 7.0, 10: 5.0, 8: 4.0, 6: 3.0}
