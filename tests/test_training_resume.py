"""A run that is killed goes on bit for bit, wherever it was; a damaged checkpoint has one behind it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import tiny_target
from flashdraft.training.checkpoints import Checkpoints
from flashdraft.training.progress import Progress, read_metrics
from flashdraft.training.run import build_trainer
from flashdraft.training.trainer import Trainer
from flashdraft.types import FlashdraftError
from test_training_trainer import answers, tiny_config

KILLS = int(os.environ.get("FLASHDRAFT_KILLS", "10"))  # scripts/kill_100.sh asks for more
STEPS = 6 * KILLS  # a fast machine makes several while a killer sleeps
STAGES = ("made", "tensors", "draft", "manifest", "flushed", "renamed", "linked", "cleaned")
# all that a run has: anchors drawn anew each epoch, KL, D-PACE, a draft vocabulary, a running mean
CHANGES: dict[str, Any] = {
    "anchors_per_sequence": 12, "kl_weight": 0.5, "dpace_alpha": 0.5, "draft_vocab": 48, "ema": 0.9,
    "accumulate": 2, "blocks_per_batch": 16, "anchors_per_piece": 4, "schedule": "wsd", "max_steps": STEPS,
    "checkpoint_steps": 1, "num_layers": 1, "block_size": 4,
}  # fmt: skip


MUON = {"optimizer": "muon", "ema": None, "dpace_alpha": None}


def trainer_in(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    return build_trainer(tiny_config(folder, rows, **{**CHANGES, **changes}), target=tiny_target("llama", "float32"))


def train(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> None:
    """What a process of `flashdraft train` does."""
    torch.set_num_threads(1)
    trainer = trainer_in(folder, rows, **changes)
    trainer.resume()
    with Progress(None, trainer.num_steps, trainer.step) as progress:
        trainer.run(progress)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "run" / "latest" / "state.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return answers(4, tokens=24)


@pytest.fixture(scope="module")
def whole(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, rows)
    return digest(folder)


def test_killed_at_any_moment(rows: list[dict[str, Any]], whole: str, tmp_path: Path) -> None:
    """kill -9 at random moments, many of them while a checkpoint is written: the final state has the
    SHA-256 of an uninterrupted run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashdraft.training.run", "transformers.models.llama.modeling_llama", "bed"])
    rng = random.Random(0)
    kills = 0
    while True:
        process = context.Process(target=train, args=(tmp_path, rows))
        process.start()
        began = read_steps(tmp_path)
        wanted = began + rng.randrange(1, 4)
        if kills < KILLS:
            while process.is_alive() and read_steps(tmp_path) < min(wanted, STEPS - 1):
                time.sleep(0.002)
            time.sleep(rng.random() * 0.05)
            if process.is_alive():
                os.kill(process.pid or 0, signal.SIGKILL)
                kills += 1
        process.join(120)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, "it ended by itself, with an error"
    assert kills >= 0.8 * KILLS
    assert digest(tmp_path) == whole


def read_steps(folder: Path) -> int:
    """The step of the newest checkpoint, or 0."""
    names = [f.name for f in (folder / "run" / "checkpoints").glob("step-*")]
    return max((int(name.split("-")[1]) for name in names), default=0)


class Crash(BaseException):
    """Not an Exception: nothing may catch it on the way."""


@pytest.mark.parametrize("stage", STAGES)
def test_every_crash_point_of_saving(stage: str, rows: list[dict[str, Any]], whole: str, tmp_path: Path) -> None:
    """A crash at each stage of the saver, at two steps: a whole checkpoint is found, and going on
    from it gives the same weights."""
    for at in (6, 11):
        trainer = trainer_in(tmp_path, rows, checkpoint_steps=5 if at == 6 else 3)
        trainer.resume()

        def crash(reached: str, trainer: Trainer = trainer, at: int = at) -> None:
            if reached == stage and trainer.step >= at:
                raise Crash

        trainer.checkpoints = Checkpoints(trainer.config.run, 2, crash)
        with pytest.raises(Crash), Progress(None, 1, 0) as progress:
            trainer.run(progress)
        left = trainer.checkpoints.load()
        assert left is not None and left.state["step"] <= trainer.step
    train(tmp_path, rows)
    assert digest(tmp_path) == whole
    checkpoints = tmp_path / "run" / "checkpoints"
    assert len(list(checkpoints.glob("step-*"))) == 2 and not list(checkpoints.glob(".writing-*"))


@pytest.mark.parametrize("file", ["state.safetensors", "state.json", "manifest.json", "model.safetensors"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_has_one_behind_it(
    file: str, how: str, rows: list[dict[str, Any]], whole: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, rows, max_steps=9, schedule="wsd", warmup_steps=5, decay_share=0.0)
    newest = (tmp_path / "run" / "latest").resolve()
    assert newest.name == "step-00000009"
    damaged = newest / file
    content = bytearray(damaged.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    elif how == "cut":
        damaged.write_bytes(content[: len(content) // 2])
    else:
        damaged.unlink()
    trainer = trainer_in(tmp_path, rows, max_steps=9, decay_share=0.0)
    assert trainer.resume() and trainer.step == 8
    assert "step-00000009 is damaged" in caplog.text
    assert (tmp_path / "run" / "latest").resolve().name == "step-00000008"


def test_nothing_whole_is_an_error(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    train(tmp_path, rows, max_steps=3)
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(FlashdraftError, match=r"all checkpoints in .* are damaged; remove the folder"):
        trainer_in(tmp_path, rows, max_steps=3).resume()


def test_a_changed_configuration_is_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    train(tmp_path, rows, max_steps=3)
    with pytest.raises(FlashdraftError, match=r"another configuration: block_size: 4 -> 8; lr: 0\.003 -> 0\.001\."):
        trainer_in(tmp_path, rows, max_steps=3, block_size=8, lr=1e-3).resume()
    longer = trainer_in(tmp_path, rows, max_steps=5, log_steps=1, threads=1)
    assert longer.resume() and longer.step == 3


def test_changed_data_is_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """The file's name is the same, its sequences are not: batches would be others."""
    train(tmp_path, rows, max_steps=3)
    changed = [*rows[:-1], {**rows[-1], "token_ids": [*rows[-1]["token_ids"][:-1], 5]}]
    with pytest.raises(FlashdraftError, match="data: the files hold other sequences"):
        trainer_in(tmp_path, changed, max_steps=3).resume()


def test_metrics_of_repeated_steps_are_taken_back(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    train(tmp_path, rows, max_steps=8, log_steps=1, checkpoint_steps=100)
    file = tmp_path / "run" / "metrics.jsonl"
    with file.open("a") as lines:
        lines.write(json.dumps({"step": 9, "loss": 1.0}) + "\n" + '{"step": 10, "lo')
    train(tmp_path, rows, max_steps=12, log_steps=1)
    assert [line["step"] for line in read_metrics(file)] == list(range(1, 13))


def test_interrupt_saves(rows: list[dict[str, Any]], whole: str, tmp_path: Path) -> None:
    """Ctrl-C ends after the step, saved; the same call goes on."""
    trainer = trainer_in(tmp_path, rows, checkpoint_steps=100)
    steps = trainer.train_step

    def interrupted() -> Any:
        report = steps()
        if trainer.step == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return report

    trainer.train_step = interrupted  # type: ignore[method-assign]
    with Progress(None, 1, 0) as progress:
        trainer.run(progress)
    assert trainer.interrupted and read_steps(tmp_path) == 7
    train(tmp_path, rows)
    assert digest(tmp_path) == whole


def test_muon_resumes_too(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Its momenta are part of the state."""
    train(tmp_path / "whole", rows, max_steps=12, decay_share=0.0, **MUON)
    train(tmp_path / "parts", rows, max_steps=5, decay_share=0.0, **MUON)
    train(tmp_path / "parts", rows, max_steps=12, decay_share=0.0, **MUON)
    assert digest(tmp_path / "parts") == digest(tmp_path / "whole")
