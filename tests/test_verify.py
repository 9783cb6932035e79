"""Acceptance is lossless, by exact enumeration at V = 4: the real functions are integrated over
their uniforms, and the law of what they emit is the target's, to rounding.

The breakpoints come from the theory (p / q, the residual's cumulative sum), the answers from the
code: at three points of every interval it must say the same, and what it says is what counts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from flashdraft.tree import path_to
from flashdraft.verify import accept_matching, accept_rejection, residual_probs, sample_at

V = 4
Tokens = tuple[int, ...]
Law = Callable[[Tokens], list[float]]  # next-token probabilities after some tokens


def random_law(seed: int, zeros: float = 0.0, spread: float = 1.5) -> Law:
    """A law of its own for every prefix; `zeros` of the probabilities are 0."""

    def law(prefix: Tokens) -> list[float]:
        rng = random.Random(f"{seed} {prefix}")
        weights = [math.exp(rng.gauss(0, spread)) if rng.random() >= zeros else 0.0 for _ in range(V)]
        weights[rng.randrange(V)] += 0.1
        return [w / sum(weights) for w in weights]

    return law


def block_law(seed: int, zeros: float = 0.0) -> Law:
    """A block-diffusion draft: slots do not see each other, only their place counts."""
    law = random_law(seed, zeros)
    return lambda prefix: law((len(prefix),))


def point_law(seed: int) -> Law:
    """A draft that is simply there (prompt lookup)."""
    rng = random.Random(seed)
    script = [rng.randrange(V) for _ in range(8)]
    return lambda prefix: [float(token == script[len(prefix)]) for token in range(V)]


def assert_law(emitted: dict[Tokens, float], target: Law, length: int, bound: float = 1e-12) -> None:
    """What was emitted, gone on with by the target itself to `length` tokens, has the target's law."""
    distance = 0.0
    for full in itertools.product(range(V), repeat=length):
        wanted = math.prod(target(full[:i])[full[i]] for i in range(length))
        found = 0.0
        for end in range(1, length + 1):
            rest = math.prod(target(full[:i])[full[i]] for i in range(end, length))
            found += emitted.get(full[:end], 0.0) * rest
        distance += abs(wanted - found) / 2
    assert sum(emitted.values()) == pytest.approx(1, abs=bound)
    assert distance < bound


def cells(law: Sequence[float]) -> Iterator[tuple[float, float]]:
    """The intervals of [0, 1) on which a draw by quantile gives one token."""
    ends = [0.0, *itertools.accumulate(law)]
    yield from ((a, b) for a, b in itertools.pairwise(ends) if b - a > 1e-15)


def inside(a: float, b: float) -> list[float]:
    return [a + (b - a) * f for f in (1e-6, 0.5, 1 - 1e-6)]


def residual(p: Sequence[float], q: Sequence[float]) -> list[float]:
    rest = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    return [r / sum(rest) for r in rest]


def integrate_rejection(target: Law, draft: Law, length: int, told: Law | None) -> dict[Tokens, float]:
    """The exact law of what `accept_rejection` emits for drafts of `length` tokens.

    told: the probabilities the function is given; None says point masses.
    """
    emitted: dict[Tokens, float] = defaultdict(float)
    for x in itertools.product(range(V), repeat=length):
        weight = math.prod(draft(x[:n])[x[n]] for n in range(length))
        if weight == 0:
            continue
        p = [target(x[:n]) for n in range(length + 1)]
        q = [draft(x[:n]) for n in range(length)]
        probs = None if told is None else torch.tensor([told(x[:n]) for n in range(length)], dtype=torch.float64)
        args = (list(x), torch.tensor(p, dtype=torch.float64), probs)
        border = [min(1.0, p[n][x[n]] / q[n][x[n]]) for n in range(length)]
        for kept in range(length + 1):
            chance = weight * math.prod(border[:kept]) * (1 - border[kept] if kept < length else 1)
            if chance < 1e-18:
                continue
            last = residual(p[kept], q[kept]) if kept < length else p[length]
            for a, b in cells(last):
                verdicts = set()
                for place in range(3):
                    accept = [inside(0, border[n])[place] for n in range(kept)]
                    accept += [inside(border[n], 1)[place] for n in range(kept, kept + 1) if n < length]
                    accept += [0.3] * (length - len(accept))
                    bonus = [0.9] * (length + 1)
                    bonus[kept] = inside(a, b)[place]
                    verdicts.add(accept_rejection(*args, accept, bonus))
                (verdict,) = verdicts
                assert verdict.path == tuple(range(kept))
                emitted[(*x[:kept], verdict.bonus)] += chance * (b - a)
    return emitted


PAIRS: dict[str, tuple[Law, Law]] = {
    "chain": (random_law(1), random_law(2)),
    "chain, sharp": (random_law(3, spread=4), random_law(4, spread=4)),
    "draft has zeros": (random_law(5), random_law(6, zeros=0.5)),
    "target has zeros": (random_law(7, zeros=0.5), random_law(8)),
    "both have zeros": (random_law(9, zeros=0.5), random_law(10, zeros=0.5)),
    "block": (random_law(11), block_law(12)),
    "block with zeros": (random_law(13, zeros=0.4), block_law(14, zeros=0.4)),
    "equal": (random_law(15), random_law(15)),
    "equal with zeros": (random_law(16, zeros=0.5), random_law(16, zeros=0.5)),
    "point, told its law": (random_law(17), point_law(18)),
}


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_rejection_keeps_the_law(pair: str, length: int) -> None:
    """D7: the emitted tokens have the target's law, for any draft whose law is known."""
    target, draft = PAIRS[pair]
    assert_law(integrate_rejection(target, draft, length, draft), target, length + 1)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
def test_rejection_of_point_masses_keeps_the_law(length: int, zeros: float) -> None:
    """D7: a draft without probabilities (prompt lookup) counts as drawn with probability 1."""
    target = random_law(20, zeros)
    for seed in range(6):
        emitted = integrate_rejection(target, point_law(seed), length, None)
        assert_law(emitted, target, length + 1)


def test_a_draft_without_usable_probabilities_is_refused_and_the_law_kept() -> None:
    """A broken draft network gives nan for everything. That used to accept all it proposed."""
    target = random_law(21)
    p = torch.tensor([target(()), target((2,))], dtype=torch.float64)
    for q in (math.nan, math.inf):
        broken = torch.full((1, V), q, dtype=torch.float64)
        for accept in (0.0, 0.5, 1 - 2**-53):
            drawn = defaultdict(float)
            for a, b in cells(target(())):
                verdict = accept_rejection([2], p, broken, [accept], [(a + b) / 2, 0.5])
                assert verdict.num_accepted == 0
                drawn[(verdict.bonus,)] += b - a
            assert_law(drawn, target, 1)


def test_a_token_the_target_excludes_is_never_kept() -> None:
    """Not even by a uniform of exactly 0, nor if the draft thinks it impossible too."""
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    for q in (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), None):
        for accept in (0.0, 0.5, 1 - 2**-53):
            assert accept_rejection([0], p, q, [accept], [0.0, 0.0]).bonus == 1
            assert accept_rejection([0], p, q, [accept], [1 - 2**-53] * 2).path == ()


# --- matching: greedy and coupled sampling ---------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 3])
def test_matching_keeps_the_law_whatever_the_draft_knows(length: int) -> None:
    """D7: the target's own tokens are enumerated; a draft that even knows their noise (right in the
    slots of `right`, wrong in the others) changes nothing."""
    target = random_law(30)
    for right in itertools.product((True, False), repeat=length):
        emitted: dict[Tokens, float] = defaultdict(float)
        for own in itertools.product(range(V), repeat=length + 1):
            draft = [token if ok else (token + 1) % V for token, ok in zip(own, right, strict=False)]
            weight = math.prod(target(tuple(draft[:n]))[own[n]] for n in range(length + 1))
            verdict = accept_matching(draft, own)
            assert verdict.num_accepted == [*right, False].index(False)
            emitted[(*(draft[n] for n in verdict.path), verdict.bonus)] += weight
        assert_law(emitted, target, length + 1)


# two levels; among the children of one parent, some tokens come twice
TREES = [
    ([-1, -1, 0, 0, 1], [0, 1, 2, 3, 0]),
    ([-1, -1, 0, 1, 1], [2, 2, 1, 1, 3]),
    ([-1, 0, 0, -1, 3], [3, 3, 3, 1, 1]),
    ([-1, -1, -1, -1, 2], [0, 1, 2, 3, 2]),
]


@pytest.mark.parametrize(("parents", "tokens"), TREES)
def test_matching_on_a_tree_keeps_the_law(parents: list[int], tokens: list[int]) -> None:
    """D14: every node's own token drawn independently."""
    target = random_law(40)
    behind = [()] + [tuple(tokens[n] for n in path_to(parents, node)) for node in range(len(tokens))]
    emitted: dict[Tokens, float] = defaultdict(float)
    for own in itertools.product(range(V), repeat=len(tokens) + 1):
        weight = math.prod(target(prefix)[token] for prefix, token in zip(behind, own, strict=True))
        verdict = accept_matching(tokens, own, parents)
        emitted[(*(tokens[n] for n in verdict.path), verdict.bonus)] += weight
    assert_law(emitted, target, 3)


@pytest.mark.parametrize(("parents", "tokens"), TREES)
def test_matching_on_a_tree_keeps_the_law_when_siblings_share_noise(parents: list[int], tokens: list[int]) -> None:
    """D14: noise belongs to a position, so all nodes of one depth draw with the same number."""
    target = random_law(41)
    behind = [()] + [tuple(tokens[n] for n in path_to(parents, node)) for node in range(len(tokens))]
    borders = [
        sorted({0.0, 1.0, *(end for p in behind if len(p) == depth for end in itertools.accumulate(target(p)[:-1]))})
        for depth in range(3)
    ]
    emitted: dict[Tokens, float] = defaultdict(float)
    for cell in itertools.product(*(itertools.pairwise(border) for border in borders)):
        noise = [(a + b) / 2 for a, b in cell]
        own = [sample_at(torch.tensor(target(p), dtype=torch.float64), noise[len(p)]) for p in behind]
        verdict = accept_matching(tokens, own, parents)
        emitted[(*(tokens[n] for n in verdict.path), verdict.bonus)] += math.prod(b - a for a, b in cell)
    assert_law(emitted, target, 3)


def test_matching_by_hand() -> None:
    assert accept_matching([], [7]) == accept_matching([], [7], [])
    assert (accept_matching([], [7]).path, accept_matching([], [7]).bonus) == ((), 7)
    assert accept_matching([5, 6, 7], [5, 6, 8, 9]).path == (0, 1)
    assert accept_matching([5, 6, 7], [5, 6, 8, 9]).bonus == 8
    assert accept_matching([5, 6, 7], [4, 6, 7, 9]).path == ()
    assert accept_matching([5, 6], [5, 6, 7]).bonus == 7
    # a chain, said as a tree
    assert accept_matching([5, 6, 7], [5, 6, 8, 9], [-1, 0, 1]) == accept_matching([5, 6, 7], [5, 6, 8, 9])
    # the second child, then its own child, with the bonus of that node
    verdict = accept_matching([1, 2, 3, 4], [2, 0, 4, 0, 9], [-1, -1, 0, 1])
    assert (verdict.path, verdict.bonus, verdict.num_accepted) == ((1, 3), 9, 2)


# --- parts -----------------------------------------------------------------------------------


def test_residual_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.1, 0.6, 0.1, 0.2])
    assert residual_probs(p, q, 1).tolist() == pytest.approx([0.8, 0.0, 0.2, 0.0])
    assert residual_probs(p, None, 0).tolist() == pytest.approx([0.0, 0.6, 0.4, 0.0])


def test_residual_of_nothing_is_the_target() -> None:
    """D17: mass 0 must not be divided by; the refusal had probability 0 up to rounding."""
    p = torch.tensor([0.25, 0.75])
    assert residual_probs(p, p, 0).tolist() == [0.25, 0.75]
    assert residual_probs(torch.tensor([1.0, 0.0]), None, 0).tolist() == [1.0, 0.0]


def test_sample_at_the_ends() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    below_one = 1 - 2**-53
    assert [sample_at(probs, u) for u in (0.0, 0.2499, 0.25, 0.5, below_one)] == [1, 1, 3, 3, 3]
    assert sample_at(torch.tensor([1.0]), below_one) == 0
    wide = torch.full((50_000,), 1 / 50_000)  # sums to something else than 1 in fp32
    assert sample_at(wide, below_one) == 49_999
    assert sample_at(torch.cat([wide, torch.zeros(9)]), below_one) == 49_999
