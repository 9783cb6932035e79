"""There: the phases one after the other, each by the clock, each leaving what it has in the output folder."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.target import Target

from . import decoder, evaluate, export
from .clock import Clock
from .generate import generate
from .settings import SHARES, Settings
from .train import name_of, train
from .unpack import Prompts

Evaluation = dict[str, list[list[int]]]


class Run:
    """Of one call. Files of an earlier call on the same machine are gone on with: rows, checkpoints.

    Args:
        load: gives the target. work: data, runs. out: what comes back.
    """

    def __init__(
        self, load: Callable[[], Target], prompts: Prompts, evaluation: Evaluation, settings: Settings,
        work: Path, out: Path, seconds: float,
    ) -> None:  # fmt: skip
        self.clock = Clock(seconds, SHARES)
        self._load, self._prompts, self._evaluation, self._settings = load, prompts, evaluation, settings
        self._out, self._data, self._runs = out, work / "sequences.jsonl", work / "runs"
        self.report: dict[str, Any] = {"seconds_given": seconds, **_machine()}
        self._best: tuple[float, Path] | None = None

    def __call__(self) -> dict[str, Any]:
        work = self._data.parent
        work.mkdir(parents=True, exist_ok=True)
        target = self._loading()
        self._writing(target)
        self._training(target)
        self._evaluating(target)
        self.clock.begin("save")
        self._save()
        self._say("done", self.clock.spent)
        return self.report

    def _loading(self) -> Target:
        self.clock.begin("load")
        target = self._load()
        prompt = max(self._prompts.token_ids[:64], key=len)
        self.report["target"] = self._prompts.facts["target"]
        self.report["static_decoding_differs_by"] = round(decoder.check(target, prompt), 5)
        return target

    def _writing(self, target: Target) -> None:
        seconds = self.clock.begin("generate")
        self.report["data"] = generate(target, self._prompts, self._settings, self._data, seconds)
        self._say("data", self.report["data"])
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
        self._save()

    def _training(self, target: Target) -> None:
        """Of two shapes the first has two thirds of the time, quick evaluations included: one draft that
        is trained enough is worth more than two that are not. The best so far is in the output folder."""
        end = time.monotonic() + self.clock.begin("train")
        shapes = self._settings.shapes
        self.report["runs"] = []
        for number, shape in enumerate(shapes):
            seconds = max(1.0, (end - time.monotonic()) * 2 / (len(shapes) - number + 1))
            if number and seconds < self._settings.least_run / 2:
                self._say("training", f"no time for {name_of(shape)}")
                continue
            run = self._runs / name_of(shape)
            found = train(target, shape, self._settings, self._data, run, 0.9 * seconds)
            began = time.monotonic()
            quick = {k: rows[: self._settings.quick_prompts] for k, rows in self._evaluation.items()}
            drafter = DFlashDrafter.load(run / "latest", target)
            lines = evaluate.acceptance(target, drafter, quick, (0.0,), self._settings, began + 0.1 * seconds)
            found |= {"tau_quick": round(evaluate.mean_tau(lines), 3)}
            self.report["runs"].append(found)
            self._say("draft", found)
            if self._best is None or found["tau_quick"] > self._best[0]:
                self._best = (found["tau_quick"], run / "latest")
                export.write_shards(run / "latest", self._out)
            self._save()

    def _evaluating(self, target: Target) -> None:
        assert self._best is not None
        seconds = self.clock.begin("evaluate")
        began = time.monotonic()
        drafter = DFlashDrafter.load(self._best[1], target)
        timed = [p for rows in self._evaluation.values() for p in rows[:1]][: self._settings.timed_prompts]
        timed = (timed * self._settings.timed_prompts)[: self._settings.timed_prompts]
        self.report["rounds"] = evaluate.round_times(target, drafter, timed, self._settings, began + 0.3 * seconds)
        self._save()
        self.report["acceptance"] = evaluate.acceptance(
            target, drafter, self._evaluation, (0.0, 1.0), self._settings, began + seconds
        )
        self.report["best"] = self._best[1].parent.name

    def _save(self) -> None:
        self.report["phases"] = dict(self.clock.spent)
        metrics = [self._runs / name_of(shape) / "metrics.jsonl" for shape in self._settings.shapes]
        export.write_report(self._out, self.report, metrics)

    def _say(self, what: str, facts: object) -> None:
        print(f"[{self.clock.left:.0f} s left] {what}: {facts}", flush=True)


def _machine() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    names = ("torch", "transformers", "safetensors")
    return {
        "device": device, "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }  # fmt: skip
