"""A draft as a tree: parents before children, ancestors are what a node may see."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdraft.tree import (
    ancestor_mask,
    best_first,
    chain,
    check,
    depths,
    hang,
    parents_of,
    path_to,
    paths,
    spine_first,
)
from flashdraft.types import FlashdraftError


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(0, 12))
    return [draw(st.integers(-1, node - 1)) for node in range(size)]


@settings(max_examples=80, deadline=None)
@given(trees())
def test_paths_depths_and_mask_agree(parents: list[int]) -> None:
    check(parents)
    mask = ancestor_mask(parents)
    assert mask.shape == (len(parents) + 1, len(parents) + 1)
    assert mask[0].tolist() == [True] + [False] * len(parents)
    for node in range(len(parents)):
        path = path_to(parents, node)
        assert path[-1] == node and parents[path[0]] == -1
        assert all(parents[child] == parent for parent, child in itertools.pairwise(path))
        assert depths(parents)[node] == len(path)
        seen = [slot for slot in range(len(parents) + 1) if mask[node + 1, slot]]
        assert seen == sorted([0, *(n + 1 for n in path)])


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_chain_is_the_causal_case(length: int) -> None:
    parents = chain(length)
    check(parents)
    assert depths(parents) == list(range(1, length + 1))
    assert torch.equal(ancestor_mask(parents), torch.ones(length + 1, length + 1).tril().bool())
    assert path_to(parents, length - 1) == tuple(range(length))
    assert path_to(parents, -1) == ()


@pytest.mark.parametrize(("parents", "node"), [([0], 0), ([-1, 1], 1), ([-1, 2, 0], 1), ([-2], 0)])
def test_a_parent_has_to_come_first(parents: list[int], node: int) -> None:
    with pytest.raises(FlashdraftError, match=rf"^node {node} of a draft tree has parent .*; expected -1 .*\.$"):
        check(parents)


CHANCES = st.sampled_from([1.0, 0.5, 0.5, 0.25, 0.2, 0.125, 0.01, 0.0])


@settings(max_examples=120, deadline=None)
@given(st.lists(st.lists(CHANCES, min_size=1, max_size=4), min_size=1, max_size=3), st.integers(1, 30))
def test_best_first_takes_the_likeliest_paths(chances: list[list[float]], nodes: int) -> None:
    """Against all paths there are: the same chances, likeliest first, parents before their children."""
    table = [[math.log(p) if p else -math.inf for p in sorted(row, reverse=True)] for row in chances]
    found = best_first(table, nodes)

    def logprob(path: tuple[int, ...]) -> float:
        return sum(table[depth][rank] for depth, rank in enumerate(path))

    every = [p for n in range(len(table)) for p in itertools.product(*(range(len(row)) for row in table[: n + 1]))]
    possible = sorted((logprob(path) for path in every if logprob(path) > -math.inf), reverse=True)
    assert [logprob(path) for path in found] == pytest.approx(possible[:nodes], abs=1e-9)
    assert len(set(found)) == len(found)
    check(parents_of(found))
    assert [len(path) for path in found] == depths(parents_of(found))


def test_best_first_with_nothing_to_take() -> None:
    assert best_first([], 4) == [] and parents_of([]) == []
    assert best_first([[-math.inf, -math.inf], [0.0]], 4) == []
    assert len(best_first([[math.nan, math.nan], [math.nan]], 4)) <= 4  # a broken draft ends as well


@settings(max_examples=80, deadline=None)
@given(trees())
def test_the_spine_comes_first_in_the_same_tree(parents: list[int]) -> None:
    tokens = list(range(10, 10 + len(parents)))
    moved, order = spine_first(tokens, parents)
    check(order)
    assert sorted(paths(moved, order)) == sorted(paths(tokens, parents))
    spine = 0
    while spine < len(order) and order[spine] == spine - 1:
        spine += 1
    assert all(parent != spine - 1 for parent in order[spine:])  # it goes down to a leaf
    at = -1
    for token in moved[:spine]:  # by first children
        first = parents.index(at)
        assert token == tokens[first]
        at = first


@settings(max_examples=40, deadline=None)
@given(trees(), st.integers(0, 4))
def test_a_tree_at_the_end_of_a_chain(parents: list[int], length: int) -> None:
    hung = hang(parents, length)
    assert hung[:length] == chain(length)
    assert depths(hung)[length:] == [length + depth for depth in depths(parents)]
    assert [path_to(hung, node + length)[length:] for node in range(len(parents))] == [
        tuple(n + length for n in path_to(parents, node)) for node in range(len(parents))
    ]
