"""From records to figures: acceptance, time and its ratio to plain decoding, per domain.

There is no figure over all domains without the domains: a mean hides that chat is far under
mathematics. Ratios have a bootstrap interval over groups of prompts; repeats of a group become their
median first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from typing import Literal

import torch

from ..types import Round
from .records import PLAIN, Cell, Counts, Record

_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A value and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Slot:
    """Of drafted slot k: rounds that drafted it; those that kept it; and of those that kept all
    slots before it."""

    drafted: int
    kept: int
    reached: int

    @property
    def survival(self) -> float:
        """Share of rounds in which slots 1 to k were all kept: a joint count."""
        return self.kept / self.drafted if self.drafted else math.nan

    @property
    def conditional(self) -> float:
        """Share kept of those rounds that kept all before."""
        return self.kept / self.reached if self.reached else math.nan


@dataclass(frozen=True)
class Summary:
    """A cell on one domain.

    Attributes:
        tau: committed tokens over rounds, pooled; tau_mean: mean of the requests' own.
        equal: share of answers that equal plain decoding's, token by token; None for the plain arm, and for
            a server that draws.
        round_ms: (draft, verify, rest) of a round; nan where a server does not say.
        tokens_per_second: decoding, prefills apart.
        ratio: to plain decoding with the same temperature, rows and server; None without such records.
        busy: share of the groups that ran while the machine had other work.
        draft_bytes: that a context token takes in the drafter's cache; None if unknown.
        first_token_ms: median; None if it was not measured. num_failed: requests without an answer.
    """

    cell: Cell
    task: str
    num_prompts: int
    num_rounds: int
    tau: Interval
    tau_mean: float
    slots: tuple[Slot, ...]
    round_ms: tuple[float, float, float]
    tokens_per_second: float
    ratio: Interval | None
    equal: float | None
    peak_mb: float | None
    busy: float
    draft_bytes: int | None = None
    first_token_ms: float | None = None
    num_failed: int = 0


def summarise(records: Sequence[Record]) -> list[Summary]:
    """A summary of every cell and domain, plain arms first."""
    parts: dict[tuple[Cell, str], list[Record]] = {}
    for record in records:
        parts.setdefault((record.cell, record.task), []).append(record)
    order = sorted(parts, key=lambda key: (key[0].temperature, key[0].rows, key[0].arm != PLAIN, key[0], key[1]))
    return [_summary(cell, task, parts[cell, task], parts.get((cell.plain, task))) for cell, task in order]


def _summary(cell: Cell, task: str, every: list[Record], plain: list[Record] | None) -> Summary:
    own = [record for record in every if not record.failure]
    rounds = [r for record in own for r in record.as_rounds()]
    by_prompt = _by_prompt(own)
    counts = _by_group_counts(own)
    compared = plain if plain is not None and cell.arm != PLAIN else None
    firsts = [r.first_token_seconds for r in own if r.first_token_seconds is not None]
    return Summary(
        cell=cell,
        task=task,
        num_prompts=len(by_prompt),
        num_rounds=round(sum(c.passes for group in counts for c in group)) if cell.server else len(rounds),
        tau=_served_tau(counts) if cell.server else _tau(by_prompt),
        tau_mean=_mean([_pooled(r) for r in by_prompt.values() if r]),
        slots=_served_slots(counts) if cell.server else slots(rounds),
        round_ms=(math.nan,) * 3 if cell.server else _round_ms(own),
        tokens_per_second=_speed(_by_group(every)),
        ratio=None if compared is None else _ratio(_by_group(every), _by_group(compared)),
        equal=None if compared is None or (cell.server and cell.temperature) else _equal(own, compared),
        peak_mb=max((r.peak_mb for r in own if r.peak_mb is not None), default=None),
        busy=_mean([float(record.load is not None and record.load > _BUSY) for record in own]),
        draft_bytes=max((n for r in own if (n := r.draft_bytes_per_context_token) is not None), default=None),
        first_token_ms=1e3 * median(firsts) if firsts else None,
        num_failed=len(every) - len(own),
    )


# CPUs that others keep busy
_BUSY = 0.25


def slots(rounds: Sequence[Round]) -> tuple[Slot, ...]:
    """Counts of every drafted slot; rounds whose draft was cut shorter (of a tree: has fewer levels) do not count for later slots."""
    found = []
    for k in range(1, max((r.num_slots for r in rounds), default=0) + 1):
        able = [r for r in rounds if r.num_slots >= k]
        kept, reached = (sum(r.num_accepted >= n for r in able) for n in (k, k - 1))
        found.append(Slot(len(able), kept, reached))
    return tuple(found)


def _by_prompt(records: Sequence[Record]) -> dict[str, list[Round]]:
    """Rounds of each prompt, all repeats together."""
    found: dict[str, list[Round]] = {}
    for record in records:
        found.setdefault(record.prompt, []).extend(record.as_rounds())
    return found


def _pooled(rounds: Sequence[Round]) -> float:
    return sum(r.num_committed for r in rounds) / len(rounds) if rounds else math.nan


def _tau(by_prompt: dict[str, list[Round]]) -> Interval:
    counts = [(float(sum(r.num_committed for r in rounds)), float(len(rounds))) for rounds in by_prompt.values()]
    return _interval(counts)


def _interval(pairs: Sequence[tuple[float, float]]) -> Interval:
    """Sum of the first over sum of the second, resampled in pairs."""
    table = torch.tensor(pairs, dtype=torch.float64)
    if not len(pairs) or not float(table[:, 1].sum()):
        return Interval(math.nan, math.nan, math.nan)
    value = float(table[:, 0].sum() / table[:, 1].sum())
    drawn = _resamples(len(pairs))
    sums = table[drawn].sum(1)
    low, high = _quantiles(sums[:, 0] / sums[:, 1])
    return Interval(value, low, high)


def _ratio(own: dict[int, tuple[float, int]], plain: dict[int, tuple[float, int]]) -> Interval | None:
    """Tokens a second over plain decoding's, over the groups that both have decoded."""
    groups = sorted(g for g in own.keys() & plain.keys() if own[g][0] > 0 and plain[g][0] > 0)
    if not groups:
        return None
    table = torch.tensor([[*own[g], *plain[g]] for g in groups], dtype=torch.float64)

    def of(sums: torch.Tensor) -> torch.Tensor:
        return (sums[..., 1] / sums[..., 0]) / (sums[..., 3] / sums[..., 2])

    low, high = _quantiles(of(table[_resamples(len(groups))].sum(1)))
    return Interval(float(of(table.sum(0))), low, high)


def _resamples(n: int) -> torch.Tensor:
    return torch.randint(n, (_RESAMPLES, n), generator=torch.Generator().manual_seed(0))


def _quantiles(values: torch.Tensor) -> tuple[float, float]:
    ordered = values.sort().values
    return float(ordered[int(0.025 * len(ordered))]), float(ordered[int(0.975 * len(ordered)) - 1])


def _by_group(records: Sequence[Record]) -> dict[int, tuple[float, int]]:
    """Of each group (median seconds over its repeats, tokens decoded behind the prefill's). A group that lacks
    an answer was an easier one: it has no speed."""
    seconds: dict[int, dict[int, float]] = {}
    tokens: dict[int, dict[int, int]] = {}
    failed = {(record.group, record.repeat) for record in records if record.failure}
    for record in records:
        if (record.group, record.repeat) not in failed:
            seconds.setdefault(record.group, {})[record.repeat] = record.decode_seconds
            counts = tokens.setdefault(record.group, {})
            counts[record.repeat] = counts.get(record.repeat, 0) + max(record.num_tokens - 1, 0)
    return {g: (median(seconds[g].values()), round(median(tokens[g].values()))) for g in seconds}


def _speed(groups: dict[int, tuple[float, int]]) -> float:
    seconds = sum(s for s, _ in groups.values())
    return sum(n for _, n in groups.values()) / seconds if seconds else math.nan


def _round_ms(records: Sequence[Record]) -> tuple[float, float, float]:
    """(draft, verify, rest) of a round of the batch."""
    draft, verify = (_seconds(records, name) for name in ("draft_seconds", "verify_seconds"))
    total = sum(seconds for seconds, _ in _by_group(records).values())
    rounds = max(_batch_rounds(records), 1)
    return 1e3 * draft / rounds, 1e3 * verify / rounds, 1e3 * max(total - draft - verify, 0.0) / rounds


def _seconds(records: Sequence[Record], name: Literal["draft_seconds", "verify_seconds"]) -> float:
    """Of all groups, the median over the repeats; a group's rounds last as long as its longest request."""
    found: dict[int, dict[int, float]] = {}
    for record in records:
        repeats = found.setdefault(record.group, {})
        repeats[record.repeat] = max(repeats.get(record.repeat, 0.0), getattr(record, name) or 0.0)
    return sum(median(repeats.values()) for repeats in found.values())


def _batch_rounds(records: Sequence[Record]) -> int:
    """Rounds of the batch: those of a group's longest request, summed over groups (one repeat)."""
    longest: dict[int, int] = {}
    for record in records:
        longest[record.group] = max(longest.get(record.group, 0), len(record.rounds))
    return sum(longest.values())


def _by_group_counts(records: Sequence[Record]) -> list[list[Counts]]:
    """A server's counters, those of a group together: it may count its requests in one."""
    found: dict[int, list[Counts]] = {}
    for record in records:
        if record.counts is not None:
            found.setdefault(record.group, []).append(record.counts)
    return list(found.values())


def _served_tau(counts: Sequence[Sequence[Counts]]) -> Interval:
    return _interval([(sum(c.committed for c in group), sum(c.passes for c in group)) for group in counts])


def _served_slots(counts: Sequence[Sequence[Counts]]) -> tuple[Slot, ...]:
    """Of all passes, since no server says how long each draft was: a lower bound where some were short."""
    own = [c for group in counts for c in group if c.by_slot]
    passes = round(sum(c.passes for c in own))
    kept = [sum(slots) for slots in zip_longest(*(c.by_slot for c in own), fillvalue=0)]
    return tuple(Slot(passes, n, before) for n, before in zip(kept, [passes, *kept], strict=False))


def _equal(own: Sequence[Record], plain: Sequence[Record]) -> float:
    texts = {(r.prompt, r.repeat): r.ids_sha256 for r in plain}
    pairs = [r.ids_sha256 == texts[r.prompt, r.repeat] for r in own if (r.prompt, r.repeat) in texts]
    return _mean([float(same) for same in pairs])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
