"""The training loop: batches of a step, gradient, AdamW, now and then a checkpoint or validation.

It is given target, network and data and builds none of them. The state of a run is a step number
and the optimizer's tensors: order, anchors and batches are functions of the seed and the step.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..target import Target
from ..types import FlashdraftError
from .blocks import Blocks, make_blocks
from .checkpoints import Checkpoints
from .config import TrainConfig, as_json, as_record, config_diff
from .data import TokenSequence
from .features import FeatureSource
from .length import RunLength
from .methods import Method, Start
from .objectives import Outcome, denominator, head_loss, leading_runs, make_targets
from .optimizer import Masters, learning_rate
from .parallel import Group
from .plan import Plan, fingerprint
from .progress import MetricsFile, Progress


@dataclass(frozen=True)
class StepReport:
    """Of an optimizer step, all processes together: sums that a window of steps can be made of."""

    loss: float
    grad_norm: float
    num_blocks: float
    accepted: float
    right_L: torch.Tensor
    labels_L: torch.Tensor


class Trainer:
    """One run.

    Args:
        method: its network in the compute precision, on the target's device.
        start: full-precision weights to begin with, and the names of those that were the target's.
        validate: scores the draft: (tau, details for the metrics).
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        method: Method,
        start: Start,
        sequences: Sequence[TokenSequence],
        *,
        training_info: Mapping[str, Any] | None = None,
        validate: Callable[[Trainer], tuple[float, Any]] | None = None,
        group: Group | None = None,
    ) -> None:
        self.config, self.target, self.method, self.sequences = config, target, method, sequences
        self._info, self._validate = dict(training_info or {}), validate
        self.group = group or Group()
        self.plan = Plan(sequences, config)
        if not self.plan.num_anchors:
            raise FlashdraftError(
                "the data has no position to train on: every answer is shorter than two tokens (an anchor and a label)."
            )
        self.length = RunLength(config, self.plan.steps_per_epoch)
        self.features = FeatureSource(target, sequences, method.layer_ids, config, method.vocab_ids)
        self._index_of = None
        if method.vocab_ids is not None:
            self._index_of = torch.full((target.vocab_size,), -1, dtype=torch.int64, device=target.device)
            self._index_of[method.vocab_ids.to(target.device)] = torch.arange(
                len(method.vocab_ids), device=target.device
            )
        # One program is compiled for a full batch, so the last of an epoch is filled up.
        self._pieces = config.blocks_per_batch // config.anchors_per_piece if method.attention == "flex" else None
        self.masters = Masters(method.network, *start, config, self.group)
        self.checkpoints = Checkpoints(config.run, config.keep)
        self.step = 0
        self.best_tau = 0.0
        self._stop_asked = False
        self._ahead: tuple[int, list[Blocks]] = (-1, [])
        self._data_sha256 = fingerprint(sequences)

    @property
    def num_steps(self) -> int:
        """Steps of the whole run; a huge number while only the clock knows (training/length.py)."""
        return self.length.num_steps

    # -- one step ------------------------------------------------------------------------------

    def train_step(self) -> StepReport:
        """All batches of a step, this process's share of them, and the update."""
        batches = self._prepared(self.step)
        total = sum(denominator(blocks.labels_AL, self.config) for blocks in batches)
        width = self.method.block_size - 1
        sums = torch.zeros(3 + 2 * width, dtype=torch.float64, device=self.target.device)
        for i, blocks in enumerate(batches):
            if i % self.group.world == self.group.rank:
                here = blocks.to(self.target.device)
                outcome = self._batch(here, total)
                real = here.labels_AL >= 0
                sums[0] += outcome.loss_sum
                sums[1] += real.any(-1).sum()
                sums[2] += leading_runs(outcome.correct_AL, real).sum()
                sums[3:] += torch.cat([(outcome.correct_AL & real).sum(0), real.sum(0)])
        if self.target.device.type != "cpu":  # while the GPU works
            self._ahead = (self.step + 1, self._make_batches(self.step + 1))
        self.masters.reduce()
        self.group.sum([sums])
        rate = learning_rate(self.step, self.num_steps, self.config)
        norm = self.masters.step(rate)
        self.step += 1
        sums = sums.cpu()
        return StepReport(float(sums[0]), norm, float(sums[1]), float(sums[2]), sums[3 : 3 + width], sums[3 + width :])

    def _prepared(self, step: int) -> list[Blocks]:
        (made_for, batches), self._ahead = self._ahead, (-1, [])
        return batches if made_for == step else self._make_batches(step)

    def _make_batches(self, step: int) -> list[Blocks]:
        """On the CPU, where counting labels waits for nobody."""
        method, size = self.method, self.config.anchors_per_piece
        made = [
            make_blocks(pieces, self.sequences, method.block_size, method.mask_token_id, size, num_pieces=self._pieces)
            for pieces in self.plan.batches(step)
        ]
        return [method.prepare(blocks, step) for blocks in made]

    def _batch(self, blocks: Blocks, total: float) -> Outcome:
        features = self.features.of(blocks.sequences)
        states = self.method.states(blocks, features)
        targets = make_targets(blocks, features, self._index_of, self.config.needs_distribution)
        outcome = head_loss(states.detach(), self.method.head, targets, self.config, total)
        torch.autograd.backward(states, outcome.grad_ALD)
        self.masters.gather()
        return outcome

    # -- the run -------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Go on from the newest whole checkpoint. Raises FlashdraftError if the configuration changed."""
        saved = self.checkpoints.load(relink=self.group.leads)
        if saved is None:
            return False
        changes = config_diff(saved.state["config"], as_json(self.config))
        if saved.state["data_sha256"] != self._data_sha256:
            changes.append("data: the files hold other sequences than before")
        if changes:
            raise FlashdraftError(
                f"{self.checkpoints.run} was trained with another configuration: {'; '.join(changes)}. "
                "Change it back to go on, or set another run folder."
            )
        self.masters.load_state(saved.tensors())
        self.step, self.best_tau = saved.state["step"], saved.state["best_tau"]
        self.length.load_state(saved.state)
        return True

    def save(self) -> Path | None:
        tensors = self.masters.state()
        self.masters.collect()
        if not self.group.leads:
            return None
        state = {
            "step": self.step,
            "best_tau": self.best_tau,
            "config": as_json(self.config),
            "data_sha256": self._data_sha256,
            **self.length.state(),
        }
        return self.checkpoints.save(self.step, tensors, state, self.write_draft)

    def write_draft(self, folder: Path) -> None:
        """The draft as it is now, as `flashdraft generate --draft` reads it."""
        dtype = self.target.dtype
        weights = {name: weight.to(dtype) for name, weight in self.masters.best_weights.items()}
        info = {**self._info, "step": self.step, "best_tau": self.best_tau, "config": as_record(self.config)}
        self.method.write(folder, weights, info)

    def run(self, progress: Progress) -> None:
        """Train to the end, or until somebody interrupts; either way the state is saved."""
        metrics = MetricsFile(self.checkpoints.run, self.step) if self.group.leads else None
        window = _Window(self)
        self.length.start()
        saved = validated = time.monotonic()
        with self._interruptible(progress):
            if self.step == 0 and self.config.validation_steps is None:
                self._validate_now(metrics, progress)  # where the curve begins
            while self.step < self.num_steps and not self.group.agree(self._stop_asked):
                window.add(self.train_step())
                if self.length.open and self.group.agree(self.group.leads and self.length.due):
                    self.length.fix(self.step)
                progress.expect(self.length.known_steps, self.length.seconds_left)
                if self.step % self.config.log_steps == 0 or self.step == self.num_steps:
                    line = window.close()
                    if metrics is not None:
                        metrics.add(line)
                        progress.show(line)
                if self._due(self.config.validation_steps, self.config.validation_minutes, validated):
                    self._validate_now(metrics, progress)
                    validated = time.monotonic()
                    window.pause()
                if self._due(self.config.checkpoint_steps, self.config.checkpoint_minutes, saved):
                    self.save()
                    saved = time.monotonic()
                    window.pause()
            if self.step == self.num_steps:
                self._validate_now(metrics, progress)
            self.save()

    def _due(self, steps: int | None, minutes: float, since: float) -> bool:
        """By steps if given, else by the clock (of the first process)."""
        if self.step == self.num_steps:
            return False
        if steps is not None:
            return self.step % steps == 0
        return self.group.agree(self.group.leads and time.monotonic() - since > 60 * minutes)

    def _validate_now(self, metrics: MetricsFile | None, progress: Progress) -> None:
        """On the first process; the others wait at the next sum."""
        if self._validate is None:
            return
        self.masters.collect()
        if metrics is None:
            return
        tau, details = self._validate(self)
        metrics.add({"step": self.step, "validation_tau": round(tau, 4), "validation": details})
        progress.decoded(self.step, tau, {name: score["tau"] for name, score in details.items()})
        if tau > self.best_tau:
            self.best_tau = tau
            self.checkpoints.save_best(self.step, self.write_draft)

    @contextlib.contextmanager
    def _interruptible(self, progress: Progress) -> Iterator[None]:
        """Ctrl-C and a polite kill end the run after the current step."""

        def ask(_signal: int, _frame: object) -> None:
            self._stop_asked = True
            progress.note("stopping after this step")

        try:
            old = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs it there stops it
            old = {}
        try:
            yield
        finally:
            for number, handler in old.items():
                # torchrun ends the processes that are left, but why they end has to be said first
                if not (self.group.broken and number == signal.SIGTERM):
                    signal.signal(number, handler)

    @property
    def interrupted(self) -> bool:
        return self._stop_asked and self.step < self.num_steps


class _Window:
    """Sums of the steps since the last line of metrics; validation and saving are not counted."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._reports: list[StepReport] = []
        self._seconds = 0.0
        self._since = time.monotonic()

    def add(self, report: StepReport) -> None:
        now = time.monotonic()
        self._seconds += now - self._since
        self._since = now
        self._reports.append(report)

    def pause(self) -> None:
        self._since = time.monotonic()

    def close(self) -> dict[str, Any]:
        trainer, reports = self._trainer, self._reports
        blocks = sum(r.num_blocks for r in reports)
        right = torch.stack([r.right_L for r in reports]).sum(0)
        labels = torch.stack([r.labels_L for r in reports]).sum(0).clamp(min=1)
        line = {
            "step": trainer.step,
            "loss": round(sum(r.loss for r in reports) / len(reports), 6),
            "tau_estimate": round(1 + sum(r.accepted for r in reports) / max(blocks, 1), 4),
            "slot_accuracy": [round(float(x), 4) for x in right / labels],
            "grad_norm": round(sum(r.grad_norm for r in reports) / len(reports), 4),
            "lr": trainer.config.lr * learning_rate(trainer.step - 1, trainer.num_steps, trainer.config),
            "epoch": round(trainer.step / trainer.plan.steps_per_epoch, 4),
            "anchors_per_second": round(blocks / max(self._seconds, 1e-9), 1),
            "tokens_per_second": round(float(labels.sum()) / max(self._seconds, 1e-9), 1),
        }
        self._reports, self._seconds = [], 0.0
        return line
