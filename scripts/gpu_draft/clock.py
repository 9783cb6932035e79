"""Wall clock of a run: every phase gets its share of what is left, so a late phase shortens those behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class Clock:
    """Shares out `seconds` from now on.

    Args:
        shares: phase -> weight, in the order of the phases.
        now: tests move it by hand.
    """

    def __init__(self, seconds: float, shares: Mapping[str, float], now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._end = now, now() + seconds
        self._shares = dict(shares)
        self.spent: dict[str, float] = {}
        self._phase, self._since = "", now()

    @property
    def left(self) -> float:
        return self._end - self._now()

    def begin(self, phase: str) -> float:
        """Start a phase; returns the seconds it may take. Phases before it are over."""
        self.finish()
        names = list(self._shares)
        behind = names[names.index(phase) :]
        self._phase, self._since = phase, self._now()
        return max(0.0, self.left) * self._shares[phase] / sum(self._shares[name] for name in behind)

    def finish(self) -> None:
        if self._phase:
            self.spent[self._phase] = round(self._now() - self._since, 2)
        self._phase = ""
