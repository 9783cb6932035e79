"""Preallocated keys and values: rows x slots, one length per row. Rolling back lowers a length.

A forward pass writes at `lengths[row]` and after; nothing counts until `keep` raises the length.
So a refused draft costs nothing to undo, and the next pass overwrites it. Target and draft network
use the same class: the target keeps its tokens, DFlash keeps context features' keys and values and
writes its block behind them for one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

# Attention reads whole multiples of this many slots: a masked tail is cheaper than a kernel
# compiled for every length (oneDNN), and static enough for CUDA.
BUCKET = 64


def round_up(n: int, multiple: int = BUCKET) -> int:
    return -(-n // multiple) * multiple


class KVCache:
    """Keys and values of all layers, each [rows, kv heads, slots, head dim].

    A layer's tensors are made at its first write, from the shapes that come, so no model
    configuration is read. They start as zeros: attention multiplies masked slots by 0, and 0 times
    an uninitialised NaN would be NaN.
    """

    def __init__(self, rows: int, slots: int) -> None:
        assert rows >= 1 and slots >= 1
        self.rows = rows
        self.slots = round_up(slots)
        self.lengths = [0] * rows
        self._written = [0] * rows  # slots from here on are zeros
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, values) of a layer, [rows, kv heads, slots, head dim]; written at least once."""
        return self._layers[index]

    def write(self, layer: int, rows: Sequence[int], starts: Sequence[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k and v [B, kv heads, T, head dim] of `rows` at slots starts[b] .. starts[b] + T."""
        if layer not in self._layers:
            self._layers[layer] = (self._empty(k), self._empty(v))
        num_tokens = k.shape[2]
        for row, start in zip(rows, starts, strict=True):
            self._written[row] = max(self._written[row], start + num_tokens)
        for first, last in _runs(rows, starts):
            row, start = rows[first], starts[first]
            for new, store in zip((k, v), self._layers[layer], strict=True):
                store[row : row + last - first, :, start : start + num_tokens] = new[first:last]

    def write_flat(
        self, layer: int, rows: Sequence[int], counts: Sequence[int], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Put k and v [C, kv heads, head dim] behind each row's length: counts[i] tokens of rows[i]."""
        if layer not in self._layers:
            shapes = [t.transpose(0, 1)[None] for t in (k, v)]
            self._layers[layer] = (self._empty(shapes[0]), self._empty(shapes[1]))
        for new, store in zip((k, v), self._layers[layer], strict=True):
            at = 0
            for row, count in zip(rows, counts, strict=True):
                start = self.lengths[row]
                store[row, :, start : start + count] = new[at : at + count].transpose(0, 1)
                self._written[row] = max(self._written[row], start + count)
                at += count

    def keep(self, row: int, num_tokens: int) -> None:
        """Make the next `num_tokens` written slots of a row final."""
        assert num_tokens >= 0 and self.lengths[row] + num_tokens <= self.slots
        self.lengths[row] += num_tokens

    def roll_back(self, row: int, length: int) -> None:
        """Forget everything of a row from slot `length` on."""
        assert 0 <= length <= self.lengths[row]
        self.lengths[row] = length

    def clear(self, row: int, first: int) -> None:
        """Zero what earlier, longer passes left in a row from slot `first` on. Such slots are masked
        but read, and 0 times a NaN or an infinity of theirs would be NaN."""
        if self._written[row] > first:
            with torch.inference_mode():  # the stores were made in it
                for store in (store for pair in self._layers.values() for store in pair):
                    store[row, :, first : self._written[row]] = 0
            self._written[row] = first

    @property
    def bytes_per_slot(self) -> int:
        """Bytes one context token takes in all layers of one row."""
        return sum(t[0, :, 0].numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        _, heads, _, dim = like.shape
        return torch.zeros(self.rows, heads, self.slots, dim, dtype=like.dtype, device=like.device)


def _runs(rows: Sequence[int], starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of batch rows that are neighbours in the cache and start alike: one copy for all."""
    first = 0
    for b in range(1, len(rows) + 1):
        if b == len(rows) or rows[b] != rows[b - 1] + 1 or starts[b] != starts[b - 1]:
            yield first, b
            first = b
