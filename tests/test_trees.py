"""Tree drafts are verified in one pass and change nothing: any tree, any batch, greedy and coupled."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

from bed import _COMMON, CONFIGS, DTYPES, PROMPTS, PuppetTarget, decode, make_model, tiny_target
from flashdraft.engine import Engine
from flashdraft.sampling import RowSampler
from flashdraft.session import Session
from flashdraft.target import Target
from flashdraft.tree import paths
from flashdraft.types import Draft, FlashdraftError, Request, Result, SamplingParams
from flashdraft.verify import accept_matching
from trees import KINDS, TreeDrafter

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "coupled": {"temperature": 0.8, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 7},
}
NUM_TOKENS = 20


@functools.cache
def windowed(dtype: str) -> Target:
    """Every layer sees 6 tokens: a path that is deeper than it is wide crosses the border."""
    config = transformers.MistralConfig(**_COMMON, sliding_window=6, head_dim=8)
    return Target(make_model(config, DTYPES[dtype]), name="windowed")


@functools.cache
def capped(dtype: str) -> Target:
    """Gemma 2: windows in every other layer, caps, scaled embeddings."""
    config = transformers.Gemma2Config(**_COMMON, sliding_window=5, head_dim=8, query_pre_attn_scalar=8)
    return Target(make_model(config, DTYPES[dtype]), name="capped")


TARGETS = {
    **{family: functools.partial(tiny_target, family) for family in CONFIGS},
    "windowed": windowed,
    "capped": capped,
}


@functools.cache
def plain(name: str, dtype: str, mode: str) -> list[Result]:
    return decode(TARGETS[name](dtype), None, PROMPTS, max_tokens=NUM_TOKENS, **MODES[mode])


def answers(results: Sequence[Result]) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {tuple(p): r.token_ids for p, r in zip(PROMPTS, results, strict=False)}


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in TARGETS), ("llama", "float32"), ("capped", "float32")]
)
@pytest.mark.parametrize("mode", MODES)
def test_equals_plain_decoding(mode: str, name: str, dtype: str) -> None:
    """Random trees with the answer on a branch, nowhere, or here and there; rows of a batch have
    different trees, some have none."""
    expected = plain(name, dtype, mode)
    for kind, max_rows in (("echo", 1), ("wrong", 3), ("coin", 3)):
        made = TreeDrafter(answers(expected), kind, seed=max_rows)
        results = decode(TARGETS[name](dtype), made, PROMPTS, max_rows, max_tokens=NUM_TOKENS, **MODES[mode])
        assert [r.token_ids for r in results] == [r.token_ids for r in expected], kind
        rounds = [r for result in results for r in result.stats.rounds]
        kept = [r.num_accepted for r in rounds]
        assert all(r.num_accepted <= r.num_slots <= r.num_drafted for r in rounds)
        assert any(r.num_slots < r.num_drafted for r in rounds)  # the depth of a tree, not its nodes
        assert sum(kept) == 0 if kind == "wrong" else max(kept) >= 2


@pytest.mark.parametrize("name", ["llama", "windowed"])
def test_the_path_is_kept_and_told(name: str) -> None:
    """After every round the cache holds what a fresh pass over the tokens writes, and the drafter was
    told each token once, with the state that predicted it, in order."""
    target = TARGETS[name]("float64")
    made = TreeDrafter(answers(plain(name, "float64", "greedy")), "coin", nodes=12, seed=3)
    engine = Engine(target, made, max_rows=3, reuse_prefix=False)
    for prompt in PROMPTS:
        engine.submit(Request(prompt, SamplingParams(max_tokens=NUM_TOKENS)))
    branched = 0
    before: list[list[int]] = [[], [], []]
    while engine.busy:
        engine.step()
        for row, tokens in enumerate(engine.session.tokens):
            assert engine.session.state[row] == tokens
            cached = engine.session.num_cached(row)  # what lay on a branch is read again
            branched += cached < len(tokens) - 1
            assert cached <= len(tokens) - 1
            if len(tokens) > len(before[row]) and tokens[: len(before[row])] == before[row]:
                assert cached >= len(before[row]) - 1  # once
            before[row] = list(tokens)
            fresh = target.new_cache(1, 64)
            out = target.forward(torch.tensor([tokens[:-1]]), fresh, [0], layer_ids=(0, 1))
            assert out.features_BTF is not None
            assert torch.allclose(torch.stack(made.features[row]), out.features_BTF[0], rtol=0, atol=1e-9)
            for layer in range(target.num_layers):
                for found, wanted in zip(engine.session.cache.layer(layer), fresh.layer(layer), strict=True):
                    assert torch.allclose(found[row, :, :cached], wanted[0, :, :cached], rtol=0, atol=1e-9)
    assert branched > 3


def test_siblings_share_their_noise() -> None:
    """Coupled noise belongs to the position: nodes of one depth with the same logits choose alike."""
    sampler = RowSampler(SamplingParams(temperature=1.0), 5, [3, 4], 50)
    tokens, parents = [7, 8, 9, 7, 7], [-1, -1, 0, 1, 2]
    ways = paths(tokens, parents)
    assert ways == [(), (7,), (8,), (7, 9), (8, 7), (7, 9, 7)]
    own = sampler.choose(torch.zeros(6, 50), paths=ways).tolist()
    chain = sampler.choose(torch.zeros(4, 50)).tolist()
    assert own == [chain[0], chain[1], chain[1], chain[2], chain[2], chain[3]]


V = 4
TREE = ([0, 2, 1, 3, 0], [-1, -1, 0, 0, 1])  # two children of the anchor, three grandchildren


def test_d14_law_of_a_two_level_tree() -> None:
    """D14: the law with a tree at T > 0 is the target's. Exact enumeration at V = 4: the target picks
    each node's own token from its distribution, the walk keeps what fits; the law of the committed
    tokens, gone on with from the target where the walk ends early, is p(a) p(b|a) p(c|ab)."""
    generator = torch.Generator().manual_seed(0)
    table = {
        path: torch.rand(V, generator=generator).double()
        for n in range(3)
        for path in itertools.product(range(V), repeat=n)
    }
    law = {path: (scores / scores.sum()).tolist() for path, scores in table.items()}
    tokens, parents = TREE
    ways = paths(tokens, parents)
    found: dict[tuple[int, ...], float] = dict.fromkeys(itertools.product(range(V), repeat=3), 0.0)
    for own in itertools.product(range(V), repeat=len(ways)):
        weight = 1.0
        for way, token in zip(ways, own, strict=True):
            weight *= law[way][token]
        verdict = accept_matching(tokens, own, parents)
        said = (*(tokens[n] for n in verdict.path), verdict.bonus)
        for rest in itertools.product(range(V), repeat=3 - len(said)):
            whole, more = (*said, *rest), weight
            for n in range(len(said), 3):
                more *= law[whole[:n]][whole[n]]
            found[whole] += more
    distance = sum(abs(p - law[()][a] * law[a,][b] * law[a, b][c]) for (a, b, c), p in found.items()) / 2
    assert distance < 1e-12


class FixedTree(TreeDrafter):
    """The same tree every round."""

    def __init__(self) -> None:
        super().__init__({}, "wrong", len(TREE[0]), taps=False)

    def propose(self, state: Any, rows: Sequence[int], samplers: Any, limits: Sequence[int]) -> Draft:
        sizes = tuple(len(TREE[0]) if limit >= 2 else 0 for limit in limits)
        both = (torch.tensor([part] * len(rows)) for part in TREE)
        return Draft(next(both), sizes, next(both))


def test_d14_a_tree_decodes_the_plain_text() -> None:
    """D14, through the engine at V = 4: 200 seeds say what plain decoding says, and the tree is used."""
    table = torch.randn(V, V, generator=torch.Generator().manual_seed(1)).double()
    target: Any = PuppetTarget(lambda prefix: table[prefix[-1]], V)
    requests = [Request([1], SamplingParams(seed=i, max_tokens=12, temperature=1.0)) for i in range(200)]
    expected = Engine(target, max_rows=20).run(requests)
    found = Engine(target, FixedTree(), max_rows=20).run(requests)
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    kept = [r.num_accepted for result in found for r in result.stats.rounds]
    assert {0, 1, 2} == set(kept)


@pytest.mark.parametrize(("place", "lead", "kept"), [("spine", 2e-15, 4), ("branch", 2e-15, 1), ("branch", 1e-3, 4)])
def test_a_near_tie_on_a_branch_is_left_to_the_next_round(place: str, lead: float, kept: int) -> None:
    """What a target says behind a branch is rounded in another order than in the text. Where two tokens are nearly
    tied there, the walk ends before that choice; on the spine, which lies as the text does, it goes on."""
    law = torch.zeros(6, 6, dtype=torch.float64)
    law[1, 2] = law[2, 3] = law[4, 5] = law[5, 1] = 9.0
    law[3, 4], law[3, 5] = 9.0, 9.0 - lead
    tokens, parents = ([3, 4, 5, 0], [-1, 0, 1, -1]) if place == "spine" else ([0, 3, 4, 5], [-1, -1, 1, 2])

    class Knows(FixedTree):
        def propose(self, state: Any, rows: Sequence[int], samplers: Any, limits: Sequence[int]) -> Draft:
            return Draft(torch.tensor([tokens]), (4,), torch.tensor([parents]))

    session = Session(PuppetTarget(lambda prefix: law[prefix[-1]], 6), Knows(), 1, 32)  # type: ignore[arg-type]
    session.prefill(0, [0, 1], RowSampler(SamplingParams(), 0, [0, 1], 6))
    (proposal,) = session.verify([0], [5])
    assert proposal.tokens == (3, 4, 5, 1)[:kept]
    session.commit([proposal.tokens])
    # entries of the spine stay; those of a branch are made again by the next pass, which says the same
    assert session.num_cached(0) == 2 + (kept if place == "spine" else 1)
    (proposal,) = session.verify([0], [5])
    assert proposal.tokens[0] == {1: 4, 4: 2}[kept]


def test_a_prompt_that_ends_on_a_branch_is_not_reused_further_than_the_cache_goes() -> None:
    """A conversation goes on behind an answer whose last tokens are still to be read again."""
    target = TARGETS["llama"]("float64")
    (first,) = decode(target, None, PROMPTS[:1], max_tokens=NUM_TOKENS, ignore_eos=True)
    again = [*PROMPTS[0], *first.token_ids, 7, 8]
    (expected,) = decode(target, None, [again], max_tokens=6, ignore_eos=True)
    short = 0
    for seed in range(12):
        engine = Engine(target, TreeDrafter({**answers([first]), tuple(again): expected.token_ids}, "coin", 12, seed))
        engine.run([Request(PROMPTS[0], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))])
        cached = engine.session.num_cached(0)
        short += cached < len(again) - 3
        (found,) = engine.run([Request(again, SamplingParams(max_tokens=6, ignore_eos=True))])
        assert found.token_ids == expected.token_ids and found.stats.num_reused_tokens == cached
    assert short > 1


@pytest.mark.parametrize(("parents", "limit"), [([1, -1], 5), ([-1, 0, 1], 2)])
def test_broken_trees_are_an_error(parents: list[int], limit: int) -> None:
    """A node before its parent, a tree deeper than asked for: a bug of the drafter, said at once."""

    class Broken(TreeDrafter):
        def propose(self, state: Any, rows: Sequence[int], samplers: Any, limits: Sequence[int]) -> Draft:
            return Draft(torch.tensor([[4] * len(parents)]), (len(parents),), torch.tensor([parents]))

    session = Session(tiny_target(), Broken({}, "wrong"), 1, 64)
    session.prefill(0, PROMPTS[0], RowSampler(SamplingParams(), 0, PROMPTS[0], tiny_target().vocab_size))
    with pytest.raises((FlashdraftError, AssertionError)):
        session.verify([0], [limit])


def test_kinds_are_what_they_say() -> None:
    """The machinery above: echo trees hold the answer, wrong ones never its next token."""
    answer = tuple(range(10, 40))
    for kind in KINDS:
        made = TreeDrafter({(1, 2): answer}, kind, nodes=12)
        for _ in range(40):
            tokens, parents = made._tree([1, 2, *answer[:3]], 5)
            hits = accept_matching(
                tokens,
                [
                    answer[3],
                    *(0 if w != answer[3 : 3 + len(w)] else answer[3 + len(w)] for w in paths(tokens, parents)[1:]),
                ],
                parents,
            )
            assert kind != "wrong" or hits.num_accepted == 0
