"""Plots as SVG text: no library, no script, no network; readable on a phone, in the dark and without colours.

Every plot has a title and a description for those who do not see it. Series differ by shape and dashes as
well as by colour (Okabe and Ito's, which stay apart for colour-blind eyes).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 400  # in its own units; shown from 340 to 560 px wide
NUM_COLOURS = 8

_LIGHT = ("#0072b2", "#c04a00", "#00795a", "#a8508a", "#7a6400", "#2f7ca8", "#444444", "#8a5a2b")
_DARK = ("#6cb8ee", "#ff9a5c", "#4cd0a4", "#f0a3d0", "#f0e442", "#9ad7ff", "#dddddd", "#d9a877")
_DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4", "4 2 1 2", "3 1")

STYLE = (
    ":root{--ink:#1c1c1c;--soft:#595959;--line:#c9c9c9;--paper:#fff;"
    + "".join(f"--c{i}:{c};" for i, c in enumerate(_LIGHT))
    + "}@media (prefers-color-scheme:dark){:root{--ink:#ececec;--soft:#b0b0b0;--line:#4a4a4a;--paper:#16181b;"
    + "".join(f"--c{i}:{c};" for i, c in enumerate(_DARK))
    + "}}svg{font:12px system-ui,sans-serif}svg text{fill:var(--ink);paint-order:stroke;stroke:var(--paper);stroke-width:3px;"
    "stroke-linejoin:round}svg .soft{fill:var(--soft)}"
    "svg .axis{stroke:var(--line);stroke-width:1}svg .base{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:4 3}"
    "svg .series{fill:none;stroke-width:2}"
    + "".join(f"svg .s{i}{{stroke:var(--c{i})}}svg .f{i}{{fill:var(--c{i})}}" for i in range(NUM_COLOURS))
    + "svg .hollow{fill:var(--paper);stroke-width:2}"
)


# What HTML may not hold, or what would turn the text around it: control characters, lone surrogates,
# bidirectional marks and overrides.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def shown(text: str) -> str:
    """Any text, as HTML and SVG show it: nothing in it is markup, and what cannot be seen is shown."""
    return escape(_UNSEEN.sub(_picture, text), quote=True)


def _picture(found: re.Match[str]) -> str:
    return f"\u2039{ord(found.group()):04X}\u203a"


@dataclass(frozen=True)
class Dot:
    """A line of a dot plot: a value with its interval. series: which colour and shape; None has no mark."""

    label: str
    value: float
    low: float
    high: float
    series: int
    text: str
    hollow: bool = False


@dataclass(frozen=True)
class Curve:
    """Points (x, y) of a line; `joined` draws it, `marks` sets a shape at each point."""

    label: str
    points: tuple[tuple[float, float], ...]
    series: int
    joined: bool = True
    marks: bool = True
    bars: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Stack:
    """A bar of parts that lie one behind the other."""

    label: str
    parts: tuple[float, ...]
    text: str


def dots(
    title: str, description: str, groups: Sequence[tuple[str, Sequence[Dot]]], base: float | None, axis: str
) -> str:
    """Values with intervals, a line each, under headings. `base` is a reference drawn through."""
    every = [d for _, lines in groups for d in lines]
    finite = [x for d in every for x in (d.value, d.low, d.high) if math.isfinite(x)]
    ticks = _ticks(0.0, max([*finite, base or 0.0, 1e-9]))
    left, right, top, step = 12.0, WIDTH - 12.0, 8.0, 34.0
    x = _scale(ticks[0], ticks[-1], left, right)
    y, body = top, []
    for heading, lines in groups:
        body.append(_text(0, y + 12, heading, "font-weight='600'"))
        y += 20
        for d in lines:
            body.append(_text(left, y + 11, d.label))
            body.append(_text(right, y + 11, d.text, "text-anchor='end'"))
            body += _whisker(x, d, y + 21)
            y += step
        y += 4
    marks = [f"<line class='axis' x1='{x(t):.1f}' x2='{x(t):.1f}' y1='{top}' y2='{y:.1f}'/>" for t in ticks]
    marks += [_text(x(t), y + 14, _number(t), "text-anchor='middle' class='soft'") for t in ticks]
    if base is not None:
        marks.append(f"<line class='base' x1='{x(base):.1f}' x2='{x(base):.1f}' y1='{top}' y2='{y:.1f}'/>")
    axis_text = _text(WIDTH / 2, y + 30, axis, "text-anchor='middle' class='soft'")
    return _svg(title, description, y + 38, [*marks, *body, axis_text])


def _whisker(x: Callable[[float], float], d: Dot, y: float) -> list[str]:
    if not math.isfinite(d.value):
        return []
    low, high = (v if math.isfinite(v) else d.value for v in (d.low, d.high))
    line = f"<line class='series s{d.series % NUM_COLOURS}' x1='{x(low):.1f}' x2='{x(high):.1f}' y1='{y}' y2='{y}'/>"
    ends = "".join(
        f"<line class='series s{d.series % NUM_COLOURS}' x1='{x(v):.1f}' x2='{x(v):.1f}' y1='{y - 4}' y2='{y + 4}'/>"
        for v in (low, high)
    )
    return [line, ends, shape(d.series, x(d.value), y, d.hollow)]


def curves(
    title: str, description: str, series: Sequence[Curve], axes: tuple[str, str], base: float | None = None,
    y_top: float | None = None, x_whole: bool = True, diagonal: float | None = None,
) -> str:  # fmt: skip
    """Lines over a number line, a legend below. `diagonal`: y = x, and the band of that share around it."""
    points = [p for c in series for p in c.points if math.isfinite(p[1])]
    reach = [high for c in series for _, high in c.bars if math.isfinite(high)]
    x_values = [p[0] for p in points] or [0.0, 1.0]
    x_ticks = _whole_ticks(min(x_values), max(x_values)) if x_whole else _ticks(0.0, max(x_values))
    y_ticks = _ticks(0.0, y_top if y_top is not None else max([p[1] for p in points] + reach + [base or 0.0, 1e-9]))
    left, right, top, bottom = 38.0, WIDTH - 12.0, 10.0, 220.0
    x = _scale(x_ticks[0] - 0.3 * x_whole, x_ticks[-1] + 0.3 * x_whole, left, right)
    y = _scale(y_ticks[0], y_ticks[-1], bottom, top)
    body = [f"<line class='axis' x1='{left}' x2='{right}' y1='{y(t):.1f}' y2='{y(t):.1f}'/>" for t in y_ticks]
    body += [_text(left - 5, y(t) + 4, _number(t), "text-anchor='end' class='soft'") for t in y_ticks]
    body += [_text(x(t), bottom + 18, _number(t), "text-anchor='middle' class='soft'") for t in x_ticks]
    if base is not None:
        body.append(f"<line class='base' x1='{left}' x2='{right}' y1='{y(base):.1f}' y2='{y(base):.1f}'/>")
    if diagonal is not None:
        end = min(x_ticks[-1], y_ticks[-1])
        for slope, kind in ((1.0, "base"), (1 - diagonal, "axis"), (1 + diagonal, "axis")):
            far = end / max(slope, 1.0)
            body.append(
                f"<line class='{kind}' x1='{x(0):.1f}' y1='{y(0):.1f}' x2='{x(far):.1f}' y2='{y(far * slope):.1f}'/>"
            )
    for curve in series:
        body += _curve(curve, x, y)
    body.append(_text((left + right) / 2, bottom + 34, axes[0], "text-anchor='middle' class='soft'"))
    body.append(_text(0, top - 12, axes[1], "class='soft'"))
    height = bottom + 46
    for curve in series:
        body += _legend(curve, height)
        height += 18
    return _svg(title, description, height, body, above=16)


def _curve(curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> list[str]:
    known = [(i, p) for i, p in enumerate(curve.points) if math.isfinite(p[1])]
    body, i = [], curve.series % NUM_COLOURS
    if curve.joined and known:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for _, (a, b) in known)
        body.append(f"<polyline class='series s{i}' stroke-dasharray='{_DASHES[i]}' points='{path}'/>")
    for n, (a, b) in known:
        if n < len(curve.bars):
            low, high = curve.bars[n]
            body.append(
                f"<line class='series s{i}' x1='{x(a):.1f}' x2='{x(a):.1f}' y1='{y(low):.1f}' y2='{y(high):.1f}'/>"
            )
        if curve.marks:
            body.append(shape(curve.series, x(a), y(b)))
    return body


def _legend(curve: Curve, y: float) -> list[str]:
    i = curve.series % NUM_COLOURS
    line = f"<line class='series s{i}' stroke-dasharray='{_DASHES[i]}' x1='4' x2='34' y1='{y + 4}' y2='{y + 4}'/>"
    mark = [shape(curve.series, 19, y + 4)] if curve.marks else []
    return [*([line] if curve.joined else []), *mark, _text(42, y + 8, curve.label)]


def stacks(
    title: str, description: str, groups: Sequence[tuple[str, Sequence[Stack]]], names: Sequence[str], axis: str
) -> str:
    """Bars of parts, under headings; the parts differ by pattern too."""
    most = max([sum(s.parts) for _, lines in groups for s in lines], default=0.0)
    ticks = _ticks(0.0, max(most, 1e-9))
    left, right, top, step = 12.0, WIDTH - 12.0, 30.0, 36.0
    x = _scale(0.0, ticks[-1], left, right)
    body, at = [], 4.0
    for n, name in enumerate(names):
        body.append(f"<rect x='{at}' y='4' width='14' height='14' {_fill(n)}/>")
        body.append(_text(at + 19, 15, name))
        at += 32 + 7.2 * len(name)
    y = top
    for heading, lines in groups:
        body.append(_text(0, y + 12, heading, "font-weight='600'"))
        y += 20
        for stack in lines:
            body.append(_text(left, y + 11, stack.label))
            body.append(_text(right, y + 11, stack.text, "text-anchor='end' class='soft'"))
            start = 0.0
            for n, part in enumerate(stack.parts):
                body.append(
                    f"<rect x='{x(start):.1f}' y='{y + 15}' width='{max(x(start + part) - x(start), 0):.1f}' height='12' {_fill(n)}/>"
                )
                start += part
            y += step
        y += 4
    grid = [f"<line class='axis' x1='{x(t):.1f}' x2='{x(t):.1f}' y1='{top}' y2='{y:.1f}'/>" for t in ticks]
    grid += [_text(x(t), y + 14, _number(t), "text-anchor='middle' class='soft'") for t in ticks]
    return _svg(
        title, description, y + 38, [*grid, *body, _text(WIDTH / 2, y + 30, axis, "text-anchor='middle' class='soft'")]
    )


def _fill(n: int) -> str:
    return f"fill='url(#p{n})' class='s{n}' stroke-width='1.2'"


def patterns(count: int = 4) -> str:
    """What the parts of stacks are filled with, once a page: full, hatched, dotted, blank."""
    inner = (
        "<rect width='6' height='6' class='f{n}'/>",
        "<path d='M0 6L6 0M-1 1L1 -1M5 7L7 5' class='s{n}' stroke-width='1.4'/>",
        "<circle cx='3' cy='3' r='1.1' class='f{n}'/>",
        "",
    )
    made = "".join(
        f"<pattern id='p{n}' width='6' height='6' patternUnits='userSpaceOnUse'>{inner[n % 4].format(n=n)}</pattern>"
        for n in range(count)
    )
    return f"<svg width='0' height='0' style='position:absolute' aria-hidden='true'><defs>{made}</defs></svg>"


def shape(series: int, x: float, y: float, hollow: bool = False) -> str:
    """The mark of a series: eight shapes for eight colours."""
    i, kind = series % NUM_COLOURS, series % 8
    look = f"class='hollow s{i}'" if hollow else f"class='f{i}'"
    if kind == 0:
        return f"<circle {look} cx='{x:.1f}' cy='{y:.1f}' r='4.5'/>"
    outline = (
        "", "M-4 -4H4V4H-4Z", "M0 -5.5L5 4H-5Z", "M0 -6L5 0L0 6L-5 0Z", "M0 5.5L5 -4H-5Z",
        "M-1.6 -5H1.6V-1.6H5V1.6H1.6V5H-1.6V1.6H-5V-1.6H-1.6Z", "M-5 -2L0 -5.5L5 -2L3 4.5H-3Z",
        "M-5 -4.5L0 -1.6L5 -4.5V4.5L0 1.6L-5 4.5Z",
    )[kind]  # fmt: skip
    return f"<path {look} transform='translate({x:.1f} {y:.1f})' d='{outline}'/>"


def standalone(svg: str) -> str:
    """A plot as a file of its own."""
    return svg.replace(
        ">", f" xmlns='http://www.w3.org/2000/svg'><style>{STYLE}svg{{background:var(--paper)}}</style>", 1
    )


def _svg(title: str, description: str, height: float, body: Sequence[str], above: float = 0.0) -> str:
    said = shown(f"{title.rstrip('.')}. {description}")
    return (
        f"<svg viewBox='0 {-above:g} {WIDTH} {height + above:.0f}' role='img' aria-label='{said}'>"
        f"<title>{shown(title)}</title>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{shown(text)}</text>"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    spread = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / spread


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to at least `high`, four to seven of them."""
    high = high if high > low else low + 1
    rough = (high - low) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    return [low + n * step for n in range(math.ceil((high - low) / step - 1e-9) + 1)]


def _whole_ticks(low: float, high: float) -> list[float]:
    step = max(1, math.ceil((high - low) / 8))
    return [float(v) for v in range(math.floor(low), math.ceil(high) + step, step)]


def _number(value: float) -> str:
    return f"{value:.6g}"
