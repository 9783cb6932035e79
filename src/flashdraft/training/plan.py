"""Which blocks are trained when: a pure function of (sequences, configuration, epoch).

An anchor is a token of the answer at position p, given in decoding; slots 1.. predict the tokens
after it, up to the end of its loss span (end of turn included, nothing behind it). Anchors of a
sequence come in *pieces*; a batch is a fixed number of pieces, so shapes repeat.

Randomness is counter-based (sampling.counter_key), so a run can be resumed from numbers alone.
"""

from __future__ import annotations

import hashlib
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


def usable_anchors(sequence: TokenSequence) -> list[tuple[int, int]]:
    """(anchor, end of its span) of every answer token that another one of its span follows.

    Position 0 has no context, which never happens in decoding.
    """
    spans = [(max(start, 1), min(end, len(sequence.token_ids))) for start, end in sequence.loss_spans]
    return [(p, end) for start, end in spans for p in range(start, end - 1)]


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

    Raises FlashdraftError if no sequence has an anchor.
    """

    def __init__(self, sequences: Sequence[TokenSequence], config: TrainConfig) -> None:
        self._anchors = [usable_anchors(sequence) for sequence in sequences]
        self._config = config
        self._cached: tuple[int, list[list[Piece]]] = (-1, [])
        limit = config.anchors_per_sequence
        self.num_anchors = sum(min(len(a), limit) if limit else len(a) for a in self._anchors)
        pieces = sum(len(self._cut(i, a[:limit])) for i, a in enumerate(self._anchors))
        batches = -(-pieces // self._pieces_per_batch)
        self.steps_per_epoch = -(-batches // config.accumulate)

    @property
    def _pieces_per_batch(self) -> int:
        return self._config.blocks_per_batch // self._config.anchors_per_piece

    def batches(self, step: int) -> list[list[Piece]]:
        """The batches of an optimizer step (counted from 0 through all epochs)."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._cached[0] != epoch:
            self._cached = (epoch, self._epoch(epoch))
        size = self._config.accumulate
        return self._cached[1][index * size : (index + 1) * size]

    def _epoch(self, epoch: int) -> list[list[Piece]]:
        seed = counter_key(self._config.seed, epoch, _EPOCH)
        order = permutation(seed, len(self._anchors), _ORDER)
        pieces: list[Piece] = []
        for first in range(0, len(order), self._config.mix):
            group = [
                piece for i in order[first : first + self._config.mix] for piece in self._cut(i, self._draw(seed, i))
            ]
            pieces += [group[j] for j in permutation(seed + first, len(group), _PIECES)]
        size = self._pieces_per_batch
        return [pieces[i : i + size] for i in range(0, len(pieces), size)]

    def _draw(self, seed: int, index: int) -> list[tuple[int, int]]:
        anchors, limit = self._anchors[index], self._config.anchors_per_sequence
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
