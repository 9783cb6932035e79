"""What a round costs on this machine: measured with the engine itself, for `flashdraft plan`.

Every arm decodes random prompts of some length, all arms in turns, a round at a time; a row of the table is
the median over rounds after a warm-up. The arm "free" drafts tokens out of nothing: its rounds show what a
verify pass of that width costs, and what a draft without a price would be worth.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ..engine import Engine
from ..types import Commit, Draft, FlashdraftError, Request, SamplingParams
from .machine import OtherWork, environment
from .planner import CostPoint, CostTable, RoundCost
from .records import PLAIN

if TYPE_CHECKING:
    from ..drafters import Drafter
    from ..sampling import RowSampler
    from ..target import Target

VERSION = 1
FREE = "free"
_WARM_UP = 3  # rounds


class FreeDrafter:
    """Drafts token 0, without reading anything."""

    name = FREE
    target_layer_ids: tuple[int, ...] = ()
    drafts_trees = False
    bytes_per_context_token = 0

    def __init__(self, block_size: int) -> None:
        self.max_draft_tokens = block_size - 1

    def open(self, rows: int, capacity: int) -> None:
        return None

    def reset(self, state: None, row: int, num_context: int, token: int) -> None:
        pass

    def observe(self, state: None, commit: Commit) -> None:
        pass

    def propose(self, state: None, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]) -> Draft:
        lengths = tuple(min(self.max_draft_tokens, limit) for limit in limits)
        return Draft(torch.zeros(len(rows), max(lengths), dtype=torch.int64), lengths, probs_NV=(None,) * len(rows))


class Cut:
    """A drafter that is asked for shorter drafts: another block size, with the weights loaded once."""

    def __init__(self, drafter: Drafter, block_size: int) -> None:
        self._drafter = drafter
        self.max_draft_tokens = min(block_size - 1, drafter.max_draft_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, state: Any, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]) -> Draft:
        return self._drafter.propose(state, rows, samplers, [min(limit, self.max_draft_tokens) for limit in limits])


def block_sizes(largest: int) -> list[int]:
    """2, 4, 8... and the largest itself; times between them are interpolated."""
    return sorted({2**n for n in range(1, 11) if 2**n < largest} | {largest}) if largest > 1 else []


def measure(
    target: Target,
    drafters: Sequence[tuple[str, Drafter]],
    contexts: Sequence[int],
    rows: Sequence[int],
    rounds: int = 15,
    widest: int = 16,
    advance: Callable[[str], None] = lambda said: None,
) -> CostTable:
    """Rounds of plain decoding, of the free drafter and of all drafters, at every context and batch size.

    Args:
        rounds: timed rounds of each arm. widest: block of the free drafter.
    Raises FlashdraftError where a context does not fit the target.
    """
    arms: list[tuple[str, int, Drafter | None]] = [(PLAIN, 1, None)]
    arms += [(FREE, b, FreeDrafter(b)) for b in block_sizes(widest)]
    for name, drafter in drafters:
        own = drafter.max_draft_tokens + 1
        # a tree cut to a smaller depth is not the tree that a smaller block would draft
        arms += [(name, b, Cut(drafter, b)) for b in ([own] if drafter.drafts_trees else block_sizes(own))]
    most = max(block for _, block, _ in arms) * (rounds + _WARM_UP + 1)
    points = []
    for context in contexts:
        if context < 1 or context + most > target.max_context:
            raise FlashdraftError(
                f"context is {context}; with {rounds} rounds of blocks of up to {most // (rounds + _WARM_UP + 1)} expected "
                f"1 to {target.max_context - most} ({target.name} holds {target.max_context})."
            )
        for count in rows:
            advance(f"context {context}, {count} at a time")
            points += _measure(target, arms, context, count, rounds, most)
    return CostTable(tuple(points))


def _measure(
    target: Target, arms: Sequence[tuple[str, int, Drafter | None]], context: int, rows: int, rounds: int, most: int
) -> list[CostPoint]:
    engines = []
    for name, block, drafter in arms:
        engine = Engine(target, drafter, max_rows=rows, max_context=context + most, reuse_prefix=False)
        draw = torch.Generator().manual_seed(context)
        for _ in range(rows):
            prompt = torch.randint(target.num_tokens, (context,), generator=draw).tolist()
            engine.submit(Request(prompt, SamplingParams(max_tokens=most, ignore_eos=True)))
        engines.append((name, block, engine))
    took: dict[tuple[str, int], list[RoundCost]] = {}
    for number in range(_WARM_UP + rounds):
        # who begins rotates: a machine whose speed drifts favours nobody
        first = number % len(engines)
        for name, block, engine in engines[first:] + engines[:first]:
            cost = _round(engine)
            if number >= _WARM_UP:
                took.setdefault((name, block), []).append(cost)
    return [CostPoint(name, block, float(context), rows, _median(took[name, block])) for name, block, _ in engines]


def _round(engine: Engine) -> RoundCost:
    session = engine.session
    draft, verify, began = session.draft_seconds, session.verify_seconds, time.perf_counter()
    engine.step()
    total = time.perf_counter() - began
    own, checked = session.draft_seconds - draft, session.verify_seconds - verify
    return RoundCost(1e3 * own, 1e3 * checked, 1e3 * max(total - own - checked, 0.0))


def _median(costs: Sequence[RoundCost]) -> RoundCost:
    return RoundCost(*(round(median(getattr(c, part) for c in costs), 4) for part in ("draft", "verify", "rest")))


# -- on the disk -------------------------------------------------------------------------------


def measured_json(target: Target, table: CostTable, others: OtherWork) -> dict[str, Any]:
    """A table with what it depends on. `others`: made before the measurement."""
    return {
        "version": VERSION,
        "kind": "flashdraft costs",
        "target": target.name,
        "environment": environment(target),
        "load": others.load(),
        "points": [
            {
                "arm": p.arm, "block_size": p.block_size, "context": p.context, "rows": p.rows,
                "draft_ms": p.cost.draft, "verify_ms": p.cost.verify, "rest_ms": p.cost.rest,
            }
            for p in table.points
        ],
    }  # fmt: skip


def read_costs(path: str | Path) -> CostTable:
    """Raises FlashdraftError for a file that is no cost table."""
    path = Path(path).expanduser()
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FlashdraftError(
            f"{path} cannot be read ({error}); expected what `flashdraft plan --out` wrote."
        ) from None
    if not isinstance(raw, dict) or raw.get("kind") != "flashdraft costs" or raw.get("version") != VERSION:
        raise FlashdraftError(f"{path} is no cost table of this version; expected what `flashdraft plan --out` wrote.")
    try:
        return CostTable(tuple(map(_point, raw["points"])))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FlashdraftError(
            f"{path} has a row that is no cost ({error}); measure again with `flashdraft plan`."
        ) from None


def _point(raw: dict[str, Any]) -> CostPoint:
    times = [float(raw[name]) for name in ("draft_ms", "verify_ms", "rest_ms")]
    if not all(math.isfinite(t) and t >= 0 for t in times) or not sum(times):
        raise ValueError(f"times {times}")
    return CostPoint(
        str(raw["arm"]), int(raw["block_size"]), float(raw["context"]), int(raw["rows"]), RoundCost(*times)
    )
