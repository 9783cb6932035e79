"""How far a long run is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

# seconds between two lines where there is no terminal
_PAUSE = 30.0


class Tally:
    """Prompts done, tokens per second, time left, rejected.

    Args:
        done: prompts that were done before this run.
    """

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console, self._total, self._done = console, total, done
        self._began = self._said = time.monotonic()
        words = TextColumn("{task.fields[words]}", markup=False)
        self._bar = Bar(BarColumn(), MofNCompleteColumn(), words, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, completed=done, words="")

    def __enter__(self) -> Tally:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, finished: int, tokens: int, rejected: int) -> None:
        """Args: of this run: prompts finished, tokens written so far, rows rejected."""
        now = time.monotonic()
        words = self._words(now - self._began, finished, tokens, rejected)
        self._bar.update(self._task, completed=self._done + finished, words=words)
        if not self._console.is_terminal and now - self._said >= _PAUSE:
            self._said = now
            line = f"{self._done + finished} of {self._total} prompts, {words}"
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _words(self, seconds: float, finished: int, tokens: int, rejected: int) -> str:
        words = f"{tokens / max(seconds, 1e-9):.0f} tok/s"
        if finished:
            left = seconds / finished * (self._total - self._done - finished)
            words += f", {_span(left)} left"
        return words + (f", {rejected} rejected" if rejected else "")


def _span(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min" if minutes else f"{round(seconds)} s"
