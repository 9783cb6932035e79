"""Logits -> scores -> token: noise that is a pure function of its key, processors that equal plain
loops and transformers' own, ties to the lowest id, parameters that are checked.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import transformers
from scipy import stats

from bed import plain_scores, plain_softmax
from flashdraft.sampling import ACCEPT, DRAFT, NOISE, RESIDUAL, RowSampler, counter_key, gumbel_noise, uniform
from flashdraft.types import FlashdraftError, Request, SamplingParams

STREAMS = (NOISE, ACCEPT, RESIDUAL, DRAFT)
SEEDS = (0, 1, -1, 12345, 2**63 - 1, -(2**63))
V = 40


# --- noise -----------------------------------------------------------------------------------


def splitmix(key: int, index: int) -> float:
    """The index-th number in (0, 1] of SplitMix64 from a key, in Python integers."""
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return ((z ^ (z >> 31)) // 2**11 + 1) / 2**53


def test_noise_is_splitmix64_through_the_gumbel_quantile() -> None:
    for seed in SEEDS:
        noise = gumbel_noise(seed, 7, 50, stream=DRAFT)
        key = counter_key(seed, 7, DRAFT)
        for token in range(50):
            v = min(splitmix(key, token), 1 - 2**-24)
            assert float(noise[token]) == pytest.approx(-math.log(-math.log1p(-v)), rel=1e-5, abs=1e-5)


def test_noise_is_a_pure_function_of_its_key() -> None:
    """D8: repeated calls agree, whatever was drawn in between; every part of the key counts."""
    keys = [(seed, position, stream) for seed in SEEDS for position in (0, 1, 2, 10**6) for stream in STREAMS]
    first = [gumbel_noise(seed, position, 64, stream=stream) for seed, position, stream in keys]
    again = [gumbel_noise(seed, position, 64, stream=stream) for seed, position, stream in reversed(keys)]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    assert len({tuple(noise.tolist()) for noise in first}) == len(keys)
    assert len({uniform(*key) for key in keys}) == len(keys)
    assert [uniform(*key) for key in keys] == [uniform(*key) for key in keys]


def test_noise_of_a_token_does_not_depend_on_the_vocabulary() -> None:
    long = gumbel_noise(3, 4, 1003)
    for size in (1, 2, 7, 64, 1000):
        assert torch.allclose(gumbel_noise(3, 4, size), long[:size], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("stream", [NOISE, DRAFT])
def test_a_million_values_are_gumbel(stream: int) -> None:
    one_key = gumbel_noise(11, 5, 1_000_000, stream=stream).double().numpy()
    many_keys = torch.cat(
        [gumbel_noise(seed, position, 100, stream=stream) for seed in range(100) for position in range(100)]
    )
    for values in (one_key, many_keys.double().numpy()):
        assert stats.kstest(values, "gumbel_r").pvalue > 1e-3


def test_noise_is_always_finite() -> None:
    for position in range(400):
        assert bool(gumbel_noise(position % 7 - 3, position, 4099).isfinite().all())


@pytest.mark.parametrize("stream", [ACCEPT, RESIDUAL])
def test_uniforms_are_uniform(stream: int) -> None:
    values = [uniform(seed, position, stream) for seed in range(40) for position in range(2500)]
    assert min(values) >= 0 and max(values) < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_keys_that_are_neighbours_are_independent() -> None:
    """A drawn token must say nothing about the uniform that accepts it, nor about its neighbours."""
    size = 40_000
    base = gumbel_noise(5, 100, size).double()
    others = [gumbel_noise(5, 101, size), gumbel_noise(6, 100, size), gumbel_noise(5, 100, size, stream=DRAFT)]
    others += [base.roll(1), gumbel_noise(5, 101, size).roll(1), gumbel_noise(5, 101, size).roll(-1)]
    for other in others:
        pair = torch.stack([base, other.double()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(size)
    columns = [[uniform(5, position, stream) for position in range(20_000)] for stream in (ACCEPT, RESIDUAL)]
    columns.append([uniform(5, position + 1, ACCEPT) for position in range(20_000)])
    columns.append([float(gumbel_noise(5, position, 1, stream=DRAFT)) for position in range(20_000)])
    correlation = torch.corrcoef(torch.tensor(columns, dtype=torch.float64)) - torch.eye(len(columns))
    assert float(correlation.abs().max()) < 5 / math.sqrt(20_000)


def test_argmax_of_scores_and_noise_follows_the_softmax() -> None:
    """D8: the Gumbel-max draw has the law it claims, over positions and over seeds."""
    scores = torch.tensor([0.3, -1.0, 1.7, 0.0, -2.5, 0.9])
    expected = scores.double().softmax(-1) * 8_000
    for keys in ([(9, t) for t in range(8_000)], [(t, 9) for t in range(8_000)]):
        draws = torch.stack([scores + gumbel_noise(seed, position, 6) for seed, position in keys]).argmax(-1)
        assert stats.chisquare(draws.bincount(minlength=6).numpy(), expected.numpy()).pvalue > 1e-3


# --- scores ----------------------------------------------------------------------------------

PARAMS: dict[str, dict[str, Any]] = {
    "nothing": {"temperature": 1.0},
    "temperature": {"temperature": 0.3},
    "hot": {"temperature": 2.0},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-k 1": {"temperature": 1.0, "top_k": 1},
    "top-k of all": {"temperature": 1.0, "top_k": V},
    "top-p": {"temperature": 1.0, "top_p": 0.7},
    "top-p low": {"temperature": 1.0, "top_p": 1e-6},
    "top-p high": {"temperature": 1.5, "top_p": 0.999},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "min-p 1": {"temperature": 1.0, "min_p": 1.0},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"temperature": 1.0, "repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "presence below 0": {"temperature": 0.5, "presence_penalty": -0.9},
    "frequency": {"frequency_penalty": 0.4},
    "frequency below 0": {"temperature": 0.5, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {3: 2.5, 7: -math.inf, 0: -4.0}},
    "bias drawn": {"temperature": 1.0, "logit_bias": {3: 2.5, 7: -math.inf}},
    "min_tokens": {"min_tokens": 5},
    "all": {
        "temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.03, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": 0.2, "logit_bias": {1: -math.inf, 2: 3.0}, "min_tokens": 4,
    },
}  # fmt: skip
STOPS = {2, 11}


def some_history(seed: int) -> tuple[list[int], list[int]]:
    rng = random.Random(seed)
    return [rng.randrange(V) for _ in range(9)], [rng.randrange(V) for _ in range(7)]


def some_logits(seed: int, slots: int, spread: float = 3.0, size: int = V) -> torch.Tensor:
    return torch.randn(slots, size, generator=torch.Generator().manual_seed(seed)) * spread


def sampler_at(params: SamplingParams, prompt: list[int], committed: list[int], seed: int = 4) -> RowSampler:
    sampler = RowSampler(params, seed, prompt, V, sorted(STOPS))
    sampler.commit(committed)
    return sampler


@pytest.mark.parametrize("name", PARAMS)
def test_scores_equal_plain_loops(name: str) -> None:
    """D9: every processor, at every slot of a block, behind committed and drafted tokens."""
    params = SamplingParams(**PARAMS[name])
    for trial in range(8):
        prompt, answer = some_history(trial)
        logits = some_logits(trial, 5)
        committed, drafted = answer[:3], answer[3:]
        sampler = sampler_at(params, prompt, committed)
        scores = sampler.scores(logits, drafted)
        chosen = sampler.choose(logits, drafted).tolist()
        for slot in range(5):
            expected = plain_scores(logits[slot].tolist(), prompt, answer[: 3 + slot], params, STOPS)
            assert scores[slot].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
            noise = gumbel_noise(4, 9 + 3 + slot, V).tolist() if params.temperature else [0.0] * V
            sums = [x + g for x, g in zip(expected, noise, strict=True)]
            assert chosen[slot] == sums.index(max(sums))


def test_the_nucleus_of_a_flat_distribution() -> None:
    """More tokens than the first look takes in, next to a row that has few."""
    logits = torch.cat([some_logits(1, 1, 0.2, 3000), some_logits(2, 1, 9.0, 3000), some_logits(3, 1, 0.0, 3000)])
    for top_p in (0.05, 0.5, 0.95, 0.9999):
        params = SamplingParams(temperature=1.0, top_p=top_p)
        scores = RowSampler(params, 0, [1], 3000).scores(logits)
        for slot in range(3):
            probs = sorted(plain_softmax(logits[slot].tolist()), reverse=True)
            kept = int(scores[slot].isfinite().sum())
            masses = list(itertools.accumulate(probs))
            needed = next(n for n, mass in enumerate(masses, start=1) if mass >= top_p)
            if slot == 2:
                assert kept == 3000  # all equal: ties at the cut are kept
            else:
                assert abs(kept - needed) <= 1  # the sum in fp32 may fall on the other side
            assert masses[kept - 1] > top_p - 1e-5


def processors(params: SamplingParams, prompt_length: int) -> list[Any]:
    """The same request in transformers' words, in the order its `generate` applies them."""
    hf = transformers.generation.logits_process
    found: list[Any] = []
    if params.logit_bias:
        found.append(hf.SequenceBiasLogitsProcessor([[[i], b] for i, b in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        found.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        found.append(hf.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, sorted(STOPS)))
    if params.temperature not in (0, 1):
        found.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        found.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        found.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        found.append(hf.MinPLogitsWarper(params.min_p))
    return found


@pytest.mark.parametrize("name", [n for n in PARAMS if "presence" not in n and "frequency" not in n])
def test_scores_equal_those_of_transformers(name: str) -> None:
    """Where both have a processor it means the same. (Presence and frequency it does not have.)"""
    params = SamplingParams(**{**PARAMS[name], "presence_penalty": 0.0, "frequency_penalty": 0.0})
    for trial in range(8):
        prompt, answer = some_history(trial)
        logits = some_logits(trial, 1)
        expected = logits.clone()
        for processor in processors(params, len(prompt)):
            expected = processor(torch.tensor([prompt + answer[:3]]), expected)
        found = sampler_at(params, prompt, answer[:3]).scores(logits)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PARAMS)
def test_a_slot_is_scored_as_if_it_came_alone(name: str) -> None:
    """D9: a block's slots equal, bit for bit, the same tokens committed one by one; and a draft
    leaves no trace in the counts."""
    params = SamplingParams(**PARAMS[name])
    prompt, answer = some_history(5)
    logits = some_logits(6, len(answer) + 1)
    before = logits.clone()
    block = sampler_at(params, prompt, [])
    scores, tokens = block.scores(logits, answer), block.choose(logits, answer)
    alone = sampler_at(params, prompt, [])
    for slot in range(len(answer) + 1):
        assert torch.equal(alone.scores(logits[slot : slot + 1])[0], scores[slot])
        assert torch.equal(alone.choose(logits[slot : slot + 1])[0], tokens[slot])
        alone.commit(answer[slot : slot + 1])
    assert torch.equal(block.scores(logits, answer), scores)
    assert torch.equal(logits, before)


# --- ties, corners ---------------------------------------------------------------------------

GREEDY = [{}, {"logit_bias": {V - 1: -1.0}}, {"presence_penalty": 0.5}, {"min_tokens": 1}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("params", GREEDY, ids=lambda p: next(iter(p), "untouched"))
def test_greedy_ties_go_to_the_lowest_id(params: dict[str, Any], dtype: torch.dtype) -> None:
    rng = random.Random(0)
    for size in (2, 5, 40, 1000):
        for _ in range(10):
            best = sorted(rng.sample(range(size), 2))
            logits = torch.randn(1, size).clamp(max=4)
            logits[0, best] = 5
            sampler = RowSampler(SamplingParams(**params), 0, [0], size)
            assert sampler.choose(logits.to(dtype)).tolist() == [best[0]]


@pytest.mark.parametrize("params", GREEDY, ids=lambda p: next(iter(p), "untouched"))
def test_float64_logits_closer_than_fp32_are_a_tie(params: dict[str, Any]) -> None:
    """All choices are made on fp32 scores, with and without processors in the way."""
    logits = torch.zeros(1, 9, dtype=torch.float64)
    logits[0, 3], logits[0, 6] = 5.0, 5.0 + 1e-9
    assert RowSampler(SamplingParams(**params), 0, [0], 9).choose(logits).tolist() == [3]


@pytest.mark.parametrize("name", PARAMS)
def test_a_vocabulary_of_one_token(name: str) -> None:
    params = SamplingParams(**{**PARAMS[name], "logit_bias": {}})
    sampler = RowSampler(params, 0, [0], 1)
    assert sampler.choose(torch.tensor([[0.3], [-2.0]]), [0]).tolist() == [0, 0]
    assert sampler.scores(torch.tensor([[0.3]])).softmax(-1).tolist() == [[1.0]]


def test_stop_ids_outside_the_vocabulary_ban_nothing() -> None:
    """Some models name end-of-text tokens they do not have, or -1 for none."""
    sampler = RowSampler(SamplingParams(min_tokens=3), 0, [1], 5, stop_ids=[-1, 5, 99])
    assert sampler.choose(torch.arange(5.0)[None]).tolist() == [4]


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_the_widest_parameters_give_no_nan(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, repetition_penalty=1e3, presence_penalty=-1e6, frequency_penalty=-1e6, top_p=0.9,
        logit_bias={0: 1e6, 1: -1e6, 2: -math.inf}, min_p=0.1, top_k=20,
    )  # fmt: skip
    sampler = RowSampler(params, 0, list(range(V)), V)
    sampler.commit([0] * 1000)
    for logits in (some_logits(1, 2, 1e4), some_logits(1, 2, 0.0)):
        probs = sampler.scores(logits).softmax(-1)
        assert bool(probs.isfinite().all()) and probs.sum(-1).tolist() == pytest.approx([1, 1])
        assert bool((sampler.choose(logits) == 0).all())


# --- parameters ------------------------------------------------------------------------------

BAD: list[dict[str, Any]] = [
    *({"max_tokens": v} for v in (0, -1, 2.5, "9", None, True, math.nan)),
    *({"temperature": v} for v in (-1, math.nan, math.inf, "1", None, 1e-9, 1e9, True)),
    *({"top_k": v} for v in (-1, 1.5, "4", None)),
    *({"top_p": v} for v in (0, -0.1, 1.1, math.nan, None, "1")),
    *({"min_p": v} for v in (-0.1, 1.1, math.nan, None)),
    *({"repetition_penalty": v} for v in (0, -1, math.inf, math.nan, None, 1e-9, 1e9)),
    *({"presence_penalty": v} for v in (math.inf, math.nan, None, 1e9)),
    *({"frequency_penalty": v} for v in (-math.inf, math.nan, "0", -1e9)),
    *({"logit_bias": v} for v in ({-1: 1.0}, {1: math.nan}, {1: math.inf}, {"1": 1.0}, {1: None}, {1: 1e9}, [1], None)),
    *({"min_tokens": v} for v in (-1, 1.5, None, 257)),
    *({"stop": v} for v in ("", ["a", ""], [1], None, 5)),
    *({"stop_token_ids": v} for v in (7, [1.5], ["a"], [-1], None)),
    *({"ignore_eos": v} for v in (None, 1, "yes")),
    *({"seed": v} for v in (1.5, "1", 2**63, -(2**63) - 1, True)),
    *({"logprobs": v} for v in (-1, 101, 2.5, True, "1")),
    *({"acceptance": v} for v in ("greedy", None, 1)),
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_parameter_is_one_sentence(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(FlashdraftError) as caught:
        SamplingParams(**bad)
    message = str(caught.value)
    assert message.startswith(f"{name} is ") and "; expected " in message and message.endswith(".")
    assert "\n" not in message and len(message) < 200


def test_good_parameters_are_taken_as_copies() -> None:
    bias, stops, ids, prompt = {1: 2.0}, ["x"], [3], [1, 2]
    params = SamplingParams(logit_bias=bias, stop=stops, stop_token_ids=ids, seed=-5)
    request = Request(prompt, params)
    bias[2] = 1.0
    for values in (stops, ids, prompt):
        values.append(9)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({1: 2.0}, ("x",), (3,))
    assert request.prompt_ids == (1, 2)
    assert SamplingParams(stop="end").stop == ("end",)
    assert Request(torch.tensor([4, 5])).prompt_ids == (4, 5)


@pytest.mark.parametrize("prompt", ["text", [1.5], [None], None, 7, torch.tensor([0.5])])
def test_a_prompt_that_is_no_ids_is_one_sentence(prompt: Any) -> None:
    with pytest.raises(FlashdraftError, match=r"^the prompt is no list of token ids; .*\.$"):
        Request(prompt)
