"""A draft as a tree: node n hangs under `parents[n]` (-1 is the anchor); a chain is the plain case.

Nodes are numbered so that a parent comes before its children. Slot 0 of a verify pass is the
anchor and slot n + 1 is node n; all functions here speak of nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .types import FlashdraftError


def chain(length: int) -> list[int]:
    """The parents of a chain of `length` nodes: -1, 0, 1, ..."""
    return list(range(-1, length - 1))


def check(parents: Sequence[int]) -> None:
    """Raise unless every parent is the anchor (-1) or an earlier node."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise FlashdraftError(
                f"node {node} of a draft tree has parent {parent}; expected -1 (the anchor) or an earlier node."
            )


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node; children of the anchor have 1. A node sits at anchor position + depth."""
    out: list[int] = []
    for parent in parents:
        out.append(1 if parent < 0 else out[parent] + 1)
    return out


def ancestor_mask(parents: Sequence[int]) -> torch.Tensor:
    """bool [1 + N, 1 + N]: slot i may see slot j, i.e. j is i itself, an ancestor, or the anchor."""
    size = len(parents) + 1
    mask = torch.zeros(size, size, dtype=torch.bool)
    mask[:, 0] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node + 1] |= mask[parent + 1]
        mask[node + 1, node + 1] = True
    return mask


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """Per slot, the drafted tokens from below the anchor down to it: the anchor's is empty."""
    out: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        out.append((*out[parent + 1], token))
    return out


def path_to(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """Nodes from the anchor's child down to `node`; empty for the anchor (-1)."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))
