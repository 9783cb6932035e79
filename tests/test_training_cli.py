"""`flashdraft train` on a tiny target in a folder: runs, is interrupted, goes on; its draft is used."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from cli_bed import save_draft, save_target
from flashdraft import checkpoint, cli
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.target import Target
from flashdraft.text import template_digest, template_warning
from flashdraft.training import run
from flashdraft.training.data import ChatTemplate
from flashdraft.training.trainer import StepReport, Trainer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on conversations, which are tokenised by the target's own template."""
    folder = tmp_path_factory.mktemp("train")
    save_target(folder / "target")
    talk = [
        {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": f"{word} " * 9}]}
        for word in ("hello", "world", "token")
    ]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in talk))
    (folder / "prompts.jsonl").write_text(json.dumps({"turns": ["say hello", "again"]}) + "\n")
    values = {
        "run": str(folder / "run"), "target": str(folder / "target"), "data": [str(folder / "talk.jsonl")],
        "dtype": "float32", "num_layers": 1, "block_size": 4, "target_layer_ids": [0, 1], "anchors_per_piece": 8,
        "blocks_per_batch": 16, "accumulate": 1, "max_steps": 6, "log_steps": 2, "mix": 2, "draft_vocab": 64,
        "validation": [str(folder / "prompts.jsonl")], "validation_tokens": 8, "validation_steps": 3,
    }  # fmt: skip
    (folder / "c.yaml").write_text(yaml.safe_dump(values))
    return folder / "c.yaml"


def invoke(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_train_then_generate(config: Path) -> None:
    code, out, err = invoke("train", str(config), "--set", "lr=1e-3")
    assert code == 0, err
    folder = config.parent / "run"
    assert "starting: 3 sequences" in out and "step 6/6" in out
    assert "decoded acceptance length" in out and "prompts" in out
    assert f"try it with: flashdraft chat --target {config.parent / 'target'} --draft {folder / 'best'}" in out
    target = str(config.parent / "target")
    code, out, err = invoke("generate", "--target", target, "--dtype", "float32", "--draft", str(folder / "best"),
                            "--max-tokens", "8", "--json", "hello")  # fmt: skip
    assert code == 0, err
    plain = invoke("generate", "--target", target, "--dtype", "float32", "--max-tokens", "8", "--json", "hello")
    assert json.loads(out)["token_ids"] == json.loads(plain[1])["token_ids"]
    made = json.loads((folder / "best" / "training.json").read_text())
    template = ChatTemplate(Target.load(target, dtype="float32").tokenizer, ())
    assert made["chat_template"] == {"sha256": template.sha256, "thinking": None, "system": None}
    assert made["config"]["target"] == "target" and made["config"]["validation"] == ["prompts.jsonl"]
    assert str(config.parent) not in (folder / "best" / "training.json").read_text()  # it is published
    assert made["started_from"] is None


def test_a_draft_tells_what_it_started_from(config: Path) -> None:
    """A card can be written from the last stage of a training alone."""
    one = ["--set", "max_steps=1", "--set", "validation=[]"]
    assert invoke("train", str(config), *one, "--set", f"run={config.parent / 'first'}")[0] == 0
    first, second = config.parent / "first" / "latest", config.parent / "second"
    code, _, err = invoke("train", str(config), *one, "--set", f"init_from={first}", "--set", f"run={second}")
    assert code == 0, err
    made = json.loads((second / "latest" / "training.json").read_text())
    assert made["started_from"] == json.loads((first / "training.json").read_text())
    assert made["started_from"]["step"] == 1 and made["config"]["init_from"] == "latest"


def test_what_a_user_can_mend_is_one_sentence(config: Path) -> None:
    code, _, err = invoke("train", str(config), "--set", "blok_size=8")
    assert code == 2 and "the closest one is 'block_size'" in err and "Traceback" not in err
    code, _, err = invoke("train", str(config), "--set", "lr=2e-3")
    assert code == 2 and "lr: 0.001 -> 0.002" in err


def test_ctrl_c_saves_and_says_how_to_go_on(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = config.parent / "other run"
    train_step = Trainer.train_step

    def interrupted(trainer: Trainer) -> StepReport:
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return train_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    settings = ["--set", f"run={folder}", "--set", "validation=[]"]
    code, out, err = invoke("train", str(config), *settings)
    assert code == 130, err
    assert f"stopped after step 3, saved as {folder / 'latest'}; go on with: flashdraft train {config} --set '" in out
    assert (folder / "latest" / "state.safetensors").is_file()
    assert "going on at step 3" in invoke("train", str(config), *settings)[1]


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        ({"sha256": "0" * 64, "thinking": None}, "trained with another chat template"),
        ({"thinking": False}, "trained with thinking off, and now it is left to the template"),
    ],
    ids=["template", "thinking"],
)
def test_another_template_is_warned_of(config: Path, made: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """T11: trained with thinking off, served with it on: 60 % -> 25 %. Template and mode are in the
    checkpoint, and a mismatch warns."""
    target = Target.load(config.parent / "target", dtype="float32")
    save_draft(tmp_path / "draft", target, mask_token_id=target.vocab_size - 1)
    own = {"sha256": template_digest(target.tokenizer), "thinking": None, "system": None}
    for changes, expected in (({}, None), (made, sentence)):
        training = {"chat_template": {**own, **changes}}
        (tmp_path / "draft" / "training.json").write_text(json.dumps(training))
        code, _, err = invoke("generate", "--target", str(config.parent / "target"), "--dtype", "float32",
                              "--draft", str(tmp_path / "draft"), "--max-tokens", "4", "hello")  # fmt: skip
        assert code == 0
        assert ("warning: " in err) is (expected is not None)
        assert expected is None or f"warning: the draft was {expected}" in err
    assert template_warning(None, None) is None and template_warning({}, None) is None


def test_every_command_that_drafts_warns(config: Path, tmp_path: Path) -> None:
    """Target, weights and template at once, and each only where it is not as training.json says."""
    folder, draft = config.parent / "target", tmp_path / "draft"
    target = Target.load(folder, dtype="float32")
    save_draft(draft, target, mask_token_id=target.vocab_size - 1)
    (tmp_path / "p.jsonl").write_text('{"id": 1, "prompt": "hello"}\n')
    shared = ["--target", str(folder), "--dtype", "float32", "--draft", str(draft), "--max-tokens", "4"]
    commands = {
        "bench": ["--task", f"p={tmp_path / 'p.jsonl'}", "--repeat", "1"],
        "regenerate": ["--prompts", str(tmp_path / "p.jsonl"), "--temperature", "0"],
    }
    own = {
        "target_sha256": checkpoint.target_digest(target),
        "draft_sha256": checkpoint.digest(checkpoint.read(draft)[1]),
    }
    template = {"sha256": template_digest(target.tokenizer), "thinking": None}
    other = {"target_sha256": "0" * 64, "draft_sha256": "0" * 64, "chat_template": {"sha256": "0" * 64}}
    for made, count in (({**own, "chat_template": template}, 0), (other, 3)):
        (draft / "training.json").write_text(json.dumps(made))
        for name, more in commands.items():
            out = tmp_path / f"{name}{count}.jsonl"
            code, _, err = invoke(name, *shared, *more, "--out", str(out))
            assert code == 0, err
            assert [line.count("warning: ") for line in err.splitlines() if "warning" in line] == [1] * count, err
            for sentence in (
                "other weights than its training.json",
                "made for another target",
                "another chat template",
            ):
                assert (sentence in err) is bool(count), (name, err)
        examined = invoke("doctor", "--target", str(folder), "--dtype", "float32", "--draft", str(draft))[1]
        assert ("other weights than its training.json" in " ".join(examined.split())) is bool(count)


def test_data_of_two_templates_is_refused(config: Path, tmp_path: Path) -> None:
    for name, thinking in (("a", True), ("b", False)):
        (tmp_path / f"{name}.jsonl").write_text('{"id": 1, "token_ids": [5, 6, 7, 8], "num_prompt_tokens": 1}\n')
        (tmp_path / f"{name}.jsonl.meta.json").write_text(json.dumps({"template_sha256": None, "thinking": thinking}))
    settings = ["--set", f"run={tmp_path / 'run'}", "--set", f"data=[{tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}]"]
    code, _, err = invoke("train", str(config), *settings)
    assert code == 2 and "written with 2 different chat templates, thinking modes or system prompts" in err


def test_validation_drafts_from_the_trained_vocabulary(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the whole head ids that were never trained would be proposed, and tau come out too low."""
    seen: list[Any] = []
    real = run.validate

    def watched(drafter: Any, *args: Any) -> Any:
        seen.append(drafter)
        return real(drafter, *args)

    monkeypatch.setattr(run, "validate", watched)
    folder = config.parent / "validated"
    assert invoke("train", str(config), "--set", f"run={folder}", "--set", "ema=0.5")[0] == 0
    assert len(seen) == 2  # after step 3, and at the end
    for drafter in seen:
        assert len(drafter._vocab_ids) == 64
    exported = DFlashDrafter.load(folder / "latest", Target.load(config.parent / "target", dtype="float32"))
    for name, weight in exported.network.named_parameters():  # what is scored is what is saved
        assert torch.equal(weight, dict(seen[-1].network.named_parameters())[name])
