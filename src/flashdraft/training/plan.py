"""Which blocks are trained when: a pure function of (sequences, configuration, epoch).

An anchor is a token of the answer at position p, given in decoding; slots 1.. predict the tokens
after it, up to the end of its loss span (end of turn included, nothing behind it). Anchors of a
sequence come in *pieces*; a batch is a fixed number of pieces, so shapes repeat.

Randomness is counter-based (sampling.counter_key), so a run can be resumed from numbers alone.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..sampling import counter_key
from .config import TrainConfig
from .data import TokenSequence

# streams of counter_key, away from those of decoding
_EPOCH, _ORDER, _ANCHORS, _PIECES = range(16, 20)


@dataclass(frozen=True)
class Piece:
    """Anchors of one sequence; block i may predict tokens before position ends[i]."""

    sequence: int
    anchors: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True)
class _Epoch:
    """An epoch's order of sequences; starts[g]: pieces before its g-th group of `mix` sequences."""

    number: int
    seed: int
    order: list[int]
    starts: list[int]


def usable_anchors(sequence: TokenSequence) -> list[tuple[int, int]]:
    """(anchor, end of its span) of every answer token that another one of its span follows.

    Position 0 has no context, which never happens in decoding.
    """
    return [(p, end) for start, end in _spans(sequence) for p in range(start, end - 1)]


def num_anchors(sequence: TokenSequence) -> int:
    return sum(max(end - 1 - start, 0) for start, end in _spans(sequence))


def _spans(sequence: TokenSequence) -> list[tuple[int, int]]:
    return [(max(start, 1), min(end, len(sequence.token_ids))) for start, end in sequence.loss_spans]


def fingerprint(sequences: Sequence[TokenSequence]) -> str:
    """SHA-256 of what the plan and the loss depend on, so that a resumed run has the same data."""
    digest = hashlib.sha256()
    for sequence in sequences:
        digest.update(repr((sequence.token_ids, sequence.loss_spans)).encode())
    return digest.hexdigest()


def permutation(seed: int, n: int, stream: int) -> list[int]:
    return sorted(range(n), key=lambda i: counter_key(seed, i, stream))


class Plan:
    """The batches of every epoch.

    Pieces are made a shuffled group of sequences at a time: millions of anchors would else be lists
    before the first step.
    """

    def __init__(self, sequences: Sequence[TokenSequence], config: TrainConfig) -> None:
        self._sequences, self._config = sequences, config
        counts = [num_anchors(sequence) for sequence in sequences]
        limit = config.anchors_per_sequence
        self._counts = [min(count, limit) if limit else count for count in counts]
        self.num_anchors = sum(self._counts)
        self._num_pieces = [-(-count // config.anchors_per_piece) for count in self._counts]
        batches = -(-sum(self._num_pieces) // self._pieces_per_batch)
        self.steps_per_epoch = -(-batches // config.accumulate)
        self._epoch = _Epoch(-1, 0, [], [])
        self._groups: OrderedDict[int, list[Piece]] = OrderedDict()

    @property
    def _pieces_per_batch(self) -> int:
        return self._config.blocks_per_batch // self._config.anchors_per_piece

    def batches(self, step: int) -> list[list[Piece]]:
        """The batches of an optimizer step (counted from 0 through all epochs)."""
        number, index = divmod(step, self.steps_per_epoch)
        if self._epoch.number != number:
            self._epoch = self._shuffle(number)
            self._groups.clear()
        size = self._pieces_per_batch
        first = index * self._config.accumulate * size
        pieces = self._slice(first, first + self._config.accumulate * size)
        return [pieces[i : i + size] for i in range(0, len(pieces), size)]

    def _shuffle(self, number: int) -> _Epoch:
        seed = counter_key(self._config.seed, number, _EPOCH)
        order = permutation(seed, len(self._sequences), _ORDER)
        sizes = (
            sum(self._num_pieces[i] for i in order[first : first + self._config.mix])
            for first in range(0, len(order), self._config.mix)
        )
        return _Epoch(number, seed, order, [0, *itertools.accumulate(sizes)])

    def _slice(self, first: int, last: int) -> list[Piece]:
        """Pieces first..last of the epoch, which may begin and end inside a group."""
        starts = self._epoch.starts
        found: list[Piece] = []
        group = bisect.bisect_right(starts, first) - 1
        while group < len(starts) - 1 and starts[group] < last:
            pieces = self._group(group)
            found += pieces[max(first - starts[group], 0) : last - starts[group]]
            group += 1
        return found

    def _group(self, group: int) -> list[Piece]:
        if group not in self._groups:
            first = group * self._config.mix
            seed, order = self._epoch.seed, self._epoch.order[first : first + self._config.mix]
            pieces = [piece for i in order for piece in self._cut(i, self._draw(seed, i))]
            self._groups[group] = [pieces[j] for j in permutation(seed + first, len(pieces), _PIECES)]
            if len(self._groups) > 2:
                self._groups.popitem(last=False)
        return self._groups[group]

    def _draw(self, seed: int, index: int) -> list[tuple[int, int]]:
        anchors, limit = usable_anchors(self._sequences[index]), self._config.anchors_per_sequence
        if limit is None or len(anchors) <= limit:
            return anchors
        chosen = permutation(counter_key(seed, index, _ANCHORS), len(anchors), _ANCHORS)[:limit]
        return [anchors[i] for i in sorted(chosen)]

    def _cut(self, index: int, anchors: list[tuple[int, int]]) -> list[Piece]:
        """Interleaved pieces: each spans the whole answer, so a batch repeats itself little."""
        count = -(-len(anchors) // self._config.anchors_per_piece)
        return [
            Piece(index, tuple(p for p, _ in anchors[j::count]), tuple(end for _, end in anchors[j::count]))
            for j in range(count)
        ]
