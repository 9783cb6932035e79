"""Runs that end by the clock, and what a terminal shows of a run."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bed import tiny_target
from flashdraft.training import length as length_module
from flashdraft.training.length import RunLength
from flashdraft.training.optimizer import learning_rate
from flashdraft.training.progress import Progress, read_metrics
from flashdraft.training.run import build_trainer
from flashdraft.training.trainer import StepReport, Trainer
from flashdraft.types import FlashdraftError
from test_training_trainer import answers, tiny_config

TIMED: dict[str, Any] = {
    "max_steps": None, "max_minutes": 1, "schedule": "wsd", "decay_share": 0.25, "warmup_steps": 2, "num_layers": 1,
    "block_size": 4, "log_steps": 1, "checkpoint_steps": 2,
}  # fmt: skip


class Clock:
    """A monotonic clock that every training step moves on."""

    def __init__(self, seconds_a_step: float = 5.0) -> None:
        self.now, self.step = 100.0, seconds_a_step

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return answers(2, tokens=16)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(length_module, "time", made)
    train_step = Trainer.train_step

    def timed(trainer: Trainer) -> StepReport:
        made.now += made.step
        return train_step(trainer)

    monkeypatch.setattr(Trainer, "train_step", timed)
    return made


def trainer_in(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Trainer:
    folder.mkdir(exist_ok=True)
    return build_trainer(tiny_config(folder, rows, **{**TIMED, **changes}), target=tiny_target("llama", "float32"))


def run(trainer: Trainer, console: Console | None = None) -> None:
    with Progress(console, trainer.length.known_steps, trainer.step) as progress:
        trainer.run(progress)


def rates(trainer: Trainer) -> list[float]:
    return [line["lr"] for line in read_metrics(trainer.checkpoints.run / "metrics.jsonl")]


def test_the_clock_ends_a_run(clock: Clock, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Steps of 5 s in a minute: 9 at the full rate, then the decay, 12 in all; the rates are those of a
    run of 12 steps."""
    trainer = trainer_in(tmp_path, rows)
    assert trainer.length.known_steps is None
    console = Console(file=io.StringIO(), width=200)
    run(trainer, console)
    assert trainer.step == trainer.length.known_steps == 12
    same = tiny_config(tmp_path, rows, **{**TIMED, "max_minutes": None, "max_steps": 12})
    assert rates(trainer) == [same.lr * learning_rate(step, 12, same) for step in range(12)]
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 3  loss" in said and "left 0m45s" in said and "step 12/12" in said


@pytest.mark.parametrize("stop_at", [5, 9, 10])
def test_a_timed_run_resumes(
    stop_at: int, clock: Clock, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before, at and after the moment when the length is fixed: time that the run has had is
    counted, a length once saved stays though the machine has become slower, and the weights are those
    of a run that nobody disturbed."""
    whole = trainer_in(tmp_path / "whole", rows, checkpoint_steps=1)
    run(whole)
    part = trainer_in(tmp_path / "part", rows, checkpoint_steps=1)
    train_step = part.train_step

    def stopping() -> StepReport:
        if part.step == stop_at:
            raise KeyboardInterrupt
        return train_step()

    monkeypatch.setattr(part, "train_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(part)
    clock.now += 10_000  # nobody worked in between
    again = trainer_in(tmp_path / "part", rows, checkpoint_steps=1)
    assert again.resume() and again.step == stop_at
    assert again.length.seconds == pytest.approx(5 * stop_at)
    if again.length.known_steps is not None:
        clock.step = 50.0
    assert (again.length.known_steps is None) is (stop_at < 9)
    run(again)
    assert again.step == 12
    for name, weight in whole.masters.weights.items():
        assert weight.equal(again.masters.weights[name])


def test_more_minutes_are_a_new_decision(clock: Clock, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    run(trainer_in(tmp_path, rows))
    longer = trainer_in(tmp_path, rows, max_minutes=2)
    assert longer.resume() and longer.length.known_steps is None
    run(longer)
    assert longer.step == 24
    lower = trainer_in(tmp_path / "limited", rows, max_steps=5)
    assert lower.length.known_steps == 5
    run(lower)
    assert lower.step == 5


def test_what_a_clock_cannot_end_is_refused(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(FlashdraftError, match="schedule is 'cosine'; expected \"wsd\" with max_minutes"):
        tiny_config(tmp_path, rows, **{**TIMED, "schedule": "cosine"})
    with pytest.raises(FlashdraftError, match=r"max_minutes is 0\.0; expected a number above 0"):
        tiny_config(tmp_path, rows, **{**TIMED, "max_minutes": 0})
    no_decay = RunLength(tiny_config(tmp_path, rows, **{**TIMED, "decay_share": 0.0}), 10)
    no_decay.fix(7)
    assert no_decay.known_steps == 7
    assert RunLength(tiny_config(tmp_path, rows, **{**TIMED, "max_minutes": None, "epochs": 2}), 10).known_steps == 20


# -- the live panel ----------------------------------------------------------------------------


METRICS = {
    "step": 30, "loss": 2.0, "tau_estimate": 1.5, "slot_accuracy": [0.5, 0.25, 1.0], "lr": 1e-3,
    "anchors_per_second": 10.0, "tokens_per_second": 20.0,
}  # fmt: skip


def frames(console: Console) -> list[str]:
    """Lines that were drawn, without the escape sequences that draw them."""
    import re

    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    return [line for part in text.split("\n") for line in part.split("\r")]


@pytest.mark.parametrize("width", [24, 40, 100])
def test_the_panel_fits_its_terminal(width: int) -> None:
    """A narrow one gets shorter bars and one value a line; nothing wraps, nothing is lost but at 24."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    with Progress(console, 100, 20) as progress:
        progress.show(METRICS)
        progress.decoded(30, 1.25, {})
        progress.note("stopping")
        progress.show(METRICS)
    shown = frames(console)
    panel = [line for line in shown if line.startswith(("│", "╭", "╰"))]
    assert panel and all(len(line) == min(76, width) for line in panel)
    bars = {line.count("█") for line in panel if "slot" in line}
    assert len(bars) == 3 and max(bars) == max(line.count("█") + line.count("·") for line in panel)
    if width >= 40:
        text = "\n".join(panel)
        for part in ("slot  2", "25.0 %", "acceptance length ~1.500", "10 anchors/s", "decoded: 1.25", "stopping"):
            assert part in text, part
        assert ("loss 2.0000" in text) and ("step 30 of 100" in text)
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_time_left_is_from_steps_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run has not made the steps before in this time."""
    from flashdraft.training import progress as module

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    console = Console(file=io.StringIO(), width=200)
    with Progress(console, 100, 20) as progress:
        clock.now += 10  # 10 steps in 10 s, 70 to go
        progress.show(METRICS)
        progress.expect(None, 65.0)
        progress.show(METRICS)
        progress.expect(9000, None)
        progress.show(METRICS)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("left ")[1] for line in lines] == ["1m10s", "1m05s", "2h29m"]
    assert lines[0].startswith("step 30/100  loss") and lines[1].startswith("step 30  loss")


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_inside_the_panel(
    terminal: bool, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says at once that it will stop, ends after the step, saves, and gives the cursor back; without
    a terminal there are only lines."""
    trainer = trainer_in(tmp_path, rows, max_minutes=None, max_steps=9)
    train_step = trainer.train_step
    console = Console(file=io.StringIO(), width=60, force_terminal=terminal)

    def interrupted() -> StepReport:
        report = train_step()
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return report

    monkeypatch.setattr(trainer, "train_step", interrupted)
    run(trainer, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert trainer.interrupted and trainer.step == 3
    assert json.loads((tmp_path / "run" / "latest" / "state.json").read_text())["step"] == 3
    if terminal:
        assert "stopping after this step" in said
        assert said.rfind("\x1b[?25h") > said.rfind("\x1b[?25l") >= 0  # the cursor is shown again
        assert said.rstrip("\r").endswith("\x1b[2K")  # and the panel is wiped
    else:
        assert "\x1b" not in said and len(said.splitlines()) == 3
