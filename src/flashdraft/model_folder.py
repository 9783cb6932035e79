"""A model folder, looked at before anything is loaded from it: what it may not hold, and how much
it holds. Reads JSON and safetensors headers only; needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .types import FlashdraftError

# No configuration of a model is larger; a broken or hostile file may be.
_MAX_JSON_BYTES = 64 << 20
# Neither is any other text file that is read with it: tokenizers are the largest.
_MAX_TEXT_BYTES = 256 << 20
_TEXT = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".jsonl")
# Counts of things that are built one by one, before any weight is looked at.
_MAX_COUNT = 1 << 17

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.model", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class ModelFolder:
    """What a checked folder holds: its config, numbers summed over its weight files, and the names
    of tensors that are no floating-point numbers."""

    path: Path
    config: Mapping[str, Any]
    num_weights: int
    integers: frozenset[str]


def one_line(error: BaseException) -> str:
    """What an error of another library says, as part of a sentence."""
    reason = error.strerror if isinstance(error, OSError) else None
    text = " ".join((reason or str(error)).split()).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or FlashdraftError."""
    try:
        if file.stat().st_size > _MAX_JSON_BYTES:
            raise FlashdraftError(f"{file} has {file.stat().st_size:,} bytes; expected a JSON file of a model.")
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, FlashdraftError):
            raise
        raise FlashdraftError(f"{file} cannot be read as JSON: {one_line(error)}.") from error
    if not isinstance(value, dict):
        raise FlashdraftError(f"{file} holds a {type(value).__name__}; expected a JSON object.")
    return value


def check_folder(path: Path) -> ModelFolder:
    """Raises FlashdraftError with one sentence if the folder cannot hold a model that we load."""
    if not (path / "config.json").is_file():
        raise FlashdraftError(f"{path} has no config.json; expected a model folder.")
    _check_files(path)
    config = read_json(path / "config.json")
    files = weight_files(path)
    sizes: dict[str, int] = {}
    integers: set[str] = set()
    for file in files:
        _measure(file, sizes, integers)
    if not any(True for pattern in _TOKENIZER_FILES for _ in path.glob(pattern)):
        raise FlashdraftError(
            f"{path} has no tokenizer; expected tokenizer.json or another tokenizer file beside the weights."
        )
    _check_counts(config, len(sizes), path / "config.json")
    return ModelFolder(path, config, sum(sizes.values()), frozenset(integers))


def _check_files(path: Path) -> None:
    """Refuse what other libraries would wait for or read without end: pipes, devices, texts of gigabytes."""
    for file in sorted(path.iterdir()):
        try:
            found = file.stat()
        except OSError:  # a broken link is nothing
            continue
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            raise FlashdraftError(
                f"{file} is neither a file nor a folder (a pipe or a device); a model folder has none."
            )
        if file.suffix in _TEXT and found.st_size > _MAX_TEXT_BYTES:
            raise FlashdraftError(f"{file} has {found.st_size:,} bytes; expected a text file of a model.")


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder: one, or the parts its index names."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    others = sorted(f.name for f in path.iterdir() if f.suffix == ".safetensors")
    pickles = sorted(f.name for f in path.iterdir() if f.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"))
    if others:
        found = f"{others[0]} but no index that says what it is part of"
    elif pickles:
        found = f"only {pickles[0]}, which could run code when it is opened"
    else:
        found = "no weights"
    raise FlashdraftError(f"{path} has {found}; expected model.safetensors, or model.safetensors.index.json and parts.")


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise FlashdraftError(f"{index} has no weight_map from tensors to files.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise FlashdraftError(f"{index} names {name!r}; expected safetensors files in the same folder.")
        if not (index.parent / name).is_file():
            raise FlashdraftError(f"{index.parent} has no {name}, which its index names; get the file again.")
    return [index.parent / name for name in names]


def _measure(file: Path, sizes: dict[str, int], integers: set[str]) -> None:
    """Note the tensors of a safetensors file, by its header, which is checked."""
    try:
        with safe_open(file, framework="np") as weights:
            for key in weights.keys():  # noqa: SIM118 (no mapping)
                tensor = weights.get_slice(key)
                sizes[key] = math.prod(tensor.get_shape())
                if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    integers.add(key)
    except (SafetensorError, OSError, ValueError) as error:
        raise FlashdraftError(
            f"{file} cannot be read as safetensors: {one_line(error)}; get the file again."
        ) from error


def _check_counts(config: Mapping[str, Any], num_tensors: int, where: Path) -> None:
    """Refuse numbers of layers, experts and heads that no weights can stand behind: the model would
    be built from them before its weights are read."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_counts(value, num_tensors, where)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") and value > num_tensors:
            raise FlashdraftError(f"{where} asks for {key} {value:,}; the weights are {num_tensors:,} tensors in all.")
        if key.startswith(("num_", "n_")) and value > _MAX_COUNT and not key.startswith(("n_pos", "n_ctx", "num_pos")):
            raise FlashdraftError(f"{where} asks for {key} {value:,}; expected at most {_MAX_COUNT:,}.")
