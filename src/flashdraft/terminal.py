"""What a person sees: tokens as they come, the summary line, why it waits; results as JSON; and the
prompt a person gives.

Answers go to standard output, everything else to standard error. Text of a model is never read as
markup. On a terminal its control characters are shown instead of obeyed: an answer may not move the
cursor or set the window title.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from .types import FlashdraftError, Origin, Result, Stats, Token

# One colour for tokens that were drafted and accepted, one for the target's own.
COLOURS: dict[Origin, str] = {"draft": "green", "bonus": "magenta", "prefill": "magenta"}
_SGR = {"green": "\x1b[32m", "magenta": "\x1b[35m"}
_RESET = "\x1b[0m"

# C0 and C1 control characters but tab and newline, as the pictures Unicode has for them
_PICTURES = {c: 0x2400 + c for c in range(0x20) if c not in (0x09, 0x0A)}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def console(stream: IO[str] | None = None) -> Console:
    """A rich console that prints text as it is; standard error by default.

    The stream is held, not looked up at every print: loading redirects `sys.stderr` for a while.
    """
    return Console(file=stream or sys.stderr, markup=False, emoji=False, highlight=False)


def shows_colour(screen: Console) -> bool:
    """Whether colours may be written: a terminal that has them, and no NO_COLOR."""
    return bool(screen.is_terminal and screen.color_system and not screen.no_color and not screen.legacy_windows)


def printable(text: str) -> str:
    """Text whose control characters a terminal shows instead of obeying them."""
    return text.translate(_PICTURES)


class TokenPrinter:
    """Writes the tokens of answers to a stream as they come.

    Args:
        colours: tell drafted from own tokens, if the stream is a terminal that shows it.
    """

    def __init__(self, stream: IO[str], colours: bool = True) -> None:
        screen = console(stream)
        self._stream = stream
        self._terminal = screen.is_terminal
        self._colours = colours and shows_colour(screen)
        self._open_line = False

    def write(self, tokens: Sequence[Token]) -> None:
        for colour, group in groupby(tokens, key=lambda token: COLOURS[token.origin]):
            text = "".join(token.text for token in group)
            if not text:
                continue
            self._open_line = not text.endswith("\n")
            shown = printable(text) if self._terminal else text
            self._stream.write(f"{_SGR[colour]}{shown}{_RESET}" if self._colours else shown)
        self._stream.flush()

    def end(self) -> None:
        """End the line, if the text left one open."""
        if self._open_line:
            self._stream.write("\n")
            self._stream.flush()
        self._open_line = False


def tokens_per_second(result: Result) -> float | None:
    """Decoded tokens a second; the prompt's pass and the token it gives are not counted."""
    decoded, seconds = len(result.token_ids) - 1, result.stats.decode_seconds
    return decoded / seconds if decoded > 0 and seconds > 0 else None


def summary(result: Result, *, drafter: str | None, sampled: bool, reused: bool = False) -> Text:
    """The line that ends an answer.

    Args:
        drafter: what drafted; say how many tokens were its own. None: nothing did.
        sampled: T > 0; say the seed.
        reused: say how much of the prompt was still in the cache.
    """
    stats = result.stats
    line = Text(count_of(len(result.token_ids), "token"), style="dim")
    if drafter is not None:
        accepted = sum(token.origin == "draft" for token in result.tokens)
        line.append(" (").append(f"{accepted} drafted by {drafter}", COLOURS["draft"]).append(", ")
        line.append(f"{len(result.tokens) - accepted} own", COLOURS["bonus"]).append(")")
    parts = []
    speed = tokens_per_second(result)
    if speed is not None:
        parts.append(f"{speed:.1f} tok/s")
    if stats.rounds:
        parts += [
            f"acceptance length {stats.acceptance_length:.2f}",
            count_of(len(stats.rounds), "round"),
            _time(stats),
        ]
    if reused:
        parts.append(f"{stats.num_reused_tokens} of {stats.num_prompt_tokens} prompt tokens reused")
    parts.append(result.finish_reason)
    if sampled:
        parts.append(f"seed {result.seed}")
    for part in parts:
        line.append(" | ").append(part)
    return line


def _time(stats: Stats) -> str:
    shares = {"draft": stats.draft_seconds, "verify": stats.verify_seconds, "rest": stats.rest_seconds}
    total = sum(shares.values()) or 1.0
    return "time " + ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in shares.items())


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_line(screen: Console, line: Text | str) -> None:
    """One line; a terminal too narrow for it gets it in whole words."""
    screen.print(line, soft_wrap=not screen.is_terminal)


def result_json(result: Result, *, sampled: bool) -> dict[str, Any]:
    """A result as JSON values: what has no value is null, never NaN."""
    stats = result.stats
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "seed": result.seed if sampled else None,
        "stats": {
            "prompt_tokens": stats.num_prompt_tokens,
            "reused_tokens": stats.num_reused_tokens,
            "tokens": len(result.token_ids),
            "rounds": len(stats.rounds),
            "drafted": sum(r.num_drafted for r in stats.rounds),
            "accepted": sum(r.num_accepted for r in stats.rounds),
            "acceptance_length": _finite(stats.acceptance_length),
            "tokens_per_second": tokens_per_second(result),
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": stats.decode_seconds,
            "draft_seconds": stats.draft_seconds,
            "verify_seconds": stats.verify_seconds,
            "rest_seconds": stats.rest_seconds,
        },
        "tokens": [_token_json(token) for token in result.tokens],
    }


def _token_json(token: Token) -> dict[str, Any]:
    value: dict[str, Any] = {"id": token.id, "text": token.text, "origin": token.origin}
    if token.logprob is not None:
        value["logprob"] = _finite(token.logprob)
        value["top_logprobs"] = [{"id": i, "logprob": _finite(logprob)} for i, logprob in token.top_logprobs]
    return value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@contextlib.contextmanager
def waiting(sentence: str) -> Iterator[None]:
    """Show on a terminal what is being waited for. What the package logs meanwhile (that weights are
    unpacked, for instance) is shown too, and as plain lines where there is no terminal."""
    screen = console()
    logger = logging.getLogger("flashdraft")
    level = logger.level
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(screen.status(Text(sentence))) if screen.is_terminal else None
        handler = _Notes(lambda note: status.update(Text(note)) if status else print_line(screen, note))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        stack.callback(logger.setLevel, level)
        stack.callback(logger.removeHandler, handler)
        yield


class _Notes(logging.Handler):
    def __init__(self, show: Any) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())


def read_prompt(prompt: str | None, file: Path | None, raw: bool = False) -> str:
    """The prompt from where it was given; one final newline of a file or pipe is not part of it."""
    if file is not None and prompt is not None:
        raise FlashdraftError("the prompt is given twice, as an argument and with --file; give it once.")
    if file is not None and str(file) != "-":
        try:
            text = _decoded(file.read_bytes(), str(file))
        except OSError as error:
            raise FlashdraftError(f"the prompt cannot be read from {file}: {error.strerror}.") from error
    elif prompt is None or prompt == "-":
        if prompt is None and file is None and sys.stdin.isatty():
            raise FlashdraftError("there is no prompt; give it as an argument, with --file, or on standard input.")
        text = _decoded(sys.stdin.buffer.read(), "standard input")
    else:
        text = _decoded(os.fsencode(prompt), "the argument", whole=True)
    if not (text if raw else text.strip()):
        raise FlashdraftError("the prompt is empty; give at least one character.")
    return text


def _decoded(data: bytes, where: str, whole: bool = False) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FlashdraftError(f"{where} is no UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}).") from error
    return text if whole else text.removesuffix("\n").removesuffix("\r")
