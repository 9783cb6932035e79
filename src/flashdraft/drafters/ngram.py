"""Prompt lookup: what followed the last few tokens the last time they occurred is the draft.

No network and no training; good where the answer repeats its prompt (editing, summarising, code),
useless elsewhere. Known as prompt lookup decoding (Saxena 2023) and n-gram speculation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sampling import RowSampler
from ..types import Commit, Draft, FlashdraftError


class _History:
    """A row's tokens and, for every n-gram in them, the position after its latest occurrence."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def append(self, token: int) -> None:
        # An n-gram enters once a token follows it, so a look-up never finds the end it asks about.
        for n in self.sizes:
            if n <= len(self.tokens):
                self._after[tuple(self.tokens[-n:])] = len(self.tokens)
        self.tokens.append(token)

    def rewind(self, length: int) -> None:
        kept, self.tokens = self.tokens[:length], []
        self._after.clear()
        for token in kept:
            self.append(token)

    def continuation(self, limit: int) -> list[int]:
        for n in self.sizes:
            start = self._after.get(tuple(self.tokens[-n:])) if n <= len(self.tokens) else None
            if start is not None:
                return self.tokens[start : start + limit]
        return []


class NGramDrafter:
    """Drafts by prompt lookup, longest match first, its latest occurrence.

    Args:
        block_size: anchor + drafted tokens, as everywhere.
        max_ngram, min_ngram: how many last tokens have to match.
    """

    name = "ngram"
    target_layer_ids: tuple[int, ...] = ()
    drafts_trees = False
    bytes_per_context_token = 0  # a list of ids and a table, in Python

    def __init__(self, block_size: int = 8, max_ngram: int = 3, min_ngram: int = 2) -> None:
        if block_size < 1:
            raise FlashdraftError(f"block_size is {block_size}; expected at least 1 (it counts the anchor).")
        if not 1 <= min_ngram <= max_ngram:
            raise FlashdraftError(
                f"n-grams of {min_ngram} to {max_ngram} tokens; expected 1 <= min_ngram <= max_ngram."
            )
        self.block_size = block_size
        self.max_draft_tokens = block_size - 1
        self._sizes = (min_ngram, max_ngram)

    def open(self, rows: int, capacity: int) -> list[_History]:
        return [_History(*self._sizes) for _ in range(rows)]

    def reset(self, state: list[_History], row: int, num_context: int, token: int) -> None:
        state[row].rewind(num_context)
        state[row].append(token)

    def observe(self, state: list[_History], commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            for token in tokens:
                state[row].append(token)

    def propose(
        self, state: list[_History], rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]
    ) -> Draft:
        found = [
            state[row].continuation(min(limit, self.max_draft_tokens)) for row, limit in zip(rows, limits, strict=True)
        ]
        width = max(map(len, found), default=0)
        tokens = torch.tensor([draft + [0] * (width - len(draft)) for draft in found], dtype=torch.int64)
        return Draft(tokens.view(len(found), width), tuple(map(len, found)), probs_NV=(None,) * len(found))
