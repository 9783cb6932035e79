"""A draft as a tree: parents before children, ancestors are what a node may see."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdraft.tree import ancestor_mask, chain, check, depths, path_to
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
