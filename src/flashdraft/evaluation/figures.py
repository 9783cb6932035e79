"""Which plots a report has, and what they say to those who do not see them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from . import svg
from .planner import RoundCost, autoregressive_speedup, one_pass_speedup
from .predictions import NEAR, Plan
from .records import PLAIN, Cell
from .summary import Interval, Summary
from .svg import Curve, Dot, Stack
from .tables import interval

# Shares of fewer rounds than this are not drawn; the tables have them.
FEW = 10

Setting = tuple[float, int]  # temperature, rows


def settings_of(summaries: Sequence[Summary]) -> list[Setting]:
    return sorted({(s.cell.temperature, s.cell.rows) for s in summaries})


def setting_name(setting: Setting) -> str:
    temperature, rows = setting
    said = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return f"{said}, {'one request' if rows == 1 else f'{rows} requests'} at a time"


def label(cell: Cell) -> str:
    return cell.name if not cell.block_size else f"{cell.arm}, block {cell.block_size}"


def series(summaries: Sequence[Summary]) -> dict[Cell, int]:
    """A colour and shape for every arm and block size, the same in all plots of a setting."""
    cells = sorted({s.cell for s in summaries if s.cell.arm != PLAIN})
    return {cell: i for i, cell in enumerate(cells)}


def speed_plot(summaries: Sequence[Summary]) -> str:
    """Speedup per domain with intervals; plain decoding is the line at 1."""
    own = [s for s in summaries if s.ratio is not None]
    groups = _by_task(own, "ratio")
    return svg.dots(
        "Speed over plain decoding, per domain",
        "; ".join(f"{s.task}, {label(s.cell)}: {interval(s.ratio)}{_loses(s)}" for s in own),
        groups, 1.0, "times as fast (dashed: plain decoding; hollow: slower)",
    )  # fmt: skip


def tau_plot(summaries: Sequence[Summary]) -> str:
    own = [s for s in summaries if s.cell.arm != PLAIN and not math.isnan(s.tau.value)]
    groups = _by_task(own, "tau")
    return svg.dots(
        "Acceptance length, per domain",
        "; ".join(f"{s.task}, {label(s.cell)}: {interval(s.tau)}" for s in own),
        groups, 1.0, "tokens a round (dashed: plain decoding)",
    )  # fmt: skip


def _loses(summary: Summary) -> str:
    return " (slower than plain decoding)" if loses(summary) else ""


def loses(summary: Summary) -> bool:
    return summary.ratio is not None and summary.ratio.high < 1


def _by_task(own: Sequence[Summary], what: Literal["ratio", "tau"]) -> list[tuple[str, list[Dot]]]:
    marks = series(own)
    groups: dict[str, list[Dot]] = {}
    for s in own:
        value: Interval = getattr(s, what) or Interval(math.nan, math.nan, math.nan)
        slow = what == "ratio" and loses(s)
        text = interval(value) + (" slower" if slow else "")
        groups.setdefault(s.task, []).append(
            Dot(label(s.cell), value.value, value.low, value.high, marks[s.cell], text, slow)
        )
    return list(groups.items())


def largest_blocks(summaries: Sequence[Summary]) -> list[Summary]:
    """Of each arm the largest block: smaller ones are that block, cut."""
    sizes: dict[str, int] = {}
    for s in summaries:
        sizes[s.cell.arm] = max(sizes.get(s.cell.arm, 0), s.cell.block_size)
    return [s for s in summaries if s.cell.arm != PLAIN and s.cell.block_size == sizes[s.cell.arm]]


def slot_plots(task: str, summaries: Sequence[Summary], marks: Mapping[Cell, int]) -> list[str]:
    """Survival and conditional acceptance per slot, a line an arm."""
    plots = []
    for name, said in (
        ("survival", "share of rounds that kept slots 1 to k"),
        ("conditional", "share kept, of rounds that kept all before"),
    ):
        lines = [Curve(label(s.cell), _shares(s, name), marks[s.cell]) for s in summaries if s.task == task and s.slots]
        title = f"{task}: {'survival' if name == 'survival' else 'conditional acceptance'} per slot"
        told = "; ".join(f"{c.label}: " + ", ".join(f"{y:.2f}" for _, y in c.points if y == y) for c in lines)
        plots.append(svg.curves(title, told, lines, ("drafted slot", said), y_top=1.0))
    return plots


def _shares(summary: Summary, name: str) -> tuple[tuple[float, float], ...]:
    """A slot's share, as far as enough rounds came there."""
    counts = {k: slot.drafted if name == "survival" else slot.reached for k, slot in enumerate(summary.slots, 1)}
    return tuple((k, getattr(slot, name)) for k, slot in enumerate(summary.slots, 1) if counts[k] >= FEW)


def time_plot(summaries: Sequence[Summary]) -> str:
    """Where a round's time goes."""
    groups: dict[str, list[Stack]] = {}
    for s in summaries:
        if math.isnan(sum(s.round_ms)):  # a server's: only the whole is seen
            continue
        parts = " + ".join(f"{ms:.1f}" for ms in s.round_ms)
        groups.setdefault(s.task, []).append(Stack(label(s.cell), s.round_ms, f"{parts} = {sum(s.round_ms):.1f} ms"))
    told = "; ".join(f"{task}, {stack.label}: {stack.text}" for task, lines in groups.items() for stack in lines)
    return svg.stacks(
        "Where a round's time goes: draft + verify + rest", told, list(groups.items()), ("draft", "verify", "rest"),
        "ms a round",
    )  # fmt: skip


def block_plot(plan: Plan, number: int) -> str:
    """Speedup against block size: measured, predicted, and what the classical formulas make of it."""
    own = [(line.forecast, line.measured) for line in plan.lines]
    measured = [(f.block_size, m.ratio) for f, m in own if m is not None and m.ratio is not None]
    blocks = range(1, own[-1][0].block_size + 1)
    pass_cost = plan.draft_cost / (1 if plan.way.one_pass else max(blocks[-1] - 1, 1))
    lines = [
        Curve(
            "measured", tuple((b, r.value) for b, r in measured), number, joined=False,
            bars=tuple((r.low, r.high) for _, r in measured),
        ),
        Curve("predicted: measured survival and times", ((1, 1.0), *((f.block_size, f.speedup) for f, _ in own)),
              number, marks=False),
        Curve(f"one pass, constant acceptance {plan.alpha:.2f}",
              tuple((b, one_pass_speedup(plan.alpha, b - 1, pass_cost)) for b in blocks), number + 1, marks=False),
        Curve("a pass for every token (Leviathan et al.)",
              tuple((b, autoregressive_speedup(plan.alpha, b - 1, pass_cost)) for b in blocks), number + 2, marks=False),
    ]  # fmt: skip
    told = "; ".join(f"block {b}: {interval(r)}" for b, r in measured)
    return svg.curves(
        f"{plan.task}, {plan.arm}, {_short(plan)}: speed by block size", f"measured {told}. {plan.advice}", lines,
        ("block size (1 is plain decoding)", "times plain"), base=1.0,
    )  # fmt: skip


def _short(plan: Plan) -> str:
    return f"T {plan.temperature:g}" + (f", {plan.rows} at a time" if plan.rows > 1 else "")


def agreement_plot(plans: Sequence[Plan]) -> str:
    """Predicted against measured, all cells: on the dashed line they agree."""
    arms: dict[str, list[tuple[float, float]]] = {}
    for plan in plans:
        for line in plan.lines:
            if line.measured is not None and line.measured.ratio is not None:
                arms.setdefault(plan.arm, []).append((line.measured.ratio.value, line.forecast.speedup))
    lines = [Curve(arm, tuple(points), i, joined=False) for i, (arm, points) in enumerate(arms.items())]
    told = "; ".join(
        f"{arm}: " + ", ".join(f"{m:.2f} measured, {p:.2f} predicted" for m, p in at) for arm, at in arms.items()
    )
    return svg.curves(
        "Predicted against measured speedup", told, lines,
        (f"measured (thin lines: {100 * NEAR:.0f} % off)", "predicted"), x_whole=False, diagonal=NEAR,
    )  # fmt: skip


def formula_plot(alpha: float, pass_cost: float, wide: RoundCost, largest: int = 16) -> str:
    """The three formulas for one imagined drafter: what a block's size buys.

    Args:
        wide: a round of the largest block, over a plain round of 1; verify grows linearly up to it.
    """
    blocks = range(1, largest + 1)

    def growing(block: int) -> float:
        tokens: float = sum(alpha**k * 0.93 ** (k * (k - 1) / 2) for k in range(block))
        share = (block - 1) / (largest - 1)
        return tokens / (wide.draft * (block > 1) + 1 + (wide.verify - 1) * share + wide.rest)

    lines = [
        Curve("a pass for every token (Leviathan et al., Theorem 3.8)",
              tuple((b, autoregressive_speedup(alpha, b - 1, pass_cost)) for b in blocks), 1, marks=False),
        Curve("one pass for the block, the same acceptance",
              tuple((b, one_pass_speedup(alpha, b - 1, pass_cost)) for b in blocks), 2, marks=False),
        Curve("one pass; acceptance falls per slot, verifying costs",
              tuple((b, growing(b)) for b in blocks), 0, marks=False),
    ]  # fmt: skip
    return svg.curves(
        f"Speedup against block size: acceptance {alpha:g}, a draft pass {pass_cost:g} of the target's",
        "; ".join(f"{c.label}: {c.points[7][1]:.2f} at block 8 and {c.points[15][1]:.2f} at 16" for c in lines),
        lines, ("block size (1 is plain decoding)", "times plain"), base=1.0,
    )  # fmt: skip


def formula_file() -> str:
    """docs/plan-formulas.svg: a drafter that is right four times in five, a fifth of the target's price a pass."""
    return svg.standalone(formula_plot(0.8, 0.2, RoundCost(0.2, 1.3, 0.05))) + "\n"
