"""The engine: who runs when never changes what is said; prefix reuse, streams, cancelling, failures."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from bed import PROMPTS, random_prompt, repetitive_prompt, tiny_target, trained_network
from flashdraft.drafters import NoDrafter
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.drafters.ngram import NGramDrafter
from flashdraft.engine import Engine
from flashdraft.types import Delta, FlashdraftError, Request, Result, SamplingParams

DRAFTERS = ("none", "ngram", "dflash")


def make(name: str, block_size: int = 6) -> Any:
    if name == "dflash":
        return DFlashDrafter(trained_network("llama"), tiny_target(), block_size)
    return NGramDrafter(block_size, min_ngram=1) if name == "ngram" else NoDrafter()


def new_engine(name: str = "ngram", **kwargs: Any) -> Engine:
    return Engine(tiny_target(), make(name), **kwargs)


def request(prompt: Sequence[int], **params: Any) -> Request:
    return Request(prompt, SamplingParams(**{"max_tokens": 16, "seed": 1, **params}))


def alone(name: str, wanted: Request) -> Result:
    return new_engine(name).run([wanted])[0]


@functools.cache
def alone_mixed(name: str) -> list[tuple[Any, ...]]:
    return [essence(alone(name, wanted)) for wanted in MIXED]


def essence(result: Result) -> tuple[Any, ...]:
    """All of a result that may not depend on its company."""
    rounds = tuple((r.num_drafted, r.num_accepted, r.num_committed) for r in result.stats.rounds)
    return result.token_ids, result.finish_reason, result.seed, rounds


MIXED = [
    request(PROMPTS[0]),
    request(PROMPTS[3], temperature=0.8, seed=5),
    request(PROMPTS[1], temperature=1.2, seed=6, acceptance="rejection", max_tokens=23),
    request(PROMPTS[4], max_tokens=1),
    request(PROMPTS[4], max_tokens=2),
    request(PROMPTS[2], temperature=1.0, top_k=5, presence_penalty=0.5, min_tokens=8, max_tokens=9),
    request(PROMPTS[5], repetition_penalty=1.3, logit_bias={5: 2.0, 76: -math.inf}, max_tokens=30),
    request(PROMPTS[3], temperature=0.8, seed=5, top_p=0.9, min_p=0.05, ignore_eos=True),
]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("max_rows", [2, 8])
def test_different_requests_in_one_batch_each_equal_alone(name: str, max_rows: int) -> None:
    """D8: parameters, limits and rounds are a row's own: tokens, and what was drafted and accepted,
    do not depend on batch mates. More requests than rows wait their turn."""
    expected = alone_mixed(name)
    for seed in range(2):
        order = random.Random(seed).sample(range(len(MIXED)), len(MIXED))
        results = new_engine(name, max_rows=max_rows).run([MIXED[i] for i in order])
        assert [essence(r) for r in results] == [expected[i] for i in order]


@pytest.mark.parametrize("name", DRAFTERS)
def test_requests_that_join_and_leave_at_any_time(name: str) -> None:
    """Rows join between rounds, and some are cancelled; the others say what they say alone."""
    expected = alone_mixed(name)
    for seed in range(2):
        rng = random.Random(seed)
        engine = new_engine(name, max_rows=3)
        ids: dict[int, int] = {}
        found: dict[int, Result] = {}
        queue = rng.sample(range(len(MIXED)), len(MIXED))
        while queue or engine.busy:
            while queue and rng.random() < 0.4:
                i = queue.pop()
                ids[engine.submit(MIXED[i])] = i
            deltas = []
            if rng.random() < 0.1:  # a stranger comes and is sent away
                stranger = engine.submit(request(random_prompt(9), max_tokens=50))
                deltas = engine.step()
                engine.cancel(stranger)
            for delta in deltas + engine.step():
                if delta.result is not None and delta.request_id in ids:
                    found[ids[delta.request_id]] = delta.result
        assert [essence(found[i]) for i in range(len(MIXED))] == expected


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_a_prompt_in_pieces_is_the_same_prompt(name: str, chunk: int) -> None:
    for wanted, expected in zip(MIXED[:3], alone_mixed(name), strict=False):
        assert essence(new_engine(name, prefill_chunk=chunk).run([wanted])[0]) == expected


# --- prefix reuse ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "coupled"])
def test_the_next_turn_goes_on_from_the_cache(name: str, params: dict[str, Any]) -> None:
    """Reuse changes neither tokens nor acceptance, and says how much it reused."""
    engine = new_engine(name)
    prompt = list(PROMPTS[3])
    known = 0
    for turn in range(4):
        result = engine.run([request(prompt, **params)])[0]
        assert essence(result) == essence(alone(name, request(prompt, **params)))
        assert result.stats.num_reused_tokens == known
        known = len(prompt) + len(result.token_ids) - 1  # all but the last one are in the cache
        prompt = [*prompt, *result.token_ids, *random_prompt(turn, 5)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_reuse_ends_where_the_prompts_part(name: str) -> None:
    base = repetitive_prompt(1, 20)
    others = {
        "the same": (base, 19),
        "shorter": (base[:8], 7),
        "another end": ([*base[:11], 90, 91, 92, 93], 11),
        "nothing": ([95, *base], 0),
    }
    for prompt, reused in others.values():
        engine = new_engine(name)
        first = engine.run([request(base)])[0]
        result = engine.run([request(prompt)])[0]
        assert result.stats.num_reused_tokens == reused
        assert essence(result) == essence(alone(name, request(prompt)))
        # and back: the row is now the other prompt's
        again = engine.run([request(base)])[0]
        assert essence(again) == essence(first)


def test_reuse_can_be_switched_off_and_picks_the_row_that_shares_most() -> None:
    prompts = [random_prompt(i, 10) for i in range(3)]
    engine = new_engine(max_rows=3)
    engine.run([request(p) for p in prompts])
    for prompt in reversed(prompts):
        assert engine.run([request(prompt)])[0].stats.num_reused_tokens == 9
    off = new_engine(reuse_prefix=False)
    assert [off.run([request(prompts[0])])[0].stats.num_reused_tokens for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_cancelled_answer_is_a_prefix_like_any_other(name: str) -> None:
    engine = new_engine(name)
    wanted = request(PROMPTS[3], max_tokens=40, ignore_eos=True)
    said: list[int] = []
    for delta in engine.stream(wanted):
        said += [token.id for token in delta.tokens]
        if len(said) > 6:
            break
    assert not engine.busy
    prompt = [*PROMPTS[3], *said, 7]
    result = engine.run([request(prompt)])[0]
    assert result.stats.num_reused_tokens >= len(PROMPTS[3])
    assert essence(result) == essence(alone(name, request(prompt)))


# --- streams, cancelling, failures -----------------------------------------------------------


def test_an_idle_engine_does_nothing() -> None:
    engine = new_engine()
    assert not engine.busy and engine.step() == []
    engine.cancel(0)
    assert engine.run([]) == []


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_stream_adds_up_to_the_result(name: str) -> None:
    deltas = list(new_engine(name).stream(MIXED[1]))
    result = deltas[-1].result
    assert result is not None and all(d.result is None for d in deltas[:-1])
    assert [t for d in deltas for t in d.tokens] == list(result.tokens)
    assert [t.id for t in result.tokens] == list(result.token_ids)
    assert essence(result) == essence(alone(name, MIXED[1]))
    origins = [[t.origin for t in d.tokens] for d in deltas]
    assert origins[0] == ["prefill"]
    assert all(o[-1] in ("bonus", "draft") and set(o[:-1]) <= {"draft"} for o in origins[1:])
    assert [r.num_committed for r in result.stats.rounds] == [len(o) for o in origins[1:]]


def test_several_streams_share_an_engine() -> None:
    """Deltas of one stream used to be lost in the steps of another, which then waited for ever."""
    engine = new_engine(max_rows=2)
    submitted = engine.submit(MIXED[0])
    streams = [engine.stream(wanted) for wanted in MIXED[1:4]]
    found: list[list[Delta]] = [[] for _ in streams]
    live = set(range(len(streams)))
    while live:
        for i in sorted(live):
            delta = next(streams[i], None)
            if delta is None:
                live.discard(i)
            else:
                found[i].append(delta)
    for deltas, wanted in zip(found, MIXED[1:4], strict=True):
        assert deltas[-1].result is not None
        assert essence(deltas[-1].result) == essence(alone("ngram", wanted))
        assert [t for d in deltas for t in d.tokens] == list(deltas[-1].result.tokens)
    rest = []
    while engine.busy:
        rest += engine.step()
    assert {d.request_id for d in rest} == {submitted}
    assert rest[-1].result is not None and essence(rest[-1].result) == essence(alone("ngram", MIXED[0]))


def test_a_request_cancelled_inside_its_stream_ends_it() -> None:
    engine = new_engine()
    deltas = []
    for delta in engine.stream(request(PROMPTS[0], max_tokens=50, ignore_eos=True)):
        deltas.append(delta)
        engine.cancel(delta.request_id)
    assert len(deltas) <= 2 and not engine.busy  # a prefill and the round of the same step


def test_a_waiting_request_can_be_cancelled() -> None:
    engine = new_engine()
    first, second = engine.submit(MIXED[0]), engine.submit(MIXED[1])
    engine.cancel(second)
    seen = set()
    while engine.busy:
        seen |= {d.request_id for d in engine.step()}
    assert seen == {first}


def test_one_bad_request_of_many_leaves_nothing_behind() -> None:
    engine = new_engine()
    with pytest.raises(FlashdraftError, match="empty"):
        engine.run([MIXED[0], request([])])
    assert not engine.busy


class CtrlC(BaseException):
    """Like KeyboardInterrupt, which pytest keeps for itself."""


class Failing(NGramDrafter):
    """Breaks off in its n-th call of a method."""

    def __init__(self, method: str, calls: int) -> None:
        super().__init__(6, min_ngram=1)
        self.method, self.calls = method, calls

    def _count(self, method: str) -> None:
        if method == self.method:
            self.calls -= 1
            if self.calls == 0:
                raise CtrlC

    def reset(self, *args: Any) -> None:
        self._count("reset")
        super().reset(*args)

    def observe(self, *args: Any) -> None:
        self._count("observe")
        super().observe(*args)

    def propose(self, *args: Any) -> Any:
        self._count("propose")
        return super().propose(*args)


@pytest.mark.parametrize(("method", "calls"), [("reset", 2), ("observe", 3), ("observe", 9), ("propose", 2)])
def test_ctrl_c_anywhere_leaves_an_engine_that_works(method: str, calls: int) -> None:
    """A prefill that was broken off used to keep its row for ever; half a commit used to be reused."""
    wanted = [request(PROMPTS[i], max_tokens=12, ignore_eos=True) for i in (3, 4, 5)]
    engine = Engine(tiny_target(), Failing(method, calls), max_rows=2, prefill_chunk=8)
    with pytest.raises(CtrlC):
        engine.run(wanted)
    assert not engine.busy
    for result, request_ in zip(engine.run(wanted), wanted, strict=True):
        assert essence(result) == essence(alone("ngram", request_))


def test_a_stream_whose_round_failed_elsewhere_says_so() -> None:
    engine = Engine(tiny_target(), Failing("propose", 3), max_rows=2)
    first, second = (engine.stream(request(PROMPTS[i], ignore_eos=True)) for i in (3, 4))
    next(first)
    next(second)
    with pytest.raises(CtrlC):
        list(first)
    with pytest.raises(FlashdraftError, match="failed or was interrupted; submit it again"):
        list(second)
