"""How fast a configuration trains, and what it does with the time.

    python scripts/train_speed.py CONFIG.yaml [--set KEY=VALUE] [--steps N] [--ops 12]

Features are computed when a shuffled group of sequences (`mix`) begins, so no single step is typical: without --steps
as many are measured as a group has. Runs steps of `flashdraft train` without saving anything and prints: sequences, anchors and labels a second; the
arithmetic of a step (counted by torch, backward included) as a share of what one large product of matrices
reaches on the same device, in the same type, with the same threads; the time of every part; and of the
first operations of torch's profiler. With one thread the time is the CPU's own, so that other work on the machine
does not count; with more it is the clock's, and the machine should be idle.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from flashdraft.training import run as training_run
from flashdraft.training import trainer as trainer_module
from flashdraft.training.config import load_config
from flashdraft.training.trainer import Trainer
from flashdraft.types import FlashdraftError

PARTS = ("target's pass", "draft forward", "head and loss", "draft backward", "optimizer")


def packed_products() -> dict[Any, Callable[..., int]]:
    """How torch's counter is to count products with packed weights (flashdraft/packing.py), which it does not know."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return {}

    def count(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
        return 2 * math.prod(x) * weight[0]

    return {torch.ops.mkldnn._linear_pointwise: count}


class Clock:
    """Seconds of the part that is running; parts inside a part are its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now = time.process_time if torch.get_num_threads() == 1 and device.type == "cpu" else time.perf_counter
        self.seconds: Counter[str] = Counter()

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._now()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = self.now()
        yield
        self.seconds[name] += self.now() - began

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return wrapped


@contextlib.contextmanager
def watched(trainer: Trainer, clock: Clock) -> Iterator[None]:
    """The parts of a step, timed from outside: the trainer itself has no clock in it."""
    places = [
        (trainer.features, "of", PARTS[0]), (trainer.method, "states", PARTS[1]),
        (trainer_module, "head_loss", PARTS[2]), (torch.autograd, "backward", PARTS[3]),
        (trainer.masters, "gather", PARTS[4]), (trainer.masters, "step", PARTS[4]),
    ]  # fmt: skip
    old = [(where, name, getattr(where, name)) for where, name, _ in places]
    for where, name, part in places:
        setattr(where, name, clock.timed(part, getattr(where, name)))
    try:
        yield
    finally:
        for where, name, function in old:
            setattr(where, name, function)


def peak(device: torch.device, dtype: torch.dtype, clock: Clock) -> float:
    """FLOP/s of the best of a few large products."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(6):
        began = clock.now()
        a @ b
        best = max(best, 2 * size**3 / max(clock.now() - began, 1e-9))
    return best


def measure(trainer: Trainer, steps: int, ops: int) -> list[str]:
    clock = Clock(trainer.target.device)
    with FlopCounterMode(
        display=False, custom_mapping=packed_products()
    ) as counter:  # and kernels are compiled, memory is taken
        for _ in range(steps):
            trainer.train_step()
    flops = counter.get_total_flops() / steps
    top = peak(trainer.target.device, trainer.target.dtype, clock)
    blocks = labels = 0.0
    with watched(trainer, clock), clock.part("all"):
        for _ in range(steps):
            report = trainer.train_step()
            blocks, labels = blocks + report.num_blocks, labels + float(report.labels_L.sum())
    total = clock.seconds.pop("all")
    epoch_share = blocks / trainer.plan.num_anchors
    lines = [
        f"{blocks / total:.0f} anchors/s, {labels / total:.0f} labels/s, "
        f"{epoch_share * len(trainer.sequences) / total:.2f} sequences/s, {total / steps:.2f} s a step ({steps} steps)",
        f"{flops / 1e9:.3g} GFLOP a step: {flops * steps / total / 1e9:.0f} GFLOP/s, "
        f"{100 * flops * steps / total / top:.0f} % of the {top / 1e9:.0f} that one product of matrices reaches",
        "", "| part | ms a step | share |", "| --- | --- | --- |",
    ]  # fmt: skip
    clock.seconds["rest"] = total - sum(clock.seconds.values())
    lines += [
        f"| {part} | {1e3 * clock.seconds[part] / steps:.0f} | {100 * clock.seconds[part] / total:.0f} % |"
        for part in (*PARTS, "rest")
    ]
    return lines + operations(trainer, ops)


def operations(trainer: Trainer, count: int) -> list[str]:
    cuda = trainer.target.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        trainer.train_step()
    key = "self_device_time_total" if cuda else "self_cpu_time_total"
    events = sorted(found.key_averages(), key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in events)
    return ["", "| operation | calls | share |", "| --- | --- | --- |"] + [
        f"| `{event.key}` | {event.count} | {100 * getattr(event, key) / total:.1f} % |" for event in events[:count]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, help="default: as many as a group of `mix` sequences has")
    parser.add_argument("--ops", type=int, default=12, help="operations to name")
    args = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory() as nowhere:
            config = load_config(args.config, [*args.set, f"run={nowhere}", "validation=[]"])
            if config.threads is not None:
                torch.set_num_threads(config.threads)
            training_run.keep_freed_memory()
            trainer = training_run.build_trainer(config)
            group = math.ceil(trainer.plan.steps_per_epoch * min(1.0, config.mix / len(trainer.sequences)))
            lines = measure(trainer, args.steps or group, args.ops)
    except FlashdraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
