"""What the arithmetic predicts for a benchmark's cells, beside what was measured.

Survival is that of an arm's largest measured block; smaller ones are that block, cut. Times come from a
cost table, or from the same records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .planner import CostPoint, CostTable, Forecast, RoundCost, Trial, advice, forecasts, iid_alpha, survival
from .records import PLAIN, Record, Recorded
from .summary import Summary, summarise

# Beyond this share the report says why.
NEAR = 0.10
# Methods whose draft takes a pass for every token (of a path).
_PASS_PER_TOKEN = ("draft_model", "eagle3")


@dataclass(frozen=True)
class Way:
    """How an arm drafts, as far as its price goes. one_pass: the whole block at once."""

    one_pass: bool = True
    tree: bool = False


@dataclass(frozen=True)
class Compared:
    """A forecast, and the cell that was measured with this block, if any."""

    forecast: Forecast
    measured: Summary | None
    why: str = ""

    @property
    def deviation(self) -> float:
        """Predicted over measured speedup, minus 1; nan without a measurement."""
        ratio = self.measured.ratio if self.measured is not None else None
        return self.forecast.speedup / ratio.value - 1 if ratio is not None else math.nan


@dataclass(frozen=True)
class Plan:
    """The forecasts of an arm on one domain, at one temperature and batch size.

    alpha: the constant chance of acceptance that would give the largest block's tokens; the classical
    formulas are drawn with it. draft_cost: the draft of the largest block over a plain round.
    """

    arm: str
    task: str
    temperature: float
    rows: int
    context: float
    way: Way
    survived: tuple[float, ...]
    lines: tuple[Compared, ...]
    alpha: float
    draft_cost: float

    @property
    def advice(self) -> str:
        return advice([line.forecast for line in self.lines])


def plans(recorded: Recorded, costs: CostTable | None = None) -> list[Plan]:
    """One for every arm, domain, temperature and batch size of a file, where plain decoding was timed too."""
    summaries = summarise(recorded.records)
    ways = arm_ways(recorded.header)
    settings = recorded.header.get("settings", {})
    keys = sorted({(s.cell.temperature, s.cell.rows, s.cell.arm, s.task) for s in summaries if s.cell.arm != PLAIN})
    found = []
    for temperature, rows, arm, task in keys:
        own = {
            s.cell.block_size: s
            for s in summaries
            if (s.cell.arm, s.cell.temperature, s.cell.rows, s.task) == (arm, temperature, rows, task)
        }
        records = [r for r in recorded.records if r.cell == own[max(own)].cell and r.task == task]
        table = costs or record_costs(summaries, task, temperature)
        plan = _plan(arm, task, own, records, table, ways.get(arm, Way()), settings.get("max_tokens"))
        found += [plan] if plan is not None else []
    return found


def _plan(
    arm: str,
    task: str,
    own: Mapping[int, Summary],
    records: Sequence[Record],
    table: CostTable,
    way: Way,
    max_tokens: int | None,
) -> Plan | None:
    largest = max(own)
    cell = own[largest].cell
    if largest < 2:
        return None
    survived = survival(trials(records, largest, max_tokens), largest - 1)
    context = mean_context(records)
    # a tree cut to fewer nodes is another tree: only what was measured is predicted
    blocks = sorted(own) if way.tree else None
    made = forecasts(survived, table, arm, context, cell.rows, way.one_pass, blocks)
    plain = table.plain(context, cell.rows)
    if not made or plain is None:
        return None
    lines = [_compared(forecast, own.get(forecast.block_size), plain) for forecast in made]
    last = made[-1]
    return Plan(
        arm, task, cell.temperature, cell.rows, context, way, survived, tuple(lines),
        iid_alpha(last.tokens, last.block_size - 1), last.cost.draft / plain.total,
    )  # fmt: skip


def _compared(forecast: Forecast, measured: Summary | None, plain: RoundCost) -> Compared:
    line = Compared(forecast, measured)
    if measured is None or measured.ratio is None or abs(line.deviation) <= NEAR:
        return line
    took = sum(measured.round_ms)
    plain_took = took * measured.ratio.value / measured.tau.value
    shares = {
        f"{forecast.tokens:.2f} tokens a round were expected and {measured.tau.value:.2f} came": forecast.tokens
        / measured.tau.value,
        f"a round was to take {forecast.cost.total:.1f} ms and took {took:.1f}": took / forecast.cost.total,
        f"a plain round was to take {plain.total:.1f} ms and took {plain_took:.1f}": plain.total / plain_took,
    }
    why = max(shares, key=lambda sentence: abs(math.log(max(shares[sentence], 1e-9))))
    return Compared(forecast, measured, why)


def arm_ways(header: Mapping[str, Any]) -> dict[str, Way]:
    """How each arm drafts, from what the run noted or, in older files, from its settings."""
    settings = header.get("settings", {})
    named = {
        raw.get("name") or raw.get("drafter") or "dflash": {"method": raw.get("drafter") or "dflash"}
        for raw in settings.get("drafters") or ()
    } | dict(header.get("arms") or {})
    return {
        arm: Way(one_pass=raw.get("method") not in _PASS_PER_TOKEN, tree=bool(raw.get("tree")))
        for arm, raw in named.items()
    }


def trials(records: Sequence[Record], block_size: int, max_tokens: int | None = None) -> Iterator[Trial]:
    """The rounds of some requests. Without `max_tokens` a draft is taken to be as long as it could be."""
    for record in records:
        have = 1  # the prefill's
        for drafted, accepted, committed in record.rounds:
            limit = drafted if max_tokens is None else min(block_size - 1, max(max_tokens - have - 1, 0))
            # a round that was not cut ends with the target's own token
            yield Trial(accepted, max(limit, accepted), cut=committed == accepted)
            have += committed


def mean_context(records: Sequence[Record]) -> float:
    """Tokens in the cache at an average round."""
    return sum(r.num_prompt_tokens + r.num_tokens / 2 for r in records) / len(records)


def record_costs(summaries: Sequence[Summary], task: str, temperature: float, context: float = 0.0) -> CostTable:
    """The times of a domain's own cells at one temperature as a cost table."""
    return CostTable(
        tuple(
            CostPoint(s.cell.arm, max(s.cell.block_size, 1), context, s.cell.rows, RoundCost(*s.round_ms))
            for s in summaries
            if s.task == task and s.cell.temperature == temperature
        )
    )
