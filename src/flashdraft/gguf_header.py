"""The header of a GGUF file, checked against the file's size before another library believes it:
readers loop as often as a count says, and a damaged count says 2**60.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .model_folder import one_line
from .types import FlashdraftError

# value type -> bytes; 8 is a string, 9 an array
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_INTEGERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 10: "<Q", 11: "<q"}
_LAYER = re.compile(rb"blk\.(\d{1,9})\.")
_MAX_EXPERTS = 1 << 12


@dataclass(frozen=True)
class GgufHeader:
    """Counts of a checked file: tensors, and numbers in them."""

    num_tensors: int
    num_weights: int


class _Reader:
    """Little-endian values from a file, never past its end."""

    def __init__(self, file: BinaryIO, size: int, name: str) -> None:
        self.file, self.size, self.name = file, size, name

    def damaged(self, what: str) -> FlashdraftError:
        return FlashdraftError(f"{self.name} is a damaged GGUF file: {what}; get the file again.")

    def skip(self, count: int) -> None:
        if count > self.size - self.file.tell():
            raise self.damaged("it ends inside its header")
        self.file.seek(count, 1)

    def value(self, form: str) -> int:
        data = self.file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise self.damaged("it ends inside its header")
        return int(struct.unpack(form, data)[0])

    def string(self) -> bytes:
        length = self.value("<Q")
        if length > self.size - self.file.tell():
            raise self.damaged("it ends inside its header")
        return self.file.read(length)

    def count(self, least_bytes: int) -> int:
        """How many things of at least that many bytes follow."""
        number = self.value("<Q")
        if number * least_bytes > self.size - self.file.tell():
            raise self.damaged(f"it counts {number:,} entries and has no room for them")
        return number

    def metadata(self, kind: int) -> int | None:
        """Pass over a value; an integer is returned."""
        if kind in _INTEGERS:
            return self.value(_INTEGERS[kind])
        if kind in _SIZES:
            self.skip(_SIZES[kind])
        elif kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            inner = self.value("<I")
            if inner in _SIZES:
                self.skip(self.count(_SIZES[inner]) * _SIZES[inner])
            elif inner == _STRING:
                for _ in range(self.count(8)):
                    self.skip(self.value("<Q"))
            else:
                raise self.damaged(f"it has an array of the unknown type {inner}")
        else:
            raise self.damaged(f"it has a value of the unknown type {kind}")
        return None


def read_header(path: Path) -> GgufHeader:
    """Check magic, version, counts, and that every tensor lies inside the file."""
    try:
        with path.open("rb") as file:
            return _read(_Reader(file, path.stat().st_size, path.name))
    except OSError as error:
        raise FlashdraftError(f"{path} cannot be read: {one_line(error)}.") from error


def _read(reader: _Reader) -> GgufHeader:
    if reader.file.read(4) != b"GGUF":
        raise FlashdraftError(f"{reader.name} does not begin with GGUF; expected a GGUF file.")
    version = reader.value("<I")
    if version not in (2, 3):
        raise FlashdraftError(f"{reader.name} has GGUF version {version}; expected 2 or 3 (little-endian).")
    num_tensors, num_keys = reader.count(24), reader.count(13)
    numbers = {}
    for _ in range(num_keys):
        key = reader.string()
        number = reader.metadata(reader.value("<I"))
        if number is not None:
            numbers[key] = number
    names, total = _check_tensors(reader, num_tensors, numbers.get(b"general.alignment", 32))
    layers = {int(found[1]) for name in names if (found := _LAYER.match(name))}
    for key, number in numbers.items():
        # Layers beyond the count would be left out silently, others filled at random.
        if key.endswith(b".block_count") and layers != set(range(min(number, num_tensors + 1))):
            raise reader.damaged(f"it claims {number:,} layers and has tensors of {len(layers):,}")
        if key.endswith(b".expert_count") and number > _MAX_EXPERTS:
            raise reader.damaged(f"it claims {number:,} experts")
    return GgufHeader(num_tensors, total)


def _check_tensors(reader: _Reader, num_tensors: int, alignment: int) -> tuple[list[bytes], int]:
    """Names of the tensors, each of which lies inside the file, and how many numbers they hold."""
    from gguf.constants import GGML_QUANT_SIZES

    block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    if not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
        raise reader.damaged(f"its alignment is {alignment}")
    names, total, ends = [], 0, [0]
    for _ in range(num_tensors):
        names.append(reader.string())
        name = names[-1].decode("utf-8", "replace")[:80]
        num_dims = reader.value("<I")
        if not 1 <= num_dims <= 4:
            raise reader.damaged(f"the tensor {name} has {num_dims} dimensions")
        count = 1
        for _ in range(num_dims):
            count *= reader.value("<Q")
        kind, offset = reader.value("<I"), reader.value("<Q")
        if kind not in block_sizes:
            raise reader.damaged(f"the tensor {name} is of the unknown type {kind}")
        numbers, size = block_sizes[kind]
        total += count
        ends.append(offset + count // numbers * size)
    start = -(-reader.file.tell() // alignment) * alignment
    if start + max(ends) > reader.size:
        raise reader.damaged(f"its tensors end at byte {start + max(ends):,} and the file at {reader.size:,}")
    return names, total
