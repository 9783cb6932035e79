"""The same prompts decoded plainly and with speculation: are the texts equal, and what is gained?

All arms are the same engine; plain decoding is the drafter that proposes nothing. All begin each
prompt once before any clock counts, and timed runs go round the arms.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .drafters import Drafter
from .engine import Engine
from .terminal import COLOURS, console, count_of, print_line, printable, shows_colour, tokens_per_second, waiting
from .text import encode_chat, encode_text
from .training.validation import score_rounds
from .types import FlashdraftError, Request, Result, SamplingParams

if TYPE_CHECKING:
    from .target import Target

# Columns a terminal needs to have for two texts side by side.
WIDE = 100

# Tokens of a run that only warms up. What is left to compile comes in one of several timed runs, and
# the median leaves that one out.
_WARM_UP = 8

# What stands for a share, eighth by eighth.
_BARS = " ▁▂▃▄▅▆▇█"

# Gaps between the two best logits, by precision, that rounding may close. A bfloat16 logit between
# 16 and 32 is a multiple of 1/8, and several layers' rounding adds to that.
_NEAR_TIE = {torch.bfloat16: 0.5, torch.float16: 0.1, torch.float32: 1e-3, torch.float64: 1e-9}


@dataclass(frozen=True)
class Case:
    """A prompt; `repeats_prompt` says whether its answer is expected to reuse the prompt's words."""

    kind: str
    prompt: str
    repeats_prompt: bool


@dataclass(frozen=True)
class Comparison:
    """Timed runs of plain decoding and a drafter on one case, and what their texts have in common.

    differs_at: index of the first token that differs, None if none does. gap: between the two best
    logits there, in plain decoding; None where the texts agree or one has ended.
    """

    case: Case
    plain: tuple[Result, ...]
    speculative: tuple[Result, ...]
    differs_at: int | None = None
    gap: float | None = None

    @property
    def speeds(self) -> tuple[float | None, float | None]:
        """Median tokens a second of the plain and the speculative arm."""
        plain, speculative = (
            [speed for speed in map(tokens_per_second, runs) if speed is not None]
            for runs in (self.plain, self.speculative)
        )
        return (median(plain) if plain else None, median(speculative) if speculative else None)


def read_prompts(file: Path | None = None) -> list[Case]:
    """Cases of a JSON file: a list of objects with `prompt`, and `kind` and `repeats_prompt` if you
    like. None reads the built-in ones."""
    try:
        if file is None:
            text = (resources.files(__package__) / "data" / "demo_prompts.json").read_text(encoding="utf-8")
        else:
            text = file.read_text(encoding="utf-8")
        raw = json.loads(text)
    except OSError as error:
        raise FlashdraftError(f"the prompts cannot be read from {file}: {error.strerror}.") from error
    except ValueError as error:
        raise FlashdraftError(f"{file} cannot be read as JSON: {error}.") from error
    good = (
        isinstance(raw, list) and raw and all(isinstance(item, dict) and _is_text(item.get("prompt")) for item in raw)
    )
    if not good:
        raise FlashdraftError(
            f'{file} holds no prompts; expected a list such as [{{"kind": "story", "prompt": "..."}}].'
        )
    return [
        Case(str(item.get("kind", f"prompt {i + 1}")), item["prompt"], bool(item.get("repeats_prompt", False)))
        for i, item in enumerate(raw)
    ]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def run(
    target: Target, drafters: Sequence[Drafter], cases: Sequence[Case], params: SamplingParams, repeat: int
) -> bool:
    """Show all cases and the table. False if texts differ where rounding does not explain it.

    Args:
        drafters: the first one's texts are shown; others have a column in the table.
    """
    screen = console(sys.stdout)
    prompts = [_encode(target, case.prompt) for case in cases]
    room = min(target.max_context, max(map(len, prompts)) + params.max_tokens)
    plain, *others = (
        Engine(target, made, max_context=room, reuse_prefix=False) for made in (None, *drafters)
    )  # the prefix of a prompt that was decoded before would be free, so it is not reused
    _introduce(screen, target, drafters[0])
    done = []
    for case, prompt in zip(cases, prompts, strict=True):
        with waiting(f"{case.kind}: decoding each way"):
            done.append(compare_all(plain, others, case, Request(prompt, params), repeat))
        _show(screen, done[-1])
    names = [drafter.name for drafter in drafters]
    _show_table(screen, done, names, repeat)
    _show_slots(screen, [found[0] for found in done], drafters[0])
    return all(explained(comparison, target.dtype) for found in done for comparison in found)


def _encode(target: Target, prompt: str) -> list[int]:
    if target.tokenizer is not None and not target.tokenizer.chat_template:
        return encode_text(target.tokenizer, prompt)
    return encode_chat(target.tokenizer, [{"role": "user", "content": prompt}])


def compare(plain: Engine, speculative: Engine, case: Case, request: Request, repeat: int) -> Comparison:
    """Warm both arms up, time them in turns, and look for the first token that differs."""
    return compare_all(plain, [speculative], case, request, repeat)[0]


def compare_all(plain: Engine, others: Sequence[Engine], case: Case, request: Request, repeat: int) -> list[Comparison]:
    """The same for several drafters, with the plain runs in common."""
    arms: list[tuple[Engine, list[Result]]] = [(engine, []) for engine in (plain, *others)]
    short = replace(request, params=replace(request.params, max_tokens=min(_WARM_UP, request.params.max_tokens)))
    for engine, _ in arms:
        engine.run([short])
    for _ in range(repeat):
        for engine, results in arms:
            results += engine.run([request])
    return [
        _with_difference(Comparison(case, tuple(arms[0][1]), tuple(results)), plain, request) for _, results in arms[1:]
    ]


def _with_difference(comparison: Comparison, plain: Engine, request: Request) -> Comparison:
    found = [
        at
        for one, other in zip(comparison.plain, comparison.speculative, strict=True)
        if (at := first_difference(one.token_ids, other.token_ids)) is not None
    ]
    if not found:
        return comparison
    looked = plain.run([replace(request, params=replace(request.params, logprobs=2))])[0]
    at = min(found)
    best = looked.tokens[at].top_logprobs if at < len(looked.tokens) else ()
    return replace(comparison, differs_at=at, gap=best[0][1] - best[1][1] if len(best) == 2 else None)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, None if the sequences are equal."""
    if tuple(one) == tuple(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def explained(comparison: Comparison, dtype: torch.dtype) -> bool:
    """Whether the texts are equal or part at a near-tie of that precision."""
    if comparison.differs_at is None:
        return True
    return comparison.gap is not None and comparison.gap <= _NEAR_TIE[dtype]


def _introduce(screen: Console, target: Target, drafter: Drafter) -> None:
    dtype = str(target.dtype).removeprefix("torch.")
    where = count_of(torch.get_num_threads(), "CPU thread") if target.device.type == "cpu" else str(target.device)
    screen.print(f"{target.name} in {dtype} on {where}, greedy, drafter {drafter.name}")
    if drafter.name == "ngram":
        screen.print(
            "Drafts come from prompt lookup (n-grams): that helps where an answer repeats its prompt, and cannot "
            "help with open questions. Prompts of both kinds follow."
        )
    else:
        tree = " in a tree" if drafter.drafts_trees else ""
        screen.print(
            f"The draft guesses up to {count_of(drafter.max_draft_tokens, 'token')} a round{tree}. How many are kept depends "
            "on the kind of text: prompts of several kinds follow, those where little is gained among them."
        )
    if shows_colour(screen):
        own = ("the target's own tokens", COLOURS["bonus"])
        screen.print(Text.assemble(("drafted and accepted tokens", COLOURS["draft"]), ", ", own))


def _show(screen: Console, found: Sequence[Comparison]) -> None:
    """A case: its prompt, both texts, and the verdict; of other drafters only a text that differs."""
    comparison = found[0]
    plain, speculative = comparison.plain[-1], comparison.speculative[-1]
    texts = [Text(printable(plain.text)), _coloured(speculative)]
    screen.print()
    screen.rule(Text(printable(comparison.case.kind), "bold"), align="left", style="dim")
    screen.print(Text(printable(comparison.case.prompt.split("\n")[0]), "italic", overflow="ellipsis", no_wrap=True))
    if screen.width >= WIDE:
        grid = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="dim")
        grid.add_column("plain", ratio=1)
        grid.add_column("speculative", ratio=1)
        grid.add_row(*texts)
        screen.print(grid)
    else:
        for name, text in zip(("plain", "speculative"), texts, strict=True):
            screen.print(Group(Text(name, "dim"), text))
    print_line(screen, verdict(comparison))
    for other in found[1:]:
        if other.differs_at is not None:
            print_line(screen, Text("another drafter's text ") + verdict(other))


def _coloured(result: Result) -> Text:
    return Text.assemble(*((printable(token.text), COLOURS[token.origin]) for token in result.tokens))


def verdict(comparison: Comparison) -> Text:
    """One sentence on whether the texts are equal."""
    plain, speculative = comparison.plain[-1], comparison.speculative[-1]
    total, at = len(plain.token_ids), comparison.differs_at
    if at is None:
        return Text(f"identical: {total} of {total} tokens", "bold")
    said = [repr(result.tokens[at].text) if at < len(result.tokens) else "nothing" for result in (plain, speculative)]
    sentence = f"differs from token {at + 1} on: plain {said[0]}, speculative {said[1]}; "
    if comparison.gap is None:
        return Text(sentence + "one text is longer.", "bold red")
    return Text(
        f"{sentence}the two best logits are {comparison.gap:.3g} apart there. A pass over several tokens rounds "
        "differently from a pass over one, which can decide a near-tie either way.",
        "bold yellow",
    )


def _show_table(screen: Console, done: Sequence[Sequence[Comparison]], names: Sequence[str], repeat: int) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("prompt", no_wrap=True)
    others = names[1:] if screen.width >= 80 else []
    heads = ["tokens", "tok/s\nplain", f"tok/s\n{names[0]}", "ratio", "acceptance\nlength"]
    for name in (*heads, *(f"ratio\n{other}" for other in others)):
        table.add_column(name, justify="right")
    for found in done:
        plain, speculative = found[0].speeds
        stats = found[0].speculative[-1].stats
        table.add_row(
            Text(printable(found[0].case.kind)),
            str(len(found[0].speculative[-1].token_ids)),
            _number(plain, ".1f"),
            _number(speculative, ".1f"),
            _number(_ratio(found[0]), ".2f"),
            _number(stats.acceptance_length if stats.rounds else None, ".2f"),
            *(_number(_ratio(found[k]), ".2f") for k in range(1, 1 + len(others))),
        )
    every = [comparison for found in done for comparison in found]
    equal = sum(comparison.differs_at is None for comparison in every)
    screen.print()
    screen.print(table)
    screen.print()
    screen.print(
        f"Texts: {equal} of {len(every)} identical to plain decoding, token by token. Speed: decoding without the "
        f"prompt's pass, all arms through the same engine, median of {count_of(repeat, 'run')}."
    )


def _ratio(comparison: Comparison) -> float | None:
    plain, speculative = comparison.speeds
    return speculative / plain if plain and speculative else None


def _show_slots(screen: Console, done: Sequence[Comparison], drafter: Drafter) -> None:
    """For each prompt, in how many rounds slot k and all before it were kept: a bar and per cent each."""
    num_slots = drafter.max_draft_tokens
    if drafter.drafts_trees:  # which have fewer levels than tokens
        num_slots = max((r.num_slots for found in done for r in found.speculative[-1].stats.rounds), default=0)
    shown = min(num_slots, (screen.width - 24) // 7)
    if shown < 1:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("kept slots", no_wrap=True)
    for k in range(1, shown + 1):
        table.add_column(str(k), justify="right", no_wrap=True)
    for comparison in done:
        score = score_rounds(comparison.speculative[-1].stats.rounds, num_slots)
        cells = [_cell(share, not screen.options.ascii_only) for share in score.survival[:shown]]
        table.add_row(Text(printable(comparison.case.kind)), *cells)
    screen.print()
    screen.print(table)
    screen.print()
    screen.print(
        f"In how many rounds, in % of those that drafted it, {drafter.name}'s slot and all before it were kept."
    )


def _cell(share: float, bars: bool) -> str:
    percent = f"{100 * share:3.0f}"
    return f"{_BARS[round(share * (len(_BARS) - 1))]}{percent}" if bars else percent


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
