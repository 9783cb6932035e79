"""GGUF files: written tensor by tensor, read back and compared before they get their name.

Which fields and tensors a model has is said in gguf_target.py and llama_cpp.py; bytes and types are the package
gguf's.
"""

from __future__ import annotations

import importlib.util
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..gguf_header import read_header
from ..model_folder import one_line
from ..types import FlashdraftError

# Types of weights that gguf can write -> llama.cpp's number for a file of them
KINDS = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q5_1": 9, "q5_0": 8, "q4_1": 3, "q4_0": 2}

# Numbers in a block of a quantised type, and the most that a number may be off, as a share of its block's largest
_BLOCK = 32
_ERRORS = {"q8_0": 1 / 254, "q5_1": 1 / 31, "q5_0": 1 / 16, "q4_1": 1 / 15, "q4_0": 1 / 8}
# A block's scale and offset are float16: rounded, and not below 2**-24.
_HALF, _LEAST = 2.0**-9, 2.0**-16
_MOST_HALF = 65504.0
_QUANTIZE = re.compile(r"i?q\d_|tq\d_|mxfp4|nvfp4")


@dataclass(frozen=True)
class Field:
    """A value of the metadata. `kind` is GGUF's name of its type ("uint32"), of its items' type for a list."""

    value: Any
    kind: str


Fields = dict[str, Field]


@dataclass(frozen=True)
class Piece:
    """A tensor of a file, loaded when its turn comes: floating-point numbers, or, if `stored_as` names their
    type, the bytes as they are stored [rows, bytes]."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Any]
    stored_as: str | None = None


def check_kind(kind: str, known: Sequence[str] = tuple(KINDS)) -> str:
    """The type in small letters. Raises FlashdraftError for one that cannot be written."""
    name = kind.lower()
    if name in known:
        return name
    more = ""
    if name in KINDS or _QUANTIZE.match(name):
        more = "; llama.cpp's llama-quantize makes that type from an f16 or f32 file"
    raise FlashdraftError(f"weights cannot be written as {kind!r}: expected one of {', '.join(known)}{more}.")


def type_of(piece: Piece, kind: str) -> str:
    """A tensor's own type in a file of `kind`: llama.cpp wants vectors in f32, and rows of whole blocks."""
    if piece.stored_as is not None:
        return piece.stored_as.lower()
    if len(piece.shape) == 1:
        return "f32"
    return "f16" if kind in _ERRORS and piece.shape[-1] % _BLOCK else kind


def write_gguf(out: Path, architecture: str, fields: Fields, pieces: Sequence[Piece], kind: str) -> Path:
    """Write a file, read it back and compare all of it; only then it gets its name. An older one is replaced.

    Raises FlashdraftError if it cannot be written, or `kind` cannot hold the numbers.
    """
    require_gguf(f"writing {out}")
    fields = {**fields, "general.file_type": Field(KINDS[kind], "uint32")}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=out.parent) as stage:
            file = Path(stage) / out.name
            _write(file, architecture, fields, pieces, kind)
            check_gguf(file, architecture, fields, pieces, kind)
            file.replace(out)
    except OSError as error:
        raise FlashdraftError(f"{out} cannot be written: {one_line(error)}.") from error
    return out


def require_gguf(what: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise FlashdraftError(f"{what} needs the package gguf; run: pip install 'flashdraft[gguf]'")


def _write(file: Path, architecture: str, fields: Fields, pieces: Sequence[Piece], kind: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    try:
        for key, field in fields.items():
            item = gguf.GGUFValueType[field.kind.upper()]
            if isinstance(field.value, list):
                writer.add_key_value(key, field.value, gguf.GGUFValueType.ARRAY, sub_type=item)
            else:
                writer.add_key_value(key, field.value, item)
        for piece in pieces:
            own = gguf.GGMLQuantizationType[type_of(piece, kind).upper()]
            shape = gguf.quants.quant_shape_to_byte_shape(piece.shape, own)
            writer.add_tensor_info(piece.name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=own)
        writer.write_header_to_file(file)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for piece in pieces:
            writer.write_tensor_data(packed(piece, kind))
    finally:
        writer.close()


def packed(piece: Piece, kind: str) -> np.ndarray[Any, Any]:
    """A tensor's bytes in a file of `kind`, uint8."""
    import gguf

    own = type_of(piece, kind)
    if piece.stored_as is not None:
        return np.ascontiguousarray(piece.load())
    values = numbers(piece)
    most = float(np.abs(values).max(initial=0.0))
    if not most < math.inf:
        raise FlashdraftError(f"{piece.name} holds numbers that are not finite; the weights are damaged.")
    if own not in ("f32", "bf16") and most > _MOST_HALF:
        raise FlashdraftError(f"{piece.name} holds {most:g}, more than {own} can; write bf16 or f32.")
    with np.errstate(all="ignore"):  # blocks of tiny numbers: what they became is compared afterwards
        made = gguf.quants.quantize(values, gguf.GGMLQuantizationType[own.upper()])
    return np.ascontiguousarray(made).view(np.uint8)


def numbers(piece: Piece) -> np.ndarray[Any, Any]:
    """A tensor's numbers as float32."""
    loaded: torch.Tensor = piece.load()
    return loaded.detach().to("cpu", torch.float32).contiguous().numpy()


def open_gguf(path: Path) -> Any:
    """A gguf.GGUFReader of a file whose header was checked first: readers loop as often as a count says."""
    require_gguf(f"reading {path}")
    read_header(path)
    import gguf

    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # it raises many kinds
        raise FlashdraftError(f"{path} cannot be read as GGUF: {one_line(error)}.") from error


def read_fields(reader: Any, path: Path) -> Fields:
    """The metadata of an open file, without gguf's own entries and empty lists, which nothing can write."""
    found: Fields = {}
    try:
        for key, field in reader.fields.items():
            value = field.contents()
            if not key.startswith("GGUF.") and value != []:
                found[key] = Field(value, field.types[-1].name.lower())
    except Exception as error:  # text that is no UTF-8, and what damaged files hold besides
        raise FlashdraftError(f"{path} cannot be read as GGUF: {one_line(error)}.") from error
    return found


def check_gguf(path: Path, architecture: str, fields: Fields, pieces: Sequence[Piece], kind: str) -> None:
    """Raise FlashdraftError unless a file holds these fields and tensors, each number as near as its type allows."""
    reader = open_gguf(path)
    wanted = {"general.architecture": Field(architecture, "string"), **fields}
    found = read_fields(reader, path)
    problems = [key for key in {*wanted, *found} if not _equal(wanted.get(key), found.get(key))]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    problems += sorted(tensors.keys() ^ {piece.name for piece in pieces})
    problems += [
        piece.name for piece in pieces if piece.name in tensors and not _holds(tensors[piece.name], piece, kind)
    ]
    if problems:
        raise FlashdraftError(
            f"{path.name} reads back with other content ({', '.join(sorted(problems)[:5])}); this is a bug of flashdraft, "
            "please report it."
        )


def _equal(wanted: Field | None, found: Field | None) -> bool:
    if wanted is None or found is None or wanted.kind != found.kind:
        return False
    if wanted.kind == "float32":
        return bool(np.array_equal(np.float32(wanted.value), np.float32(found.value)))
    return bool(wanted.value == found.value)


def _holds(tensor: Any, piece: Piece, kind: str) -> bool:
    import gguf

    own = type_of(piece, kind)
    if tensor.tensor_type.name.lower() != own or tuple(map(int, reversed(tensor.shape))) != piece.shape:
        return False
    if piece.stored_as is not None:
        return np.ascontiguousarray(tensor.data).tobytes() == packed(piece, kind).tobytes()
    values = numbers(piece)
    stored = gguf.quants.dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type).reshape(values.shape)
    if own == "f32":
        return bool((stored == values).all())
    if own in ("f16", "bf16"):
        rounded = torch.from_numpy(values).to(torch.float16 if own == "f16" else torch.bfloat16)
        return bool((stored == rounded.float().numpy()).all())
    blocks, off = values.reshape(-1, _BLOCK), np.abs(stored - values).reshape(-1, _BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    return bool((off <= largest * (_ERRORS[own] + _HALF) + _LEAST).all())


def uint(value: int) -> Field:
    return Field(int(value), "uint32")


def real(value: float) -> Field:
    return Field(float(value), "float32")


def text(value: str) -> Field:
    return Field(value, "string")


def flag(value: bool) -> Field:
    return Field(bool(value), "bool")


def prefixed(architecture: str, values: Mapping[str, Field]) -> Fields:
    """Keys of a model's own section."""
    return {f"{architecture}.{key}": field for key, field in values.items()}
