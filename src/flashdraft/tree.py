"""A draft as a tree: node n hangs under `parents[n]` (-1 is the anchor); a chain is the plain case.

Nodes are numbered so that a parent comes before its children. Slot 0 of a verify pass is the
anchor and slot n + 1 is node n; all functions here speak of nodes.
"""

from __future__ import annotations

import heapq
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


def spine_first(tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same tree with its spine, each node's first child from the anchor down, as nodes 0, 1, 2, ..."""
    spine: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (spine[-1] if spine else -1):
            spine.append(node)
    order = spine + [node for node in range(len(parents)) if node not in set(spine)]
    place = {node: i for i, node in enumerate(order)} | {-1: -1}
    return [tokens[node] for node in order], [place[parents[node]] for node in order]


def hang(parents: Sequence[int], length: int) -> list[int]:
    """A tree at the end of a chain: parents of `length` nodes and the tree's, where the chain's end is what the
    tree's root was."""
    return [*chain(length), *(parent + length for parent in parents)]


def best_first(logprobs: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """The `nodes` likeliest paths where places do not know each other: a path's chance is the product over its places.

    Args:
        logprobs: per depth, the log-probabilities of its tokens, best first; -inf is never taken.

    Returns:
        Paths of ranks, e.g. (0, 2) is the third token of depth 2 behind the best of depth 1; likeliest first,
        so parents come before their children. Ties go to the lower rank (DDTree, arXiv 2604.12989, section 3.2).
    """
    found: list[tuple[int, ...]] = []
    # a path's next sibling and its first child are never likelier than itself: the edge holds the best of the rest
    edge: list[tuple[float, tuple[int, ...]]] = [(-values[0], (0,)) for values in logprobs[:1]]
    while edge and len(found) < nodes:
        cost, path = heapq.heappop(edge)
        if cost == float("inf"):
            break
        found.append(path)
        values, rank = logprobs[len(path) - 1], path[-1]
        if rank + 1 < len(values):
            heapq.heappush(edge, (cost + values[rank] - values[rank + 1], (*path[:-1], rank + 1)))
        if len(path) < len(logprobs):
            heapq.heappush(edge, (cost - logprobs[len(path)][0], (*path, 0)))
    return found


def parents_of(paths_of_ranks: Sequence[tuple[int, ...]]) -> list[int]:
    """Parents of nodes that are given as paths; each path's beginning has to come before it."""
    index = {path: node for node, path in enumerate(paths_of_ranks)} | {(): -1}
    return [index[path[:-1]] for path in paths_of_ranks]
