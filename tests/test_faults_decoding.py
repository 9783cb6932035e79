"""Faults that others' speculative decoding had, each with its number in the list of reported faults:
endings inside a block, roll back, processors, logprobs, the context limit, counting.
(Text is in test_faults_text.py, laws are in test_faults_law.py and test_verify.py.)
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import test_lossless
from bed import (
    CONFIGS,
    PROMPTS,
    PuppetTarget,
    coin,
    decode,
    echo,
    make_model,
    plain_scores,
    random_network,
    random_prompt,
    saying,
    tiny_target,
    trained_network,
    with_eos,
    wrong,
)
from flashdraft import drafters
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.drafters.ngram import NGramDrafter
from flashdraft.engine import Engine
from flashdraft.sampling import gumbel_noise
from flashdraft.target import Target
from flashdraft.types import Draft, FlashdraftError, Request, Result, SamplingParams

PROMPT = [3, 4]


def scripted(kind: str, answer: Sequence[int], block_size: int, vocab: int = 96) -> Any:
    """A drafter for PROMPT whose share of right guesses is known."""
    if kind == "plain":
        return None
    if kind == "coin":
        return coin(answer, block_size, len(PROMPT), 0.6, vocab=vocab)
    return {"echo": echo, "wrong": wrong}[kind](answer, block_size, len(PROMPT))


# --- D1, D2: endings inside a block ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["echo", "coin", "wrong"])
def test_d1_end_of_text_in_each_slot_of_a_block(kind: str) -> None:
    """D1: an EOS that was accepted in the middle of a block ends the answer there, on a real model."""
    target, block_size = tiny_target(), 4
    (free,) = decode(target, None, [PROMPTS[5]], max_tokens=16, ignore_eos=True)
    draft = {"echo": echo, "coin": lambda *a: coin(*a, 0.6), "wrong": wrong}[kind]
    slots = set()
    for end, token in enumerate(free.token_ids):
        if token in free.token_ids[:end]:
            continue  # the answer ends earlier
        ending = with_eos(target, token)
        made = draft(free.token_ids, block_size, len(PROMPTS[5]))
        (result,) = decode(ending, made, [PROMPTS[5]], max_tokens=16)
        (plain,) = decode(ending, None, [PROMPTS[5]], max_tokens=16)
        assert result.token_ids == plain.token_ids == free.token_ids[: end + 1]
        assert result.finish_reason == plain.finish_reason == "stop"
        slots.add((end - 1) % block_size)
    assert slots == set(range(block_size))


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("kind", ["echo", "coin", "wrong"])
def test_d2_length_limit_and_end_of_text_in_one_block(kind: str, block_size: int) -> None:
    """D2: max_tokens 1..3B x EOS in every slot or nowhere: nothing leaks behind either, and the
    reason is that of plain decoding."""
    for end in [*range(3 * block_size), None]:
        answer = [10 + i for i in range(3 * block_size + 2)]
        if end is not None:
            answer[end] = 2
        target = PuppetTarget(saying(answer, len(PROMPT), 96), 96, eos_ids=[2])
        for max_tokens in range(1, 3 * block_size + 1):
            engine = Engine(target, scripted(kind, answer, block_size))
            (result,) = engine.run([Request(PROMPT, SamplingParams(max_tokens=max_tokens))])
            count = max_tokens if end is None else min(max_tokens, end + 1)
            reason = "length" if end is None or end >= max_tokens else "stop"
            assert (list(result.token_ids), result.finish_reason) == (answer[:count], reason)
            (plain,) = decode(target, None, [PROMPT], max_tokens=max_tokens)
            assert (result.token_ids, result.finish_reason) == (plain.token_ids, plain.finish_reason)
            assert engine.session.tokens[0] == PROMPT + answer[:count]
            assert engine.session.cache.lengths[0] == len(PROMPT) + count - 1


# --- D6: roll back ---------------------------------------------------------------------------


class CoinDFlash(DFlashDrafter):
    """The real drafter, caches and all, but its tokens are right with probability 0.7."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], target: Target, block_size: int) -> None:
        super().__init__(random_network(target), target, block_size)
        self.answers, self.rng = answers, random.Random(0)
        self.rows: dict[int, list[int]] = collections.defaultdict(list)

    def reset(self, state: Any, row: int, num_context: int, token: int) -> None:
        super().reset(state, row, num_context, token)
        self.rows[row] = [*self.rows[row][:num_context], token]

    def observe(self, state: Any, commit: Any) -> None:
        super().observe(state, commit)
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            self.rows[row] += tokens

    def propose(self, state: Any, rows: Any, samplers: Any, limits: Any) -> Draft:
        draft = super().propose(state, rows, samplers, limits)
        tokens_BN = draft.tokens_BN.clone()
        for b, row in enumerate(rows):
            size = next(n for n in range(len(self.rows[row]), 0, -1) if tuple(self.rows[row][:n]) in self.answers)
            rest = self.answers[tuple(self.rows[row][:size])][len(self.rows[row]) - size :]
            for n in range(draft.lengths_B[b]):
                tokens_BN[b, n] = rest[n] if self.rng.random() < 0.7 else (rest[n] + 1) % 96
        return dataclasses.replace(draft, tokens_BN=tokens_BN)


def test_d6_lengths_are_right_after_every_round() -> None:
    """D6: 200 prompts x random accept patterns in float64: the target's cache and the drafter's
    context hold all committed tokens but the last after every round, and the text is plain."""
    target, block_size = tiny_target(), 6
    prompts = [random_prompt(i, 3 + i % 18) for i in range(200)]
    params = {"max_tokens": 14, "ignore_eos": True}
    plain = decode(target, None, prompts, max_rows=8, **params)
    answers = {tuple(p): r.token_ids for p, r in zip(prompts, plain, strict=True)}
    made = CoinDFlash(answers, target, block_size)
    engine = Engine(target, made, max_rows=8)
    ids = [engine.submit(Request(p, SamplingParams(**params))) for p in prompts]
    results: dict[int, Result] = {}
    while engine.busy:
        results |= {d.request_id: d.result for d in engine.step() if d.result is not None}
        session = engine.session
        for row, tokens in enumerate(session.tokens):
            assert session.cache.lengths[row] == session.state.cache.lengths[row] == len(tokens) - 1
            assert session.state.anchors[row] == tokens[-1] and made.rows[row] == tokens
    assert [results[i].token_ids for i in ids] == [r.token_ids for r in plain]
    accepted = collections.Counter(r.num_accepted for result in results.values() for r in result.stats.rounds)
    assert set(accepted) == set(range(block_size)) and min(accepted.values()) > 20
    assert_context_equals_a_fresh_one(engine, made)


def assert_context_equals_a_fresh_one(engine: Engine, made: DFlashDrafter) -> None:
    """The drafter's keys and values are those of one pass over the final tokens."""
    session, target = engine.session, engine.target
    for row, tokens in enumerate(session.tokens):
        out = target.forward(torch.tensor([tokens[:-1]]), target.new_cache(1, 64), [0], layer_ids=(0, 1))
        assert out.features_BTF is not None
        with torch.inference_mode():
            context = made.network.project_context(out.features_BTF[0], torch.arange(len(tokens) - 1))
        for layer, pair in enumerate(context):
            for found, expected in zip(session.state.cache.layer(layer), pair, strict=True):
                assert torch.allclose(found[row, :, : len(tokens) - 1], expected.transpose(0, 1), rtol=0, atol=1e-9)


# --- D9, D10: processors and logprobs --------------------------------------------------------

# ids of the plain answers below, so that they matter
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "repetition, drawn": {"repetition_penalty": 0.7, "temperature": 0.9},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8, "temperature": 0.7},
    "bias": {"logit_bias": {76: -3.0, 88: 1.5}},
    "ban": {"logit_bias": {76: -float("inf"), 88: -float("inf")}, "temperature": 0.8},
    "min_tokens": {"min_tokens": 9},
    "min_tokens, drawn": {"min_tokens": 9, "temperature": 1.0},
    "top-k": {"temperature": 1.4, "top_k": 4},
    "top-p": {"temperature": 1.4, "top_p": 0.6},
    "min-p": {"temperature": 1.4, "min_p": 0.2},
    "all": {
        "temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 7,
        "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {76: -1.0},
    },
}  # fmt: skip


def decode_by_hand(target: Target, prompt: list[int], params: SamplingParams) -> list[int]:
    """Plain decoding written again: no cache, no engine, processors as plain loops."""
    answer: list[int] = []
    while len(answer) < params.max_tokens and not (answer and answer[-1] in target.eos_ids):
        tokens = torch.tensor([[*prompt, *answer]])
        logits = target.forward(tokens, target.new_cache(1, 64), [0], keep=tokens.shape[1] - 1).logits_BTV[0, 0]
        scores = plain_scores(logits.float().tolist(), prompt, answer, params, set(target.eos_ids))
        if params.temperature:
            noise = gumbel_noise(params.seed or 0, len(prompt) + len(answer), len(scores)).tolist()
            scores = [x + g for x, g in zip(scores, noise, strict=True)]
        answer.append(scores.index(max(scores)))
    return answer


@pytest.mark.parametrize("name", PROCESSORS)
def test_d9_every_processor_under_speculation(name: str) -> None:
    """D9: penalties, biases, minimum length and cuts see committed tokens and the draft before a
    slot, never rejected ones: ids equal plain decoding and a decoder written with plain loops."""
    target = with_eos(tiny_target(), 2, 25, 28, 60, 83)
    for prompt in (PROMPTS[2], PROMPTS[4]):
        params = {"max_tokens": 14, "seed": 7, **PROCESSORS[name]}
        expected = decode_by_hand(target, prompt, SamplingParams(**params))
        made = [None, NGramDrafter(5, min_ngram=1), DFlashDrafter(trained_network("llama"), target, 5)]
        made += [echo(expected, 5, len(prompt)), wrong(expected, 5, len(prompt)), coin(expected, 5, len(prompt), 0.7)]
        for drafter in made:
            (result,) = decode(target, drafter, [prompt], **params)
            assert list(result.token_ids) == expected


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_k": 7, "presence_penalty": 1.0}], ids=str)
def test_d10_logprobs_equal_plain_decoding(params: dict[str, Any], dtype: str) -> None:
    """D10: of the chosen token and of the likeliest ones, before any processing; to 1e-6
    where the target computes finely enough."""
    target, rounding = tiny_target("llama", dtype), 1e-6 if dtype == "float64" else 2e-5
    for prompt in PROMPTS[:4]:
        wanted = {"max_tokens": 20, "logprobs": 4, **params}
        (plain,) = decode(target, None, [prompt], **wanted)
        tokens = torch.tensor([[*prompt, *plain.token_ids]])
        exact = target.forward(tokens, target.new_cache(1, 64), [0]).logits_BTV[0].log_softmax(-1)[len(prompt) - 1 :]
        makers = (echo, wrong, lambda *a: coin(*a, 0.6))
        for drafter in [None, *(maker(plain.token_ids, 6, len(prompt)) for maker in makers)]:
            (result,) = decode(target, drafter, [prompt], **wanted)
            assert result.token_ids == plain.token_ids
            for t, token in enumerate(result.tokens):
                assert token.logprob == pytest.approx(float(exact[t, token.id]), abs=rounding)
                assert token.logprob == pytest.approx(plain.tokens[t].logprob, abs=rounding)
                assert [i for i, _ in token.top_logprobs] == exact[t].topk(4).indices.tolist()
                values = [value for _, value in plain.tokens[t].top_logprobs]
                assert [value for _, value in token.top_logprobs] == pytest.approx(values, abs=rounding)


# --- D11: the context limit ------------------------------------------------------------------

SHORT = 40


@pytest.mark.parametrize(("family", "params"), [("llama", {}), ("gpt2", {"temperature": 1.0, "seed": 3})])
def test_d11_prompts_near_the_context_limit(family: str, params: dict[str, Any]) -> None:
    """D11: prompts of limit - k tokens, k = 0..B + 1, alone and beside a long draft: no crash, the
    answer fills the context and ends with "length"; equal to plain decoding."""
    import transformers

    sizes = {"n_positions": SHORT, "vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4}
    config = (
        CONFIGS["llama"](max_position_embeddings=SHORT)
        if family == "llama"
        else transformers.GPT2Config(**sizes, initializer_range=0.25, bos_token_id=1, eos_token_id=2)
    )
    target, block_size = with_eos(Target(make_model(config, torch.float64))), 5
    assert target.max_context == SHORT
    with pytest.raises(FlashdraftError, match=f"^the prompt has {SHORT} tokens; this engine holds {SHORT} "):
        decode(target, None, [[5] * SHORT])
    network = random_network(target, max_context=SHORT)
    for k in range(1, block_size + 2):
        prompt = (random_prompt(k, 6) * 9)[: SHORT - k]
        wanted = {"max_tokens": 30, **params}
        (plain,) = decode(target, None, [prompt], **wanted)
        assert (len(plain.token_ids), plain.finish_reason) == (k, "length")
        padded = [*plain.token_ids, *range(5, 15)]
        made = [NGramDrafter(block_size, min_ngram=1), DFlashDrafter(network, target, block_size)]
        for drafter in [*made, echo(padded, block_size, len(prompt)), wrong(padded, block_size, len(prompt))]:
            (result,) = decode(target, drafter, [prompt], **wanted)
            assert (result.token_ids, result.finish_reason) == (plain.token_ids, "length")
        for drafter in made:
            mate = (random_prompt(99, 4) * 3)[:9]
            results = decode(target, drafter, [prompt, mate], max_rows=2, **wanted)
            assert results[0].token_ids == plain.token_ids
            assert results[1].token_ids == decode(target, None, [prompt, mate], **wanted)[1].token_ids


def test_d11_an_engine_shorter_than_its_target() -> None:
    target = tiny_target()
    for k in range(1, 8):
        prompt = PROMPTS[5][: 20 - k]
        wanted = [Request(prompt, SamplingParams(max_tokens=30, ignore_eos=True))]
        (plain,) = Engine(target, None, max_context=20).run(wanted)
        (result,) = Engine(target, NGramDrafter(6, min_ngram=1), max_context=20).run(wanted)
        assert result.token_ids == plain.token_ids and len(result.token_ids) == k
        assert result.finish_reason == "length"
    with pytest.raises(
        FlashdraftError, match=r"^the prompt has 20 tokens; this engine holds 20 .*at most 256 for tiny"
    ):
        Engine(target, None, max_context=20).submit(Request([5] * 20))


# --- D15, D20 --------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 16])
def test_d15_acceptance_length_of_echo_and_wrong(block_size: int, params: dict[str, Any]) -> None:
    """D15: tau counts committed tokens per round, the anchor's own round not: always right is
    block_size exactly, never right 1 exactly. (Limits chosen so that no round is cut.)"""
    target = tiny_target()
    wanted = {"max_tokens": 1 + 4 * block_size, "ignore_eos": True, **params}
    (plain,) = decode(target, None, [PROMPTS[2]], **wanted)
    assert plain.stats.acceptance_length == 1
    (right,) = decode(target, echo(plain.token_ids, block_size, len(PROMPTS[2])), [PROMPTS[2]], **wanted)
    (never,) = decode(target, wrong(plain.token_ids, block_size, len(PROMPTS[2])), [PROMPTS[2]], **wanted)
    assert right.token_ids == never.token_ids == plain.token_ids
    assert right.stats.acceptance_length == block_size and len(right.stats.rounds) == 4
    assert never.stats.acceptance_length == 1 and len(never.stats.rounds) == 4 * block_size
    assert all(r.num_accepted == r.num_drafted == block_size - 1 for r in right.stats.rounds)
    assert all(r.num_accepted == 0 for r in never.stats.rounds)


def test_d20_every_drafter_is_in_the_losslessness_test() -> None:
    """D20: a speculative path nobody compares with plain decoding breaks unseen."""
    assert {name.split("-")[0] for name in test_lossless.DRAFTERS} == set(drafters.DRAFTERS)
