"""The arithmetic of speculation: formulas against simulation and by hand, predictions against known costs."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdraft.evaluation import planner
from flashdraft.evaluation.planner import CostPoint, CostTable, RoundCost, Trial, survival
from flashdraft.evaluation.predictions import Way, arm_ways, plans, trials
from flashdraft.evaluation.records import PLAIN, Cell, Record, Recorded

SHARES = st.floats(0, 1)
TIMES = st.floats(0.01, 100)


# -- formulas ----------------------------------------------------------------------------------


def test_by_hand() -> None:
    assert planner.iid_tokens(0.5, 3) == 1.875 and planner.iid_tokens(1.0, 7) == 8 and planner.iid_tokens(0, 5) == 1
    assert planner.autoregressive_speedup(0.5, 3, 0.1) == pytest.approx(1.875 / 1.3)
    assert planner.one_pass_speedup(0.5, 3, 0.1) == pytest.approx(1.875 / 1.1)
    assert planner.autoregressive_speedup(0.9, 0, 0.5) == planner.one_pass_speedup(0.9, 0, 0.5) == 1
    assert planner.expected_tokens((0.75, 0.5, 0.125), 4) == 2.375
    assert planner.expected_tokens((0.75, 0.5, 0.125), 1) == 1
    # (1 - a^(g+1)) / (1 - a), as the paper writes it
    assert planner.iid_tokens(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))


@pytest.mark.parametrize(("alpha", "drafted"), [(0.3, 4), (0.8, 7), (0.95, 15)])
def test_formulas_against_simulation(alpha: float, drafted: int) -> None:
    """Seeded: rounds are played token by token, a draft pass takes 0.2 and the target's 1."""
    draw = random.Random(7)
    rounds, tokens = 20000, 0
    for _ in range(rounds):
        tokens += 1
        for _ in range(drafted):
            if draw.random() >= alpha:
                break
            tokens += 1
    assert planner.iid_tokens(alpha, drafted) == pytest.approx(tokens / rounds, rel=0.02)
    seconds = rounds * (1 + 0.2 * drafted)
    assert planner.autoregressive_speedup(alpha, drafted, 0.2) == pytest.approx(tokens / seconds, rel=0.02)
    assert planner.one_pass_speedup(alpha, drafted, 0.2) == pytest.approx(tokens / (rounds * 1.2), rel=0.02)


def test_survival_against_simulation() -> None:
    """Slots of different difficulty, endings at random: joint counts give the tokens a round makes, and
    those of a block cut shorter."""
    draw = random.Random(3)
    chances = (0.9, 0.7, 0.8, 0.4)

    def accepted(width: int) -> int:
        kept = 0
        while kept < width and draw.random() < chances[kept]:
            kept += 1
        return kept

    told = []
    for _ in range(20000):
        limit = 4 if draw.random() < 0.8 else draw.randrange(4)
        told.append(Trial(accepted(limit), limit))
    survived = survival(told, 4)
    assert survived == pytest.approx([0.9, 0.63, 0.504, 0.2016], abs=0.015)
    for block in (2, 3, 5):
        played = sum(1 + accepted(block - 1) for _ in range(20000)) / 20000
        assert planner.expected_tokens(survived, block) == pytest.approx(played, rel=0.02)


def test_rounds_that_say_nothing_are_not_counted() -> None:
    told = [Trial(3, 3), Trial(0, 3), Trial(1, 1), Trial(2, 3, cut=True)]
    # slot 1: kept 3 of 4; slot 2: of the three with room, two; slot 3: the cut round is unknown
    assert survival(told, 3) == (3 / 4, 2 / 3, 1 / 2)
    assert survival([], 2) == (0, 0)
    # a drafter that found nothing to propose kept nothing: prompt lookup
    assert survival([Trial(0, 3), Trial(3, 3)], 3) == (0.5, 0.5, 0.5)


@settings(max_examples=60, deadline=None)
@given(SHARES, st.integers(0, 20), TIMES)
def test_formulas_are_monotone(alpha: float, drafted: int, cost: float) -> None:
    assert 1 <= planner.iid_tokens(alpha, drafted) <= planner.iid_tokens(alpha, drafted + 1) <= drafted + 2
    assert planner.iid_tokens(alpha, drafted) <= planner.iid_tokens((1 + alpha) / 2, drafted)
    assert planner.autoregressive_speedup(alpha, drafted, cost) >= planner.autoregressive_speedup(
        alpha, drafted, 2 * cost
    )
    # one pass is never slower than as many passes as tokens, and its speedup never falls with the block
    one = planner.one_pass_speedup(alpha, drafted + 1, cost)
    assert one >= planner.autoregressive_speedup(alpha, drafted + 1, cost) - 1e-12
    assert planner.one_pass_speedup(alpha, drafted + 2, cost) >= one
    tokens = planner.iid_tokens(alpha, drafted + 1)
    assert planner.iid_tokens(planner.iid_alpha(tokens, drafted + 1), drafted + 1) == pytest.approx(tokens)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=30))
def test_survival_never_rises(counts: list[tuple[int, int, bool]]) -> None:
    survived = survival([Trial(min(a, limit), limit, cut) for a, limit, cut in counts], 6)
    assert all(1 >= a >= b >= 0 for a, b in itertools.pairwise(survived))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SHARES, min_size=1, max_size=8).map(lambda x: sorted(x, reverse=True)), TIMES, TIMES, TIMES, st.booleans()
)
def test_speedup_falls_with_every_price(
    survived: list[float], plain: float, draft: float, verify: float, one_pass: bool
) -> None:
    def speeds(draft: float, verify: float) -> list[float]:
        points = [cost(PLAIN, 1, 0, plain, 0), cost("x", len(survived) + 1, draft, plain + verify, 0)]
        return [f.speedup for f in planner.forecasts(survived, CostTable(tuple(points)), "x", one_pass=one_pass)]

    base = speeds(draft, verify)
    assert len(base) == len(survived)
    for dearer in (speeds(2 * draft, verify), speeds(draft, 2 * verify)):
        assert all(a >= b for a, b in zip(base, dearer, strict=True))


# -- cost tables -------------------------------------------------------------------------------


def cost(
    arm: str, block: int, draft: float, verify: float, rest: float, context: float = 0, rows: int = 1
) -> CostPoint:
    return CostPoint(arm, block, context, rows, RoundCost(draft, verify, rest))


def test_between_measured_blocks_and_contexts() -> None:
    table = CostTable(
        (
            cost(PLAIN, 1, 0, 10, 1, 100), cost(PLAIN, 1, 0, 20, 1, 300),
            cost("x", 5, 4, 18, 2, 100), cost("x", 9, 8, 26, 2, 100),
        )
    )  # fmt: skip
    assert table.plain(200, 1) == RoundCost(0, 15, 1) and table.plain(900, 1) == RoundCost(0, 20, 1)
    assert table.cost("x", 7, 100, 1) == RoundCost(6, 22, 2)
    assert table.cost("x", 3, 100, 1) == RoundCost(4, 14, 1.5)  # one pass: no cheaper for being shorter
    assert table.cost("x", 3, 100, 1, one_pass=False) == RoundCost(2, 14, 1.5)
    assert table.cost("x", 10, 100, 1) is None and table.cost("x", 5, 100, 2) is None
    assert table.cost("y", 5, 100, 1) is None and table.cost("x", 1, 100, 1) == table.plain(100, 1)
    assert planner.forecasts((0.5,), table, "x", rows=4) == []


def test_the_best_block_and_when_plain_decoding_is_better() -> None:
    """By hand: one more slot costs 1 ms of 10; it pays while its survival is worth more than its time."""
    points = [cost(PLAIN, 1, 0, 10, 0), cost("x", 5, 2, 14, 0)]
    found = planner.forecasts((0.8, 0.5, 0.2, 0.05), CostTable(tuple(points)), "x")
    assert [f.cost.total for f in found] == [13, 14, 15, 16]
    assert [f.speedup for f in found] == pytest.approx([18 / 13, 23 / 14, 25 / 15, 25.5 / 16])
    top = planner.best(found)
    assert top is not None and top.block_size == 4 and "Take a block of 4: 2.50 tokens" in planner.advice(found)
    assert "Take a tree of 3 nodes: 2.50 tokens" in planner.advice(found, tree=True)
    found = planner.forecasts((0.1, 0.05, 0, 0), CostTable(tuple(points)), "x")
    assert planner.best(found) is None and "Plain decoding is better" in planner.advice(found)
    found = planner.forecasts((0.31, 0, 0, 0), CostTable(tuple(points)), "x")
    assert "Hardly worth it" in planner.advice(found) and "No prediction" in planner.advice([])
    assert planner.break_even(RoundCost(2, 14, 0), RoundCost(0, 10, 0)) == 1.6


# -- from records ------------------------------------------------------------------------------


def rounds_of(counts: Sequence[int], block: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((block - 1, kept, kept + 1) for kept in counts)


def record(arm: str, block: int, prompt: int, rounds: Any, ms: tuple[float, float, float], **changes: Any) -> Record:
    tokens = 1 + sum(committed for _, _, committed in rounds)
    n = len(rounds) / 1e3
    values: dict[str, Any] = {
        "cell": Cell(arm, block, 0.0, 1), "task": "a", "prompt": str(prompt), "group": prompt, "group_size": 1,
        "repeat": 0, "num_prompt_tokens": 10, "num_tokens": tokens, "ids_sha256": "x", "finish_reason": "stop",
        "rounds": tuple(rounds), "prefill_seconds": 0.1, "draft_seconds": n * ms[0], "verify_seconds": n * ms[1],
        "decode_seconds": n * sum(ms), "peak_mb": 1.0, "load": 0.0,
    }  # fmt: skip
    return Record(**(values | changes))


HEADER = {
    "settings": {
        "target": "t", "max_tokens": 1000, "repeats": 1,
        "drafters": [{"draft": "d", "name": "x", "block_sizes": [3, 5]}, {"drafter": "draft_model", "draft": "m"}],
    },
    "environment": {"dtype": "float32", "threads": 1, "device": "a CPU", "torch": "2", "flashdraft": "0"},
}  # fmt: skip


def known_model(prompts: int = 6, seed: int = 1) -> list[Record]:
    """Times of a known cost model: plain 10 + 1; block b: draft 2 (one pass) or 0.5 (b - 1), verify
    10 + 0.4 (b - 1), rest 1. A draft of a smaller block keeps what the larger one kept, cut."""
    draw = random.Random(seed)
    found = []
    for prompt in range(prompts):
        kept = [min(draw.randrange(7), 4) for _ in range(40)]
        plain = ((0, 0, 1),) * sum(k + 1 for k in kept)
        found.append(record(PLAIN, 0, prompt, plain, (0.0, 10.0, 1.0)))
        for block in (3, 5):
            cut = rounds_of([min(k, block - 1) for k in kept], block)
            found.append(record("x", block, prompt, cut, (2.0, 10 + 0.4 * (block - 1), 1.0)))
        cut = rounds_of(kept, 5)
        found.append(record("draft_model", 5, prompt, cut, (2.0, 11.6, 1.0)))
    return found


def test_a_known_cost_model_is_predicted_exactly() -> None:
    recorded = Recorded(HEADER, tuple(known_model()))
    model, x = plans(recorded)
    assert [line.forecast.block_size for line in x.lines] == [2, 3, 4, 5]
    assert [line.measured is not None for line in x.lines] == [False, True, False, True]
    for line in x.lines:
        assert line.forecast.cost.total == pytest.approx(13 + 0.4 * (line.forecast.block_size - 1))
        assert not line.why
        if line.measured is not None:
            assert line.forecast.tokens == pytest.approx(line.measured.tau.value)
            assert line.deviation == pytest.approx(0, abs=1e-4)
    assert not model.way.one_pass
    assert [line.forecast.cost.draft for line in model.lines] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert model.lines[-1].deviation == pytest.approx(0, abs=1e-4)
    assert planner.iid_tokens(x.alpha, 4) == pytest.approx(x.lines[-1].forecast.tokens)
    assert x.draft_cost == pytest.approx(2 / 11)


def test_a_cost_table_takes_the_place_of_the_records_times() -> None:
    table = CostTable((cost(PLAIN, 1, 0, 20, 2), cost("x", 5, 4, 23.2, 2)))
    recorded = Recorded(HEADER, tuple(known_model()))
    found = plans(recorded, table)
    assert [p.arm for p in found] == ["x"]  # nothing is known of the other one's price
    assert all(math.isnan(line.deviation) or abs(line.deviation) < 1e-3 for line in found[0].lines)
    dearer = CostTable((cost(PLAIN, 1, 0, 20, 2), cost("x", 5, 30, 23.2, 2)))
    line = plans(recorded, dearer)[0].lines[-1]
    assert line.deviation < -0.4 and line.why.startswith("a round was to take 55.2 ms and took 14.6")


def test_a_wrong_prediction_says_why() -> None:
    """The larger block's drafts are worse than the smaller one's: cutting it expects too little."""
    records = known_model()
    worse = [
        record("x", 5, int(r.prompt), rounds_of([0] * len(r.rounds), 5), (2.0, 11.6, 1.0))
        if r.cell == Cell("x", 5, 0.0, 1) else r
        for r in records
    ]  # fmt: skip
    found = next(p for p in plans(Recorded(HEADER, tuple(worse))) if p.arm == "x")
    by_block = {line.forecast.block_size: line for line in found.lines}
    assert by_block[3].why.startswith("1.00 tokens a round were expected") and not by_block[5].why
    assert "Plain decoding is better" in found.advice


def test_ends_of_answers_do_not_count_against_a_drafter() -> None:
    """Near max_tokens a draft has no room: those rounds say nothing about later slots."""
    one = record("x", 5, 0, ((4, 4, 5), (3, 3, 4)), (1, 1, 1))
    assert survival(trials([one], 5, max_tokens=10), 4) == (1, 1, 1, 1)
    stopped = record("x", 5, 0, ((4, 4, 5), (4, 2, 2)), (1, 1, 1))  # the last token ended it: a drafted one
    assert survival(trials([stopped], 5, max_tokens=50), 4) == (1, 1, 1, 1)
    # prompt lookup that finds nothing has room, and keeps nothing
    idle = record("x", 5, 0, ((4, 4, 5), (0, 0, 1)), (1, 1, 1))
    assert survival(trials([idle], 5, max_tokens=50), 4) == (0.5,) * 4
    assert survival(trials([idle], 5), 4) == (1,) * 4  # not known how much room there was


def test_how_arms_draft() -> None:
    assert arm_ways(HEADER) == {"x": Way(), "draft_model": Way(one_pass=False)}
    noted = HEADER | {"arms": {"x": {"method": "eagle3", "tree": True}}}
    assert arm_ways(noted)["x"] == Way(one_pass=False, tree=True)


def test_a_tree_is_not_cut() -> None:
    header = HEADER | {"arms": {"x": {"method": "medusa", "tree": True}}}
    found = next(p for p in plans(Recorded(header, tuple(known_model()))) if p.arm == "x")
    assert [line.forecast.block_size for line in found.lines] == [3, 5]
