"""Prompt lookup as one more branch of another drafter's tree.

A network guesses what is likely in general, prompt lookup what this text has said before: names, numbers, code. A
lookup costs nothing, and in a tree both can be tried. Its tokens take the places of the tree's least likely ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..sampling import RowSampler
from ..types import Commit, Draft, FlashdraftError
from .drawing import RowDraft, joined, parted
from .ngram import NGramDrafter

if TYPE_CHECKING:
    import torch

    from . import Drafter


class LookupBranchDrafter:
    """Drafts what `drafter` drafts, and a branch of at most `length` tokens of prompt lookup.

    Args:
        drafter: drafts trees whose last nodes are the least likely ones.
        length: of the branch; at most as many tokens as `drafter` has nodes.
    """

    drafts_trees = True

    def __init__(self, drafter: Drafter, length: int, device: torch.device) -> None:
        most = drafter.max_draft_tokens
        if not 1 <= length <= most:
            raise FlashdraftError(f"ngram is {length}; expected 1 to {most}, the nodes of the tree it is a branch of.")
        self.drafter = drafter
        self.name = drafter.name
        self.target_layer_ids = drafter.target_layer_ids
        self.max_draft_tokens = most
        self.bytes_per_context_token = drafter.bytes_per_context_token
        self._lookup, self._device = NGramDrafter(length + 1), device

    def open(self, rows: int, capacity: int) -> tuple[Any, Any]:
        return self.drafter.open(rows, capacity), self._lookup.open(rows, capacity)

    def reset(self, state: tuple[Any, Any], row: int, num_context: int, token: int) -> None:
        self.drafter.reset(state[0], row, num_context, token)
        self._lookup.reset(state[1], row, num_context, token)

    def observe(self, state: tuple[Any, Any], commit: Commit) -> None:
        self.drafter.observe(state[0], commit)
        self._lookup.observe(state[1], commit)

    def propose(
        self, state: tuple[Any, Any], rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]
    ) -> Draft:
        draft = self.drafter.propose(state[0], rows, samplers, limits)
        found = self._lookup.propose(state[1], rows, samplers, limits)
        merged = [
            tree if sampler.rejects else with_branch(tree, branch.tokens, self.max_draft_tokens)
            for tree, branch, sampler in zip(parted(draft), parted(found), samplers, strict=True)
        ]
        return joined(merged, self._device)


def with_branch(tree: RowDraft, branch: Sequence[int], nodes: int) -> RowDraft:
    """The tree with the branch's path in it: as many of its own nodes, the first ones, as leave room for that."""
    kept = min(len(tree.tokens), nodes)
    while True:
        tokens, parents, at = tree.tokens[:kept], tree.parents[:kept], -1
        for token in branch:
            child = next((n for n, parent in enumerate(parents) if parent == at and tokens[n] == token), None)
            if child is None:
                child = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = child
        if len(tokens) <= nodes:
            return RowDraft(tokens, parents)
        kept -= 1
