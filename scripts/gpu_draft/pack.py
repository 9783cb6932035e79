"""Here: target, prompts and evaluation prompts -> parts that fit a copy of 64 MiB each."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flashdraft import locate
from flashdraft.training.data import ChatTemplate, Rejected, read_prompts
from flashdraft.training.ways import load_tokenizer
from flashdraft.types import FlashdraftError

from .unpack import BLOCKS, KINDS, PARTS, dequantise, sha256, tensor_sha256

# A copy holds 64 MiB, and the repository's own files travel with every part.
PART_BYTES = 56 << 20

# Llama's names in a GGUF file -> transformers'
_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def prepare(
    source: str, train: Sequence[Path], evaluation: Sequence[str], out: Path, *, max_prompt: int = 256,
    num_prompts: int = 45_000, manifest: Path | None = None,
) -> list[Path]:  # fmt: skip
    """Write out/part-0, out/part-1... and return them.

    Args:
        evaluation: FILE or FILE:COUNT, a domain each.
        manifest: lists the licences of the training files; files that are not "free" there are refused.
    """
    if out.exists():
        shutil.rmtree(out)
    folder = locate.locate_target(source)
    tokenizer, eos_ids, _ = load_tokenizer(str(folder))
    template = ChatTemplate(tokenizer, eos_ids)
    with tempfile.TemporaryDirectory() as place:
        stage = Path(place)
        _pack_target(source, folder, stage / "target")
        licences = _licences(train, manifest)
        _pack_prompts(train, template, stage, max_prompt, num_prompts, {"target": source, "licences": licences})
        _pack_evaluation(evaluation, template, stage)
        return _split(stage, out)


def _pack_target(source: str, folder: Path, out: Path) -> None:
    """The folder's small files, and the weights: as the blocks of the GGUF file they came from, where
    that is possible, else as they are."""
    out.mkdir()
    for file in folder.iterdir():
        if not file.name.endswith(".safetensors") and file.name != "flashdraft.json":
            shutil.copy(file, out / file.name)
    gguf = _gguf_file(source)
    if gguf is not None:
        _pack_blocks(gguf, folder, out)
        return
    for file in folder.glob("*.safetensors*"):
        shutil.copy(file, out / file.name)


def _gguf_file(source: str) -> Path | None:
    if source in locate.ALIASES:
        return locate._file_in_distribution(source)
    return Path(source) if source.lower().endswith(".gguf") else None


def _pack_blocks(gguf: Path, folder: Path, out: Path) -> None:
    """Raises FlashdraftError unless the blocks unpack to exactly the weights in `folder`."""
    from gguf import GGUFReader

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise FlashdraftError(f"{gguf.name} is a {config['model_type']} model; only Llama's GGUF names are known here.")
    blocks: dict[str, torch.Tensor] = {}
    layout: dict[str, dict[str, Any]] = {}
    for tensor in GGUFReader(gguf).tensors:
        name = _name(tensor.name)
        kind = tensor.tensor_type.name
        if kind not in (*KINDS, "F32", "F16"):
            raise FlashdraftError(f"{tensor.name} is packed as {kind}; known are {', '.join(KINDS)}, F32, F16.")
        data = torch.from_numpy(tensor.data.copy())
        facts: dict[str, Any] = {"kind": kind if kind in KINDS else "plain", "shape": tensor.shape.tolist()[::-1]}
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            facts["heads"] = config[key]
        blocks[name] = data.flatten() if kind in KINDS else data
        layout[name] = facts
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        if set(stored.keys()) != set(blocks):
            raise FlashdraftError(f"{gguf.name} has other tensors than {folder}; expected the same names.")
        for name, facts in layout.items():
            facts["sha256"] = tensor_sha256(stored.get_tensor(name))
            if tensor_sha256(dequantise(blocks[name], facts)) != facts["sha256"]:
                raise FlashdraftError(f"{name} unpacks to other numbers than those in {folder}.")
    save_file(blocks, out / BLOCKS, metadata={"layout": json.dumps(layout)})


def _name(name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", name)
    if found is None or found[2] not in _NAMES:
        raise FlashdraftError(f"the GGUF file has a tensor {name}, which is none of Llama's.")
    layer = f"model.layers.{found[1]}." if found[1] is not None else ""
    return f"{layer}{_NAMES[found[2]]}.weight"


def _licences(files: Sequence[Path], manifest: Path | None) -> dict[str, str]:
    if manifest is None:
        return {}
    known = json.loads(manifest.read_text(encoding="utf-8"))["train"]
    names = [file.name.split(".")[0] for file in files]
    closed = [name for name in names if known.get(name, {}).get("class") != "free"]
    if closed:
        raise FlashdraftError(f"{manifest.name} does not call these free to use: {', '.join(closed)}; leave them out.")
    return {name: known[name]["licence"] for name in names}


def _pack_prompts(
    files: Sequence[Path], template: ChatTemplate, out: Path, max_prompt: int, count: int, facts: dict[str, Any]
) -> None:
    """First turns through the chat template, in an order that a hash of their ids gives, so that any
    first part of them is a fair sample of all files."""
    rejected: list[Rejected] = []
    prompts = sorted(read_prompts(files, rejected.append), key=lambda p: hashlib.sha256(p.id.encode()).digest())
    ids, names, sources = [], [], []
    for prompt in prompts:
        if len(ids) == count:
            break
        tokens = _opening(template, prompt.turns[0], prompt.system)
        if len(tokens) <= max_prompt:
            ids.append(tokens)
            names.append(prompt.id)
            sources.append(prompt.source)
    if not ids:
        raise FlashdraftError(f"no prompt of at most {max_prompt} tokens in {', '.join(map(str, files))}.")
    flat = torch.tensor([token for tokens in ids for token in tokens])
    narrow = torch.int16 if int(flat.max()) < 1 << 16 else torch.int32
    listed = sorted(set(sources))
    place = {source: i for i, source in enumerate(listed)}
    save_file(
        {
            "ids": flat.to(narrow),  # wraps above 32767; read back as unsigned
            "lengths": torch.tensor([len(tokens) for tokens in ids], dtype=torch.int32),
            "source": torch.tensor([place[source] for source in sources], dtype=torch.int16),
        },
        out / "prompts.safetensors",
    )
    facts = {**facts, "template_sha256": template.sha256, "rejected": len(rejected)}
    (out / "prompts.json").write_text(json.dumps({"facts": facts, "sources": listed, "names": names}), encoding="utf-8")


def _pack_evaluation(files: Sequence[str], template: ChatTemplate, out: Path) -> None:
    """First turns, evenly spread over each file; the file's name is the domain's."""
    found = {}
    for named in files:
        name, _, count = named.partition(":")
        prompts = list(read_prompts([name], _refuse))
        number = min(int(count) if count else len(prompts), len(prompts))
        chosen = [prompts[i * len(prompts) // number] for i in range(number)]
        found[Path(name).name.split(".")[0]] = [_opening(template, p.turns[0], p.system) for p in chosen]
    if not found:
        raise FlashdraftError("there is nothing to evaluate on; name at least one file with --eval.")
    (out / "evaluation.json").write_text(json.dumps(found), encoding="utf-8")


def _opening(template: ChatTemplate, turn: str, system: str | None) -> list[int]:
    before = [{"role": "system", "content": system}] if system else []
    return template.opening([*before, {"role": "user", "content": turn}])


def _refuse(rejected: Rejected) -> None:
    raise FlashdraftError(rejected.sentence)


def _split(stage: Path, out: Path) -> list[Path]:
    out.mkdir(parents=True)
    archive = stage.parent / f"{stage.name}.tar.gz"
    try:
        with tarfile.open(archive, "w:gz", compresslevel=6) as tar:
            for path in sorted(stage.iterdir()):
                tar.add(path, path.name)
        data = archive.read_bytes()
    finally:
        archive.unlink(missing_ok=True)
    count = max(2, math.ceil(len(data) / PART_BYTES))
    size = math.ceil(len(data) / count)
    pieces = [data[i * size : (i + 1) * size] for i in range(count)]
    names = [f"archive.{i}" for i in range(count)]
    facts = {"parts": {n: sha256(piece) for n, piece in zip(names, pieces, strict=True)}, "sha256": sha256(data)}
    folders = []
    for i, (name, piece) in enumerate(zip(names, pieces, strict=True)):
        folder = out / f"part-{i}"
        folder.mkdir()
        (folder / name).write_bytes(piece)
        (folder / PARTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        folders.append(folder)
    return folders
