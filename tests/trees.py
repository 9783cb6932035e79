"""A drafter that proposes trees of known worth: random shapes, the right branch anywhere in them.

It taps layers too, and keeps what it is told, so that a test can compare that with a fresh pass.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bed import VOCAB
from flashdraft.types import Commit, Draft

KINDS = ("echo", "wrong", "coin")


class TreeDrafter:
    """Random trees of up to `nodes` nodes over answers that are known beforehand.

    echo: the answer lies on one branch as deep as the tree goes. wrong: nothing fits. coin: each level
    of the answer is there with probability 0.7. Other branches are wrong, or right tokens in wrong places.

    Args:
        answers: prompt -> the answer that follows it.
    """

    name = "trees"
    drafts_trees = True

    def __init__(
        self,
        answers: Mapping[tuple[int, ...], Sequence[int]],
        kind: str,
        nodes: int = 9,
        seed: int = 0,
        taps: bool = True,
    ) -> None:
        self.answers, self.kind, self.max_draft_tokens = answers, kind, nodes
        self.rng = random.Random(seed)
        self.target_layer_ids: tuple[int, ...] = (0, 1) if taps else ()
        self.features: dict[int, list[torch.Tensor]] = {}

    def open(self, rows: int, capacity: int) -> list[list[int]]:
        return [[] for _ in range(rows)]

    def reset(self, state: list[list[int]], row: int, num_context: int, token: int) -> None:
        state[row] = [*state[row][:num_context], token]
        self.features[row] = self.features.get(row, [])[:num_context]

    def observe(self, state: list[list[int]], commit: Commit) -> None:
        at = 0
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            state[row].extend(tokens)
            if commit.features_CF is not None:
                self.features[row] += list(commit.features_CF[at : at + len(tokens)])
            at += len(tokens)

    def propose(self, state: list[list[int]], rows: Sequence[int], samplers: Any, limits: Sequence[int]) -> Draft:
        drafts = [self._tree(state[row], limit) for row, limit in zip(rows, limits, strict=True)]
        width = max(len(tokens) for tokens, _ in drafts)
        pad = [width - len(tokens) for tokens, _ in drafts]
        tokens_BN = torch.tensor([[*t, *[1] * p] for (t, _), p in zip(drafts, pad, strict=True)], dtype=torch.int64)
        parents_BN = torch.tensor([[*t, *[-1] * p] for (_, t), p in zip(drafts, pad, strict=True)], dtype=torch.int64)
        shape = (len(rows), width)
        return Draft(tokens_BN.view(shape), tuple(len(t) for t, _ in drafts), parents_BN.view(shape))

    def _rest(self, tokens: list[int]) -> list[int]:
        for size in range(len(tokens), 0, -1):
            if tuple(tokens[:size]) in self.answers:
                return list(self.answers[tuple(tokens[:size])][len(tokens) - size :])
        raise AssertionError("the row is on no known answer")

    def _tree(self, tokens: list[int], limit: int) -> tuple[list[int], list[int]]:
        """(tokens, parents): branches in random order, so that the right one is seldom the first."""
        rest, rng = self._rest(tokens), self.rng
        size = rng.randint(0, self.max_draft_tokens)
        drafted: list[int] = []
        parents: list[int] = []
        depth: list[int] = []
        on_path, levels = -1, 0  # the deepest right node, and how many levels of the answer are there
        while len(drafted) < size:
            goes_on = self.kind != "wrong" and rng.random() < 0.6 and levels < min(limit, len(rest))
            if goes_on and (self.kind == "echo" or rng.random() < 0.7):
                parent, token = on_path, rest[levels]
                on_path, levels = len(drafted), levels + 1
            else:
                parent = rng.randint(-1, len(drafted) - 1)
                at = 0 if parent < 0 else depth[parent]
                if at >= limit:
                    if limit == 0:
                        break
                    continue
                right = rest[at] if at < len(rest) else 0
                token = rng.choice(
                    [t for t in (*rest[:6], rng.randrange(3, VOCAB)) if t != right] or [(right + 1) % VOCAB]
                )
            drafted.append(token)
            parents.append(parent)
            depth.append(1 if parent < 0 else depth[parent] + 1)
        return drafted, parents
