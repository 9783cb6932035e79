"""Drafts in other people's layouts: their config.json said in the keys of the z-lab layout.

A table of recognisers. draft_config.py reads what they return as if it had been written so; what is
said wrongly is reported there, under the z-lab name. ../docs/serving.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .config_keys import short
from .types import FlashdraftError

ARCHITECTURE = "DFlashDraftModel"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class Foreign:
    """A draft of another layout: its name, the z-lab keys, and how many tokens its own head has rows for
    (None: as many as the target)."""

    layout: str
    raw: dict[str, Any]
    head_rows: int | None = None


def translate(raw: Mapping[str, Any], where: str = "config.json") -> Foreign | None:
    """What a config.json of another layout means; None for the z-lab layout and for everything unknown.

    Raises FlashdraftError with one sentence for a draft of that layout that no DFlash network can be.
    """
    for recognised, translated in _LAYOUTS:
        if recognised(raw):
            return translated(raw, where)
    return None


def _is_speculators(raw: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in raw


def _speculators(raw: Mapping[str, Any], where: str) -> Foreign:
    """The package speculators: a decoder's configuration inside, layers numbered by `hidden_states` (one
    more than ours), full layers always bidirectional, sliding ones causal unless it says otherwise."""
    kind, inner = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind != "dflash":
        raise FlashdraftError(
            f"{where} is a {short(kind)} draft of the package speculators; of its drafts 'dflash' is read."
        )
    if not isinstance(inner, dict):
        raise FlashdraftError(f"{where}: transformer_layer_config is {short(inner)}, expected an object.")
    if raw.get("shift_label") and not raw.get("sample_from_anchor"):
        raise FlashdraftError(f"{where} was trained with shift_label, whose blocks end elsewhere; it is not supported.")
    ids = raw.get("aux_hidden_state_layer_ids")
    if isinstance(ids, list):
        ids = [i - 1 if type(i) is int else i for i in ids]
    kinds = inner.get("layer_types")
    slides = isinstance(kinds, list) and SLIDING in kinds
    ours: dict[str, Any] = {
        **{key: value for key, value in inner.items() if key != "dflash_config"},
        "architectures": [ARCHITECTURE],
        "layer_types": kinds,
        "use_sliding_window": slides,
        "is_causal": False if slides and raw.get("sliding_window_non_causal") is True else None,
        "block_size": None,
        "dflash_config": {
            "block_size": _block_size(raw, raw.get("sample_from_anchor")),
            "mask_token_id": raw.get("mask_token_id"),
            "target_layer_ids": ids,
            "sample_from_anchor": raw.get("sample_from_anchor"),
            **{key: raw[key] for key in ("projector_type", "markov_rank") if key in raw},
        },
        "target_hidden_size": raw.get("target_hidden_size"),
        "draft_vocab_size": None,
    }
    if inner.get("head_dim") is None and isinstance(kind := inner.get("model_type"), str) and kind != "qwen3":
        width, heads = inner.get("hidden_size"), inner.get("num_attention_heads")
        if type(width) is int and type(heads) is int and heads > 0:  # other families' default
            ours["head_dim"] = width // heads
    return Foreign("speculators", ours, _head_rows(raw, ours, where))


def _is_deepspec(raw: Mapping[str, Any]) -> bool:
    return raw.get("architectures") == ["Qwen3DSparkModel"]


def _deepspec(raw: Mapping[str, Any], where: str) -> Foreign:
    """DeepSpec: the same network without its two heads is DFlash whose anchor slot predicts too, so a block
    of n slots proposes n tokens. Embedding and head are stored, copies of the target's."""
    extra = {
        "markov_rank": "a Markov head",
        "enable_confidence_head": "a confidence head",
    }
    for key, meaning in extra.items():
        if raw.get(key):
            raise FlashdraftError(
                f"{where} is a DSpark draft with {meaning} ({key} {short(raw[key])}): another method."
            )
    inner = {
        "block_size": _block_size(raw, True),
        "mask_token_id": raw.get("mask_token_id"),
        "target_layer_ids": raw.get("target_layer_ids"),
        "sample_from_anchor": True,
    }
    return Foreign("DeepSpec", {**raw, "architectures": [ARCHITECTURE], "block_size": None, "dflash_config": inner})


def _is_reduced(raw: Mapping[str, Any]) -> bool:
    rows, vocab = raw.get("draft_vocab_size"), raw.get("vocab_size")
    return raw.get("architectures") == [ARCHITECTURE] and type(rows) is int and type(vocab) is int and 0 < rows < vocab


def _reduced(raw: Mapping[str, Any], where: str) -> Foreign:
    """The z-lab layout as vLLM reads it for a part of the vocabulary: rows of the head, and their tokens."""
    return Foreign("vLLM", {**raw, "draft_vocab_size": None}, _head_rows(raw, raw, where))


def _block_size(raw: Mapping[str, Any], from_anchor: Any) -> Any:
    """Ours counts the anchor whether or not its slot predicts."""
    size = raw.get("block_size")
    return size + 1 if from_anchor is True and type(size) is int else size


def _head_rows(raw: Mapping[str, Any], ours: Mapping[str, Any], where: str) -> int | None:
    rows, vocab = raw.get("draft_vocab_size"), ours.get("vocab_size")
    if rows is None or rows == vocab:
        return None
    if type(rows) is int and type(vocab) is int and 0 < rows < vocab:
        return rows
    raise FlashdraftError(f"{where}: draft_vocab_size is {short(rows)}, expected at most vocab_size {short(vocab)}.")


_LAYOUTS: tuple[
    tuple[Callable[[Mapping[str, Any]], bool], Callable[[Mapping[str, Any], str], Foreign]], ...
] = (
    (_is_speculators, _speculators),
    (_is_deepspec, _deepspec),
    (_is_reduced, _reduced),
)  # fmt: skip
