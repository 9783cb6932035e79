"""From a configuration to a run: loads the target and the data, makes the draft, trains it."""

from __future__ import annotations

import copy
import ctypes
import json
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import checkpoint
from ..locate import DEFAULT_TARGET
from ..target import Target
from ..types import FlashdraftError
from .config import TrainConfig, as_record, load_config
from .data import ChatTemplate, TokenSequence, read_meta, read_sequences
from .methods import make_method
from .parallel import Group
from .progress import Progress, write_plot
from .trainer import Trainer
from .validation import load_prompts, validate

if TYPE_CHECKING:
    from rich.console import Console


def run_training(config_path: str | Path, overrides: Sequence[str] = (), console: Console | None = None) -> bool:
    """Train as a YAML file says, from the run's last checkpoint if there is one.

    Returns whether it came to the end; if not (Ctrl-C), the state is saved and the console is told
    how to go on. Raises FlashdraftError.
    """
    command = shlex.join(["flashdraft", "train", str(config_path), *_settings(overrides)])
    return _train(load_config(config_path, overrides), command, console)


def run_demo(overrides: Sequence[str] = (), console: Console | None = None) -> bool:
    """The same with the configuration and the rows that ship with the package."""
    data = resources.files("flashdraft") / "data"
    files = {"data": "demo_sequences.jsonl.gz", "validation": "word_problems.jsonl"}
    # JSON text is YAML, whatever the path is made of
    own = [f"{key}={json.dumps([str(data / name)])}" for key, name in files.items()]
    config = load_config(str(data / "demo_training.yaml"), [*own, *overrides])
    command = shlex.join(["flashdraft", "train", "--demo", *_settings(overrides)])
    if console is not None:
        minutes = f" for about {config.max_minutes:g} minutes" if config.max_minutes is not None else ""
        console.print(
            f"Training a small draft for {config.target}{minutes}, on its own answers to word problems. Decoding "
            "of problems it is not trained on says how many tokens a pass of the target is worth.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return _train(config, command, console)


def _settings(overrides: Sequence[str]) -> list[str]:
    return [part for override in overrides for part in ("--set", override)]


def _train(config: TrainConfig, command: str, console: Console | None) -> bool:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    keep_freed_memory()
    group = Group()
    try:
        trainer = build_trainer(config, group)
        return _run(trainer, command, console if group.leads else None)
    finally:
        group.close()


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed memory instead of giving it back: on a CPU the page faults of tensors
    that are made anew for every batch take about as long as the arithmetic."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    trim_threshold, mmap_max = -1, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)


def _run(trainer: Trainer, command: str, console: Console | None) -> bool:
    resumed = trainer.resume()
    with Progress(console, trainer.length.known_steps, trainer.step) as progress:
        progress.say(_opening(trainer, resumed))
        trainer.run(progress)
    latest = trainer.checkpoints.run / "latest"
    if console is not None and trainer.interrupted:
        progress.say(f"stopped after step {trainer.step}, saved as {latest}; go on with: {command}")
    elif console is not None:
        plot = write_plot(trainer.checkpoints.run)
        shown = f"; curves in {plot}" if plot else ""
        progress.say(f"finished: the draft is in {latest}{shown}; try it with: {_chat_command(trainer)}")
    return not trainer.interrupted


def _chat_command(trainer: Trainer) -> str:
    """With the best draft if there was a validation to choose it."""
    run, target = trainer.checkpoints.run, trainer.config.target
    draft = run / "best" if (run / "best").exists() else run / "latest"
    other = [] if target == DEFAULT_TARGET else ["--target", target]
    # these folders do not say how many tokens they were trained to draft
    untold = trainer.config.method in ("draft_model", "eagle3")
    size = ["--block-size", str(trainer.config.block_size)] if untold else []
    return shlex.join(["flashdraft", "chat", *other, "--draft", str(draft), *size])


def _opening(trainer: Trainer, resumed: bool) -> str:
    plan, config = trainer.plan, trainer.config
    size = sum(p.numel() for p in trainer.method.network.parameters() if p.requires_grad)
    what = f"going on at step {trainer.step}" if resumed else "starting"
    known = trainer.length.known_steps
    length = f"{known} steps in all" if known is not None else f"{config.max_minutes:g} minutes in all"
    return (
        f"{what}: {len(trainer.sequences)} sequences, {plan.num_anchors} anchors an epoch, "
        f"{plan.steps_per_epoch} steps an epoch, {length}; "
        f"{config.method} of {size / 1e6:.1f} M trained parameters, {config.num_layers} layers, block {config.block_size}, "
        f"{trainer.group.world} process(es)"
    )


def build_trainer(config: TrainConfig, group: Group | None = None, target: Target | None = None) -> Trainer:
    """All parts of a run, loaded and made."""
    device = f"cuda:{group.local_rank}" if group is not None and torch.cuda.is_available() else None
    target = target or Target.load(config.target, dtype=config.dtype, device=device)
    sequences = load_sequences(config, target)
    method, start = make_method(config, target, sequences)
    prompts = load_prompts(config.validation, target, config.validation_prompts) if config.validation else {}

    def score(trainer: Trainer) -> tuple[float, Any]:
        found = validate(method.drafter(exported(trainer)), target, prompts, config.validation_tokens)
        return found.tau, found.as_json()

    return Trainer(
        config, target, method, start, sequences,
        training_info=training_info(config, target), validate=score if prompts else None, group=group,
    )  # fmt: skip


def exported(trainer: Trainer) -> nn.Module:
    """A copy of the draft network with the weights that would be saved."""
    network = copy.deepcopy(trainer.method.network).requires_grad_(False)
    with torch.no_grad():
        for name, weight in trainer.masters.best_weights.items():
            network.get_parameter(name).copy_(weight)
    return network


def load_sequences(config: TrainConfig, target: Target) -> list[TokenSequence]:
    """All sequences, cut to max_length; those of other targets are refused by their ids."""
    template = ChatTemplate(target.tokenizer, target.eos_ids) if target.tokenizer is not None else None
    limit = min(config.max_length, target.max_context)
    return [
        _cut(sequence, limit)
        for sequence in read_sequences(config.data, vocab_size=target.vocab_size, template=template)
    ]


def _cut(sequence: TokenSequence, limit: int) -> TokenSequence:
    if len(sequence.token_ids) <= limit:
        return sequence
    spans = tuple((start, min(end, limit)) for start, end in sequence.loss_spans if start < limit)
    return TokenSequence(
        sequence.id, sequence.source, sequence.token_ids[:limit], spans, sequence.temperature, finished=False
    )


def training_info(config: TrainConfig, target: Target) -> dict[str, Any]:
    """What made the draft, for training.json. Raises FlashdraftError if the files were written with
    different templates, or for another template than the target's."""
    made_by = {path: read_meta(path) for path in config.data}
    known = [meta for meta in made_by.values() if meta is not None]
    modes = {(meta.get("template_sha256"), meta.get("thinking"), meta.get("system")) for meta in known}
    own = ChatTemplate(target.tokenizer, target.eos_ids).sha256
    if len(modes) > 1:
        raise FlashdraftError(
            f"the data files were written with {len(modes)} different chat templates, thinking modes or system "
            "prompts; train on files of one, or write them anew."
        )
    sha256, thinking, system = modes.pop() if modes else (own, None, None)
    if sha256 not in (None, own):
        raise FlashdraftError(f"the data was written with another chat template than {target.name} has.")
    return {
        "target": as_record(config)["target"],
        "target_sha256": checkpoint.target_digest(target),
        "chat_template": {"sha256": sha256, "thinking": thinking, "system": system},
        "data": [{"file": Path(path).name, "made_by": meta} for path, meta in made_by.items()],
        "started_from": _read_training_info(config.init_from),
    }


def _read_training_info(folder: str | None) -> Any:
    """What made the draft this one starts from, so that a card can tell all stages of a training."""
    if folder is None:
        return None
    try:
        return json.loads((Path(folder).expanduser() / "training.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # other people's drafts have none
        return {"draft": Path(folder).name}
