"""What the target says about a sequence, against a plain pass over it; and an optimizer step against
its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bed import VOCAB, random_prompt, tiny_target
from flashdraft.training.blocks import block_states, make_blocks
from flashdraft.training.config import TrainConfig
from flashdraft.training.data import TokenSequence
from flashdraft.training.features import FeatureSource
from flashdraft.training.objectives import Head, head_loss, make_targets
from flashdraft.training.optimizer import Masters
from flashdraft.training.run import exported
from test_training_trainer import answers, tiny_config, tiny_trainer


def source(tmp_path: Path, sample: TokenSequence, vocab_ids: torch.Tensor | None, **changes: Any) -> FeatureSource:
    config = tiny_config(tmp_path, answers(1), kl_weight=1.0, **changes)
    return FeatureSource(tiny_target(), [sample], (0, 1), config, vocab_ids)


@pytest.mark.parametrize("length", [20, 64, 150])
def test_states_and_distributions_are_the_targets(length: int, tmp_path: Path) -> None:
    """Row t of the states is position t's; row t of the distribution is for the token AT t. T10: the
    states are the outputs of the tapped layers, as a hook sees them."""
    target = tiny_target()
    sample = TokenSequence("a", "bed", tuple(random_prompt(5, length)), ((length - 9, length),))
    found = source(tmp_path, sample, None, distribution_tokens=4).get(0)
    seen: dict[int, torch.Tensor] = {}
    handles = [
        target.layers[i].register_forward_hook(
            lambda _m, _a, out, i=i: seen.update({i: out[0] if isinstance(out, tuple) else out})
        )
        for i in (0, 1)
    ]
    logits = target.forward(torch.tensor([sample.token_ids]), target.new_cache(1, length), [0]).logits_BTV[0]
    for handle in handles:
        handle.remove()
    states = torch.cat([seen[0][0], seen[1][0]], dim=-1)
    assert torch.allclose(found.states_TF[:length], states, rtol=0, atol=1e-10)
    assert len(found.states_TF) % 64 == 0 and found.states_TF.isfinite().all()
    assert found.ids_TK is not None and found.probs_TK is not None
    for t in range(length - 9, length):
        top = logits[t - 1].softmax(-1).topk(4)
        assert found.ids_TK[t].tolist() == top.indices.tolist()
        assert torch.allclose(found.probs_TK[t], top.values, rtol=0, atol=1e-10)


def test_distributions_over_a_draft_vocabulary(tmp_path: Path) -> None:
    """Ids are indices of the part; probabilities are of the whole, so that TV knows what is missing."""
    target, ids = tiny_target(), torch.arange(1, VOCAB, 4)
    sample = TokenSequence("a", "bed", tuple(random_prompt(5, 30)), ((20, 30),))
    found = source(tmp_path, sample, ids, distribution_tokens=3).get(0)
    logits = target.forward(torch.tensor([sample.token_ids]), target.new_cache(1, 30), [0]).logits_BTV[0]
    assert found.ids_TK is not None and found.probs_TK is not None
    top = logits[24].softmax(-1)[ids].topk(3)
    assert found.ids_TK[25].tolist() == top.indices.tolist()
    assert torch.allclose(found.probs_TK[25], top.values, rtol=0, atol=1e-10)


def test_plain_cross_entropy_asks_for_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head over the whole vocabulary would be a quarter of the target's pass."""
    config = tiny_config(tmp_path, answers(1))
    sample = TokenSequence("a", "bed", tuple(random_prompt(5, 30)), ((20, 30),))
    target = tiny_target()
    kept = []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: kept.append(k["keep"]) or forward(*a, **k))
    assert FeatureSource(target, [sample], (0, 1), config).get(0).ids_TK is None
    assert kept == [slice(0, 0)]


@pytest.mark.parametrize("clip", [1e9, 0.5])
def test_a_step_is_adamw_on_the_whole_steps_loss(tmp_path: Path, clip: float) -> None:
    """Several batches with one denominator: gradients add up to that of the whole, in one piece."""
    changes = {"accumulate": 3, "blocks_per_batch": 16, "anchors_per_piece": 8, "clip": clip, "ema": 0.9}
    trainer = tiny_trainer(tmp_path, answers(3), dtype="float64", warmup_steps=1, **changes)
    config, start = trainer.config, {k: v.clone() for k, v in trainer.masters.weights.items()}
    pieces = [piece for batch in trainer.plan.batches(0) for piece in batch]
    assert len(trainer.plan.batches(0)) == 3
    report = trainer.train_step()

    shape = trainer.method.network.config
    blocks = make_blocks(pieces, trainer.sequences, shape.block_size, shape.mask_token_id, 8)
    features = {i: trainer.features.get(i) for i in set(blocks.sequences)}
    with torch.no_grad():
        for name, parameter in trainer.method.network.named_parameters():
            parameter.copy_(start[name])
    states = block_states(
        trainer.method.network, trainer.target.embed, blocks, {i: f.states_TF for i, f in features.items()}
    )
    logq = trainer.target.head(states).log_softmax(-1)
    real = blocks.labels_AL >= 0
    weights = torch.exp(-torch.arange(7, dtype=torch.float64) / 4) * real
    loss = -(logq.gather(-1, blocks.labels_AL.clamp(min=0)[..., None])[..., 0] * weights).sum() / weights.sum()
    loss.backward()
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-10)
    gradients = {name: p.grad for name, p in trainer.method.network.named_parameters()}
    norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    assert report.grad_norm == pytest.approx(float(norm), rel=1e-8)
    for name, weight in trainer.masters.weights.items():
        gradient = gradients[name]
        assert gradient is not None
        gradient = gradient * min(1.0, clip / (float(norm) + 1e-6))
        expected = start[name] - config.lr * gradient / (gradient.abs() + 1e-8)  # AdamW's first step
        assert torch.allclose(weight, expected, rtol=0, atol=1e-8), name
        mean = 0.9 * start[name] + 0.1 * weight
        assert torch.allclose(trainer.masters.means[name], mean, rtol=0, atol=1e-12)
    saved = dict(exported(trainer).named_parameters())
    assert all(torch.equal(saved[name], trainer.masters.means[name]) for name in saved)


def test_groups_of_rates(tmp_path: Path) -> None:
    """Copies of the target's weights move at their own rate; vectors do not decay."""
    trainer = tiny_trainer(tmp_path, answers(1), lr=1e-2, lr_copied=1e-4, weight_decay=0.1)
    network = trainer.method.network
    masters = Masters(network, dict(network.named_parameters()), {"layers.0.mlp.up_proj.weight"}, trainer.config)
    before = {k: v.clone() for k, v in masters.weights.items()}
    for weight in masters.weights.values():
        weight.grad = torch.ones_like(weight)
    masters.step(1.0)
    for name, weight in masters.weights.items():
        rate = 1e-4 if name == "layers.0.mlp.up_proj.weight" else 1e-2
        decay = rate * 0.1 if weight.ndim > 1 else 0.0
        assert torch.allclose(weight, before[name] * (1 - decay) - rate, rtol=0, atol=1e-6), name


def test_a_pass_over_blocks_of_two_spans(tmp_path: Path) -> None:
    """Each block keeps the end of its own span when anchors are dealt out to pieces."""
    tokens = tuple(random_prompt(3, 40))
    sample = {"id": "a", "token_ids": list(tokens), "loss_spans": [[5, 15], [20, 40]]}
    trainer = tiny_trainer(tmp_path, [sample], anchors_per_piece=4, blocks_per_batch=8, accumulate=9)
    pairs = {
        (p, end)
        for batch in trainer.plan.batches(0)
        for piece in batch
        for p, end in zip(piece.anchors, piece.ends, strict=True)
    }
    assert pairs == {(p, 15) for p in range(5, 14)} | {(p, 40) for p in range(20, 39)}
    shape = trainer.method.network.config
    blocks = make_blocks(trainer.plan.batches(0)[0], trainer.sequences, shape.block_size, shape.mask_token_id, 4)
    targets = make_targets(blocks, {}, None, with_distribution=False)
    hidden = torch.zeros(*targets.labels.shape, 32)
    assert head_loss(hidden, Head(torch.zeros(VOCAB, 32)), targets, trainer.config, 1.0).loss > 0


def test_a_pass_over_several_sequences_gives_the_features_of_each() -> None:
    """What a GPU does with the sequences of a batch: rows of different lengths in one pass."""
    target = tiny_target()
    lengths = (150, 40, 70, 64)
    samples = [TokenSequence(str(n), "", tuple(3 + i * n % 90 for i in range(n)), ((n // 2, n),)) for n in lengths]
    config = TrainConfig(run="", target="", data=("-",), kl_weight=1.0, distribution_tokens=5, mix=1)
    together = FeatureSource(target, samples, (0, 1), config)
    for index, found in enumerate(together._compute(range(4))):
        alone = FeatureSource(target, [samples[index]], (0, 1), config).get(0)
        assert found.states_TF.shape == alone.states_TF.shape
        torch.testing.assert_close(found.states_TF[: lengths[index]], alone.states_TF[: lengths[index]])
        torch.testing.assert_close(found.probs_TK, alone.probs_TK)
        assert found.ids_TK is not None and torch.equal(found.ids_TK, alone.ids_TK)  # type: ignore[arg-type]
