"""What an export or import has to know of a target, from its folder's JSON and single tensors: no model is built.

A target need not be one that flashdraft decodes: engines serve more of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open

from ..config_keys import MOST, short
from ..draft_folder import reading
from ..locate import locate_target
from ..model_folder import check_folder, read_json, weight_files
from ..types import FlashdraftError

if TYPE_CHECKING:
    from ..target import Target

# Names of the two tables, as the families of transformers have them.
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "model.language_model.embed_tokens.weight",
               "language_model.model.embed_tokens.weight", "gpt_neox.embed_in.weight")  # fmt: skip
_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "embed_out.weight")

# SGLang refuses a draft whose mask token is not this one, if the tokenizer has it.
MASK_TOKEN = "<|MASK|>"  # noqa: S105


@dataclass(frozen=True)
class TargetFacts:
    """`name` is what a user typed, `path` its folder; the rest is what `checkpoint.check_against` asks for, and
    what engines decide by."""

    name: str
    path: Path
    architecture: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_context: int
    eos_ids: frozenset[int]
    pad_id: int | None
    mask_token_id: int | None

    def as_target(self) -> Target:
        """For `checkpoint.check_against`, which reads the numbers and the name only."""
        return cast("Target", self)

    def embedding(self) -> torch.Tensor:
        """As stored; a view of the mapped file."""
        return self._table(_EMBEDDINGS, "embedding")

    def head_rows(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """The head's rows for some tokens. A head that is not stored is the embedding."""
        table = self._table((*_HEADS, *_EMBEDDINGS), "head")
        return table if ids is None else table[ids].contiguous()

    def _table(self, names: tuple[str, ...], what: str) -> torch.Tensor:
        stored: dict[str, Path] = {}
        for file in weight_files(self.path):
            with reading(file), safe_open(file, framework="pt") as part:
                stored |= dict.fromkeys(part.keys(), file)
        key = next((name for name in names if name in stored), None)
        if key is None:
            raise FlashdraftError(f"{self.name} has no {what} under a name known here; expected {names[0]}.")
        with reading(stored[key]), safe_open(stored[key], framework="pt") as part:
            found: torch.Tensor = part.get_tensor(key)
        return found


def read_target(source: str | Path) -> TargetFacts:
    """Of a folder, GGUF file, hub name or alias. Raises FlashdraftError with one sentence."""
    path = locate_target(source)
    check_folder(path)
    raw = read_json(path / "config.json")
    text = raw.get("text_config") if isinstance(raw.get("text_config"), dict) else raw
    assert isinstance(text, dict)
    where = f"config.json of {source}"
    names = raw.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise FlashdraftError(f"{where} gives the architectures {short(names)}; expected a list of one name.")
    generation = _optional_json(path / "generation_config.json")
    return TargetFacts(
        name=str(source),
        path=path,
        architecture=names[0],
        hidden_size=_count(text, ("hidden_size", "n_embd"), where),
        vocab_size=_count(text, ("vocab_size",), where),
        num_layers=_count(text, ("num_hidden_layers", "n_layer"), where),
        max_context=_count(text, ("max_position_embeddings", "n_positions"), where, default=1),
        eos_ids=frozenset(i for part in (text, raw, generation) for i in _ids(part.get("eos_token_id"))),
        pad_id=next(iter(_ids(text.get("pad_token_id"))), None),
        mask_token_id=_added_token(path, MASK_TOKEN),
    )


def _count(config: Mapping[str, Any], names: tuple[str, ...], where: str, default: int | None = None) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is int and 1 <= value <= MOST:
        return value
    raise FlashdraftError(f"{where} gives {names[0]} as {short(value)}; expected a count.")


def _ids(value: Any) -> list[int]:
    return [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _added_token(path: Path, token: str) -> int | None:
    """The id of a special token, by the tokenizer's own files."""
    added = _optional_json(path / "tokenizer.json").get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == token and type(entry.get("id")) is int:
            return int(entry["id"])
    return None
