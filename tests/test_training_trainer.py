"""The trainer on tiny targets: it learns what it is given, and decoding agrees."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from bed import PROMPTS, VOCAB, decode, tiny_target, trained_network
from flashdraft import checkpoint
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.target import Target
from flashdraft.training.config import TrainConfig, as_json, make_config
from flashdraft.training.optimizer import learning_rate, orthogonalise
from flashdraft.training.progress import Progress, read_metrics, write_plot
from flashdraft.training.run import build_trainer, exported, run_training
from flashdraft.training.trainer import Trainer
from flashdraft.training.validation import Score, score_rounds, validate
from flashdraft.types import Commit, FlashdraftError, Round


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def answers(count: int = 6, tokens: int = 40, family: str = "llama") -> list[dict[str, Any]]:
    """Greedy answers of a tiny target to the bed's prompts."""
    target = tiny_target(family, "float32")
    rows = []
    for i, prompt in enumerate(PROMPTS[:count]):
        answer = decode(target, None, [prompt], max_tokens=tokens, ignore_eos=True)[0].token_ids
        rows.append({"id": f"r{i}", "source": "bed", "temperature": 0.0, "num_prompt_tokens": len(prompt),
                     "finished": False, "token_ids": [*prompt, *answer]})  # fmt: skip
    return rows


def tiny_config(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "run": str(folder / "run"), "target": "tiny", "data": [str(write_rows(folder / "data.jsonl", rows))],
        "num_layers": 2, "block_size": 8, "target_layer_ids": [0, 1], "mask_token_id": VOCAB - 1,
        "anchors_per_piece": 16, "blocks_per_batch": 32, "accumulate": 1, "mix": 4, "lr": 3e-3, "warmup_steps": 5,
        "max_steps": 20, "log_steps": 5, **changes,
    }  # fmt: skip
    return make_config(values)


def tiny_trainer(folder: Path, rows: list[dict[str, Any]], dtype: str = "float32", **changes: Any) -> Trainer:
    return build_trainer(tiny_config(folder, rows, **changes), target=tiny_target("llama", dtype))


@pytest.mark.parametrize("changes", [{}, {"draft_vocab": 48}], ids=["whole vocabulary", "part of it"])
def test_a_learnt_sequence_is_accepted_whole(tmp_path: Path, changes: dict[str, Any]) -> None:
    """T1: 70 % accuracy in training, tau 1.02 when served. One sequence is trained until every slot
    is right; real decoding of it then accepts every draft: tau = block_size."""
    rows = answers(1, tokens=41)
    trainer = tiny_trainer(tmp_path, rows, max_steps=400, **changes)
    in_a_row = 0
    while in_a_row < 5 and trainer.step < trainer.num_steps:  # a report is about the weights before its step
        report = trainer.train_step()
        in_a_row = in_a_row + 1 if torch.equal(report.right_L, report.labels_L) else 0
    assert in_a_row == 5
    trainer.write_draft(tmp_path / "draft")
    drafter = DFlashDrafter.load(tmp_path / "draft", trainer.target)
    # 1 token of the prefill, then 5 rounds of 8
    result = decode(trainer.target, drafter, [PROMPTS[0]], max_tokens=41, ignore_eos=True)[0]
    assert result.stats.acceptance_length == 8.0
    assert list(result.token_ids) == rows[0]["token_ids"][len(PROMPTS[0]) :]
    assert exported(trainer) is not trainer.method.network


def block_logits(drafter: DFlashDrafter, tokens: list[int], num_context: int) -> torch.Tensor:
    """The draft's logits behind a prefix of a sequence."""
    target = drafter_target()
    out = target.forward(torch.tensor([tokens]), target.new_cache(1, 64), [0], layer_ids=drafter.target_layer_ids)
    assert out.features_BTF is not None
    state = drafter.open(1, 64)
    drafter.reset(state, 0, 0, tokens[0])
    committed = tuple(tokens[1 : num_context + 1])
    drafter.observe(state, Commit((0,), (committed,), out.features_BTF[0, :num_context]))
    with torch.inference_mode():
        return drafter._block_logits(state, [0], [drafter.block_size - 1])


def drafter_target() -> Target:
    return tiny_target("llama", "float32")


def test_export_and_reload_give_the_same_logits(tmp_path: Path) -> None:
    """T9: what is trained is what is served, rope included; T13: a reduced vocabulary that is not the
    first ids survives saving and loading, in the order it was trained in."""
    rows = answers(3)
    trainer = tiny_trainer(tmp_path, rows, draft_vocab=40, num_layers=1)
    for _ in range(5):
        trainer.train_step()
    assert trainer.method.vocab_ids is not None and trainer.method.vocab_ids.tolist() != list(range(40))
    trainer.write_draft(tmp_path / "draft")
    before = DFlashDrafter(exported(trainer), trainer.target, vocab_ids=trainer.method.vocab_ids)
    after = DFlashDrafter.load(tmp_path / "draft", trainer.target)
    tokens = rows[0]["token_ids"]
    served = block_logits(after, tokens, 12)
    assert served.shape[-1] == 40
    assert torch.equal(block_logits(before, tokens, 12), served)
    # without the file the same weights draft from the whole vocabulary, and the part's logits agree
    (tmp_path / "draft" / "draft_vocab.safetensors").unlink()
    full = block_logits(DFlashDrafter.load(tmp_path / "draft", trainer.target), tokens, 12)
    assert full.shape[-1] == VOCAB
    assert torch.allclose(full[..., trainer.method.vocab_ids], served, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "acceptance": "rejection"}, {"repetition_penalty": 1.3}]
)
def test_a_reduced_vocabulary_is_lossless(params: dict[str, Any]) -> None:
    """It proposes its own ids only, and the text stays the target's, in every mode."""
    target = tiny_target("llama")
    ids = torch.arange(3, VOCAB, 3)
    drafter = DFlashDrafter(trained_network("llama"), target, vocab_ids=ids)
    drafted: set[int] = set()
    propose = drafter.propose

    def watched(*args: Any) -> Any:
        draft = propose(*args)
        drafted.update(draft.tokens_BN[0, : draft.lengths_B[0]].tolist())
        return draft

    drafter.propose = watched  # type: ignore[method-assign]
    plain = decode(target, None, PROMPTS, max_tokens=24, **params)
    spoken = decode(target, drafter, PROMPTS, max_tokens=24, **params)
    if params.get("acceptance") != "rejection":  # the same law, another text
        assert [r.token_ids for r in plain] == [r.token_ids for r in spoken]
    assert drafted and drafted <= set(ids.tolist())


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"ids": torch.tensor([3, 2])}, "do not rise strictly"),
        ({"ids": torch.tensor([3, VOCAB])}, "do not rise strictly within the vocabulary of 96"),
        ({"ids": torch.tensor([3], dtype=torch.int32)}, "expected one int64 list named ids"),
        ({"d2t": torch.tensor([3])}, "holds d2t; expected"),
    ],
)
def test_a_wrong_vocabulary_file_is_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], sentence: str) -> None:
    trainer = tiny_trainer(tmp_path, answers(1), draft_vocab=40)
    trainer.write_draft(tmp_path / "draft")
    save_file(tensors, tmp_path / "draft" / "draft_vocab.safetensors")
    with pytest.raises(FlashdraftError, match=sentence):
        DFlashDrafter.load(tmp_path / "draft", trainer.target)


def test_saving_without_a_vocabulary_removes_an_older_one(tmp_path: Path) -> None:
    for size in (40, None):
        folder = tmp_path / str(size)
        folder.mkdir()
        tiny_trainer(folder, answers(1), draft_vocab=size).write_draft(tmp_path / "draft")
        assert (tmp_path / "draft" / "draft_vocab.safetensors").exists() is (size is not None)


def test_features_from_the_disk_are_the_same(tmp_path: Path) -> None:
    """A run with a feature cache equals one without, to the last bit; a damaged file is made again."""
    rows, digests = answers(3), []
    for cache in (None, tmp_path / "cache", tmp_path / "cache", tmp_path / "cache"):
        folder = tmp_path / f"run{len(digests)}"
        folder.mkdir()
        trainer = tiny_trainer(folder, rows, kl_weight=0.5, feature_cache=str(cache) if cache else None)
        for _ in range(6):
            trainer.train_step()
        digests.append({name: w.detach().clone() for name, w in trainer.masters.weights.items()})
        if len(digests) == 3:
            files = list((tmp_path / "cache").glob("*/*.safetensors"))
            assert len(files) == 3
            files[0].write_bytes(b"broken")
    for other in digests[1:]:
        assert all(torch.equal(digests[0][name], other[name]) for name in other)


def test_a_full_cache_takes_no_more(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, answers(3), feature_cache=str(tmp_path / "cache"), feature_cache_gb=25e-6)
    trainer.train_step()
    assert len(list((tmp_path / "cache").glob("*/*.safetensors"))) == 1


def test_data_without_an_anchor_is_an_error(tmp_path: Path) -> None:
    rows = [{"id": "a", "token_ids": [5, 6, 7, 8], "num_prompt_tokens": 3}]
    with pytest.raises(FlashdraftError, match="no position to train on"):
        tiny_trainer(tmp_path, rows)


def test_a_sequence_without_an_anchor_among_others(tmp_path: Path) -> None:
    """T6: it is passed over; loss and gradients are finite."""
    rows = [{"id": "a", "token_ids": [5, 6, 7, 8], "num_prompt_tokens": 3}, *answers(1)]
    trainer = tiny_trainer(tmp_path, rows)
    report = trainer.train_step()
    assert torch.tensor([report.loss, report.grad_norm]).isfinite().all() and report.loss > 0


def test_validation_is_real_decoding(tmp_path: Path) -> None:
    """Scores are counts of the engine's own rounds, per domain; survival is joint."""
    rounds = [Round(3, 3, 4), Round(3, 1, 2), Round(1, 1, 2), Round(3, 0, 1)]
    score = score_rounds(rounds, 3)
    assert score.tau == pytest.approx(9 / 4)
    assert score.survival == pytest.approx((3 / 4, 1 / 3, 1 / 3))
    assert Score({"a": score, "b": score_rounds([Round(3, 3, 4)], 3)}).tau == pytest.approx((9 / 4 + 4) / 2)
    target = tiny_target("llama")
    drafter = DFlashDrafter(trained_network("llama"), target)
    found = validate(drafter, target, {"bed": [list(p) for p in PROMPTS]}, 20)
    results = decode(target, drafter, PROMPTS, max_tokens=20)
    every = [r for result in results for r in result.stats.rounds]
    assert found.domains["bed"].rounds == len(every)
    assert found.domains["bed"].tau == pytest.approx(sum(r.num_committed for r in every) / len(every))


def test_the_best_draft_is_kept(tmp_path: Path) -> None:
    """Chosen by the decoded acceptance length, in a folder with the draft's own files only."""
    trainer = tiny_trainer(tmp_path, answers(2), max_steps=6, validation_steps=2, log_steps=2)
    scores = iter([1.5, 2.5, 2.0])
    trainer._validate = lambda _trainer: (next(scores), {"bed": {"tau": 1.0}})
    with Progress(None, 6, 0) as progress:
        trainer.run(progress)
    best = (tmp_path / "run" / "best").resolve()
    assert best.name == "best-step-00000004" and trainer.best_tau == 2.5
    assert {f.name for f in best.iterdir()} == {"config.json", "model.safetensors", "training.json"}
    DFlashDrafter.load(best, trainer.target)
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["validation_tau"] for m in lines if "validation_tau" in m] == [1.5, 2.5, 2.0]
    assert write_plot(tmp_path / "run") is not None and "<polyline" in (tmp_path / "run" / "curves.svg").read_text()


def test_a_run_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """run_training: says what it does, ends with a draft that loads, goes on if more steps are wanted."""
    config = tiny_config(tmp_path, answers(2), max_steps=4, log_steps=2)
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({k: v for k, v in as_json(config).items() if v is not None}))
    monkeypatch.setattr(Target, "load", lambda *_args, **_kwargs: tiny_target("llama", "float32"))
    console = Console(file=io.StringIO(), width=200)
    assert run_training(file, ["warmup_steps=2"], console)
    assert run_training(file, ["warmup_steps=2", "max_steps=6"], console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "starting: 2 sequences" in said and "step 4/4" in said and "going on at step 4" in said
    assert f"finished: the draft is in {tmp_path / 'run' / 'latest'}" in said
    drafter = DFlashDrafter.load(tmp_path / "run" / "latest", tiny_target("llama", "float32"))
    assert decode(drafter_target(), drafter, [PROMPTS[0]], max_tokens=8)[0].stats.rounds
    assert checkpoint.read_training(tmp_path / "run" / "latest")["step"] == 6  # type: ignore[index]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_learning_rates(schedule: str, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, answers(1), schedule=schedule, warmup_steps=10, decay_share=0.5)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == 1.0 and rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.05, abs=0.03)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert (rates[49] == 1.0) is (schedule == "wsd")


def test_the_live_panel_has_a_bar_for_each_slot(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    metrics = {"step": 5, "loss": 2.0, "tau_estimate": 1.5, "slot_accuracy": [0.5, 0.25], "lr": 1e-3,
               "anchors_per_second": 10.0, "tokens_per_second": 20.0}  # fmt: skip
    with Progress(console, 10, 0) as progress:
        progress.show(metrics)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "slot  1" in said and "50.0 %" in said and "step 5 of 10" in said


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_muon_orthogonalises(shape: tuple[int, int]) -> None:
    """All singular values come near 1, directions stay."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalise(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert float((found * (u @ v)).sum()) / 12 > 0.8


def test_muon_learns(tmp_path: Path) -> None:
    trainer = tiny_trainer(tmp_path, answers(1), max_steps=60, optimizer="muon", lr=1e-2)
    reports = [trainer.train_step() for _ in range(60)]
    assert reports[-1].loss < 0.2 * reports[0].loss
