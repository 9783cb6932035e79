"""A Hugging Face tokenizer in GGUF's metadata: byte-level BPE, as Llama 3, Qwen and SmolLM have it.

llama.cpp splits text before the merges by code of its own, which a file names; a splitting that has no name here
is refused, because the text would quietly become other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..loading import quiet_transformers
from ..model_folder import one_line
from ..types import FlashdraftError
from .gguf_file import Field, Fields, flag, text, uint

CONVERTER = "llama.cpp's own convert_hf_to_gguf.py"

# GGUF's kinds of tokens
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    (_WORDS + r"|\p{N}{1,3}" + _REST, "bytes"): "llama-bpe",
    (_WORDS + r"|\p{N}" + _REST, "bytes"): "qwen2",
    ("digits", "words"): "smollm",
    ("words",): "gpt-2",
}


def tokenizer_fields(folder: Path, vocab_size: int) -> Fields:
    """Metadata of a folder's tokenizer; ids that no token has are filled up to `vocab_size`.

    Raises FlashdraftError for every other kind of tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        core = json.loads(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # transformers raises many kinds
        raise FlashdraftError(f"{folder} has no tokenizer that can be read: {one_line(error)}.") from error
    splitting = _splitting(core, folder)
    tokens, kinds = _tokens(tokenizer, vocab_size, folder)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in core["model"].get("merges") or ()]
    if not merges:
        raise FlashdraftError(f"the tokenizer of {folder} has no merges, without which llama.cpp reads none.")
    found = {
        "model": text("gpt2"),
        "pre": text(splitting),
        "tokens": Field(tokens, "string"),
        "token_type": Field(kinds, "int32"),
        "merges": Field(merges, "string"),
    }
    for name in ("bos", "eos", "unk", "pad"):
        token = getattr(tokenizer, f"{name}_token_id")
        if isinstance(token, int) and 0 <= token < vocab_size:
            found[f"{ {'unk': 'unknown', 'pad': 'padding'}.get(name, name) }_token_id"] = uint(token)
    start, end = _added(tokenizer)
    found |= {"add_bos_token": flag(start), "add_eos_token": flag(end), "add_space_prefix": flag(False)}
    fields = {f"tokenizer.ggml.{key}": field for key, field in found.items()}
    if isinstance(tokenizer.chat_template, str):
        fields["tokenizer.chat_template"] = text(tokenizer.chat_template)
    return fields


def _splitting(core: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name for how text is split before the merges."""
    normalizer = core.get("normalizer")
    parts = core.get("pre_tokenizer") or {}
    steps = tuple(_step(part) for part in parts.get("pretokenizers", [parts]))
    plain = core["model"].get("type") == "BPE" and not core["model"].get("byte_fallback")
    if plain and steps in _SPLITS and (normalizer is None or normalizer.get("type") == "NFC"):
        return _SPLITS[steps]
    raise FlashdraftError(
        f"the tokenizer of {folder} is none that can be written as GGUF here (byte-level BPE of Llama 3, Qwen, SmolLM or "
        f"GPT-2); convert the target with {CONVERTER}, and name that file as the target."
    )


def _step(part: Mapping[str, Any]) -> str:
    kind = part.get("type")
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return "words" if part.get("use_regex", True) else "bytes"
    if kind == "Digits" and part.get("individual_digits"):
        return "digits"
    if kind == "Split" and part.get("behavior") == "Isolated" and not part.get("invert"):
        return str(part.get("pattern", {}).get("Regex"))
    return ""


def _tokens(tokenizer: Any, vocab_size: int, folder: Path) -> tuple[list[str], list[int]]:
    """Every id's text and kind."""
    known = {token: text for text, token in tokenizer.get_vocab().items()}
    if max(known) >= vocab_size:
        raise FlashdraftError(
            f"the tokenizer of {folder} has the token {max(known)}; its model has only {vocab_size} rows for them."
        )
    added = tokenizer.added_tokens_decoder
    tokens, kinds = [], []
    for i in range(vocab_size):
        tokens.append(known.get(i, f"[PAD{i}]"))
        looks_special = tokens[-1].startswith("<|") and tokens[-1].endswith("|>")
        if i not in known:
            kinds.append(_UNUSED)
        elif i in added:
            kinds.append(_CONTROL if added[i].special or looks_special else _USER_DEFINED)
        else:
            kinds.append(_NORMAL)
    return tokens, kinds


def _added(tokenizer: Any) -> tuple[bool, bool]:
    """Whether it puts tokens of its own before and behind a text."""
    bare, whole = (tokenizer("a", add_special_tokens=on)["input_ids"] for on in (False, True))
    return whole[0] != bare[0], whole[-1] != bare[-1]
