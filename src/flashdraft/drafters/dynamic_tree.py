"""EAGLE-2's dynamic tree (arXiv 2406.16858): grown level by level by a drafter that draws from behind each node.

The `top_k` nodes of the highest joint probability are expanded at every level, and of all nodes the best
`nodes` are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TreeShape:
    """EAGLE-2's tree: expanded nodes a level, levels, and drafted tokens in all."""

    top_k: int = 8
    depth: int = 6
    nodes: int = 32


@dataclass
class GrowingTree:
    """A row's tree while it grows: all nodes seen so far, parents before children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    paths: list[tuple[int, ...]] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])
    before: list[int] = field(default_factory=list)  # the frontier whose children this one's nodes are
    expanded: list[int] = field(default_factory=list)  # nodes with a slot in the draft's cache, in order

    def path(self, node: int) -> tuple[int, ...]:
        return () if node < 0 else self.paths[node]

    def add_level(self, tokens: list[list[int]], logprobs: list[list[float]], top_k: int) -> None:
        """Children of the frontier's nodes; the likeliest `top_k` of them are the next frontier."""
        first, self.before = len(self.tokens), self.frontier
        for parent, children, values in zip(self.frontier, tokens, logprobs, strict=True):
            so_far = 0.0 if parent < 0 else self.scores[parent]
            for token, value in zip(children, values, strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                self.scores.append(so_far + value)
                self.paths.append((*self.path(parent), token))
        self.frontier = sorted(self._best(range(first, len(self.tokens)), top_k))

    def expand(self) -> list[int]:
        """Give the frontier's nodes the next slots; the parents of all nodes that have one."""
        self.expanded += self.frontier
        place = {node: i for i, node in enumerate(self.expanded)} | {-1: -1}
        return [place[self.parents[node]] for node in self.expanded]

    def _best(self, nodes: Sequence[int], count: int) -> list[int]:
        return sorted(nodes, key=lambda n: -self.scores[n])[:count]  # stable: earlier nodes win ties

    def pruned(self, nodes: int, depth: int) -> tuple[list[int], list[int]]:
        """(tokens, parents) of the likeliest nodes. A child is never likelier than its parent and comes
        later, so the parents are among them."""
        near = [n for n in range(len(self.tokens)) if len(self.paths[n]) <= depth and self.scores[n] > float("-inf")]
        kept = sorted(self._best(near, nodes))
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return [self.tokens[n] for n in kept], [place[self.parents[n]] for n in kept]
