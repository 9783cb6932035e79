"""`flashdraft report`: a benchmark as one HTML file, and as Markdown.

The page is whole in itself: no script, no network (its policy forbids both), plots as SVG. All text from
the records is escaped: it may hold what a hostile model wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..types import FlashdraftError
from . import figures, svg, tables, token_view
from .planner import CostTable
from .predictions import NEAR, Plan, plans
from .records import PLAIN, Recorded
from .summary import Summary, summarise
from .svg import shown

_STYLE = (
    "*{box-sizing:border-box}html{-webkit-text-size-adjust:100%;color-scheme:light dark}"
    "body{margin:0 auto;max-width:1120px;padding:1rem;font:16px/1.5 system-ui,sans-serif;color:var(--ink);"
    "background:var(--paper);overflow-wrap:anywhere}"
    "h1{font-size:1.6rem;line-height:1.2}h2{margin-top:2.2rem;border-bottom:1px solid var(--line)}"
    "h3{margin-bottom:.3rem}a{color:var(--c0)}nav ul{display:flex;flex-wrap:wrap;gap:.3em 1.2em;padding:0;list-style:none}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:1.6rem 2rem;margin:1rem 0;align-items:start}"
    "figure{margin:0;min-width:0;max-width:560px}figure svg{display:block;width:100%;height:auto;overflow:visible}"
    "figcaption{font-weight:600;margin:.2rem 0 .4rem}"
    ".scroll{overflow-x:auto;max-width:100%;border:1px solid var(--line);border-radius:6px}"
    "table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}"
    "th,td{padding:.3em .55em;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line);overflow-wrap:normal}"
    "th:first-child,td:first-child,td.name,th.name,td.text{text-align:left}td.text{white-space:pre-wrap;min-width:16em}"
    "tr.lost td{color:var(--c1)}tr.plain td{color:var(--soft)}tr.mean td{font-weight:600;border-top:2px solid var(--soft)}"
    "summary{cursor:pointer;padding:.3em 0}dl{display:grid;grid-template-columns:minmax(7em,auto) 1fr;gap:.2em 1em}"
    "dt{color:var(--soft)}dd{margin:0;min-width:0}.remark{border-left:4px solid var(--c1);padding-left:.7em}"
    "@media print{details{break-inside:avoid}}"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def filtered(recorded: Recorded, domains: Sequence[str], mean: bool) -> Recorded:
    """The records of some domains. Raises FlashdraftError for unknown ones, and for a mean without all."""
    known = sorted({r.task for r in recorded.records})
    strange = sorted(set(domains) - set(known))
    if strange:
        raise FlashdraftError(f"the records have no domain {strange[0]!r}; they have {', '.join(known)}.")
    if mean and domains and set(domains) != set(known):
        raise FlashdraftError(
            "a mean over domains stands below the domains it is made of, all that were measured; leave out --mean or "
            "--domain."
        )
    if not domains:
        return recorded
    return replace(recorded, records=tuple(r for r in recorded.records if r.task in domains))


def means(summaries: Sequence[Summary]) -> list[tuple[Summary, float]]:
    """(any summary of the cell, mean ratio) for cells that were measured in every domain of their setting.

    The harmonic mean: the speed of as many tokens of each domain, one after the other.
    """
    found = []
    for cell in sorted({s.cell for s in summaries if s.cell.arm != PLAIN}):
        own = [s for s in summaries if s.cell == cell]
        every = {s.task for s in summaries if s.cell == cell.plain}
        ratios = [s.ratio.value for s in own if s.ratio is not None and s.ratio.value > 0]
        if every and {s.task for s in own} >= every and len(ratios) == len(own):
            found.append((own[0], len(ratios) / sum(1 / r for r in ratios)))
    return found


# -- HTML --------------------------------------------------------------------------------------


def page(runs: Sequence[tuple[str, Recorded]], title: str, costs: CostTable | None = None, mean: bool = False) -> str:
    """The whole file. `runs`: (name, records); each is shown by itself, since runs of different times are
    not to be compared."""
    links = "".join(f"<li><a href='#run{i}'>{shown(name)}</a></li>" for i, (name, _) in enumerate(runs))
    nav = f"<nav aria-label='runs'><ul>{links}</ul></nav>" if len(runs) > 1 else ""
    body = "".join(_run(i, name, recorded, costs, mean, len(runs) > 1) for i, (name, recorded) in enumerate(runs))
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='color-scheme' content='light dark'>"
        f"<title>{shown(title)}</title><style>{svg.STYLE}{_STYLE}{token_view.STYLE}</style></head>"
        f"<body>{svg.patterns()}<header><h1>{shown(title)}</h1>{nav}</header><main>{body}</main></body></html>\n"
    )


def _run(number: int, name: str, recorded: Recorded, costs: CostTable | None, mean: bool, headed: bool) -> str:
    summaries = summarise(recorded.records)
    if not summaries:
        raise FlashdraftError(f"{name} holds no records yet; let `flashdraft bench` finish a group first.")
    predicted = plans(recorded, costs)
    usual = set(tables.conditions(recorded))
    said = "".join(
        f"<p{'' if s in usual else ' class=remark'}>{shown(s)}</p>" for s in tables.remarks(recorded, summaries)
    )
    heading = f"<h2>{shown(name)}</h2>" if headed else ""
    settings = figures.settings_of(summaries)
    parts = [_setting(setting, summaries, mean, i == 0) for i, setting in enumerate(settings)]
    return (
        f"<section id='run{number}'>{heading}{said}{''.join(parts)}{_predictions(predicted)}"
        f"{_answers(recorded)}{_conditions(recorded)}</section>"
    )


def _setting(setting: figures.Setting, summaries: Sequence[Summary], mean: bool, first: bool) -> str:
    """Figures at one temperature and batch size; but for the first they wait in a box."""
    own = [s for s in summaries if (s.cell.temperature, s.cell.rows) == setting]
    name = shown(figures.setting_name(setting))
    marks = figures.series(own)
    slots = figures.largest_blocks(own)
    tasks = sorted({s.task for s in slots if s.slots})
    acceptance = "".join(_figure(plot) for task in tasks for plot in figures.slot_plots(task, slots, marks))
    timed = any(not math.isnan(s.round_ms[0]) for s in own)  # a server does not tell its parts
    inner = (
        f"<div class='plots'>{_figure(figures.speed_plot(own), 'Speed over plain decoding, per domain')}"
        f"{_figure(figures.tau_plot(own), 'Acceptance length, per domain')}"
        f"{_figure(figures.time_plot(own), 'Where a round&#8217;s time goes') if timed else ''}</div>"
        f"<h3>All figures</h3>{_table(*_trimmed(_summary_rows(own, mean)), 'all figures')}"
        f"<h3>Acceptance per drafted slot</h3><p>The largest block of each arm. Survival: slots 1 to k were all kept. "
        f"Conditional: slot k was, where all before it were. Shares of fewer than {figures.FEW} rounds are not drawn.</p>"
        f"<div class='plots'>{acceptance}</div>"
        f"<details><summary>Counts of every slot</summary>{_table(SLOTS, slot_rows(own), 'counts of every slot')}</details>"
    )
    if first:
        return f"<h2>{name}</h2>{inner}"
    return f"<details><summary><strong>{name}</strong></summary>{inner}</details>"


def _figure(plot: str, caption: str = "") -> str:
    """A plot under its caption, which its own title is unless something shorter is given."""
    said = caption or plot.split("<title>", 1)[1].split("</title>", 1)[0]
    return f"<figure><figcaption>{said}</figcaption>{plot}</figure>"


def _summary_rows(own: Sequence[Summary], mean: bool) -> list[tuple[str, tuple[str, ...]]]:
    """Domain after domain, plain decoding first."""
    ordered = sorted(own, key=lambda s: (s.task, s.cell.arm != PLAIN, s.cell))
    rows = [("plain" if s.cell.arm == PLAIN else "lost" if figures.loses(s) else "", _cells(s)) for s in ordered]
    return rows + [("mean", _mean_cells(s, value)) for s, value in (means(own) if mean else [])]


def _trimmed(rows: Sequence[tuple[str, Sequence[str]]]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """(heads, rows) without columns that nobody has a figure for."""
    kept = tables.used([cells for _, cells in rows])
    return [tables.HEADS[i] for i in kept], [(kind, [cells[i] for i in kept]) for kind, cells in rows]


def _cells(summary: Summary) -> tuple[str, ...]:
    """As on the terminal; a loss is said, not only coloured."""
    cells = list(tables.cells(summary))
    if figures.loses(summary):
        cells[tables.HEADS.index("ratio to plain")] += " slower"
    return tuple(cells)


def _mean_cells(summary: Summary, value: float) -> tuple[str, ...]:
    cells = ["", *tables.cells(summary)[1:5], *[""] * (len(tables.HEADS) - 5)]
    cells[0], cells[tables.HEADS.index("ratio to plain")] = "mean (harmonic)", f"{value:.2f}"
    return tuple(cells)


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], said: str, names: int = 2) -> str:
    """In a box that scrolls by itself. The first `names` columns are words."""
    head = "".join(f"<th scope='col'{' class=name' if i < names else ''}>{shown(h)}</th>" for i, h in enumerate(heads))
    body = "".join(
        f"<tr{f' class={kind}' if kind else ''}>"
        + "".join(f"<td{' class=name' if i < names else ''}>{shown(c)}</td>" for i, c in enumerate(cells))
        + "</tr>"
        for kind, cells in rows
    )
    return (
        f"<div class='scroll' tabindex='0' role='region' aria-label='{shown(said)}'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


SLOTS = ("domain", "arm", "T", "rows", "slot", "rounds", "kept", "reached", "survival", "conditional")


def slot_rows(summaries: Sequence[Summary]) -> list[tuple[str, tuple[str, ...]]]:
    """Of every slot: rounds that drafted it, kept it, kept all before it, and the shares."""
    return [
        (
            "",
            (
                s.task, figures.label(s.cell), f"{s.cell.temperature:g}", str(s.cell.rows), str(k), str(slot.drafted),
                str(slot.kept), str(slot.reached), _share(slot.survival), _share(slot.conditional),
            ),
        )
        for s in summaries
        for k, slot in enumerate(s.slots, 1)
    ]  # fmt: skip


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


PREDICTED = (
    "domain", "arm", "T", "rows", "block", "tokens a round", "round ms", "predicted", "measured", "deviation", "why",
)  # fmt: skip


def predicted_rows(found: Sequence[Plan]) -> list[tuple[str, ...]]:
    """Every measured block size beside its prediction, and others that were not measured."""
    rows: list[tuple[str, ...]] = []
    for plan in found:
        for line in plan.lines:
            measured = line.measured.ratio if line.measured is not None else None
            rows.append(
                (
                    plan.task, plan.arm, f"{plan.temperature:g}", str(plan.rows), str(line.forecast.block_size),
                    f"{line.forecast.tokens:.2f}", f"{line.forecast.cost.total:.1f}", f"{line.forecast.speedup:.2f}",
                    tables.interval(measured) if measured is not None else "",
                    "" if math.isnan(line.deviation) else f"{100 * line.deviation:+.1f} %", line.why,
                )
            )  # fmt: skip
    return rows


def _predictions(found: Sequence[Plan]) -> str:
    if not found:
        return ""
    several, single = _by_curve(found)
    plots = [_figure(figures.agreement_plot(found), "Predicted against measured speedup")]
    plots += [_figure(figures.block_plot(p, 0)) for p in several]
    more = "".join(_figure(figures.block_plot(p, 0)) for p in single)
    rows = [("lost" if row[-1] else "", row) for row in predicted_rows(found)]
    measured = [(kind, row) for kind, row in rows if row[PREDICTED.index("measured")]]
    said = "".join(
        f"<li>{shown(p.task)}, {shown(p.arm)} ({shown(figures.setting_name((p.temperature, p.rows)))}): {shown(p.advice)}</li>"
        for p in found
    )
    far = sum(bool(row[-1]) for _, row in measured)
    word = f"{far} of {len(measured)} measured cells are more than {100 * NEAR:.0f} % off; the table says why."
    return (
        "<h2>Predicted and measured</h2><p>Tokens a round from the survival of an arm&#8217;s largest block, cut to each "
        "size; times from what was measured. Beside them the curves of the classical formulas: one pass for a block, and "
        f"a pass for every token. {word if far else f'All measured cells are within {100 * NEAR:.0f} %.'}</p>"
        f"<div class='plots'>{''.join(plots)}</div>"
        + (
            f"<details><summary>Arms measured with one block</summary><div class='plots'>{more}</div></details>"
            if more
            else ""
        )
        + f"<h3>Error of every measured cell</h3>{_table(PREDICTED, measured, 'error of every measured cell')}"
        f"<h3>Which block</h3><ul>{said}</ul>"
        f"<details><summary>All predictions</summary>{_table(PREDICTED, rows, 'all predictions')}</details>"
    )


def _by_curve(found: Sequence[Plan]) -> tuple[list[Plan], list[Plan]]:
    """Plans with several measured blocks, and those with one on a curve of more."""
    counts = [(p, sum(line.measured is not None for line in p.lines)) for p in found]
    return [p for p, n in counts if n > 1], [p for p, n in counts if n == 1 and len(p.lines) > 1]


def _answers(recorded: Recorded) -> str:
    parts = []
    for task in sorted({r.task for r in recorded.records}):
        kept = list(token_view.kept_answers(recorded.records, task))
        for i, record in enumerate(kept):
            cell = record.cell
            name = (
                f"{figures.label(cell)}, {figures.setting_name((cell.temperature, cell.rows))}, prompt {record.prompt}"
            )
            parts.append(
                f"{f'<h3>{shown(task)}</h3>' if i == 0 else ''}<details{' open' if i == 0 else ''}>"
                f"<summary>{shown(name)}</summary>{token_view.answer(record)}</details>"
            )
    if not parts:
        return ""
    return f"<h2>How the tokens came</h2>{token_view.legend()}{''.join(parts)}"


def _conditions(recorded: Recorded) -> str:
    lists = "".join(
        f"<h3>{name}</h3><dl>{''.join(f'<dt>{shown(str(k))}</dt><dd>{shown(_said(v))}</dd>' for k, v in values.items())}</dl>"
        for name, values in (
            ("Machine", recorded.header.get("environment", {})),
            ("Servers", recorded.header.get("servers", {})),
            ("Settings", recorded.header.get("settings", {})),
        )
        if values
    )
    return f"<h2>Conditions</h2>{lists}"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_said(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_said, value))
    return "not set" if value is None else str(value)


# -- Markdown ----------------------------------------------------------------------------------


def markdown_page(
    runs: Sequence[tuple[str, Recorded]], title: str, costs: CostTable | None = None, mean: bool = False
) -> str:
    """The figures of the page as tables."""
    parts = [f"# {_md(title)}", ""]
    for name, recorded in runs:
        summaries = summarise(recorded.records)
        rows = [("", tables.cells(s)) for s in summaries]
        rows += [("", _mean_cells(s, value)) for s, value in (means(summaries) if mean else [])]
        heads, trimmed = _trimmed(rows)
        parts += [f"## {_md(name)}", "", _md_table(heads, [cells for _, cells in trimmed]), ""]
        parts += [f"{_md(sentence)}\n" for sentence in tables.remarks(recorded, summaries)]
        slots = [cells for _, cells in slot_rows(summaries)]
        parts += ["### Acceptance per drafted slot", "", _md_table(SLOTS, slots), ""]
        found = plans(recorded, costs)
        if found:
            parts += ["### Predicted and measured", "", _md_table(PREDICTED, predicted_rows(found)), ""]
            parts += [
                f"- {_md(p.task)}, {_md(p.arm)}, T={p.temperature:g}, {p.rows} at a time: {p.advice}" for p in found
            ]
            parts.append("")
    return "\n".join(parts)


def _md_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(_md, line)) + " |" for line in lines)


def _md(text: str) -> str:
    return shown(text).replace("&#x27;", "'").replace("|", "\\|").replace("\n", " ")


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
