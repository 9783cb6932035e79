"""A DFlash draft as llama.cpp loads it: one GGUF file, with the target's tokenizer and without its tables.

    export_target("smollm2", "target.gguf")
    export_draft("smollm2", "smollm2", "draft.gguf", "q8_0")
    # llama-server -m target.gguf -md draft.gguf --spec-type draft-dflash --spec-draft-n-max B-1

Names, keys and what they do are llama.cpp 11434's (src/models/dflash.cpp, common/speculative.cpp). It drafts the
likeliest tokens whatever the sampling, so a soft cap and an output multiplier change nothing there; the
tokenizer has to be whole, because without one it knows no mask token. ../docs/serving.md says the rest.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from .. import checkpoint
from ..draft_config import DraftConfig
from ..locate import locate_draft
from ..types import FlashdraftError
from .gguf_file import KINDS, Field, Fields, Piece, check_kind, flag, prefixed, real, text, uint, write_gguf
from .gguf_target import LAYER_NAMES, TARGET_KINDS, Network, TargetFile, export_target, read_target_file

if TYPE_CHECKING:
    from ..target import Target

__all__ = ["KINDS", "TARGET_KINDS", "export_draft", "export_target", "refusals"]

_log = logging.getLogger("flashdraft")

ARCHITECTURE = "dflash"
# The most layers that llama.cpp has room for
_MOST_LAYERS = 512


def export_draft(
    draft: str | Path, target: str | Path, out: str | Path, kind: str = "f16", *, own_rows: bool = False
) -> Path:
    """Write a draft's GGUF file and read it back. Raises one FlashdraftError that lists all that llama.cpp
    would load and quietly draft badly with.

    Args:
        target: its GGUF file, folder (Llama, Qwen3), hub name or alias: tokenizer and sizes come from it.
        kind: one of KINDS. Rows that are not whole blocks of a quantised type are written as f16, norms as f32.
        own_rows: write the head's rows of a reduced vocabulary, which make the file larger and a draft cheaper;
            without them llama.cpp drafts from the whole head. Older versions than 11434 may refuse them.
    """
    kind = check_kind(kind)
    folder = locate_draft(draft)
    config, weights = checkpoint.read(folder)
    ids = checkpoint.read_vocab(folder, config)
    problems = refusals(config)
    if own_rows and ids is None:
        problems.append("it drafts from the whole vocabulary, so there are no rows of its own to write")
    if problems:
        raise FlashdraftError(f"the draft {folder} cannot go to llama.cpp: {'; '.join(problems)}.")
    host = read_target_file(target)
    checkpoint.check_against(config, cast("Target", host), str(folder))
    if ids is not None and not own_rows:
        _log.info(
            "llama.cpp drafts from all %d tokens: the draft's own %d are left out (own_rows writes them)",
            config.vocab_size, len(ids),
        )  # fmt: skip
    network = _network(config)
    fields = {
        "general.type": text("model"),
        "general.name": text(folder.resolve().name),
        "general.quantization_version": uint(2),
        **network.fields(ARCHITECTURE),
        **_draft_fields(config),
        **host.tokenizer,
        "tokenizer.ggml.mask_token_id": uint(config.mask_token_id),
    }
    pieces = _pieces(config, weights) + network.rope_pieces()
    if ids is not None and own_rows:
        pieces += _own_rows(ids, host)
    return write_gguf(Path(out).expanduser(), ARCHITECTURE, fields, pieces, kind)


def refusals(config: DraftConfig) -> list[str]:
    """What llama.cpp cannot say or reads differently, as parts of a sentence."""
    problems = []
    if config.is_ablation:
        problems.append("it is DFlash without one of its parts, which flashdraft alone runs")
    if config.from_anchor:
        problems.append("its anchor slot predicts a token too (DeepSpec), and all slots would be read one place off")
    if config.attention_bias:
        problems.append("its attention has biases, for which there is no place")
    if len(set(config.causal)) > 1:
        problems.append("some layers are causal and others are not, and there is one word for all of them")
    if len({window for window in config.windows if window is not None}) > 1:
        problems.append("its windows differ, and there is one size for all of them")
    if config.block_size < 2:
        problems.append(f"its block of {config.block_size} drafts nothing")
    if config.num_layers > _MOST_LAYERS:
        problems.append(f"it has {config.num_layers} layers, expected at most {_MOST_LAYERS}")
    return problems


def _network(config: DraftConfig) -> Network:
    return Network(
        config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads, config.num_kv_heads,
        config.head_dim, config.vocab_size, config.max_context, config.rms_norm_eps, config.rope,
    )  # fmt: skip


def _draft_fields(config: DraftConfig) -> Fields:
    """DFlash's own keys. llama.cpp counts layers by their inputs: the output of layer i is the input of i + 1."""
    values = {
        "block_size": uint(config.block_size),
        "target_layers": Field([i + 1 for i in config.target_layer_ids], "int32"),
    }
    if config.causal[0]:  # no word is the other way, for this kind of draft
        values["attention.causal"] = flag(True)
    window = next((size for size in config.windows if size is not None), None)
    if window is not None:
        values["attention.sliding_window"] = uint(window)
        values["attention.sliding_window_pattern"] = Field([size is not None for size in config.windows], "bool")
    if config.embedding_scale != 1:
        values["embedding_scale"] = real(config.embedding_scale)
    if config.output_multiplier != 1:
        values["logit_scale"] = real(config.output_multiplier)
    if config.softcap is not None:
        values["final_logit_softcapping"] = real(config.softcap)
    return prefixed(ARCHITECTURE, values)


def _pieces(config: DraftConfig, weights: dict[str, torch.Tensor]) -> list[Piece]:
    """The network's tensors. Rows of q and k stay where they are: heads are rotated as Hugging Face does it."""
    plain = {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
    }
    found = []
    for name, shape in checkpoint.tensor_shapes(config).items():
        theirs = plain.get(name)
        if theirs is None:
            number, inner = name.removeprefix("layers.").removesuffix(".weight").split(".", 1)
            theirs = f"blk.{number}.{LAYER_NAMES[inner]}.weight"
        found.append(Piece(theirs, shape, lambda name=name: weights[name]))  # type: ignore[misc]
    return found


def _own_rows(ids: torch.Tensor, host: TargetFile) -> list[Piece]:
    """The head's rows for a part of the vocabulary, and the target's id of each."""
    numbers = ids.to("cpu", torch.int64).numpy()
    return [
        host.head_rows(ids),
        Piece("d2t", tuple(ids.shape), lambda: np.ascontiguousarray(numbers).view(np.uint8), "I64"),
    ]
