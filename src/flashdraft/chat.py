"""A conversation in a terminal, or one turn a line from a pipe.

One engine serves all turns, so a turn pays for its new tokens only: the engine goes on from the
cache of the turn before as far as both token sequences agree.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING

from .terminal import TokenPrinter, console, count_of, print_line, summary
from .text import encode_chat
from .types import FlashdraftError, Request, Result, SamplingParams

if TYPE_CHECKING:
    from .engine import Engine

COMMANDS = {
    "/help": "list the commands",
    "/reset": "forget the conversation",
    "/exit": "leave (so does Ctrl-D)",
}


class Chat:
    """The conversation so far, and what asks and answers.

    Args:
        engine: used for nothing else, so that its cache holds this conversation.
        system: a system message in front of every turn.
    """

    def __init__(self, engine: Engine, params: SamplingParams, system: str | None = None) -> None:
        self._engine = engine
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)
        self._interactive = sys.stdin.isatty()
        self._interrupted = False
        self._screen = console()
        self._drafter = engine.drafter.name if engine.drafter.max_draft_tokens > 0 else None
        self._printer = TokenPrinter(sys.stdout, colours=self._drafter is not None)

    def run(self) -> None:
        """Turns until the input ends or the person leaves."""
        if self._interactive:
            target, drafter = self._engine.target, self._engine.drafter.name
            name = f"{target.name}, {str(target.dtype).removeprefix('torch.')}, drafter {drafter}"
            self._say(f"{name}. /help lists the commands, Ctrl-C stops an answer.")
        with contextlib.suppress(_Leave):
            while True:
                self._turn()

    def _turn(self) -> None:
        try:
            line = self._ask()
        except KeyboardInterrupt:
            self._interrupt()
            return
        self._interrupted = False
        if not line:
            return
        # a message may begin with a slash; a command is a single word
        if line.startswith("/") and line[1:].isalpha():
            self._command(line)
            return
        try:
            self._answer(line)
        except FlashdraftError as error:
            if not self._interactive:
                raise
            self._say(f"error: {error}")

    def _ask(self) -> str:
        try:
            if self._interactive and sys.stdout.isatty():
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401  # gives input() editing and a history
                return input("> ").strip()
            if self._interactive:
                self._screen.print("> ", end="")
            line = sys.stdin.readline()
        except EOFError:
            self._say("")
            raise _Leave from None
        except UnicodeDecodeError as error:
            raise FlashdraftError(f"the input is no UTF-8 text: {error}.") from error
        if not line:
            raise _Leave
        return line.strip()

    def _interrupt(self) -> None:
        """Ctrl-C where nothing is being answered: the first says so, the second leaves."""
        if not self._interactive:
            raise KeyboardInterrupt
        self._say("")
        if self._interrupted:
            raise _Leave
        self._interrupted = True
        self._say("Ctrl-C again or Ctrl-D leaves.")

    def _command(self, line: str) -> None:
        if line == "/exit":
            raise _Leave
        if line == "/reset":
            self.messages = list(self._start)
            self._say("The conversation is forgotten.")
        elif line == "/help":
            for name, meaning in COMMANDS.items():
                self._say(f"{name:8}{meaning}")
        else:
            close = get_close_matches(line, COMMANDS, 1)
            self._say(f"No command {line}; did you mean {close[0]}?" if close else f"No command {line}; see /help.")

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = encode_chat(self._engine.target.tokenizer, messages)
        limit = self._engine.max_context
        if len(prompt) >= limit:
            self._say(f"This message does not fit into the context of {limit} tokens any more; /reset starts anew.")
            return
        said, result = self._stream(Request(prompt, self._params))
        self.messages = [*messages, {"role": "assistant", "content": said}]
        if result is not None and len(prompt) + len(result.token_ids) >= limit:
            self._say(f"The context of {limit} tokens is full; /reset starts anew.")

    def _stream(self, request: Request) -> tuple[str, Result | None]:
        """What was said, and the result unless the person stopped the answer."""
        said, count, result = "", 0, None
        try:
            with (
                _interrupts_noted(self._interactive) as interrupted,
                contextlib.closing(self._engine.stream(request)) as deltas,
            ):
                for delta in deltas:
                    self._printer.write(delta.tokens)
                    said, count, result = said + delta.text, count + len(delta.tokens), delta.result
                    if interrupted() and result is None:
                        break
        finally:
            self._printer.end()
        if result is None:
            self._interrupted = True
            self._say(f"stopped after {count_of(count, 'token')}; Ctrl-C again or Ctrl-D leaves")
        else:
            sampled = request.params.temperature > 0
            line = summary(result, drafter=self._drafter, sampled=sampled, reused=True)
            print_line(self._screen, line)
        return said, result

    def _say(self, sentence: str) -> None:
        print_line(self._screen, sentence)


class _Leave(Exception):  # nothing went wrong
    """The person leaves, or the input has ended."""


@contextlib.contextmanager
def _interrupts_noted(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Ctrl-C only sets what the yielded function returns, so that a round is never torn in half;
    a second one interrupts at once and leaves."""
    noted = False

    def note(_signal: int, _frame: object) -> None:
        nonlocal noted
        if noted:
            raise _Leave
        noted = True

    if not wanted:
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: noted
    finally:
        signal.signal(signal.SIGINT, before)
