"""The report: one file that stands alone, is valid, harmless, and looks right in a real browser."""

from __future__ import annotations

import math
import re
import struct
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import browser
import report_bed
from flashdraft import cli
from flashdraft.evaluation import figures, report, svg, token_view
from flashdraft.evaluation.planner import CostPoint, CostTable, RoundCost
from flashdraft.evaluation.predictions import plans
from flashdraft.evaluation.records import PLAIN, Cell, Record, Recorded, RecordFile, read_records
from flashdraft.evaluation.summary import summarise
from flashdraft.types import FlashdraftError

_VOID = {"meta", "br", "hr", "img", "link", "input"}
_KNOWN = {
    "html", "head", "meta", "title", "style", "body", "header", "nav", "main", "section", "h1", "h2", "h3", "p", "a",
    "ul", "li", "div", "span", "b", "strong", "details", "summary", "figure", "figcaption", "table", "thead", "tbody",
    "tr", "th", "td", "dl", "dt", "dd", "svg", "defs", "pattern", "rect", "path", "circle", "line", "polyline", "text",
}  # fmt: skip


class Checker(HTMLParser):
    """Every tag closed in order, attributes once, ids once, nothing that this page has no business with."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        assert len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _KNOWN, tag
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, names)
        assert not [n for n in names if n.startswith("on") or n in ("src", "srcdoc", "action")], (tag, names)
        values = dict(attrs)
        assert not (values.get("href") or "#").partition("#")[0], values
        assert "url(" not in (values.get("style") or "")
        self.ids += [values["id"] or ""] if "id" in values else []
        self.seen.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> inside {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return report_bed.made(busy=True)


@pytest.fixture(scope="module")
def page(recorded: Recorded) -> str:
    return report.page([("bench.jsonl", recorded)], "A <title> & more", mean=True)


# -- the file ----------------------------------------------------------------------------------


def test_the_page_is_valid_and_stands_alone(page: str) -> None:
    checked = Checker(page)
    assert page.startswith("<!doctype html>") and {"svg", "details", "table"} <= checked.seen
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'\"" in page
    assert "width=device-width" in page and "prefers-color-scheme:dark" in page
    assert not re.search(r"https?:|@import|<script|<link|<img", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#p0", "#p1", "#p2"}
    page.encode("utf-8")
    words = " ".join(checked.words)
    for said in ("Acceptance per drafted slot", "Predicted and measured", "Conditions", "a made-up CPU", "refused",
                 "Other programs were running", "Slower than plain decoding"):  # fmt: skip
        assert said in words, said


def test_plots_have_text_alternatives(page: str) -> None:
    plots = re.findall(r"<svg viewBox.*?</svg>", page, flags=re.DOTALL)
    assert len(plots) > 10
    for plot in plots:
        root = ET.fromstring(plot)
        assert root.get("role") == "img" and len(root.get("aria-label") or "") > 20
        assert root[0].tag == "title" and root[0].text
        assert "nan" not in plot and "inf" not in plot


def test_every_domain_is_there_and_losses_are_seen(page: str, recorded: Recorded) -> None:
    """D18: a mean stands below the domains only; a domain where an arm loses is marked by a word."""
    words = "\n".join(Checker(page).words)
    for task in report_bed.DOMAINS:
        assert words.count(f"\n{task}") > 4 or words.count(task) > 4
    lost = [s for s in summarise(recorded.records) if figures.loses(s)]
    assert lost and words.count(" slower") >= 2 * len(lost)
    assert "mean (harmonic)" in words and "mean (harmonic)" not in report.page([("x", recorded)], "t")
    with pytest.raises(FlashdraftError, match="a mean over domains stands below the domains"):
        report.filtered(recorded, ["maths"], mean=True)
    with pytest.raises(FlashdraftError, match="no domain 'math'; they have chat, code"):
        report.filtered(recorded, ["math"], mean=False)
    only = report.filtered(recorded, ["maths"], mean=False)
    assert {r.task for r in only.records} == {"maths"}
    assert report.filtered(recorded, list(report_bed.DOMAINS), mean=True).records == recorded.records


def test_the_mean_is_of_all_domains_or_none(recorded: Recorded) -> None:
    """The speed of as many tokens of every domain; an arm that was not measured in one of them has none."""
    summaries = [s for s in summarise(recorded.records) if s.cell.temperature == 0]
    found = {s.cell: value for s, value in report.means(summaries)}
    cell = Cell("dflash", 8, 0.0, 1)
    ratios = [s.ratio.value for s in summaries if s.cell == cell and s.ratio is not None]
    assert found[cell] == pytest.approx(4 / sum(1 / r for r in ratios)) and len(found) == 4
    some = [s for s in summaries if not (s.cell == cell and s.task == "chat")]
    assert cell not in {s.cell for s, _ in report.means(some)}


def test_markdown_has_the_same_figures(recorded: Recorded) -> None:
    text = report.markdown_page([("bench.jsonl", recorded)], "A title", mean=True)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") - 2 * line.count("\\|") for line in rows if "slot" not in line}) <= 3
    assert "| maths | dflash | 8 | 0 |" in text and "### Predicted and measured" in text
    assert "<script" not in text


# -- hostile text ------------------------------------------------------------------------------


def test_a_models_text_never_becomes_markup(page: str) -> None:
    """Tags, entities, control characters, overrides of the direction, half a surrogate pair."""
    assert "<script" not in page and "&lt;script&gt;alert(1)" in page
    assert "&lt;img src=x onerror=alert(2)&gt;" in page and "&amp;lt;" in page
    assert not re.search("[\u202a-\u202e\u2066-\u2069\ud800-\udfff\x00-\x08\x0b-\x1f]", page)
    assert "\u2039202E\u203agnp.exe" in page and "\u2039001B\u203a[31m" in page


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(st.characters(), max_size=12), min_size=1, max_size=8), st.text(st.characters(), max_size=12))
def test_any_text(pieces: list[str], name: str) -> None:
    kinds = ["prefill", *["bonus"] * (len(pieces) - 1)]
    one = record(((0, 0, 1),) * (len(pieces) - 1), tuple(zip(pieces, kinds, strict=True)))
    text = token_view.answer(one) + svg.dots(name, name, [(name, [svg.Dot(name, 1.0, 0.5, 2.0, 0, name)])], 1.0, name)
    Checker(text).words  # noqa: B018 (its constructor checks)
    ET.fromstring(text[text.index("<svg") :])
    text.encode("utf-8")


def record(rounds: Any, pieces: Any = (), **changes: Any) -> Record:
    tokens = 1 + sum(n for _, _, n in rounds)
    values = {
        "cell": Cell("x", 4, 0.0, 1), "task": "a", "prompt": "0", "group": 0, "group_size": 1, "repeat": 0,
        "num_prompt_tokens": 3, "num_tokens": tokens, "ids_sha256": "s", "finish_reason": "stop", "rounds": rounds,
        "prefill_seconds": 0.1, "draft_seconds": 0.1, "verify_seconds": 0.2, "decode_seconds": 0.4, "peak_mb": 1.0,
        "load": 0.0, "pieces": pieces,
    }  # fmt: skip
    return Record(**(values | changes))


# -- the token view ----------------------------------------------------------------------------


def test_tokens_by_how_they_came() -> None:
    pieces = (("A", "prefill"), ("b", "draft"), ("c", "draft"), ("d", "bonus"), ("e", "bonus"), ("", "draft"))
    one = record(((3, 2, 3), (3, 0, 1), (2, 1, 1)), pieces)
    rounds = token_view.rounds_of(one)
    assert [(len(r.tokens), r.drafted, r.accepted, r.refused) for r in rounds] == [
        (1, 0, 0, 0), (3, 3, 2, 1), (1, 3, 0, 3), (1, 2, 1, 1),
    ]  # fmt: skip
    assert token_view.said_of(1, rounds[1]) == "round 1: 3 drafted, 2 accepted, 1 refused, 1 of the target"
    shown = token_view.answer(one)
    Checker(shown)
    assert "<span class='k-draft'>b</span><span class='k-draft'>c</span><span class='k-bonus'>d</span>" in shown
    assert "<span class='refused'>|<b>&#8722;3</b></span>" in shown and "<span class='k-draft'>&#183;</span>" in shown
    assert "Round by round (3 rounds)" in shown


def test_tokens_that_are_not_those_of_the_rounds_are_not_shown() -> None:
    for one in (record(((3, 2, 3),), (("A", "prefill"), ("b", "draft"))), record(((3, 2, 3),))):
        assert token_view.rounds_of(one) == [] and "not kept" in token_view.answer(one)


def test_one_answer_for_every_arm(recorded: Recorded) -> None:
    kept = list(token_view.kept_answers(recorded.records, "maths"))
    arms = [(r.cell.arm, r.cell.block_size) for r in kept]
    assert arms == sorted((arm, block) for arm, block, _, _ in report_bed.ARMS)


# -- plots -------------------------------------------------------------------------------------


def test_ticks_are_round_and_reach_the_top() -> None:
    assert svg._ticks(0, 3.4) == [0, 1, 2, 3, 4] and svg._ticks(0, 1.0)[-1] == 1.0
    assert svg._ticks(0, 0.0)[-1] > 0 and svg._whole_ticks(1, 16)[-1] >= 16
    for top in (0.013, 0.99, 1.01, 7, 1234.5):
        ticks = svg._ticks(0, top)
        assert 4 <= len(ticks) <= 7 and ticks[-1] >= top * 0.999, (top, ticks)


def test_points_lie_where_they_should() -> None:
    plot = svg.curves("t", "d", [svg.Curve("c", ((1, 0.0), (3, 4.0)), 0, bars=((0, 1), (3, 5)))], ("x", "y"))
    circles = [(float(c.get("cx") or 0), float(c.get("cy") or 0)) for c in ET.fromstring(plot).iter("circle")]
    assert circles[0][1] == 220.0 and circles[1][1] < 220 and circles[0][0] < circles[1][0]
    assert len(circles) == 3  # two points and the legend's
    empty = svg.curves("t", "d", [svg.Curve("c", ((1, math.nan),), 0)], ("x", "y"))
    assert "nan" not in empty


def test_series_differ_without_colours() -> None:
    marks = [re.sub(r"class='[^']*'", "", svg.shape(i, 0, 0)) for i in range(8)]
    assert len(set(marks)) == 8


# -- predicted and measured ----------------------------------------------------------------------


def timed(arm: str, block: int, prompt: int, rounds: Any, ms: float, **changes: Any) -> Record:
    """A request whose rounds take `ms` each."""
    seconds = len(rounds) * ms / 1e3
    return record(
        rounds, cell=Cell(arm, block, 0.0, 1), prompt=str(prompt), group=prompt, draft_seconds=0.0,
        verify_seconds=seconds, decode_seconds=seconds, **changes,
    )  # fmt: skip


def run_of(prompts: int, kept: dict[int, int], **changes: Any) -> Recorded:
    """Plain decoding, and an arm whose block of a size keeps so many tokens of every draft."""
    records = []
    for prompt in range(prompts):
        records.append(timed(PLAIN, 0, prompt, ((0, 0, 1),) * 60, 10.0, **changes))
        for block, n in kept.items():
            records.append(timed("x", block, prompt, ((block - 1, n, n + 1),) * 20, 12.0, **changes))
    return Recorded({"settings": {"max_tokens": 1000}, "environment": {}}, tuple(records))


def why(recorded: Recorded, block: int, costs: CostTable | None = None) -> str:
    (plan,) = plans(recorded, costs)
    return next(line.why for line in plan.lines if line.forecast.block_size == block)


def test_a_large_error_says_the_likely_reason() -> None:
    """Only what the records know: another block, other programs, few rounds, a table of another run."""
    assert why(run_of(10, {3: 2, 5: 2}), 3) == ""
    said = why(run_of(10, {3: 2, 5: 1}), 3)
    assert said.startswith(
        "2.00 tokens a round were expected and 3.00 came; likely: survival was measured with blocks of 5"
    )
    assert "busy" not in said and "few" not in said
    assert "few rounds (80): the acceptance length lies between 3.00 and 3.00" in why(run_of(4, {3: 2, 5: 1}), 3)
    assert "the machine was busy with other programs in 100 % of the groups" in why(
        run_of(10, {3: 2, 5: 1}, load=2.0), 3
    )
    table = CostTable(
        tuple(
            CostPoint(arm, block, 0.0, 1, RoundCost(0.0, ms, 0.0))
            for arm, block, ms in ((PLAIN, 1, 10.0), ("x", 5, 30.0))
        )
    )
    said = why(run_of(10, {5: 2}), 5, table)
    assert said == "a round was to take 30.0 ms and took 12.0; likely: the times are the cost table's, of another run"
    slower = run_of(10, {5: 2})
    late = tuple(replace(r, decode_seconds=2 * r.decode_seconds) if r.cell.arm == PLAIN else r for r in slower.records)
    table = CostTable((*table.points[:1], CostPoint("x", 5, 0.0, 1, RoundCost(0.0, 12.0, 0.0))))
    assert why(replace(slower, records=late), 5, table).startswith("a plain round was to take 10.0 ms and took 20.0")


def test_the_error_of_every_measured_cell_is_in_the_open(recorded: Recorded, page: str) -> None:
    """Not folded away; and the cells that are far off are counted."""
    found = [
        (p, line) for p in plans(recorded) for line in p.lines if line.measured is not None and line.measured.ratio
    ]
    assert len(found) == 4 * 2 * len(report_bed.ARMS)
    table = page.split("Error of every measured cell", 1)[1].split("</table>", 1)[0]
    assert table.count("<tr") == 1 + len(found)
    for _, line in found:
        assert f"<td>{100 * line.deviation:+.1f} %</td>" in table
    far = sum(bool(line.why) for _, line in found)
    said = f"{far} of {len(found)} measured cells are more than 10 % off" if far else "All measured cells are within"
    assert said in page


def test_formulas_are_curves_with_the_measured_points(recorded: Recorded, page: str) -> None:
    """Three curves over the block sizes; a point with its interval for each measured block."""
    plan = next(p for p in plans(recorded) if (p.arm, p.task, p.temperature) == ("dflash", "maths", 0.0))
    plot = ET.fromstring(figures.block_plot(plan, 0))
    legend = [t.text or "" for t in plot.iter("text")]
    assert any(t.startswith("one pass, constant acceptance") for t in legend)
    assert "a pass for every token (Leviathan et al.)" in legend and "measured" in legend
    curves = [line.get("points", "").split() for line in plot.iter("polyline")]
    assert [len(points) for points in curves] == [8, 8, 8]
    measured = [(float(c.get("cx", 0)), float(c.get("cy", 0))) for c in plot.iter("circle")][:2]
    # measured values of this made-up cost model lie on our curve: blocks 4 and 8
    for (x, y), point in zip(measured, (curves[0][3], curves[0][7]), strict=True):
        a, b = map(float, point.split(","))
        assert x == pytest.approx(a) and y == pytest.approx(b, abs=12)
    # one pass costs the same however long, a pass for each token does not: higher is less y
    assert all(
        float(one.split(",")[1]) <= float(many.split(",")[1]) for one, many in zip(curves[1], curves[2], strict=True)
    )
    assert page.count("speed by block size</title>") == 4 * 2 * 3


# -- the command -------------------------------------------------------------------------------


def save(recorded: Recorded, path: Path) -> Path:
    RecordFile(path, dict(recorded.header)).add(list(recorded.records))
    return path


def test_command(recorded: Recorded, tmp_path: Path) -> None:
    file = save(recorded, tmp_path / "bench.jsonl")
    assert read_records(file).records == recorded.records
    out, text = tmp_path / "r" / "report.html", tmp_path / "r" / "report.md"
    args = ["report", str(file), str(file), "--out", str(out), "--markdown", str(text), "--title", "T", "--mean"]
    result = CliRunner().invoke(cli.app, args)
    assert result.exit_code == 0, result.stderr
    checked = Checker(out.read_text(encoding="utf-8"))
    assert {"run0", "run1"} <= set(checked.ids) and "# T" in text.read_text(encoding="utf-8")


def test_what_cannot_be_drawn_is_one_sentence(recorded: Recorded, tmp_path: Path) -> None:
    file = save(recorded, tmp_path / "bench.jsonl")
    empty = save(replace(recorded, records=()), tmp_path / "empty.jsonl")

    def sentence(*args: str) -> str:
        result = CliRunner().invoke(cli.app, ["report", "--out", str(tmp_path / "x.html"), *args])
        assert result.exit_code == 2 and result.stderr.count("\n") == 1, result.stderr
        return result.stderr

    assert "cannot be read" in sentence(str(tmp_path / "none.jsonl"))
    assert "holds no records yet" in sentence(str(empty))
    assert "no domain 'poems'" in sentence(str(file), "--domain", "poems")
    assert "leave out --mean" in sentence(str(file), "--domain", "chat", "--mean")
    assert "expected what `flashdraft plan --out` wrote" in sentence(str(file), "--costs", str(file))
    assert "Missing argument" in sentence()
    assert not (tmp_path / "x.html").exists()


def test_records_without_a_plain_arm_are_drawn(recorded: Recorded) -> None:
    """There is no ratio then, and no prediction; the rest is there."""
    some = replace(recorded, records=tuple(r for r in recorded.records if r.cell.arm != PLAIN))
    text = report.page([("x", some)], "t")
    Checker(text)
    assert "Predicted and measured" not in text and "Acceptance length" in text


# -- in a real browser -------------------------------------------------------------------------


@pytest.mark.skipif(browser.find() is None, reason=browser.REASON)
def test_in_a_real_browser(page: str, tmp_path: Path) -> None:
    """Light, dark, and as wide as a phone: pictures of the right size that differ, nothing scrolls sideways,
    and no hostile text became an element."""
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    light = browser.screenshot(file, tmp_path / "light.png", 1200, 1600)
    dark = browser.screenshot(file, tmp_path / "dark.png", 1200, 1600, dark=True)
    assert size(light) == size(dark) == (1200, 1600) and light.read_bytes() != dark.read_bytes()
    phone = browser.screenshot(file, tmp_path / "phone.png", 390, 1600)
    assert size(phone)[1] == 1600
    width, height, elements = browser.measured(file, tmp_path, 390)
    assert width == 390 and height > 3000 and elements == 0


def size(png: Path) -> tuple[int, int]:
    return struct.unpack(">II", png.read_bytes()[16:24])  # type: ignore[return-value]
