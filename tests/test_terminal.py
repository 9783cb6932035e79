"""What a terminal shows: colours, raw text, why it waits."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
from collections.abc import Callable

import pytest

from cli_bed import Screen, tokens
from flashdraft import terminal

SAID = tokens(("a", "prefill"), (" b", "draft"), (" c", "draft"), ("", "draft"), (" d", "bonus"))


@pytest.mark.usefixtures("colourful")
def test_drafted_tokens_have_another_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    printer = terminal.TokenPrinter(screen)
    printer.write(SAID)
    printer.end()
    own, drafted, off = "\x1b[35m", "\x1b[32m", "\x1b[0m"
    assert screen.getvalue() == f"{own}a{off}{drafted} b c{off}{own} d{off}\n"

    plain = Screen()
    terminal.TokenPrinter(plain, colours=False).write(SAID)
    assert plain.getvalue() == "a b c d"


@pytest.mark.usefixtures("colourful")
@pytest.mark.parametrize(
    ("stream", "env"), [(io.StringIO, {}), (Screen, {"NO_COLOR": "1"}), (Screen, {"TERM": "dumb"})]
)
def test_no_colour_in_a_pipe_or_if_not_wanted(
    stream: Callable[[], io.StringIO], env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    screen = stream()
    terminal.TokenPrinter(screen).write(SAID)
    assert screen.getvalue() == "a b c d"


@pytest.mark.usefixtures("colourful")
def test_text_is_no_markup_and_moves_no_cursor() -> None:
    """`[bold]` and `:smile:` stay; escape sequences are shown on a terminal, and kept in a pipe."""
    said = tokens(("[bold]x[/bold] :smile: ", "bonus"), ("\x1b[2J\r\x07\x9b\tend", "bonus"))
    screen, pipe = Screen(), io.StringIO()
    terminal.TokenPrinter(screen, colours=False).write(said)
    terminal.TokenPrinter(pipe).write(said)
    assert screen.getvalue() == "[bold]x[/bold] :smile: ␛[2J␍␇\ufffd\tend"
    assert pipe.getvalue() == "".join(token.text for token in said)


def test_waiting_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing in a pipe but what takes long; and not once loading has ended."""
    log = logging.getLogger("flashdraft")
    with terminal.waiting("loading [x]"):
        log.info("unpacking [y]")
    log.info("not shown")
    assert capsys.readouterr().err == "unpacking [y]\n"


@pytest.mark.usefixtures("colourful")
def test_waiting_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's loader redirects standard error; the note is seen all the same."""
    screen = Screen()

    def shown(text: str) -> bool:  # drawn by a thread, ten times a second
        deadline = time.monotonic() + 60
        while text not in screen.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in screen.getvalue()

    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.waiting("loading [x]"):
        assert shown("loading [x]")
        with contextlib.redirect_stderr(io.StringIO()):
            logging.getLogger("flashdraft").info("unpacking [y]")
            assert shown("unpacking [y]")
    assert sys.stderr is screen
    assert screen.getvalue().endswith("\x1b[2K")  # wiped
