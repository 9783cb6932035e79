"""An answer with every token marked by how it came, round by round, as HTML.

The text is a model's: it is escaped, and what could not be seen in it is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .records import PLAIN, Record
from .svg import shown

# origin of a token -> (class, what the legend says)
_KINDS = {
    "prefill": ("k-prefill", "from the prompt's pass"),
    "draft": ("k-draft", "drafted and accepted"),
    "bonus": ("k-bonus", "the target's own, at the end of a round"),
}
STYLE = (
    ".answer{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.9;border:1px solid var(--line);"
    "border-radius:6px;padding:.6em .8em;margin:.5em 0;unicode-bidi:isolate}"
    ".answer span span{border-radius:3px;padding:.1em 0;margin:0 1px}"
    ".k-prefill{border-bottom:2px dotted var(--soft)}"
    ".k-draft{background:color-mix(in srgb,var(--c0) 20%,transparent);border-bottom:2px solid var(--c0)}"
    ".k-bonus{background:color-mix(in srgb,var(--c1) 18%,transparent);border-bottom:3px double var(--c1);font-weight:600}"
    ".refused{color:var(--soft);font-size:.75em;margin:0 .15em 0 .1em;white-space:nowrap;user-select:none}"
    ".refused b{color:var(--c1)}"
    ".legend{display:flex;flex-wrap:wrap;gap:.4em 1.4em;padding:0;list-style:none}"
)


@dataclass(frozen=True)
class RoundView:
    """The tokens a round committed, as (text, origin), and what it drafted."""

    tokens: tuple[tuple[str, str], ...]
    drafted: int
    accepted: int

    @property
    def refused(self) -> int:
        return self.drafted - self.accepted


def rounds_of(record: Record) -> list[RoundView]:
    """The prefill's token as a round without a draft, then the rounds. Empty if the record kept no tokens,
    or not those that its rounds committed."""
    counts = [(1, 0, 0), *((committed, drafted, accepted) for drafted, accepted, committed, *_ in record.rounds)]
    if not record.pieces or sum(n for n, _, _ in counts) != len(record.pieces):
        return []
    found, at = [], 0
    for committed, drafted, accepted in counts:
        found.append(RoundView(record.pieces[at : at + committed], drafted, accepted))
        at += committed
    return found


def legend() -> str:
    marks = "".join(f"<li><span class='{name}'>word</span> {shown(said)}</li>" for name, said in _KINDS.values())
    return (
        f"<ul class='legend'>{marks}<li><span class='refused'>|<b>&#8722;3</b></span> a round ends; of its draft 3 tokens "
        "were refused</li></ul>"
    )


def answer(record: Record) -> str:
    """The running text, and the rounds as a table in a box that opens."""
    rounds = rounds_of(record)
    if not rounds:
        return "<p>The tokens of this answer were not kept, or are not those of its rounds.</p>"
    text = "".join(_round(number, view) for number, view in enumerate(rounds))
    return (
        f"<div class='answer' dir='auto'>{text}</div><details><summary>Round by round ({len(rounds) - 1} rounds)</summary>"
        f"<div class='scroll' tabindex='0' role='region' aria-label='rounds of this answer'>{_table(rounds)}</div></details>"
    )


def _round(number: int, view: RoundView) -> str:
    said = said_of(number, view)
    tokens = "".join(f"<span class='{_kind(origin)}'>{_piece(text)}</span>" for text, origin in view.tokens)
    end = f"<span class='refused'>|{f'<b>&#8722;{view.refused}</b>' if view.refused else ''}</span>" if number else ""
    return f"<span title='{shown(said)}'>{tokens}</span>{end}"


def said_of(number: int, view: RoundView) -> str:
    if number == 0:
        return "prompt's pass: 1 token"
    own = len(view.tokens) - sum(origin == "draft" for _, origin in view.tokens)
    return (
        f"round {number}: {view.drafted} drafted, {view.accepted} accepted, {view.refused} refused, {own} of the target"
    )


def _kind(origin: str) -> str:
    return _KINDS.get(origin, ("k-prefill", ""))[0]


def _piece(text: str) -> str:
    """A token that shows nothing yet (part of a character, a stop) is a dot; a line break can be seen."""
    return shown(text).replace("\n", "&#8629;\n") if text else "&#183;"


def _table(rounds: Sequence[RoundView]) -> str:
    rows = "".join(_cells(number, view) for number, view in enumerate(rounds))
    return (
        "<table><thead><tr><th>round</th><th>tokens</th><th>drafted</th><th>accepted</th><th>refused</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _cells(number: int, view: RoundView) -> str:
    tokens = "".join(f"<span class='{_kind(origin)}'>{_piece(text)}</span>" for text, origin in view.tokens)
    counts = (view.drafted, view.accepted, view.refused) if number else ("", "", "")
    return (
        f"<tr><td>{number or 'prompt'}</td><td class='text' dir='auto'>{tokens}</td>"
        + "".join(f"<td>{n}</td>" for n in counts)
        + "</tr>"
    )


def kept_answers(records: Sequence[Record], task: str) -> Iterator[Record]:
    """One answer of a domain for every arm that kept one, coldest and smallest batch first."""
    found = [r for r in records if r.task == task and r.pieces and r.cell.arm != PLAIN]
    seen: set[tuple[str, int]] = set()
    for record in sorted(found, key=lambda r: (r.cell.temperature, r.cell.rows, r.cell, r.group, r.repeat)):
        if (record.cell.arm, record.cell.block_size) not in seen:
            seen.add((record.cell.arm, record.cell.block_size))
            yield record
