"""Reading a configuration, where a draft starts, and the plan of batches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import VOCAB, make_model, tiny_target
from flashdraft.target import Target
from flashdraft.training.config import as_json, as_record, config_diff, load_config, make_config
from flashdraft.training.data import TokenSequence
from flashdraft.training.methods.initialise import default_layer_ids, draft_config, draft_vocab, mask_token, new_network
from flashdraft.training.plan import Plan
from flashdraft.types import FlashdraftError

BASE: dict[str, Any] = {"run": "r", "target": "t", "data": ["d"], "num_layers": 2, "target_layer_ids": [0, 1]}


def config(**changes: Any) -> Any:
    return make_config({**BASE, "mask_token_id": VOCAB - 1, **changes})


def sequences(lengths: list[int], prompt: int = 3) -> list[TokenSequence]:
    return [
        TokenSequence(f"s{i}", "bed", tuple((7 * i + j) % 90 + 3 for j in range(n)), ((prompt, n),))
        for i, n in enumerate(lengths)
    ]


def test_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("run: r\ntarget: t\ndata: one.jsonl\nlr: 1e-3\ntarget_layer_ids: [1, 2]\n")
    found = load_config(file, ["max_steps=7", "draft_vocab=null", "data=[a, b]", "beta2=0.9"])
    assert found.lr == 1e-3  # YAML alone reads 1e-3 as text
    assert (found.max_steps, found.data, found.target_layer_ids) == (7, ("a", "b"), (1, 2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"blok_size": 8}, "has a key 'blok_size' that does not exist; the closest one is 'block_size'"),
        ({"block_size": "eight"}, "block_size is 'eight'; expected a whole number"),
        ({"block_size": 8.5}, "block_size is 8.5; expected a whole number"),
        ({"lr": True}, "lr is True; expected a number"),
        ({"lr": "fast"}, "lr is 'fast'; expected a number"),
        ({"run": 3}, "run is 3; expected a text"),
        ({"block_size": 1}, "block_size is 1; expected at least 2"),
        ({"keep": 1}, "keep is 1; expected at least 2"),
        ({"attention": "flash"}, 'attention is \'flash\'; expected "auto", "sdpa" or "flex"'),
        ({"shard": "yes"}, "shard is 'yes'; expected true or false"),
        ({"shard": 1}, "shard is 1; expected true or false"),
        ({"schedule": "linear"}, "schedule is 'linear'; expected"),
        ({"blocks_per_batch": 100}, "expected a multiple of anchors_per_piece (32)"),
        ({"ce_weight": 0}, "expected one above 0"),
        ({"dpace_alpha": 0}, "dpace_alpha is 0.0; expected"),
        ({"data": []}, "data is (); expected at least one"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FlashdraftError) as error:
        make_config({**BASE, **changes})
    assert sentence in str(error.value)


def test_what_a_resumed_run_may_change() -> None:
    """Not the attention, which rounds differently; shards do not. A key that is younger than the run had
    its default."""
    old = as_json(config())
    del old["attention"], old["shard"]
    assert config_diff(old, as_json(config(shard=True, max_steps=9))) == []
    assert config_diff(old, as_json(config(attention="sdpa", lr=1e-3))) == [
        "attention: 'auto' -> 'sdpa'", "lr: 0.0006 -> 0.001"
    ]  # fmt: skip


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FlashdraftError, match="lacks run, data"):
        make_config({"target": "t"})
    with pytest.raises(FlashdraftError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "c.yaml").write_text("a: [1")
    with pytest.raises(FlashdraftError, match="is no valid YAML"):
        load_config(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("- 1")
    with pytest.raises(FlashdraftError, match="holds a list"):
        load_config(tmp_path / "c.yaml")
    (tmp_path / "c.yaml").write_text("run: r")
    with pytest.raises(FlashdraftError, match="has no '='"):
        load_config(tmp_path / "c.yaml", ["lr"])


def test_every_anchor_once_an_epoch() -> None:
    samples = sequences([10, 40, 4, 3, 77])  # 3 has no answer, 4 an answer without a label
    plan = Plan(samples, config(anchors_per_piece=8, blocks_per_batch=16, accumulate=2, mix=2))
    wanted = Counter((i, p) for i, n in ((0, 10), (1, 40), (4, 77)) for p in range(3, n - 1))
    orders = []
    for epoch in range(2):
        first = epoch * plan.steps_per_epoch
        batches = [b for step in range(first, first + plan.steps_per_epoch) for b in plan.batches(step)]
        assert all(len(batch) == 2 for batch in batches[:-1])
        pieces = [piece for batch in batches for piece in batch]
        assert Counter((piece.sequence, p) for piece in pieces for p in piece.anchors) == wanted
        orders.append(pieces)
    assert orders[0] != orders[1]
    assert plan.num_anchors == sum(wanted.values())


def test_anchors_are_drawn_anew_each_epoch_from_numbers_alone() -> None:
    samples = sequences([50, 60])
    changes = {"anchors_per_sequence": 5, "anchors_per_piece": 4, "blocks_per_batch": 4, "accumulate": 1}
    drawn = []
    for step in range(8):
        batches = Plan(samples, config(**changes)).batches(step)  # a new plan: nothing is remembered
        drawn.append([piece for batch in batches for piece in batch])
    epochs = [{(p.sequence, a) for piece in drawn[i : i + 4] for p in piece for a in p.anchors} for i in (0, 4)]
    assert len(epochs[0]) == len(epochs[1]) == 10 and epochs[0] != epochs[1]
    other = Plan(samples, config(**changes, seed=1))
    assert [p for step in range(4) for b in other.batches(step) for p in b] != [p for ps in drawn[:4] for p in ps]


@pytest.mark.parametrize("token", [2, 0], ids=["eos", "pad"])
def test_the_mask_is_no_end_and_no_padding(token: int) -> None:
    """T7: mask id silently equal to eos or pad."""
    with pytest.raises(FlashdraftError, match=f"mask token {token} is the target's"):
        draft_config(config(mask_token_id=token), tiny_target(), sequences([10]))


def test_a_mask_token_is_found() -> None:
    target = tiny_target()

    class Tokenizer:
        all_special_ids = (0, 1, 2, 5, 6)
        bos_token_id = 1
        vocab_size = VOCAB
        added_tokens_decoder = {5: "<five>", 6: "<six>"}  # noqa: RUF012

        def __len__(self) -> int:
            return VOCAB

    with_tokenizer = Target(target.model, Tokenizer(), "tiny")  # type: ignore[arg-type]
    used = [TokenSequence("a", "bed", (6, 7), ((1, 2),))]
    assert mask_token(with_tokenizer, used) == 5
    assert mask_token(with_tokenizer, [TokenSequence("a", "bed", (5, 6, VOCAB - 1), ((1, 2),))]) == VOCAB - 2
    with pytest.raises(FlashdraftError, match="set mask_token_id"):
        mask_token(with_tokenizer, [TokenSequence("a", "bed", tuple(range(VOCAB)), ((1, 2),))])
    with_tokenizer.num_tokens = VOCAB - 3
    assert mask_token(with_tokenizer, used) == VOCAB - 1


def test_layer_ids_are_ones_that_can_be_tapped() -> None:
    assert default_layer_ids(36) == (1, 9, 17, 24, 32)
    for n in range(2, 40):
        ids = default_layer_ids(n)
        assert list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < n - 1


def test_draft_vocabulary_is_the_most_frequent_of_answers() -> None:
    """Prompts do not count, the end of text always does; ids rise."""
    target = tiny_target()
    samples = [TokenSequence("a", "bed", (9, 9, 9, 9, 30, 31, 31, 40, 40, 40), ((4, 10),))]
    assert draft_vocab(samples, 3, target).tolist() == [2, 31, 40]
    assert draft_vocab(samples, 500, target).tolist() == list(range(VOCAB))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_start_from_the_target(family: str) -> None:
    """Layers are the target's last two, biases included; fc passes the deepest tap on; q and k norms
    are copied (Qwen3), or measured where the target has none."""
    target = tiny_target(family)
    made = config()
    shape = draft_config(made, target, sequences([20]))
    network, copied = new_network(made, shape, target, sequences([20, 30]))
    own = dict(network.named_parameters())
    for i in (0, 1):
        theirs = dict(target.layers[target.num_layers - 2 + i].named_parameters())
        names = [n for n in theirs if n.startswith(("self_attn", "mlp", "input", "post"))]
        assert names and all(torch.equal(own[f"layers.{i}.{n}"], theirs[n]) for n in names)
        assert all(f"layers.{i}.{n}" in copied for n in names)
        q_norm = own[f"layers.{i}.self_attn.q_norm.weight"]
        assert (q_norm > 0).all() and (family == "qwen3" or not torch.allclose(q_norm, torch.ones_like(q_norm)))
    deepest = torch.randn(4, shape.hidden_size, dtype=torch.float64)
    features = torch.cat([torch.randn_like(deepest), deepest], dim=-1)
    assert torch.equal(network.fc(features), deepest)
    assert "fc.weight" not in copied
    assert torch.equal(network.norm.weight, target.model.model.norm.weight)
    assert shape.attention_bias is (family == "qwen2")


def test_start_at_random_depends_on_the_seed() -> None:
    target = tiny_target()
    shape = draft_config(config(init="random"), target, sequences([20]))
    first, again, other = (
        new_network(config(init="random", seed=s), shape, target, [])[0].fc.weight for s in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_rope_of_the_target_reaches_the_draft() -> None:
    """T9: rope parameters differ at serving."""
    from bed import CONFIGS

    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}
    target = Target(make_model(CONFIGS["llama"](rope_parameters=scaled), torch.float32))
    shape = draft_config(config(), target, sequences([10]))
    assert dict(shape.rope) == scaled


def test_what_a_resumed_run_may_not_change() -> None:
    """A run of an older version, which did not know a key, goes on if the key has its default now."""
    old = as_json(config())
    assert config_diff(old, as_json(config(max_steps=5, threads=3))) == []
    assert config_diff(old, as_json(config(lr=1.0, target_layer_ids=[0]))) == [
        "lr: 0.0006 -> 1.0",
        "target_layer_ids: [0, 1] -> [0]",
    ]
    older = {k: v for k, v in old.items() if k not in ("attention", "tv_weight")}
    assert config_diff(older, old) == []
    assert config_diff(older, old | {"tv_weight": 0.5}) == ["tv_weight: 0.0 -> 0.5"]


def test_what_is_published_names_no_folders() -> None:
    record = as_record(config(run="/home/me/run", data=["/home/me/a.jsonl", "b.jsonl"], target="Qwen/Qwen3-0.6B"))
    assert record["run"] == "run" and record["data"] == ["a.jsonl", "b.jsonl"]
    assert record["target"] == "Qwen/Qwen3-0.6B" and record["feature_cache"] is None
    assert as_record(config(target="/home/me/models/mine"))["target"] == "mine"
