"""Drafts to other engines' layouts and back. What is written is read again before it is believed: the same
weights bit by bit, an equal configuration.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import checkpoint
from ..draft_config import DraftConfig
from ..draft_folder import CONFIG, TRAINING, VOCAB_JSON, on_cpu, read_json, write_files, write_json
from ..draft_tables import HEAD, MEMBERS, OFFSETS, check_copies, mapped_ids, read_tables
from ..drafters import drafter_name
from ..foreign_config import translate
from ..locate import locate_draft
from ..types import FlashdraftError
from .launching import launch_line, request_line
from .layouts import engine_config, portable
from .rules import ENGINES, Case, examine
from .target_facts import TargetFacts, read_target

# What travels along beside training.json, if it is there: the model card, and what the card shows.
_CARD = ("README.md", "card.json", "measured.json", "curves.svg")
_MOST_CARD_BYTES = 4 << 20


@dataclass(frozen=True)
class Source:
    """A draft folder, read and checked."""

    folder: Path
    layout: str
    config: DraftConfig
    weights: dict[str, torch.Tensor]
    vocab_ids: torch.Tensor | None
    training: dict[str, Any] | None
    target: TargetFacts | None

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.weights.values())).dtype


@dataclass(frozen=True)
class Exported:
    """What was written, what to know about it, and how to serve it. `request` None: nothing serves there."""

    folder: Path
    notes: list[str]
    launch: str
    request: str | None


def read_source(draft: str | Path, target: str | None = None) -> Source:
    """A DFlash draft in any layout that flashdraft reads, and its target: the one that is named, else the one
    its files name if that is here. Raises FlashdraftError."""
    folder = locate_draft(draft)
    method = drafter_name(None, folder)
    if method != "dflash":
        raise FlashdraftError(f"{folder} holds a draft of the method {method}; only DFlash drafts are exported.")
    config, weights = checkpoint.read(folder)
    training = checkpoint.read_training(folder)
    spoilt = checkpoint.draft_warning(training, folder)
    if spoilt:
        raise FlashdraftError(spoilt)
    raw = read_json(folder / CONFIG)
    foreign = translate(raw)
    facts = read_target(target) if target is not None else _said_target(raw, training)
    _check_tables(folder, config, facts)
    vocab_ids = checkpoint.read_vocab(folder, config)
    layout = foreign.layout if foreign is not None else "z-lab"
    return Source(folder, layout, config, weights, vocab_ids, training, facts)


def _said_target(raw: dict[str, Any], training: dict[str, Any] | None) -> TargetFacts | None:
    """The target that the draft's own files name, if it is on this machine."""
    said = raw.get("speculators_config")
    verifier = said.get("verifier") if isinstance(said, dict) else None
    names = [(training or {}).get("target"), verifier.get("name_or_path") if isinstance(verifier, dict) else None]
    for name in names:
        if isinstance(name, str) and name:
            try:
                return read_target(name)
            except FlashdraftError:
                continue
    return None


def _check_tables(folder: Path, config: DraftConfig, target: TargetFacts | None) -> None:
    tables = read_tables(folder, config)
    if not tables.keys() - {OFFSETS, MEMBERS}:
        return
    if target is None:
        raise FlashdraftError(
            f"{folder} brings copies of its target's tables ({', '.join(sorted(tables))}); name the target with --target, "
            "so that they can be compared."
        )
    mapped_ids(folder, config)
    check_copies(tables, target.embedding, target.head_rows, str(folder), target.name)


def export_draft(
    draft: str | Path,
    engine: str,
    out: str | Path | None = None,
    target: str | None = None,
    *,
    own_rows: bool = False,
    kind: str | None = None,
) -> Exported:
    """Write what an engine loads, and read it back. Raises FlashdraftError for what the engine would refuse,
    or load and quietly draft badly with.

    Args:
        engine: one of ENGINES. llama.cpp gets draft.gguf and target.gguf (llama_cpp.py), the others a folder
            with safetensors.
        out: a new folder, or an older export; None: named after the draft and the engine, here.
        target: None takes the one that the draft's files name, if it is on this machine.
        own_rows: vLLM, speculators and llama.cpp: write the head's rows of a reduced vocabulary.
        kind: llama.cpp: the type of the draft's weights, f16 if it is None.
    """
    if engine not in ENGINES:
        raise FlashdraftError(f"no engine is called {engine!r} here; expected one of {', '.join(ENGINES)}.")
    if kind is not None and engine != "llama.cpp":
        raise FlashdraftError(f"--type is for llama.cpp; for {engine} the weights stay as they are.")
    source = read_source(draft, target)
    folder = out_folder(source.folder, engine, out)
    count = None if source.vocab_ids is None else len(source.vocab_ids)
    notes = examine(Case(engine, source.config, source.dtype, count, own_rows, source.target))
    if engine == "llama.cpp":
        return _export_gguf(source, folder, notes, own_rows, kind)
    config = portable(source.config, source.target)
    if config.max_context > source.config.max_context:
        notes.append(f"max_position_embeddings is {config.max_context:,}, as the target's (it was less).")
    tensors, extra = dict(source.weights), _card(source.folder)
    if source.vocab_ids is not None:
        if own_rows:
            assert source.target is not None
            tensors |= _tables(source.vocab_ids, config.vocab_size, source.target)
        else:
            extra[VOCAB_JSON] = (json.dumps({"ids": source.vocab_ids.tolist()}) + "\n").encode()
    raw = engine_config(engine, config, source.dtype, source.target, count if own_rows else None)
    write_files(folder, raw, on_cpu(tensors), source.training, extra=extra)
    _check_written(folder, config, source)
    name = _served_name(source.target)
    return Exported(
        folder,
        notes,
        launch_line(engine, folder.resolve(), name, config.block_size),
        request_line(engine, name),
    )


def _export_gguf(source: Source, folder: Path, notes: list[str], own_rows: bool, kind: str | None) -> Exported:
    """Draft and target as GGUF files; a GGUF file that the user named stays where it is."""
    from . import llama_cpp

    if source.target is None:
        raise FlashdraftError("llama.cpp's draft file holds its target's tokenizer; name the target with --target.")
    name = source.target.name
    llama_cpp.export_draft(source.folder, name, folder / "draft.gguf", kind or "f16", own_rows=own_rows)
    model = Path(name).expanduser()
    if not model.is_file():
        model = llama_cpp.export_target(name, folder / "target.gguf")
    for file, data in _card(source.folder).items():
        (folder / file).write_bytes(data)
    if source.training is not None:
        write_json(folder / TRAINING, source.training)
    line = launch_line("llama.cpp", folder.resolve() / "draft.gguf", str(model.resolve()), source.config.block_size)
    return Exported(folder, notes, line, request_line("llama.cpp", model.name))


def out_folder(draft: Path, engine: str, out: str | Path | None) -> Path:
    folder = Path(out).expanduser() if out is not None else Path(f"{draft.resolve().name}-{engine}")
    if folder.resolve() == draft.resolve():
        raise FlashdraftError(f"{folder} is the draft's own folder; write to another one with --out.")
    return folder


def _tables(ids: torch.Tensor, vocab_size: int, target: TargetFacts) -> dict[str, torch.Tensor]:
    """The head's rows of a reduced vocabulary, and the maps between the two."""
    members = torch.zeros(vocab_size, dtype=torch.bool)
    members[ids] = True
    return {HEAD: target.head_rows(ids), OFFSETS: ids - torch.arange(len(ids)), MEMBERS: members}


def _card(folder: Path) -> dict[str, bytes]:
    """Files of the model card. A link may lead into the hub's cache, whose folders are made of links, and
    nowhere else: a copied file could be published."""
    found = {}
    roots = (folder.resolve(), folder.resolve().parent.parent / "blobs")
    for name in _CARD:
        file = folder / name
        if not file.is_file() or file.stat().st_size > _MOST_CARD_BYTES:
            continue
        if any(file.resolve().is_relative_to(root) for root in roots):
            found[name] = file.read_bytes()
    return found


def _check_written(folder: Path, config: DraftConfig, source: Source) -> None:
    """What a reader makes of the written folder is the draft that was to be written."""
    found, weights = checkpoint.read(folder)
    same = found == config and all(_same(weights[name], tensor) for name, tensor in source.weights.items())
    ids = checkpoint.read_vocab(folder, found)
    same = same and (ids is None) == (source.vocab_ids is None)
    if not same or (ids is not None and not torch.equal(ids, source.vocab_ids)):  # type: ignore[arg-type]
        changed = [f.name for f in dataclasses.fields(DraftConfig) if getattr(found, f.name) != getattr(config, f.name)]
        raise FlashdraftError(
            f"{folder} reads back as another draft ({', '.join(changed) or 'other weights or tokens'}); "
            "this is a bug of flashdraft, please report it."
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, so that nan equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _served_name(target: TargetFacts | None) -> str:
    """What an engine can load: a hub name as it was typed, or else the folder, not an alias of ours."""
    if target is None:
        return "TARGET"
    return target.name if "/" in target.name and not Path(target.name).exists() else str(target.path.resolve())


def import_draft(folder: str | Path, out: str | Path, target: str | None = None) -> Source:
    """Write a draft of another layout in ours (the z-lab layout), with its card and training.json.

    Raises FlashdraftError if it is no DFlash draft, does not fit the target that was named, or brings tables
    that are not the target's.
    """
    source = read_source(folder, target)
    place = out_folder(source.folder, "flashdraft", out)
    source = dataclasses.replace(source, config=_with_layers(source, target is not None))
    raw = checkpoint.config_json(source.config, source.dtype)
    write_files(place, raw, on_cpu(source.weights), _training(source), source.vocab_ids, extra=_card(source.folder))
    _check_written(place, source.config, source)
    return source


def _with_layers(source: Source, is_named: bool) -> DraftConfig:
    """Not every layout says how many layers the target has, which tells a wrong one at load."""
    config, facts = source.config, source.target
    if facts is None:
        return config
    try:
        checkpoint.check_against(config, facts.as_target())
    except FlashdraftError:
        if is_named:
            raise
        return config  # what its files name is another model here
    return dataclasses.replace(config, num_target_layers=facts.num_layers)


def _training(source: Source) -> dict[str, Any]:
    """What made the draft, as far as it is said, and where it came from."""
    made = dict(source.training or {"imported_from": source.layout})
    if source.layout != "z-lab":
        made["imported_from"] = source.layout
    return {**made, "draft_sha256": checkpoint.digest(source.weights)}
