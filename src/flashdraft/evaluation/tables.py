"""Summaries as a table on the terminal and in Markdown, a line per arm and domain; and the bar of a
benchmark that runs."""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .records import PLAIN, Recorded
from .summary import Interval, Summary, summarise

if TYPE_CHECKING:
    from rich.console import Console

HEADS = (
    "domain", "arm", "block", "T", "rows", "prompts", "acceptance length", "tok/s", "ratio to plain", "texts equal",
    "draft ms", "verify ms", "rest ms", "first token ms", "draft bytes a token",
)  # fmt: skip
_WIDEST = 1000


def cells(summary: Summary) -> tuple[str, ...]:
    """What a line says of a summary, in the order of HEADS."""
    cell = summary.cell
    return (
        summary.task,
        cell.name,
        str(cell.block_size) if cell.block_size else "",
        f"{cell.temperature:g}",
        str(cell.rows),
        str(summary.num_prompts),
        interval(summary.tau) if cell.arm != PLAIN else "1",
        _figure(summary.tokens_per_second),
        "1" if cell.arm == PLAIN else interval(summary.ratio),
        "" if summary.equal is None else f"{100 * summary.equal:.0f} %",
        *map(_figure, summary.round_ms),
        _figure(summary.first_token_ms),
        str(summary.draft_bytes) if summary.draft_bytes is not None and cell.arm != PLAIN else "",
    )


def _figure(value: float | None) -> str:
    """Blank where nobody gives it."""
    return "" if value is None or math.isnan(value) else f"{value:.1f}"


def used(rows: Sequence[Sequence[str]], always: int = 8) -> list[int]:
    """Columns that say something in any row; the first ones stay."""
    return [i for i in range(len(HEADS)) if i < always or any(row[i] for row in rows)]


def interval(value: Interval | None) -> str:
    if value is None or math.isnan(value.value):
        return "-"
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def show_summaries(screen: Console, recorded: Recorded) -> None:
    """The table, and what has to be known to read it."""
    summaries = summarise(recorded.records)
    rows = [cells(summary) for summary in summaries]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    kept = used(rows)
    for i in kept:
        table.add_column(HEADS[i], justify="left" if HEADS[i] in ("domain", "arm") else "right")
    for summary, row in zip(summaries, rows, strict=True):
        style = "dim" if summary.cell.arm == PLAIN else None
        table.add_row(*(Text(row[i]) for i in kept), style=style)
    if not screen.is_terminal:  # a file or a pipe has no width that figures would have to be cut to
        screen.width = _WIDEST
    screen.print(table)
    for sentence in remarks(recorded, summaries):
        screen.print(Text(sentence), soft_wrap=True)


def markdown(recorded: Recorded) -> str:
    """The same as Markdown."""
    summaries = summarise(recorded.records)
    rows = [cells(summary) for summary in summaries]
    lines = [[row[i] for i in used(rows)] for row in (HEADS, ("---",) * len(HEADS), *rows)]
    texts = ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]
    return "\n".join([*texts, "", *remarks(recorded, summaries), ""])


def remarks(recorded: Recorded, summaries: Sequence[Summary]) -> list[str]:
    """Sentences below a table: how it was measured, what was in the way, what lost."""
    said = [*conditions(recorded)]
    busy = [s for s in summaries if s.busy > 0]
    if busy:
        worst = max(s.busy for s in busy)
        said.append(f"Other programs were running during up to {100 * worst:.0f} % of a line's groups: measure again.")
    lost = sorted({f"{s.cell.arm} on {s.task}" for s in summaries if s.ratio is not None and s.ratio.high < 1})
    if lost:
        said.append(f"Slower than plain decoding: {', '.join(lost)}.")
    return [*said, *_incidents(recorded)]


def conditions(recorded: Recorded) -> Iterator[str]:
    """How, and on what."""
    made, settings = recorded.header["environment"], recorded.header["settings"]
    how = f"Medians of {settings['repeats']}; prefills apart; [95 % interval over prompts]."
    if "dtype" in made:
        yield (
            f"{settings['target']} in {made['dtype']}, {made['threads']} thread(s), {made['device']}; torch "
            f"{made['torch']}, flashdraft {made['flashdraft']}. {how}"
        )
    else:
        yield f"flashdraft {made['flashdraft']}. {how}"
    for name, server in recorded.header.get("servers", {}).items():
        version = f", version {server['version']}" if server.get("version") else ""
        yield f"{name}: {server['model']} at {server['url']}{version}."
    for name, sources in sorted(_sources(recorded).items()):
        yield f"{name}: acceptance by its {', '.join(sorted(sources))}."
    silent = {s for r in recorded.records if (s := r.cell.server)} - _sources(recorded).keys()
    if silent:
        yield f"No acceptance is known of {', '.join(sorted(silent))}: no counters of drafts were found."


def _sources(recorded: Recorded) -> dict[str, set[str]]:
    """Where each server's acceptance comes from."""
    found: dict[str, set[str]] = {}
    for record in recorded.records:
        if record.counts is not None:
            found.setdefault(record.cell.name, set()).add(record.counts.source)
    return found


def _incidents(recorded: Recorded) -> Iterator[str]:
    """What went wrong with single requests, counted; the commonest reason of each arm."""
    failures: dict[str, Tally[str]] = {}
    notes: dict[str, Tally[str]] = {}
    totals = Tally(record.cell.name for record in recorded.records)
    for record in recorded.records:
        for text, told in ((record.failure, failures), (record.note, notes)):
            if text:
                told.setdefault(record.cell.name, Tally())[text] += 1
    for name, tally in sorted(failures.items()):
        reason, count = tally.most_common(1)[0]
        yield (
            f"{tally.total()} of {totals[name]} requests to {name} failed, and their groups have no speed; {count} of "
            f"them: {reason}."
        )
    for name, tally in sorted(notes.items()):
        reason, count = tally.most_common(1)[0]
        yield f"{name}, {count} group(s): {reason}."


class Counter:
    """A bar on a terminal; elsewhere a line for every tenth of the way."""

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._bar: Progress | None = None
        self._said = -1
        if screen.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=screen, transient=True)
            self._task = self._bar.add_task("loading", total=None)

    def __enter__(self) -> Counter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def warn(self, sentence: str) -> None:
        self._screen.print(f"warning: {sentence}", soft_wrap=True, markup=False, highlight=False)

    def advance(self, done: int, total: int, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=what)
        elif total and 10 * done // total > self._said:
            self._said = 10 * done // total
            self._screen.print(f"{done} of {total} groups" + (f", now {what}" if what else ""))
