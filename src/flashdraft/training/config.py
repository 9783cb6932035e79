"""The training configuration: one frozen dataclass, from a YAML file and `--set key=value` (settings.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..draft_config import CONTEXTS
from ..settings import make_settings, read_yaml
from ..types import FlashdraftError

# Changing these leaves what a resumed run computes next as it would have been, or is a decision to
# go on differently that is easy to see (a longer run, other prompts to validate on).
MAY_CHANGE = frozenset({
    "run", "threads", "max_steps", "max_minutes", "epochs", "log_steps", "keep", "checkpoint_minutes", "checkpoint_steps",
    "validation", "validation_prompts", "validation_tokens", "validation_minutes", "validation_steps",
    "feature_cache", "feature_cache_gb", "loss_chunk", "shard",
})  # fmt: skip


@dataclass(frozen=True)
class TrainConfig:
    """All settings of one run; docs/training.md explains them.

    Attributes:
        run: folder of checkpoints, metrics and the exported draft.
        data: sequence files of `flashdraft regenerate`.
        method: "dflash", or a rival of it: "medusa", "eagle3", "draft_model" (methods/).
        context, autoregressive: DFlash without one of its parts (drafters/dflash_ablations.py).
        num_layers: of the draft; a Medusa head's residual blocks. None: 5, and 1 for rivals, 4 for a draft model.
        anchors_per_sequence: random anchors of a sequence in an epoch; None is every position.
        anchors_per_piece: blocks that share one attention call; the unit batches are made of. None: 32; a draft
            model reads a whole sequence for any piece of it, and takes 1024.
        blocks_per_batch: blocks of one forward and backward pass. None: 128; of a draft model four pieces.
        accumulate: passes of one optimizer step (all processes together).
        mix: sequences whose pieces are shuffled together; their features are held in memory.
        attention: "flex" (one FlexAttention call a pass, for CUDA), "sdpa" (a call per piece) or "auto".
        shard: several processes share out the masters and the optimizer's moments.
        gamma: slot k weighs exp(-(k - 1) / gamma); None goes by the block size.
        dpace_alpha: D-PACE weights (arXiv 2605.18810) instead of the decay, smoothed by this.
        distribution_tokens: likeliest tokens of the target that the KL and TV terms compare.
        optimizer: "muon" is for matrices; vectors keep AdamW.
        lr_copied: rate of weights copied from the target; None is `lr`.
        lr_head: rate of a head of the draft's own (EAGLE-3, Medusa), always AdamW's; None is `lr`.
        decay_share: last part of a "wsd" schedule in which the rate falls to zero.
        max_minutes: the run ends by the clock (schedule "wsd"); `max_steps` may end it before.
        ema: decay of the weights' running mean, which is then what is validated and exported.
    """

    run: str
    target: str
    data: tuple[str, ...]
    dtype: str = "auto"
    seed: int = 0
    threads: int | None = None
    # the draft
    method: str = "dflash"
    context: str = "injected"
    autoregressive: bool = False
    num_layers: int = cast(int, None)  # what None stands for is set below
    block_size: int = 16
    target_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    intermediate_size: int | None = None
    draft_vocab: int | None = None
    window: int | None = None
    init: str = "target"
    init_from: str | None = None
    # the blocks
    max_length: int = 4096
    anchors_per_sequence: int | None = None
    anchors_per_piece: int = cast(int, None)
    blocks_per_batch: int = cast(int, None)
    accumulate: int = 4
    mix: int = 64
    attention: str = "auto"
    # the objective
    ce_weight: float = 1.0
    kl_weight: float = 0.0
    tv_weight: float = 0.0
    gamma: float | None = None
    dpace_alpha: float | None = None
    distribution_tokens: int = 32
    loss_chunk: int = 64
    # the optimizer
    optimizer: str = "adamw"
    lr: float = 6e-4
    lr_copied: float | None = None
    lr_head: float | None = None
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    warmup_steps: int = 100
    schedule: str = "cosine"
    decay_share: float = 0.2
    final_lr_share: float = 0.05
    ema: float | None = None
    max_steps: int | None = None
    max_minutes: float | None = None
    epochs: float = 1.0
    shard: bool = False
    # around it
    log_steps: int = 10
    keep: int = 2
    checkpoint_minutes: float = 10.0
    checkpoint_steps: int | None = None
    validation: tuple[str, ...] = ()
    validation_prompts: int = 8
    validation_tokens: int = 96
    validation_minutes: float = 20.0
    validation_steps: int | None = None
    feature_cache: str | None = None
    feature_cache_gb: float = 20.0

    def __post_init__(self) -> None:
        _require(self.method in _NUM_LAYERS, "method", self.method, f"one of {', '.join(_NUM_LAYERS)}")
        self._fill("num_layers", _NUM_LAYERS[self.method])
        self._fill("anchors_per_piece", 1024 if self.method == "draft_model" else 32)
        self._fill("blocks_per_batch", 4 * self.anchors_per_piece if self.method == "draft_model" else 128)
        for name in ("num_layers", "accumulate", "mix", "anchors_per_piece", "log_steps", "loss_chunk"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _require(bool(self.data), "data", self.data, "at least one sequence file")
        _require(self.block_size >= 2, "block_size", self.block_size, "at least 2 (it counts the anchor)")
        _require(self.keep >= 2, "keep", self.keep, "at least 2, so that a damaged checkpoint has one behind it")
        _require(
            self.blocks_per_batch % self.anchors_per_piece == 0,
            "blocks_per_batch", self.blocks_per_batch, f"a multiple of anchors_per_piece ({self.anchors_per_piece})",
        )  # fmt: skip
        _require(self.init in ("target", "random"), "init", self.init, '"target" or "random"')
        _require(self.attention in ("auto", "sdpa", "flex"), "attention", self.attention, '"auto", "sdpa" or "flex"')
        _require(self.optimizer in ("adamw", "muon"), "optimizer", self.optimizer, '"adamw" or "muon"')
        _require(self.schedule in ("cosine", "wsd"), "schedule", self.schedule, '"cosine" or "wsd"')
        weights = (self.ce_weight, self.kl_weight, self.tv_weight)
        _require(min(weights) >= 0 and sum(weights) > 0, "ce_weight, kl_weight, tv_weight", weights, "one above 0")
        _require(self.lr > 0, "lr", self.lr, "a number above 0")
        if self.dpace_alpha is not None:
            _require(0 < self.dpace_alpha <= 1, "dpace_alpha", self.dpace_alpha, "a number above 0 and at most 1")
        if self.max_minutes is not None:
            _require(self.max_minutes > 0, "max_minutes", self.max_minutes, "a number above 0")
            # a cosine has to know its length at the first step, which only a clock could tell
            _require(self.schedule == "wsd", "schedule", self.schedule, '"wsd" with max_minutes')
        if self.ema is not None:
            _require(0 < self.ema < 1, "ema", self.ema, "a number between 0 and 1")

        _require(self.context in CONTEXTS, "context", self.context, f"one of {', '.join(CONTEXTS)}")
        if self.method != "dflash":
            self._check_rival()

    def _check_rival(self) -> None:
        """What only DFlash has; a key that is quietly ignored would be a run of something else."""
        asked = [name for name in _DFLASH_ONLY if getattr(self, name) != _default(name)]
        if self.method in ("medusa", "draft_model"):
            asked += [name for name in ("target_layer_ids", "intermediate_size") if getattr(self, name) is not None]
        if self.method == "eagle3" and self.num_layers != 1:
            asked.append("num_layers")
        if asked:
            raise FlashdraftError(f"{asked[0]} is {getattr(self, asked[0])!r}, which the method {self.method} has not.")

    def _fill(self, name: str, value: int) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def decay_gamma(self) -> float:
        """gamma of the loss: the paper's for its block sizes, half the block for others."""
        return self.gamma or {16: 7.0, 10: 5.0, 8: 4.0}.get(self.block_size, self.block_size / 2)

    @property
    def needs_distribution(self) -> bool:
        return self.kl_weight > 0 or self.tv_weight > 0


_NUM_LAYERS = {"dflash": 5, "medusa": 1, "eagle3": 1, "draft_model": 4}
_DFLASH_ONLY = ("context", "autoregressive", "mask_token_id", "window")


def _default(name: str) -> Any:
    return TrainConfig.__dataclass_fields__[name].default


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise FlashdraftError(f"{name} is {value!r}; expected {expected}.")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """A TrainConfig from a YAML file and `key=value` strings, which win."""
    return make_config(read_yaml(path, overrides), str(path))


def make_config(raw: Mapping[str, Any], where: str = "the configuration") -> TrainConfig:
    return make_settings(TrainConfig, raw, where)


def config_diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What a resumed run's configuration changes though it must not, a line each. A key that the old
    one does not know yet (of an older version) had its default."""
    defaults = {f.name: f.default for f in dataclasses.fields(TrainConfig) if f.default is not dataclasses.MISSING}
    old = {**defaults, **old}
    keys = sorted({*old, *new} - MAY_CHANGE)
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in keys if _plain(old.get(key)) != _plain(new.get(key))
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def as_json(config: TrainConfig) -> dict[str, Any]:
    return {k: _plain(v) for k, v in dataclasses.asdict(config).items()}


_PATHS = ("run", "target", "data", "init_from", "validation", "feature_cache")


def as_record(config: TrainConfig) -> dict[str, Any]:
    """What is published with a draft: paths by their last part, which is all they mean elsewhere."""
    record = as_json(config)
    for key in _PATHS:
        value = record[key]
        if isinstance(value, list):
            record[key] = [Path(item).name for item in value]
        elif value is not None:
            record[key] = Path(value).name if Path(value).is_absolute() or key != "target" else value
    return record
