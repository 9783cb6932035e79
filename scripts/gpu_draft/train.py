"""Drafts of several shapes, one after the other, by the package's own trainer and its configuration."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flashdraft.target import Target
from flashdraft.training.config import make_config
from flashdraft.training.length import RunLength
from flashdraft.training.progress import Progress
from flashdraft.training.run import build_trainer

from .settings import Settings


def name_of(shape: tuple[int, int]) -> str:
    return f"layers-{shape[0]}-block-{shape[1]}"


def train(
    target: Target, shape: tuple[int, int], settings: Settings, data: Path, run: Path, seconds: float
) -> dict[str, Any]:
    """Train one draft for about that long, to `run`; a run that is there already is gone on with.

    Returns what was done, in numbers.
    """
    values = {
        "run": str(run), "target": target.name, "data": [str(data)], "num_layers": shape[0], "block_size": shape[1],
        "seed": settings.seed, **settings.training,
    }  # fmt: skip
    began = time.monotonic()
    try:
        return _train(target, values, seconds)
    except Exception as error:
        if target.device.type == "cpu":
            raise
        # FlexAttention compiles kernels on that machine; without it training is slower, not impossible
        print(f"training failed: {type(error).__name__}: {str(error)[:500]}; again with attention sdpa", flush=True)
        traceback.print_exc(limit=-4)
    _free(target)
    shutil.rmtree(run, ignore_errors=True)
    left = max(1.0, seconds - (time.monotonic() - began))
    return _train(target, {**values, "attention": "sdpa"}, left)


def _train(target: Target, values: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    began = time.monotonic()
    config = make_config({**values, "max_minutes": seconds / 60})
    trainer = build_trainer(config, target=target)
    # the trainer's clock starts when it runs: what loading took is not there any more, nor a last save
    left = max(0.95 * seconds - (time.monotonic() - began), 0.2 * seconds)
    config = dataclasses.replace(config, max_minutes=left / 60)
    trainer.length = RunLength(config, trainer.plan.steps_per_epoch)
    trainer.resume()
    loaded = time.monotonic()
    with _Deadline(loaded + 1.1 * left + 1) as progress:
        trainer.run(progress)
    report = {
        "layers": config.num_layers, "block_size": config.block_size, "attention": trainer.method.attention,
        "parameters": sum(p.numel() for p in trainer.method.network.parameters()),
        "sequences": len(trainer.sequences), "anchors_an_epoch": trainer.plan.num_anchors, "steps": trainer.step,
        "epochs": round(trainer.step / trainer.plan.steps_per_epoch, 2), "load_seconds": round(loaded - began, 1),
        "train_seconds": round(time.monotonic() - loaded, 1),
    }  # fmt: skip
    del trainer
    _free(target)
    return report


def _free(target: Target) -> None:
    gc.collect()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


class _Deadline(Progress):
    """Prints a line now and then, and ends a run that does not end by itself: kernels that are compiled
    late, say, or steps that became slower."""

    def __init__(self, end: float) -> None:
        super().__init__(None, None, 0)
        self._end, self._printed = end, 0.0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def show(self, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._printed > 5:
            self._printed = now
            print(self._line(metrics), flush=True)
        if now > self._end:
            signal.raise_signal(signal.SIGTERM)  # the trainer saves and ends after the step
