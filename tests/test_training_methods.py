"""Rivals and ablations in the trainer: what is learnt is accepted, and training sees what decoding does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bed import PROMPTS, decode, tiny_target
from cli_bed import save_target
from flashdraft.drafters import Drafter, make_drafter
from flashdraft.drafters.draft_model import DraftModelDrafter
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.training.blocks import make_blocks
from flashdraft.training.config import _NUM_LAYERS, make_config
from flashdraft.training.data import TokenSequence
from flashdraft.training.methods import METHODS as TRAINED
from flashdraft.training.methods.dflash import reveal
from flashdraft.training.objectives import Head, SlotHeads, Targets, head_loss
from flashdraft.training.plan import Piece
from flashdraft.training.run import _chat_command, build_trainer, exported
from flashdraft.training.trainer import Trainer
from flashdraft.types import FlashdraftError, Request, SamplingParams
from rivals import causal, own_context_states, shaken
from test_training_trainer import answers, tiny_config

DRAFT_LAYERS = {"method": "draft_model", "num_layers": 1, "target_layer_ids": None, "mask_token_id": None}
METHODS: dict[str, dict[str, Any]] = {
    "medusa": {"method": "medusa", "num_layers": 1, "target_layer_ids": None, "mask_token_id": None},
    "eagle3": {"method": "eagle3", "num_layers": 1, "mask_token_id": None, "draft_vocab": 80, "target_layer_ids": [0, 1, 2]},
    "draft_model": {**DRAFT_LAYERS, "anchors_per_piece": 64, "blocks_per_batch": 64},
    "fused at the input": {"context": "fused"},
    "no features": {"context": "none", "target_layer_ids": None},
    "autoregressive": {"autoregressive": True},
    "windows": {"context": "fused", "window": 20},
}  # fmt: skip


def trainer_of(
    folder: Path, method: str, rows: list[dict[str, Any]], dtype: str = "float32", **changes: Any
) -> Trainer:
    config = tiny_config(folder, rows, **{"block_size": 6, **METHODS[method], **changes})
    return build_trainer(config, target=tiny_target("llama", dtype))


def saved(trainer: Trainer, folder: Path, method: str) -> Drafter:
    if method == "draft_model":  # its folder has to have a tokenizer, which the tiny target has not
        return trainer.method.drafter(exported(trainer))
    trainer.write_draft(folder)
    name = METHODS[method].get("method", "dflash")
    options = {"tree": False} if name == "medusa" else {}
    return make_drafter(trainer.target, name, folder, 6, **options)


@pytest.mark.parametrize("method", METHODS)
def test_a_learnt_sequence_is_accepted_whole(tmp_path: Path, method: str) -> None:
    """T1 for all methods: one sequence is trained until every slot is right, saved, loaded and decoded."""
    rows = answers(1, tokens=23)
    trainer = trainer_of(tmp_path, method, rows, max_steps=600, lr=1e-2 if method == "medusa" else 3e-3)
    in_a_row, wanted = 0, 20 if method == "autoregressive" else 5  # the first filled slots are drawn
    while in_a_row < wanted and trainer.step < trainer.num_steps:
        report = trainer.train_step()
        in_a_row = in_a_row + 1 if torch.equal(report.right_L, report.labels_L) else 0
    assert in_a_row == wanted
    drafter = saved(trainer, tmp_path / "draft", method)
    result = decode(trainer.target, drafter, [PROMPTS[0]], max_tokens=19, ignore_eos=True)[0]
    assert result.stats.acceptance_length == 6.0
    assert list(result.token_ids) == rows[0]["token_ids"][len(PROMPTS[0]) : len(PROMPTS[0]) + 19]


@pytest.mark.parametrize("method", METHODS)
def test_training_sees_what_decoding_does(tmp_path: Path, method: str) -> None:
    """T3: what a half-trained draft says at every position of an answer, by the training forward, is what
    it drafts there when it decodes: the same rounds, in float64."""
    rows = answers(3, tokens=30)
    trainer = trainer_of(tmp_path, method, rows, "float64", max_steps=60, lr=3e-3)
    for _ in range(40):
        trainer.train_step()
    drafter = trainer.method.drafter(exported(trainer))
    engine = Engine(trainer.target, drafter)
    lengths = []
    for index, row in enumerate(rows):
        start = row["num_prompt_tokens"]
        request = Request(row["token_ids"][:start], SamplingParams(max_tokens=30, ignore_eos=True))
        rounds = engine.run([request])[0].stats.rounds
        at, drafted = start, drafted_right(trainer, index)
        for round_ in rounds:
            expected = min(drafted[at], round_.num_drafted)
            assert round_.num_accepted == expected, f"answer {index}, anchor {at}"
            lengths.append(expected)
            at += round_.num_committed
    assert 0 in lengths and max(lengths) > 1  # right often, not always


def drafted_right(trainer: Trainer, index: int) -> dict[int, int]:
    """Of every anchor of a sequence, how many drafted tokens are right before the first wrong one."""
    method, sequence = trainer.method, trainer.sequences[index]
    anchors = tuple(range(sequence.loss_spans[0][0], len(sequence.token_ids) - 1))
    ends = (len(sequence.token_ids),) * len(anchors)
    pieces = [Piece(index, anchors, ends)]
    size = trainer.config.block_size

    def right(filled: int) -> torch.Tensor:
        blocks = make_blocks(pieces, trainer.sequences, method.block_size, method.mask_token_id, len(anchors))
        labels = blocks.labels_AL
        if trainer.config.autoregressive:
            blocks = reveal(blocks, torch.full((len(anchors),), filled))
        with torch.no_grad():
            drafts = method.head.logits(method.states(blocks, trainer.features.of([index]))).argmax(-1)
        if method.vocab_ids is not None:
            drafts = method.vocab_ids[drafts]
        return (drafts == labels) & (labels >= 0)

    if trainer.config.autoregressive:  # slot k is drafted with the slots before it filled
        grid = torch.stack([right(filled)[:, filled] for filled in range(size - 1)], dim=1)
    elif method.block_size < size:  # a draft model is asked behind every right token
        column = torch.nn.functional.pad(right(0)[:, 0], (0, size))
        grid = torch.stack([column[k : k + len(anchors)] for k in range(size - 1)], dim=1)
    else:
        grid = right(0)
    return dict(zip(anchors, grid.int().cumprod(-1).sum(-1).tolist(), strict=True))


# -- states by plain loops, a block at a time: (method, tokens [T], features [T, F], anchor) -> [L, D] ------------


def medusa_states(method: Any, tokens: torch.Tensor, features: torch.Tensor, anchor: int) -> torch.Tensor:
    """Every head reads what predicted the anchor."""
    return torch.stack([block(features[anchor - 1]) for block in method.network.blocks])


def eagle_states(method: Any, tokens: torch.Tensor, features: torch.Tensor, anchor: int) -> torch.Tensor:
    """Pairs of token j + 1 and the feature of j up to the anchor's; behind it the network's own states."""
    embeds, hidden, states = method.target.embed(tokens)[1:], method.network.fuse(features[:anchor]), []
    for size in range(anchor, anchor + method.block_size - 1):
        states.append(method.network(embeds[None, :size], hidden[None], torch.arange(size)[None], causal)[0, -1:])
        hidden = torch.cat([hidden, states[-1]])
    out: torch.Tensor = method.network.norm(torch.cat(states))
    return out


def model_states(method: Any, tokens: torch.Tensor, features: torch.Tensor, anchor: int) -> torch.Tensor:
    """The anchor is the last token that the model has read."""
    out: torch.Tensor = method.network.base_model(input_ids=tokens[None, : anchor + 1], use_cache=False)[0][0, -1:]
    return out


def own_states(method: Any, tokens: torch.Tensor, features: torch.Tensor, anchor: int) -> torch.Tensor:
    block = torch.full((1, method.block_size), method.mask_token_id)
    block[0, 0] = tokens[anchor]
    at = torch.tensor([anchor])
    return own_context_states(method.network, method.target, tokens, features, at, block)[0, 1:]


LOOPS = {
    "medusa": medusa_states,
    "eagle3": eagle_states,
    "draft_model": model_states,
    "fused at the input": own_states,
    "no features": own_states,
}


@pytest.mark.parametrize("method", LOOPS)
def test_states_equal_a_plain_loop(tmp_path: Path, method: str) -> None:
    """T1, T3: of a random network in float64, slot k is about the token k behind the anchor and sees what
    decoding has: nothing of the answer from there on."""
    trainer = trainer_of(tmp_path, method, answers(2, tokens=24), "float64")
    made, sequences = trainer.method, trainer.sequences
    if method != "draft_model":
        shaken(made.network, 1, 0.15)
    starts = [sequence.loss_spans[0][0] for sequence in sequences]
    anchors = [(start, start + 5, start + 16) for start in starts]
    pieces = [Piece(i, some, (len(sequences[i].token_ids),) * 3) for i, some in enumerate(anchors)]
    blocks = make_blocks(pieces, sequences, made.block_size, made.mask_token_id, 3)
    features = trainer.features.of([0, 1])
    with torch.no_grad():
        found = made.states(blocks, features)
        for a, (i, anchor) in enumerate((i, anchor) for i, some in enumerate(anchors) for anchor in some):
            tokens = torch.tensor(sequences[i].token_ids)
            expected = LOOPS[method](made, tokens, features[i].states_TF[: len(tokens)], anchor)
            assert torch.allclose(found[a], expected, rtol=1e-9, atol=1e-12)
            assert blocks.labels_AL[a].tolist() == tokens[anchor + 1 : anchor + made.block_size].tolist()


def test_filled_slots_hold_their_tokens_and_are_no_labels() -> None:
    sequence = TokenSequence("a", "a", (5, 6, 7, 8, 9, 10), ((1, 6),), 0.0)
    blocks = make_blocks([Piece(0, (1, 4), (6, 6))], [sequence], 5, 99, 2)
    found = reveal(blocks, torch.tensor([2, 3]))
    assert found.tokens_AB.tolist() == [[6, 7, 8, 99, 99], [9, 10, 99, 99, 99]]
    assert found.labels_AL.tolist() == [[-1, -1, 9, 10], [-1, -1, -1, -1]]
    assert blocks.tokens_AB.tolist()[0] == [6, 99, 99, 99, 99]


@pytest.mark.parametrize("slots", [False, True], ids=["one head", "a head for every slot"])
def test_the_gradient_of_a_trained_head_is_autograds(slots: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, 4, dtype=torch.float64)
    weights = tuple(torch.randn(7, 4, dtype=torch.float64).requires_grad_() for _ in range(3 if slots else 1))
    head = SlotHeads(weights[0], weights=weights) if slots else Head(weights[0])
    labels = torch.randint(7, (5, 3))
    real = torch.tensor([[True, True, i % 2 == 0] for i in range(5)])
    config = make_config({"run": "r", "target": "t", "data": ["d"], "block_size": 4, "gamma": 2.0, "loss_chunk": 2})
    found = head_loss(hidden, head, Targets(labels, real, real), config, 3.0)
    by_hand = [weight.detach().clone().requires_grad_() for weight in weights]
    inputs = hidden.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for block in range(5):
        for slot in range(3):
            if real[block, slot]:
                logits = by_hand[slot if slots else 0] @ inputs[block, slot]
                share = torch.exp(torch.tensor(-slot / 2.0, dtype=torch.float64)) / 3.0
                loss = loss - share * logits.log_softmax(-1)[labels[block, slot]]
    loss.backward()
    assert abs(found.loss - loss.item()) < 1e-12
    assert torch.allclose(found.grad_ALD, inputs.grad, atol=1e-12)  # type: ignore[arg-type]
    for weight, expected in zip(weights, by_hand, strict=True):
        assert torch.allclose(weight.grad, expected.grad, atol=1e-12)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["medusa", "eagle3", "draft_model"])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, method: str) -> None:
    rows = answers(3, tokens=20)
    changes = {"optimizer": "muon", "ema": 0.9, "lr_head": 1e-3, "max_steps": 6}
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
    whole = trainer_of(tmp_path / "whole", method, rows, **changes)
    for _ in range(6):
        whole.train_step()
    whole.save()
    part = trainer_of(tmp_path / "parts", method, rows, **changes)
    for _ in range(3):
        part.train_step()
    part.save()
    again = trainer_of(tmp_path / "parts", method, rows, **changes)
    assert again.resume() and again.step == 3
    for _ in range(3):
        again.train_step()
    again.save()
    files = [tmp_path / folder / "run" / "latest" / "state.safetensors" for folder in ("whole", "parts")]
    one, other = (load_file(file) for file in files)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    heads = {key for key in one if "lm_head" in key}
    assert not any(key.startswith("momentum.") for key in heads)  # a projection to words is AdamW's


@pytest.mark.parametrize("method", ["medusa", "eagle3"])
def test_a_run_goes_on_from_another_draft(tmp_path: Path, method: str) -> None:
    rows = answers(2, tokens=20)
    first = trainer_of(tmp_path, method, rows)
    for _ in range(3):
        first.train_step()
    first.write_draft(tmp_path / "draft")
    second = trainer_of(tmp_path, method, rows, init_from=str(tmp_path / "draft"))
    for name, weight in first.masters.best_weights.items():
        assert torch.equal(second.masters.weights[name], weight.to(torch.float32))
    (tmp_path / "other").mkdir()
    with pytest.raises(FlashdraftError, match="other shapes than this configuration"):
        trainer_of(tmp_path / "other", method, rows, init_from=str(tmp_path / "draft"), block_size=4,
                   **({"draft_vocab": 70} if method == "eagle3" else {}))  # fmt: skip


def test_what_a_draft_model_starts_from(tmp_path: Path) -> None:
    """First and last layer are among those taken over; embedding and head stay the target's."""
    trainer = trainer_of(tmp_path, "draft_model", answers(1), num_layers=2)
    target, network = trainer.target, trainer.method.network
    theirs = dict(target.model.named_parameters())
    for own, source in ((0, 0), (1, target.num_layers - 1)):
        name = "self_attn.q_proj.weight"
        assert torch.equal(network.get_parameter(f"model.layers.{own}.{name}"), theirs[f"model.layers.{source}.{name}"])
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    assert not any("embed" in name or "lm_head" in name for name in trained)
    before = {name: weight.clone() for name, weight in theirs.items()}
    trainer.train_step()
    assert all(torch.equal(weight, before[name]) for name, weight in theirs.items())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": "eagle4"}, "method is 'eagle4'; expected one of dflash, medusa, eagle3, draft_model"),
        ({"method": "medusa", "target_layer_ids": [1]}, "target_layer_ids is (1,), which the method medusa has not"),
        ({"method": "eagle3", "num_layers": 2}, "num_layers is 2, which the method eagle3 has not"),
        ({"method": "eagle3", "context": "fused"}, "context is 'fused', which the method eagle3 has not"),
        ({"method": "draft_model", "window": 8}, "window is 8, which the method draft_model has not"),
        ({"context": "some"}, "context is 'some'; expected one of injected, fused, none"),
    ],
)
def test_what_a_method_has_not_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FlashdraftError) as caught:
        make_config({"run": "r", "target": "t", "data": ["d"], **changes})
    assert sentence in str(caught.value)
    assert list(TRAINED) == list(_NUM_LAYERS)  # what is accepted is there


@pytest.mark.parametrize(
    ("method", "changes", "sentence"),
    [
        ("medusa", {"draft_vocab": 40}, "Medusa's heads have the whole vocabulary"),
        ("draft_model", {"draft_vocab": 40}, "a draft model has the target's vocabulary"),
        ("draft_model", {"num_layers": 99}, "num_layers is 99; expected 1 to"),
        ("draft_model", {"init": "random"}, "a draft model starts from the target's layers"),
        ("eagle3", {"target_layer_ids": [0, 99]}, "taps the layers [0, 99]"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(
    tmp_path: Path, method: str, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(FlashdraftError) as caught:
        trainer_of(tmp_path, method, answers(1), **changes)
    assert sentence in str(caught.value)


def test_medusas_tree_is_one(tmp_path: Path) -> None:
    """The saved heads have a static tree that decoding takes, and that is lossless."""
    rows = answers(2, tokens=20)
    trainer = trainer_of(tmp_path, "medusa", rows)
    trainer.write_draft(tmp_path / "draft")
    choices = json.loads((tmp_path / "draft" / "config.json").read_text())["medusa_choices"]
    assert choices[0] == [0] and len(choices) == 24 and max(map(len, choices)) <= 5
    drafter = make_drafter(trainer.target, None, tmp_path / "draft")
    assert drafter.drafts_trees and _chat_command(trainer).endswith("latest")  # its block is in its heads
    plain = decode(trainer.target, None, PROMPTS[:2], max_tokens=20)
    found = decode(trainer.target, drafter, PROMPTS[:2], max_tokens=20)
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]


def test_a_draft_models_folder_is_loaded_as_one(tmp_path: Path) -> None:
    target = Target.load(save_target(tmp_path / "target"), dtype="float32")
    rows = [{"id": "a", "token_ids": list(range(5, 30)), "num_prompt_tokens": 5}]
    config = tiny_config(
        tmp_path, rows, **{**METHODS["draft_model"], "target": str(tmp_path / "target"), "block_size": 4}
    )
    trainer = build_trainer(config, target=target)
    trainer.train_step()
    trainer.write_draft(tmp_path / "draft")
    drafter = make_drafter(target, None, tmp_path / "draft", 4)
    assert isinstance(drafter, DraftModelDrafter) and drafter.model.num_layers == 1
    for name, weight in trainer.masters.best_weights.items():
        assert torch.equal(drafter.model.model.get_parameter(name), weight)
    assert json.loads((tmp_path / "draft" / "training.json").read_text())["config"]["method"] == "draft_model"
    assert _chat_command(trainer).endswith("latest --block-size 4")
    plain = decode(target, None, [[5, 6, 7]], max_tokens=12)[0]
    assert decode(target, drafter, [[5, 6, 7]], max_tokens=12)[0].token_ids == plain.token_ids


def test_no_target_pass_without_need(tmp_path: Path) -> None:
    """A draft model that learns from labels alone asks nothing of the target."""
    trainer = trainer_of(tmp_path, "draft_model", answers(1))
    trainer.target.forward = None  # type: ignore[method-assign, assignment]
    try:
        trainer.train_step()
    finally:
        del trainer.target.forward
