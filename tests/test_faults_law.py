"""Faults in the law of sampled text, through the whole engine: what is drawn follows the target's
processed distribution, computed exactly, for every drafter, rule and temperature.

Every test here is deterministic (seeds are fixed); the bounds are those of a test of level 0.001.
(The acceptance functions themselves are integrated exactly in test_verify.py: D7, D14.)
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from scipy import stats

from bed import CONFIGS, PuppetTarget, make_model, plain_scores, plain_softmax, random_network
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.drafters.drawing import draw
from flashdraft.drafters.ngram import NGramDrafter
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.types import Draft, Request, Result, SamplingParams
from flashdraft.verify import accept_rejection

V = 6
PROMPT = [1, 3, 1, 3]
LEVEL = 1e-3


@functools.cache
def small_target() -> Target:
    none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return Target(make_model(CONFIGS["llama"](**sizes, **none), torch.float64, seed=3))


def make(name: str, block_size: int = 4) -> Any:
    if name == "dflash":
        # one tapped layer of two; its block looks like the target now and then, by chance
        network = random_network(small_target(), target_layer_ids=(0,), mask_token_id=V - 1, std=0.15)
        return DFlashDrafter(network, small_target(), block_size)
    return NGramDrafter(block_size, min_ngram=1) if name == "ngram" else None


def sample(name: str, count: int, **params: Any) -> list[Result]:
    seed = params.pop("seed", 0)
    engine = Engine(small_target(), make(name), max_rows=64, max_context=80)
    return engine.run([Request(PROMPT, SamplingParams(seed=seed + i, **params)) for i in range(count)])


def laws(answers: Sequence[Sequence[int]], params: SamplingParams) -> list[list[list[float]]]:
    """For every answer, the exact distribution of each of its tokens given those before it."""
    target, size = small_target(), len(answers[0])
    tokens = torch.tensor([[*PROMPT, *answer] for answer in answers])
    cache = target.new_cache(len(answers), tokens.shape[1])
    logits = target.forward(tokens, cache, range(len(answers))).logits_BTV[:, len(PROMPT) - 1 :].float()
    return [
        [plain_softmax(plain_scores(logits[b, t].tolist(), PROMPT, answer[:t], params, set())) for t in range(size)]
        for b, answer in enumerate(answers)
    ]


# --- D7, D8: the law through the engine ------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule", "temperature", "count"),
    [("dflash", "rejection", 1.0, 700), ("dflash", "coupled", 2.0, 400), ("ngram", "rejection", 0.3, 400)],
)
def test_d7_joint_law_of_the_first_tokens(name: str, rule: Any, temperature: float, count: int) -> None:
    """D7, D8: chi-square of the first two tokens of many answers against their exact joint law."""
    params = {"temperature": temperature, "acceptance": rule}
    results = sample(name, count, max_tokens=4, seed=1000, **params)
    pairs = list(itertools.product(range(V), repeat=2))
    exact = laws(pairs, SamplingParams(**params))
    expected = {pair: count * law[0][pair[0]] * law[1][pair[1]] for pair, law in zip(pairs, exact, strict=True)}
    assert sum(expected.values()) == pytest.approx(count)
    assert fits(collections.Counter(r.token_ids[:2] for r in results), expected)


def fits(found: collections.Counter[Any], *laws_expected: dict[Any, float]) -> bool:
    """Chi-square of counts against expected counts, over one or several independent tables; what is
    expected fewer than 5 times is counted together."""
    statistic, freedom = 0.0, 0
    for expected in laws_expected:
        rare = {key for key, value in expected.items() if value < 5}
        cells = [(found[key], value) for key, value in expected.items() if key not in rare]
        rest = sum(expected[key] for key in rare)
        if rest > 1:
            cells.append((sum(found[key] for key in rare), rest))
        statistic += sum((f - e) ** 2 / e for f, e in cells)
        freedom += len(cells) - 1
    return bool(stats.chi2.sf(statistic, freedom) > LEVEL)


CUTS = {"top_k": 5, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.1}


@pytest.mark.parametrize("name", ["none", "ngram", "dflash"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("params", [{"temperature": 1.3}, {"temperature": 0.6, **CUTS}], ids=str)
def test_d8_every_token_of_long_answers_follows_its_law(name: str, rule: Any, params: dict[str, Any]) -> None:
    """D8: each token's quantile under its exact law, given the tokens before it, is uniform and
    independent of the one before: all slots of blocks, bonus tokens, processors on both sides."""
    params = {"acceptance": rule, **params}
    results = sample(name, 32, max_tokens=40, seed=77, **params)
    answers = [r.token_ids for r in results]
    rng = random.Random(0)
    quantiles = []
    for answer, law in zip(answers, laws(answers, SamplingParams(**params)), strict=True):
        for token, probs in zip(answer, law, strict=True):
            assert probs[token] > 0
            quantiles.append(sum(probs[:token]) + rng.random() * probs[token])
    assert stats.kstest(quantiles, "uniform").pvalue > LEVEL
    for lag in (1, 2):
        assert stats.pearsonr(quantiles[:-lag], quantiles[lag:]).pvalue > LEVEL
    rounds = [r for result in results for r in result.stats.rounds]
    if name != "none":  # or the test says nothing about drafts
        kept, drafted = sum(r.num_accepted for r in rounds), sum(r.num_drafted for r in rounds)
        assert 0.05 < kept / drafted < 0.95


def test_d8_seed_and_temperature_count() -> None:
    """D8: same seed same text (whatever drafts); other seeds and temperatures, other text."""
    texts = {}
    for seed, temperature in itertools.product((0, -7, 2**63 - 1), (0.3, 2.0)):
        wanted = {"max_tokens": 24, "seed": seed, "temperature": temperature}
        (first,) = {sample(name, 1, **wanted)[0].token_ids for name in ("none", "ngram", "dflash")}
        texts[seed, temperature] = first
        drawn = [sample("dflash", 1, acceptance="rejection", **wanted)[0].token_ids for _ in range(2)]
        assert drawn[0] == drawn[1]
    assert len(set(texts.values())) == len(texts)


# --- D17: a draft as good as the target ------------------------------------------------------


def test_d17_ten_thousand_rounds_of_a_perfect_draft() -> None:
    """D17: q == p leaves a residual of mass 0; dividing by it gave NaN. In single precision, at all
    temperatures, with uniforms at their ends: no exception, and nothing that p excludes."""
    generator = torch.Generator().manual_seed(0)
    rng = random.Random(0)
    ends = (0.0, 1 - 2**-53)
    logits = torch.randn(10_000, 2, 8, generator=generator) * torch.rand(10_000, 1, 1, generator=generator) * 20
    logits[::3, :, 2:5] = -torch.inf
    probs = logits.softmax(-1)
    tokens = probs[:, 0].multinomial(1, generator=generator)[:, 0].tolist()
    for p, token in zip(probs, tokens, strict=True):
        u = [rng.choice((rng.random(), *ends)) for _ in range(3)]
        verdict = accept_rejection([token], p, p[:1], u[:1], u[1:])
        assert verdict.num_accepted == 1 and float(p[1, verdict.bonus]) > 0
        rounded = p[:1] * (1 + 2**-20)  # q a little above p: refused once in a million, and then?
        refused = accept_rejection([token], p, rounded, [1 - 2**-53], u[1:])
        assert refused.num_accepted == 0 and float(p[0, refused.bonus]) > 0


class MarkovDrafter:
    """Draws each slot from a given law of the token before it, with the real `draw`."""

    name = "markov"
    target_layer_ids: tuple[int, ...] = ()
    drafts_trees = False

    def __init__(self, law: Any, block_size: int) -> None:
        self.law, self.max_draft_tokens = law, block_size - 1

    def open(self, rows: int, capacity: int) -> list[int]:
        return [0] * rows

    def reset(self, state: list[int], row: int, num_context: int, token: int) -> None:
        state[row] = token

    def observe(self, state: list[int], commit: Any) -> None:
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            state[row] = tokens[-1]

    def propose(self, state: list[int], rows: Sequence[int], samplers: Any, limits: Sequence[int]) -> Draft:
        drafted, probs = [], []
        for row, sampler, limit in zip(rows, samplers, limits, strict=True):
            size, last, tokens, logits = min(limit, self.max_draft_tokens), state[row], [], []
            for n in range(size):
                logits.append(self.law((last,)))
                last = int(draw(sampler, torch.stack(logits))[0][n])
                tokens.append(last)
            drafted.append(tokens)
            probs.append(draw(sampler, torch.stack(logits))[1] if size else None)
        width = max(map(len, drafted))
        tokens_BN = torch.tensor([d + [0] * (width - len(d)) for d in drafted]).view(len(drafted), width)
        return Draft(tokens_BN, tuple(map(len, drafted)), probs_NV=tuple(probs))


def markov_table(seed: int) -> torch.Tensor:
    """Logits [V, V] of the next token after each token."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)).double() * 1.5


def markov_answers(
    target: torch.Tensor, draft: torch.Tensor, count: int, num_tokens: int, *, block_size: int, **params: Any
) -> list[Result]:
    drafter = MarkovDrafter(lambda prefix: draft[prefix[-1]], block_size)
    engine = Engine(PuppetTarget(lambda prefix: target[prefix[-1]], V), drafter, max_rows=24)
    return engine.run([Request(PROMPT, SamplingParams(seed=i, max_tokens=num_tokens, **params)) for i in range(count)])


def transitions_fit(results: Sequence[Result], law: torch.Tensor) -> bool:
    """Chi-square of what followed each token against the rows of law [V, V]."""
    pairs = collections.Counter(pair for r in results for pair in itertools.pairwise(r.token_ids))
    seen = [sum(pairs[last, token] for token in range(V)) for last in range(V)]
    rows = enumerate(law.tolist())
    return fits(pairs, *({(last, token): seen[last] * p for token, p in enumerate(row)} for last, row in rows))


@pytest.mark.parametrize(
    ("rule", "temperature"), [("coupled", 1.0), ("rejection", 0.3), ("rejection", 1.0), ("rejection", 2.0)]
)
def test_d7_transitions_of_a_markov_target(rule: Any, temperature: float) -> None:
    """D7, D8: the draft has a law of its own, wrong in the same places every time, so that thousands
    of tokens show any bias towards it: a ratio of other tensors than the draw's, no residual."""
    target = markov_table(1)
    draft = 0.5 * target + markov_table(2)
    results = markov_answers(target, draft, 48, 61, block_size=3, temperature=temperature, acceptance=rule)
    rounds = [r for result in results for r in result.stats.rounds]
    assert 0.1 < sum(r.num_accepted for r in rounds) / sum(r.num_drafted for r in rounds) < 0.9
    assert transitions_fit(results, (target / temperature).softmax(-1))
    assert not transitions_fit(results, ((target + 0.4 * draft) / temperature).softmax(-1))  # it can fail


def test_d17_a_perfect_draft_is_always_kept() -> None:
    """D17: through the engine, T = 1, q == p: every drafted token is accepted, tau is block_size."""
    table = markov_table(1)
    results = markov_answers(table, table, 24, 1 + 5 * 12, block_size=5, temperature=1.0, acceptance="rejection")
    assert all(r.stats.acceptance_length == 5 and len(r.stats.rounds) == 12 for r in results)
    assert transitions_fit(results, table.softmax(-1))
