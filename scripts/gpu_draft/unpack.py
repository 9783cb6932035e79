"""There: parts -> one archive, checked -> a model folder, prompts, evaluation prompts.

The weights travel as the quantised blocks of the GGUF file, under the names that transformers gives
them; they are unpacked here by torch alone. Every tensor's SHA-256 is compared with that of the weights
that the package itself unpacked where the archive was made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flashdraft.types import FlashdraftError

PARTS = "parts.json"
BLOCKS = "blocks.safetensors"
# kind -> numbers of a block, bytes of a block (the layout of GGML)
KINDS = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)}


def sha256(data: bytes | Path) -> str:
    if isinstance(data, Path):
        with data.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(data).hexdigest()


def receive(part: Path, work: Path) -> bool:
    """Keep a part; with the last one, join and unpack them into `work`. Returns whether all are there.

    Raises FlashdraftError for a part that was damaged on the way, or belongs to another archive.
    """
    facts = json.loads((part / PARTS).read_text(encoding="utf-8"))
    place = work / "parts"
    place.mkdir(parents=True, exist_ok=True)
    known = place / PARTS
    if known.exists() and json.loads(known.read_text(encoding="utf-8")) != facts:
        raise FlashdraftError(f"{part} is a part of another archive than those in {place}; remove {work}.")
    shutil.copy(part / PARTS, known)
    names = [name for name in facts["parts"] if (part / name).is_file()]
    if not names:
        raise FlashdraftError(f"{part} holds none of the parts {', '.join(facts['parts'])}.")
    for name in names:
        found = sha256(part / name)
        if found != facts["parts"][name]:
            raise FlashdraftError(
                f"{part / name} has the SHA-256 {found[:12]}..., not that of {PARTS}; carry it again."
            )
        shutil.copy(part / name, place / name)
    missing = [name for name in facts["parts"] if not (place / name).is_file()]
    if missing:
        print(f"received {', '.join(names)}; still missing: {', '.join(missing)}", flush=True)
        return False
    _join(place, list(facts["parts"]), facts["sha256"], work)
    return True


def _join(place: Path, names: Sequence[str], expected: str, work: Path) -> None:
    archive = work / "archive.tar.gz"
    with archive.open("wb") as file:
        for name in names:
            file.write((place / name).read_bytes())
    if sha256(archive) != expected:
        raise FlashdraftError(f"the parts in {place} join to an archive with another SHA-256 than {PARTS} says.")
    with tarfile.open(archive) as tar:
        tar.extractall(work, filter="data")
    if (work / "target" / BLOCKS).exists():
        unpack_weights(work / "target")
    archive.unlink()
    print(f"unpacked the target and the prompts into {work}", flush=True)


def unpack_weights(folder: Path) -> None:
    """blocks.safetensors -> model.safetensors in bfloat16; the first is removed."""
    with safe_open(folder / BLOCKS, framework="pt") as stored:
        layout: dict[str, dict[str, Any]] = json.loads(stored.metadata()["layout"])
        weights = {name: dequantise(stored.get_tensor(name), facts) for name, facts in layout.items()}
    for name, facts in layout.items():
        if tensor_sha256(weights[name]) != facts["sha256"]:
            raise FlashdraftError(f"{name} unpacks to other numbers than where it was packed.")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / BLOCKS).unlink()


def dequantise(blocks: torch.Tensor, facts: dict[str, Any]) -> torch.Tensor:
    """bfloat16 weights of a tensor's blocks (uint8), or of plain numbers.

    facts: kind, shape, and for queries and keys the number of heads: GGUF keeps the two halves of a
    head that rotary embeddings pair interleaved, transformers one behind the other.
    """
    kind, shape = facts["kind"], facts["shape"]
    if kind == "plain":
        wide = blocks.float().reshape(shape)
    else:
        size, num_bytes = KINDS[kind]
        rows = blocks.view(-1, num_bytes)
        scale = rows[:, :2].contiguous().view(torch.float16).float()
        if kind == "Q8_0":
            values = rows[:, 2:].contiguous().view(torch.int8).float() * scale
        else:
            packed = rows[:, num_bytes - size // 2 :]
            nibbles = torch.cat([packed & 15, packed >> 4], dim=1).float()
            if kind == "Q4_0":
                values = (nibbles - 8) * scale
            else:
                values = nibbles * scale + rows[:, 2:4].contiguous().view(torch.float16).float()
        wide = values.reshape(shape)
    if facts.get("heads"):
        wide = wide.view(facts["heads"], -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)
    return wide.to(torch.bfloat16).contiguous()


def tensor_sha256(tensor: torch.Tensor) -> str:
    return sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True)
class Prompts:
    """Prompts through the chat template, ready for the target: ids, names, sources."""

    token_ids: list[list[int]]
    names: list[str]
    sources: list[str]
    facts: dict[str, Any]


def read_prompts(work: Path) -> Prompts:
    """The prompts that travelled; ids are two bytes each where the vocabulary allows."""
    tensors = load_file(work / "prompts.safetensors")
    listed = json.loads((work / "prompts.json").read_text(encoding="utf-8"))
    ids = tensors["ids"].long()
    if tensors["ids"].dtype == torch.int16:
        ids &= 0xFFFF
    flat, lengths = ids.tolist(), tensors["lengths"].tolist()
    rows, at = [], 0
    for length in lengths:
        rows.append(flat[at : at + length])
        at += length
    sources = [listed["sources"][i] for i in tensors["source"].tolist()]
    return Prompts(rows, listed["names"], sources, listed["facts"])


def read_evaluation(work: Path) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = json.loads((work / "evaluation.json").read_text(encoding="utf-8"))
    return found
