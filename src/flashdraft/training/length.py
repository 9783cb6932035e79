"""How many steps a run has: given by the configuration, or found by the clock.

A run of `max_minutes` learns its length late. A "wsd" rate is constant until its decay, so it does not
depend on the length before that; when the clock has reached the decay's share of the minutes, the
length is fixed so that the decay begins with the next step. It is part of the state from then on: a
step's rate is a function of its number again, and a resumed run repeats it to the bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from .config import TrainConfig

_UNKNOWN = 2**40  # more steps than a clock lets happen


class RunLength:
    """The end of a run.

    Attributes:
        num_steps: steps in all; a huge number while only the clock knows.
        clock: seconds of something that goes by; `time.process_time` makes the minutes those of the CPU, so that
            runs of one thread beside other work have equal budgets.
    """

    clock: Callable[[], float] = staticmethod(lambda: time.monotonic())

    def __init__(self, config: TrainConfig, steps_per_epoch: int) -> None:
        self._config = config
        self._limit = config.max_steps or _UNKNOWN
        if config.max_minutes is None and config.max_steps is None:
            self._limit = max(1, round(config.epochs * steps_per_epoch))
        self.num_steps = self._limit
        self._fixed = config.max_minutes is None
        self._before = 0.0
        self._began: float | None = None

    def start(self) -> None:
        """The clock runs from here."""
        self._began = self.clock()

    @property
    def seconds(self) -> float:
        """Time the run has had, earlier processes included."""
        return self._before + (self.clock() - self._began if self._began is not None else 0.0)

    @property
    def known_steps(self) -> int | None:
        return self.num_steps if self.num_steps < _UNKNOWN else None

    @property
    def seconds_left(self) -> float | None:
        """By the clock; None once steps say it better."""
        if self._fixed or self._config.max_minutes is None:
            return None
        return max(0.0, 60 * self._config.max_minutes - self.seconds)

    @property
    def open(self) -> bool:
        """Whether the clock has still to say how many steps there are."""
        return not self._fixed

    @property
    def due(self) -> bool:
        """Whether the decay should begin."""
        if self._fixed or self._config.max_minutes is None:
            return False
        return self.seconds >= 60 * self._config.max_minutes * (1 - self._config.decay_share)

    def fix(self, step: int) -> None:
        """The decay begins after this many steps: they are the other share of the run."""
        share = max(1 - self._config.decay_share, 1e-6)
        self.num_steps = min(self._limit, max(step, int(step / share)))
        self._fixed = True

    def state(self) -> dict[str, Any]:
        if self._config.max_minutes is None:
            return {}
        return {"seconds": round(self.seconds, 3), "num_steps": self.num_steps if self._fixed else None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Of a saved run. More or fewer minutes than it had are a new decision."""
        self._before = float(state.get("seconds", 0.0))
        same = state["config"].get("max_minutes") == self._config.max_minutes
        if self._config.max_minutes is not None and same and state.get("num_steps") is not None:
            self.num_steps = min(self._limit, state["num_steps"])
            self._fixed = True
