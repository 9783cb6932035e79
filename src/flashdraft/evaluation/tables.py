"""Summaries as a table on the terminal and in Markdown, a line per arm and domain; and the bar of a
benchmark that runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    "draft ms", "verify ms", "rest ms",
)  # fmt: skip


def cells(summary: Summary) -> tuple[str, ...]:
    """What a line says of a summary, in the order of HEADS."""
    cell = summary.cell
    return (
        summary.task,
        cell.arm,
        str(cell.block_size) if cell.block_size else "",
        f"{cell.temperature:g}",
        str(cell.rows),
        str(summary.num_prompts),
        interval(summary.tau) if cell.arm != PLAIN else "1",
        f"{summary.tokens_per_second:.1f}",
        "1" if cell.arm == PLAIN else interval(summary.ratio),
        "" if summary.equal is None else f"{100 * summary.equal:.0f} %",
        *(f"{ms:.1f}" for ms in summary.round_ms),
    )


def interval(value: Interval | None) -> str:
    if value is None or math.isnan(value.value):
        return "-"
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def show_summaries(screen: Console, recorded: Recorded) -> None:
    """The table, and what has to be known to read it."""
    summaries = summarise(recorded.records)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head in HEADS:
        table.add_column(head, justify="left" if head in ("domain", "arm") else "right")
    for summary in summaries:
        style = "dim" if summary.cell.arm == PLAIN else None
        table.add_row(*(Text(text) for text in cells(summary)), style=style)
    screen.print(table)
    for sentence in remarks(recorded, summaries):
        screen.print(sentence, soft_wrap=True)


def markdown(recorded: Recorded) -> str:
    """The same as Markdown."""
    summaries = summarise(recorded.records)
    rows = [HEADS, ("---",) * len(HEADS), *map(cells, summaries)]
    lines = ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join([*lines, "", *remarks(recorded, summaries), ""])


def remarks(recorded: Recorded, summaries: Sequence[Summary]) -> list[str]:
    """Sentences below a table: how it was measured, what was in the way, what lost."""
    made, settings = recorded.header["environment"], recorded.header["settings"]
    said = [
        f"{settings['target']} in {made['dtype']}, {made['threads']} thread(s), {made['device']}; torch {made['torch']}, "
        f"flashdraft {made['flashdraft']}. Medians of {settings['repeats']}; prefills apart; [95 % interval over prompts]."
    ]
    busy = [s for s in summaries if s.busy > 0]
    if busy:
        worst = max(s.busy for s in busy)
        said.append(f"Other programs were running during up to {100 * worst:.0f} % of a line's groups: measure again.")
    lost = sorted({f"{s.cell.arm} on {s.task}" for s in summaries if s.ratio is not None and s.ratio.high < 1})
    if lost:
        said.append(f"Slower than plain decoding: {', '.join(lost)}.")
    return said


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

    def advance(self, done: int, total: int, what: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=what)
        elif total and 10 * done // total > self._said:
            self._said = 10 * done // total
            self._screen.print(f"{done} of {total} groups" + (f", now {what}" if what else ""))
