"""What a run does, at full size and as a toy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# phase -> share of the time. Exports take a second each and are in `save`.
SHARES = {"load": 4.0, "generate": 22.0, "train": 52.0, "evaluate": 19.0, "save": 3.0}

# What is trained, besides the shape: docs/training.md has the keys. The batch is what keeps a large GPU
# busy; the rest is what did best in small runs.
TRAINING: Mapping[str, Any] = {
    "draft_vocab": 16384, "ce_weight": 0.5, "kl_weight": 0.5, "distribution_tokens": 32,
    "anchors_per_piece": 64, "blocks_per_batch": 4096, "accumulate": 1, "mix": 512, "loss_chunk": 1024,
    "lr": 1.5e-3, "lr_copied": 6e-4, "schedule": "wsd", "decay_share": 0.3, "warmup_steps": 50,
    "log_steps": 20, "checkpoint_minutes": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Of a run.

    Attributes:
        rows: conversations that the target writes at a time.
        num_tokens: tokens of answers to write, if time allows.
        max_new: longest answer. max_prompt: longer prompts are left out.
        temperatures: shared out over the prompts.
        shapes: (layers, block size) of the drafts, trained one after the other.
        eval_tokens: longest answer when decoding to evaluate. eval_rows: at a time.
        quick_prompts: of each domain, that choose between the drafts.
        timed_prompts: decoded for the table of round times.
        least_run: seconds; a later shape is left out if half of it is not there.
    """

    rows: int = 1024
    stride: int = 32
    prefill_rows: int = 64
    num_tokens: int = 7_000_000
    max_new: int = 384
    max_prompt: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.7)
    shapes: tuple[tuple[int, int], ...] = ((3, 8), (5, 16))
    training: Mapping[str, Any] = field(default_factory=lambda: dict(TRAINING))
    eval_tokens: int = 128
    eval_rows: int = 32
    quick_prompts: int = 16
    timed_prompts: int = 8
    least_run: float = 60.0
    seed: int = 0


def full(**changes: Any) -> Settings:
    return Settings(**changes)


def toy(**changes: Any) -> Settings:
    """All phases in seconds, on a CPU: proves that they fit together and nothing else. It ends by its
    sizes, long before a generous clock does."""
    small = {
        "draft_vocab": None, "distribution_tokens": 4, "anchors_per_piece": 8, "blocks_per_batch": 32, "mix": 8,
        "loss_chunk": 32, "warmup_steps": 2, "log_steps": 2, "lr": 1e-2, "lr_copied": 1e-2,
        "max_steps": 6,
    }  # fmt: skip
    values: dict[str, Any] = {
        "rows": 4, "stride": 4, "prefill_rows": 2, "num_tokens": 400, "max_new": 24, "max_prompt": 64,
        "shapes": ((1, 4), (2, 6)), "training": {**TRAINING, **small}, "eval_tokens": 10, "eval_rows": 2,
        "quick_prompts": 2, "timed_prompts": 2, "least_run": 2.0,
    }  # fmt: skip
    return Settings(**{**values, **changes})
