"""What a target and a draft take of memory, from their config.json alone: no weights are needed.

Weights are counted on networks without storage. Caches are ours: keys and values of every layer, nothing
evicted (windows are masks), whole buckets of slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..cache import round_up
from ..draft_config import MOST_BLOCK
from ..drafters import drafter_name
from ..loading import quiet_transformers, read_config
from ..locate import locate_draft, locate_target
from ..model_folder import ModelFolder, read_json
from ..target import resolve_dtype
from ..types import FlashdraftError

_MOST_LAYERS = 1024
_SLACK = 64  # slots of a session's cache that take a pass's padding


@dataclass(frozen=True)
class Part:
    """A network's share.

    Attributes:
        parameters: of its own; what it borrows from the target is the target's.
        cache_per_token: bytes a token of context takes in all its layers.
        slots: of its cache in a row.
    """

    name: str
    parameters: int
    weights: int
    cache_per_token: int
    slots: int
    rows: int

    @property
    def cache(self) -> int:
        return self.cache_per_token * self.slots * self.rows

    @property
    def total(self) -> int:
        return self.weights + self.cache


def parts(
    target: str,
    draft: str | None,
    drafter: str | None,
    *,
    context: int,
    rows: int,
    dtype: str,
    block_size: int | None = None,
) -> list[Part]:
    """The target's share, and the draft's. Raises FlashdraftError with one sentence."""
    if context < 1 or rows < 1:
        raise FlashdraftError(f"context is {context} and rows {rows}; expected at least 1 of each.")
    size = resolve_dtype(dtype, torch.device("cpu")).itemsize
    config, found = model_part(target, context, rows, size)
    method = drafter_name(drafter, draft and str(_folder(draft)))
    if draft is None or method in ("none", "ngram"):
        return [found]
    if method == "draft_model":
        return [found, model_part(draft, context, rows, size)[1]]
    network, per_token, block = draft_network(method, _folder(draft))
    hidden = getattr(network.config, "hidden_size", None)
    if hidden != config.hidden_size:
        raise FlashdraftError(f"{draft} is made for a hidden size of {hidden}; {target} has {config.hidden_size}.")
    block = min(block_size or block, MOST_BLOCK)
    number = _count(network)
    slots = round_up(context + block) if per_token else 0
    return [found, Part(f"{draft} ({method})", number, number * size, per_token * size, slots, rows)]


def _folder(source: str) -> Path:
    """Of a draft, or of a model whose weights need not be there."""
    path = Path(source).expanduser()
    if path.is_file() and path.name == "config.json":
        return path.parent
    return path if (path / "config.json").is_file() else locate_draft(source)


def model_part(source: str, context: int, rows: int, size: int) -> tuple[Any, Part]:
    """A language model's (configuration, share)."""
    path = Path(source).expanduser()
    if path.is_file() and path.name == "config.json":
        path = path.parent
    elif not (path / "config.json").is_file():
        path = locate_target(source)
    with quiet_transformers():
        from transformers import AutoModelForCausalLM

        config = read_config(ModelFolder(path, read_json(path / "config.json"), 0, frozenset()), source)
        layers = getattr(config, "num_hidden_layers", None)
        if not isinstance(layers, int) or not 1 <= layers <= _MOST_LAYERS:
            raise FlashdraftError(f"config.json of {source} has {layers} layers; expected 1 to {_MOST_LAYERS}.")
        try:
            with torch.device("meta"):
                number = _count(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
            heads, dim = _key_heads(config)
        except Exception as error:  # a configuration that is wrong fails in many ways
            raise FlashdraftError(
                f"no network can be made of config.json of {source} ({type(error).__name__}: {str(error)[:100]})."
            ) from error
    return config, Part(
        source, number, number * size, 2 * layers * heads * dim * size, round_up(context + _SLACK), rows
    )


def _key_heads(config: Any) -> tuple[int, int]:
    query = int(config.num_attention_heads)
    heads = getattr(config, "num_key_value_heads", None) or query
    return int(heads), int(getattr(config, "head_dim", None) or config.hidden_size // query)


def draft_network(method: str, folder: Path) -> tuple[Any, int, int]:
    """(network without storage, cached numbers a context token, block) of a draft's configuration."""
    raw, where = read_json(folder / "config.json"), str(folder / "config.json")
    with torch.device("meta"):
        if method == "dflash":
            from .. import draft_config
            from ..drafters.dflash import DFlashNetwork

            own = draft_config.parse_config(raw, where)
            return DFlashNetwork(own), 2 * own.num_layers * own.num_kv_heads * own.head_dim, own.block_size
        if method == "eagle3":
            from ..drafters import eagle3_folder
            from ..drafters.eagle3 import Eagle3Network

            other = eagle3_folder.parse_config(raw, where)
            # keys and values of one layer, and the fused feature
            return Eagle3Network(other), 2 * other.num_kv_heads * other.head_dim + other.hidden_size, 7
        if method == "medusa":
            from ..drafters import medusa

            heads = medusa.parse_config(raw, where)
            return medusa.MedusaNetwork(heads), 0, heads.num_heads + 1
    raise FlashdraftError(
        f"the memory of {method} drafts is not known here; expected dflash, eagle3, medusa or draft_model."
    )


def _count(network: nn.Module) -> int:
    """Tied weights count once."""
    return sum(p.numel() for p in network.parameters())


def gib(number: int) -> str:
    """Bytes, as a person reads them."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number} B"
