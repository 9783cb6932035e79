"""What `flashdraft plan` prints: predictions beside measurements, a cost table, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from .costs import FREE
from .figures import setting_name
from .memory import Part, gib
from .planner import CostTable, autoregressive_speedup, one_pass_speedup
from .predictions import Plan
from .records import PLAIN
from .tables import interval

if TYPE_CHECKING:
    from rich.console import Console


def show_plans(screen: Console, found: Sequence[Plan]) -> None:
    """A table for every arm and domain; classical formulas beside ours, and the recommendation below."""
    for plan in found:
        screen.print(
            Text(
                f"{plan.task}: {plan.arm}, {setting_name((plan.temperature, plan.rows))}, context {plan.context:.0f}",
                "bold",
            )
        )
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for head in (
            "block", "tokens", "round ms", "predicted", "measured", "deviation", "one pass, iid", "pass per token, iid",
        ):  # fmt: skip
            table.add_column(head, justify="right")
        for cells in plan_cells(plan):
            table.add_row(*(Text(cell) for cell in cells))
        screen.print(table)
        for line in plan.lines:
            if line.why:
                said = f"Block {line.forecast.block_size} is {100 * line.deviation:+.0f} % off: {line.why}."
                screen.print(Text(said), soft_wrap=True)
        screen.print(plan.advice, soft_wrap=True)
        screen.print()


def plan_cells(plan: Plan) -> list[tuple[str, ...]]:
    """A line for every block size."""
    largest = plan.lines[-1].forecast.block_size
    cost = plan.draft_cost if plan.way.one_pass else plan.draft_cost / (largest - 1)
    found: list[tuple[str, ...]] = []
    for line in plan.lines:
        own, measured = line.forecast, line.measured.ratio if line.measured is not None else None
        drafted = own.block_size - 1
        found.append(
            (
                str(own.block_size), f"{own.tokens:.2f}", f"{own.cost.total:.1f}", f"{own.speedup:.2f}",
                interval(measured) if measured is not None else "",
                "" if math.isnan(line.deviation) else f"{100 * line.deviation:+.1f} %",
                f"{one_pass_speedup(plan.alpha, drafted, cost):.2f}",
                f"{autoregressive_speedup(plan.alpha, drafted, cost):.2f}",
            )
        )  # fmt: skip
    return found


def show_costs(screen: Console, table: CostTable) -> None:
    """Times of a round, and what a round has to make to win."""
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head in (
        "context",
        "rows",
        "arm",
        "block",
        "draft ms",
        "verify ms",
        "rest ms",
        "round ms",
        "tokens to break even",
    ):
        shown.add_column(head, justify="left" if head == "arm" else "right")
    for p in table.points:
        plain = table.plain(p.context, p.rows)
        even = f"{p.cost.total / plain.total:.2f}" if plain is not None and p.arm != PLAIN else ""
        times = (p.cost.draft, p.cost.verify, p.cost.rest, p.cost.total)
        shown.add_row(
            f"{p.context:.0f}", str(p.rows), Text(p.arm), str(p.block_size), *(f"{ms:.2f}" for ms in times), even
        )
    screen.print(shown)
    screen.print(
        f'The arm "{FREE}" drafts without a price: what a pass of that width costs the target.', soft_wrap=True
    )


def show_memory(screen: Console, parts: Sequence[Part], context: int, dtype: str) -> None:
    """Weights and caches, a line each and in all."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head in ("network", "parameters", "weights", "cache a token", "cache in all", "together"):
        table.add_column(head, justify="left" if head == "network" else "right")
    for part in parts:
        per = f"{part.cache_per_token:,} B" if part.cache_per_token else "none"
        table.add_row(Text(part.name), f"{part.parameters:,}", gib(part.weights), per, gib(part.cache), gib(part.total))
    per_token = sum(p.cache_per_token for p in parts)
    table.add_row(
        "in all", f"{sum(p.parameters for p in parts):,}", gib(sum(p.weights for p in parts)), f"{per_token:,} B",
        gib(sum(p.cache for p in parts)), gib(sum(p.total for p in parts)),
    )  # fmt: skip
    screen.print(table)
    screen.print(
        f"{parts[0].rows} row(s) of {context} tokens in {dtype}; a cache is made for whole buckets of slots. What a pass "
        "computes with on its way, and the framework itself, come on top.",
        soft_wrap=True,
    )
    if dtype in ("bfloat16", "bf16"):
        screen.print(
            "On a CPU with units for bfloat16 most weights are kept twice, if the second copy takes at most a third of the "
            "memory; the first copy may be pages of the file, which the system takes back when it needs them.",
            soft_wrap=True,
        )
