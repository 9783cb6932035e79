"""There: the draft as shards and a report into the output folder. Here: the shards as a draft folder again.

Of the output at most 8 files of 16 MiB come back, 64 MiB together.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flashdraft import checkpoint
from flashdraft.training.progress import read_metrics
from flashdraft.types import FlashdraftError

from .unpack import sha256, tensor_sha256

SHARD_BYTES, MOST_SHARDS = 15 << 20, 4
MANIFEST, REPORT, METRICS = "manifest.json", "report.md", "metrics.jsonl"
_IDS = "draft_vocab.ids"  # how the draft vocabulary travels: as a tensor among the weights


def write_shards(draft: Path, out: Path) -> None:
    """The draft's weights as shards, its other files in manifest.json, which is written last: what it
    names is there."""
    out.mkdir(parents=True, exist_ok=True)
    config, weights = checkpoint.read(draft)
    ids = checkpoint.read_vocab(draft, config)
    tensors = {**weights, **({_IDS: ids} if ids is not None else {})}
    groups = _groups(tensors)
    (out / MANIFEST).unlink(missing_ok=True)
    for old in out.glob("shard-*.safetensors"):
        old.unlink()
    shards = {}
    for number, names in enumerate(groups):
        file = out / f"shard-{number}.safetensors"
        save_file({name: tensors[name].contiguous() for name in names}, file, metadata={"format": "pt"})
        shards[file.name] = sha256(file)
    manifest = {
        "shards": shards,
        "tensors": {name: tensor_sha256(tensor) for name, tensor in tensors.items()},
        "config": json.loads((draft / "config.json").read_text(encoding="utf-8")),
        "training": json.loads((draft / "training.json").read_text(encoding="utf-8")),
    }
    _put(out / MANIFEST, json.dumps(manifest, indent=1))


def write_report(out: Path, report: Mapping[str, Any], metrics: Sequence[Path]) -> None:
    """The report as it is so far, and the runs' metrics in one file, each line with its run's name."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"run": path.parent.name, **line}) + "\n" for path in metrics for line in read_metrics(path)]
    _put(out / METRICS, "".join(lines))
    _put(out / "report.json", json.dumps(report, indent=1))
    _put(out / REPORT, as_markdown(report))


def _groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        weight = tensor.numel() * tensor.element_size() + 256  # its line in the header
        if weight > SHARD_BYTES:
            raise FlashdraftError(f"{name} has {weight >> 20} MiB; a shard holds {SHARD_BYTES >> 20}.")
        if size + weight > SHARD_BYTES and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += weight
    if len(groups) > MOST_SHARDS:
        raise FlashdraftError(f"the draft fills {len(groups)} shards; {MOST_SHARDS} come back. Train a smaller one.")
    return groups


def _put(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def join(out: Path, draft: Path) -> Path:
    """Check the shards that came back and make a draft folder of them.

    Raises FlashdraftError if a shard is missing or damaged.
    """
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FlashdraftError(f"{out} has no whole {MANIFEST} ({error}); no draft came back.") from error
    tensors: dict[str, torch.Tensor] = {}
    for name, digest in manifest["shards"].items():
        if not (out / name).is_file():
            raise FlashdraftError(f"{out} lacks {name}; expected {', '.join(manifest['shards'])}.")
        if sha256(out / name) != digest:
            raise FlashdraftError(f"{out / name} has another SHA-256 than {MANIFEST} says; copy it again.")
        tensors |= load_file(out / name)
    wrong = [name for name, digest in manifest["tensors"].items() if tensor_sha256(tensors[name]) != digest]
    if wrong or set(tensors) != set(manifest["tensors"]):
        raise FlashdraftError(f"the shards in {out} hold other tensors than {MANIFEST} says.")
    ids = tensors.pop(_IDS, None)
    raw = manifest["config"]
    checkpoint.write(draft, checkpoint.parse_config(raw, str(out)), tensors, manifest["training"], ids)
    checkpoint.read(draft)
    for name in (REPORT, METRICS):
        if (out / name).is_file():
            shutil.copy(out / name, draft / name)
    return draft


def as_markdown(report: Mapping[str, Any]) -> str:
    """The tables of a run."""
    parts = ["# A draft made on one GPU by the clock\n"]
    facts = {k: v for k, v in report.items() if not isinstance(v, (list, dict))}
    parts.append(_table(["", ""], [[k, v] for k, v in facts.items()]))
    for title, key in (("Seconds of each phase", "phases"), ("Data written by the target", "data")):
        if report.get(key):
            parts += [f"\n## {title}\n", _table(["", ""], [[k, v] for k, v in report[key].items()])]
    if report.get("runs"):
        names = list(report["runs"][0])
        rows = [[run.get(name, "") for name in names] for run in report["runs"]]
        parts += ["\n## Drafts\n", _table(names, rows)]
    if report.get("acceptance"):
        rows = [
            [
                line["domain"], line["temperature"], f"{line['prompts']} of {line['of']}", line["rounds"], line["tau"],
                f"{line['low']} to {line['high']}", " ".join(f"{100 * s:.0f}" for s in line["survival"]),
            ]
            for line in report["acceptance"]
        ]  # fmt: skip
        heads = ["domain", "T", "prompts", "rounds", "tau", "95 %", "survival by slot, %"]
        parts += ["\n## Acceptance length by real decoding\n", _table(heads, rows)]
    if report.get("rounds"):
        names = ["way", "rows", "round_ms", "floor_ms", "tokens_per_second", "tau", "draft_ms", "verify_ms"]
        rows = [[line.get(name, "") for name in names] for line in report["rounds"]["lines"]]
        parts += ["\n## A round against the time that reading all weights once takes\n", _table(names, rows)]
        parts.append(f"\nA copy on this device moves {report['rounds']['bytes_a_second'] / 1e9:.0f} GB/s.\n")
    return "".join(parts)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)
