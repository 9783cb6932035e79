"""How answers end, what is refused, and targets that give nothing to choose from."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from bed import PROMPTS, VOCAB, PuppetTarget, byte_ids, byte_tokenizer, coin, decode, echo, saying, tiny_target
from flashdraft.drafters.ngram import NGramDrafter
from flashdraft.engine import Engine
from flashdraft.types import FlashdraftError
from test_engine import DRAFTERS, MIXED, alone, make, new_engine, request


def test_ignore_eos_and_stop_ids() -> None:
    target = tiny_target()
    (plain,) = decode(target, None, [PROMPTS[0]], max_tokens=20, ignore_eos=True)
    assert plain.finish_reason == "length" and len(plain.token_ids) == 20
    stop = plain.token_ids[5]
    first = plain.token_ids.index(stop)
    for params in ({"stop_token_ids": [stop]}, {"stop_token_ids": (stop, 0), "ignore_eos": True}):
        (result,) = decode(target, make("dflash"), [PROMPTS[0]], max_tokens=20, **params)
        assert (result.token_ids, result.finish_reason) == (plain.token_ids[: first + 1], "stop")


def test_a_drawn_seed_is_reported_and_reproduces() -> None:
    engine = new_engine()
    results = [engine.run([request(PROMPTS[0], temperature=1.5, seed=None)])[0] for _ in range(3)]
    assert len({r.seed for r in results}) == 3
    for result in results:
        again = alone("none", request(PROMPTS[0], temperature=1.5, seed=result.seed))
        assert again.token_ids == result.token_ids


def test_stats_of_a_request() -> None:
    (result,) = decode(tiny_target(), make("ngram"), [PROMPTS[3]], max_tokens=16, ignore_eos=True)
    stats = result.stats
    assert (stats.num_prompt_tokens, stats.num_reused_tokens) == (len(PROMPTS[3]), 0)
    assert sum(r.num_committed for r in stats.rounds) == 15  # and one from the prefill
    assert stats.acceptance_length == 15 / len(stats.rounds)
    assert stats.decode_seconds >= stats.draft_seconds + stats.verify_seconds > 0
    assert stats.rest_seconds >= 0 and stats.prefill_seconds > 0
    one = decode(tiny_target(), None, [PROMPTS[3]], max_tokens=1)[0]
    assert one.stats.rounds == () and math.isnan(one.stats.acceptance_length)


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], {}, r"the prompt is empty; expected at least one token\."),
        ([1, VOCAB], {}, rf"token ids outside the target's vocabulary of {VOCAB}\."),
        ([-1], {}, rf"token ids outside the target's vocabulary of {VOCAB}\."),
        ([5] * 256, {}, r"the prompt has 256 tokens; this engine holds 256 with the answer\. Shorten it"),
        ([5], {"logit_bias": {VOCAB: 1.0}}, r"logit_bias or stop_token_ids name ids outside the vocabulary"),
        ([5], {"stop_token_ids": [VOCAB]}, r"logit_bias or stop_token_ids name ids outside the vocabulary"),
        ([5], {"stop": "x"}, r"stop strings need a tokenizer"),
        ([5], {"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)}, r"leave no token to choose"),
        (
            [5],
            {"logit_bias": {i: -math.inf for i in range(VOCAB) if i != 2}, "min_tokens": 1},
            r"leave no token to choose",
        ),
    ],
)
def test_what_cannot_run_is_one_sentence(prompt: list[int], params: dict[str, Any], sentence: str) -> None:
    engine = new_engine()
    with pytest.raises(FlashdraftError, match=sentence):
        engine.submit(request(prompt, **params))
    assert not engine.busy


@pytest.mark.parametrize("bad", [{"max_rows": 0}, {"max_context": 0}, {"prefill_chunk": -1}, {"max_context": 257}])
def test_bad_engine_settings_are_one_sentence(bad: dict[str, int]) -> None:
    (name,) = bad
    with pytest.raises(FlashdraftError, match=rf"^{name} is {bad[name]}; .*\.$"):
        new_engine(**bad)


def test_all_but_one_token_banned() -> None:
    only = {i: -math.inf for i in range(VOCAB) if i != 7}
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "acceptance": "rejection"}):
        for name in DRAFTERS:
            result = alone(name, request(PROMPTS[0], logit_bias=only, max_tokens=9, **params))
            assert result.token_ids == (7,) * 9


NO_CHOICE = r"^puppet gives logits from which no token can be chosen \(nan, or all of them infinite\); .*\.$"


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "acceptance": "rejection"}, {"presence_penalty": 0.1}]
)
def test_logits_without_a_choice_are_said(value: float, params: dict[str, Any]) -> None:
    """An overflow in half precision used to come out as text: token 0, or whatever argmax makes of nan."""
    law = saying([4, 5, 6, 4, 5, 6], 2, 8)
    for length in (2, 4):  # in the prefill, and in a round
        target = PuppetTarget(lambda p, n=length: law(p) if len(p) < n else torch.full((8,), value), 8)
        engine = Engine(target, NGramDrafter(4, min_ngram=1))
        with pytest.raises(FlashdraftError, match=NO_CHOICE):
            engine.run([request([4, 5], **params)])
        assert not engine.busy


def test_a_slot_that_was_refused_may_hold_anything() -> None:
    """Only what counts is looked at: behind a wrong token the target may well overflow."""
    answer = [4, 5, 6, 7, 4, 5]
    law = saying(answer, 2, 9)

    def fragile(prefix: tuple[int, ...]) -> torch.Tensor:
        done = prefix[2:]
        return law(prefix) if list(done) == answer[: len(done)] else torch.full((9,), math.nan)

    for params in ({}, {"temperature": 0.01}, {"temperature": 0.01, "acceptance": "rejection"}):
        target = PuppetTarget(fragile, 9)
        (result,) = decode(target, coin(answer, 4, 2, 0.5, vocab=9), [[1, 2]], max_tokens=6, **params)
        assert list(result.token_ids) == answer


def test_one_token_in_the_vocabulary() -> None:
    target = PuppetTarget(lambda prefix: [0.5], 1)
    for params in ({}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}, {"temperature": 1.0, "acceptance": "rejection"}):
        for drafter in (None, NGramDrafter(4, min_ngram=1)):
            (result,) = decode(target, drafter, [[0, 0, 0]], max_tokens=7, logprobs=5, **params)
            assert result.token_ids == (0,) * 7 and result.tokens[0].top_logprobs == ((0, 0.0),)


def test_text_of_an_answer() -> None:
    tokenizer = byte_tokenizer()
    said = byte_ids("héllo €!")
    target = PuppetTarget(saying([*said, 2], 3, 262), 262, tokenizer=tokenizer, eos_ids=[2])
    prompt = byte_ids("abc")
    (result,) = decode(target, echo([*said, 2], 4, 3), [prompt], max_tokens=40)
    assert (result.text, result.finish_reason) == ("héllo €!", "stop")
    assert result.token_ids == (*said, 2)
    assert "".join(t.text for t in result.tokens) == result.text


def test_frozen_values() -> None:
    """What crosses module borders cannot be changed afterwards."""
    result = alone("none", MIXED[0])
    for value, name in ((result, "text"), (result.stats, "rounds"), (result.tokens[0], "id"), (MIXED[0], "params")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)
