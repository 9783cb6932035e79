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
# Fewer rounds than this say little of an acceptance length.
_FEW_ROUNDS = 100
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
        return advice([line.forecast for line in self.lines], tree=self.way.tree)


def plans(recorded: Recorded, costs: CostTable | None = None) -> list[Plan]:
    """One for every arm, domain, temperature and batch size of a file, where plain decoding was timed too."""
    # of a server's rounds only the number is known
    summaries = [s for s in summarise(recorded.records) if not s.cell.server]
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
        plain = next((s for s in summaries if s.cell == own[max(own)].cell.plain and s.task == task), None)
        origin = _Origin(max(own), costs is not None, plain.busy if plain is not None else 0.0)
        table = costs or record_costs(summaries, task, temperature)
        plan = _plan(arm, task, own, records, table, ways.get(arm, Way()), settings.get("max_tokens"), origin)
        found += [plan] if plan is not None else []
    return found


@dataclass(frozen=True)
class _Origin:
    """Where a plan's figures come from: the block of its survival, a cost table or the records, and how often
    the machine was busy with other work while plain decoding was timed."""

    block_size: int
    from_table: bool
    plain_busy: float


def _plan(
    arm: str,
    task: str,
    own: Mapping[int, Summary],
    records: Sequence[Record],
    table: CostTable,
    way: Way,
    max_tokens: int | None,
    origin: _Origin,
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
    lines = [_compared(forecast, own.get(forecast.block_size), plain, origin) for forecast in made]
    last = made[-1]
    return Plan(
        arm, task, cell.temperature, cell.rows, context, way, survived, tuple(lines),
        iid_alpha(last.tokens, last.block_size - 1), last.cost.draft / plain.total,
    )  # fmt: skip


def _compared(forecast: Forecast, measured: Summary | None, plain: RoundCost, origin: _Origin) -> Compared:
    """A deviation beyond NEAR with the factor that is off most, and what the records know against it."""
    line = Compared(forecast, measured)
    if measured is None or measured.ratio is None or abs(line.deviation) <= NEAR:
        return line
    took = sum(measured.round_ms)
    plain_took = took * measured.ratio.value / measured.tau.value
    tokens = f"{forecast.tokens:.2f} tokens a round were expected and {measured.tau.value:.2f} came"
    shares = {
        tokens: forecast.tokens / measured.tau.value,
        f"a round was to take {forecast.cost.total:.1f} ms and took {took:.1f}": forecast.cost.total / took,
        f"a plain round was to take {plain.total:.1f} ms and took {plain_took:.1f}": plain.total / plain_took,
    }
    factor = max(shares, key=lambda sentence: abs(math.log(max(shares[sentence], 1e-9))))
    reasons = list(_reasons(forecast, measured, origin, factor == tokens))
    return Compared(
        forecast, measured, f"{factor}; {'likely: ' + '; '.join(reasons) if reasons else 'why is not known'}"
    )


def _reasons(forecast: Forecast, measured: Summary, origin: _Origin, tokens: bool) -> Iterator[str]:
    """What is known to bend a prediction and was the case here. `tokens`: they are what is off, not times."""
    busy = max(measured.busy, origin.plain_busy)
    if busy > 0:
        yield f"the machine was busy with other programs in {100 * busy:.0f} % of the groups"
    tau = measured.tau
    if tokens and forecast.block_size != origin.block_size:
        yield f"survival was measured with blocks of {origin.block_size}, whose first slots see more masks"
    if tokens and (measured.num_rounds < _FEW_ROUNDS or tau.high - tau.low > 2 * NEAR * tau.value):
        yield f"few rounds ({measured.num_rounds}): the acceptance length lies between {tau.low:.2f} and {tau.high:.2f}"
    if not tokens and origin.from_table:
        yield "the times are the cost table's, of another run"
    if not tokens and measured.cell.rows > 1:
        yield "a batch lasts as long as its longest request, while others have ended"
    if measured.ratio is not None and measured.ratio.low <= forecast.speedup <= measured.ratio.high:
        yield "few prompts: the prediction lies inside the measured interval"


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
        for drafted, accepted, committed, *_ in record.rounds:
            limit = drafted if max_tokens is None else min(block_size - 1, max(max_tokens - have - 1, 0))
            # a round that was not cut ends with the target's own token
            yield Trial(accepted, max(limit, accepted), cut=committed == accepted)
            have += committed


def mean_context(records: Sequence[Record]) -> float:
    """Tokens in the cache at an average round."""
    return sum((r.num_prompt_tokens or 0) + r.num_tokens / 2 for r in records) / len(records)


def record_costs(summaries: Sequence[Summary], task: str, temperature: float, context: float = 0.0) -> CostTable:
    """The times of a domain's own cells at one temperature as a cost table."""
    return CostTable(
        tuple(
            CostPoint(s.cell.arm, max(s.cell.block_size, 1), context, s.cell.rows, RoundCost(*s.round_ms))
            for s in summaries
            if s.task == task and s.cell.temperature == temperature and not s.cell.server
        )
    )
