"""A conversation: its cache, its commands, Ctrl-C."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence

import pytest

from cli_bed import Call, Screen, engine_answer
from flashdraft import terminal
from flashdraft.chat import Chat
from flashdraft.drafters import make_drafter
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.text import encode_chat
from flashdraft.types import Request, SamplingParams, Token


def test_chat_reuses_the_cache_of_the_turn_before(call: Call, target: Target) -> None:
    done = call("chat", "--max-tokens", 12, "--drafter", "ngram", stdin="hello again\n\nand again\n")
    assert done.code == 0
    assert "> " not in done.out
    lines = done.err.splitlines()
    reused = [int(count) for line in lines for count in re.findall(r"(\d+) of \d+ prompt tokens reused", line)]
    first = engine_answer(target, "hello again", max_tokens=12)
    assert len(lines) == 2
    assert reused[0] == 0
    assert reused[1] >= first.stats.num_prompt_tokens
    assert done.out.startswith(first.text)


def test_chat_says_what_a_fresh_conversation_says(call: Call, target: Target) -> None:
    """The second answer is that to the whole conversation, cache or not."""
    done = call("chat", "--max-tokens", 12, "--system", "Be kind", stdin="hello\nagain\n")
    messages = [{"role": "system", "content": "Be kind"}]
    expected = ""
    for said in ("hello", "again"):
        messages.append({"role": "user", "content": said})
        prompt = encode_chat(target.tokenizer, messages)
        text = Engine(target).run([Request(prompt, SamplingParams(max_tokens=12))])[0].text
        messages.append({"role": "assistant", "content": text})
        expected += text if text.endswith("\n") else text + "\n"
    assert done.out == expected


def test_chat_commands(call: Call) -> None:
    lines = ["/help", "hello", "/rest", "/what", "/reset", "hello", "/exit", "never asked"]
    done = call("chat", "--max-tokens", 6, stdin="\n".join(lines))
    assert done.code == 0
    first, second = done.out.splitlines()[: len(done.out.splitlines()) // 2], done.out.splitlines()
    assert second == first * 2  # two turns, equal because the conversation began anew
    for name in ("/help", "/reset", "/exit", "did you mean /reset?", "No command /what; see /help.", "forgotten"):
        assert name in done.err
    assert done.err.count("tokens reused") == 2


def test_chat_says_when_the_context_is_full(call: Call) -> None:
    """The answer that fills it ends; the next message does not fit; after /reset one does."""
    lines = ["hello", "again", "/reset", "hello"]
    done = call("chat", "--context", 40, "--max-tokens", 200, "--stop", "never said", stdin="\n".join(lines))
    assert done.code == 0
    said = [line for line in done.err.splitlines() if "/reset" in line]
    assert said[0] == "The context of 40 tokens is full; /reset starts anew."
    assert said[1] == "This message does not fit into the context of 40 tokens any more; /reset starts anew."
    assert done.err.count("tokens reused") == 2


def test_a_slash_may_begin_a_message(call: Call) -> None:
    done = call("chat", "--max-tokens", 3, stdin="/etc/hosts is a file\n")
    assert "No command" not in done.err
    assert "3 tokens" in done.err


def test_chat_input_that_is_no_text(call: Call) -> None:
    done = call("chat", stdin=b"caf\xe9\n")
    assert done.code == 2
    assert done.err.startswith("error: the input is no UTF-8 text")


def interactive_chat(target: Target, monkeypatch: pytest.MonkeyPatch, lines: list[object]) -> Chat:
    """A chat with a person who types these lines; an exception among them is raised instead."""
    monkeypatch.setattr(sys, "stdin", Screen())
    monkeypatch.setattr(sys, "stdout", Screen())

    def typed(_prompt: str = "") -> object:
        line = lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    return Chat(Engine(target, make_drafter(target, "ngram")), SamplingParams(max_tokens=300, ignore_eos=True))


@pytest.mark.usefixtures("colourful")
def test_ctrl_c_stops_the_answer_and_keeps_it(
    target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The history has what was said; the next turn goes on from it; the row is sound (no round was
    torn in half); a Ctrl-C right after one leaves."""
    lines: list[object] = ["hello", "again", KeyboardInterrupt(), "never asked"]
    chat = interactive_chat(target, monkeypatch, lines)
    write, written = terminal.TokenPrinter.write, []

    def interrupting(self: terminal.TokenPrinter, tokens: Sequence[Token]) -> None:
        write(self, tokens)
        written.append("".join(token.text for token in tokens))
        if len(written) in (4, 10):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal.TokenPrinter, "write", interrupting)
    handler = signal.getsignal(signal.SIGINT)
    chat.run()
    assert signal.getsignal(signal.SIGINT) is handler
    assert lines == ["never asked"]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    assert chat.messages[1]["content"] == "".join(written[:4])
    assert chat.messages[3]["content"] == "".join(written[4:])
    prompt = encode_chat(target.tokenizer, chat.messages[:3])
    fresh = Engine(target).run([Request(prompt, SamplingParams(max_tokens=60, ignore_eos=True))])[0].text
    assert fresh.startswith(chat.messages[3]["content"])
    err = capsys.readouterr().err
    assert err.count("stopped after") == 2
    assert err.count("Ctrl-C again or Ctrl-D leaves") == 2


@pytest.mark.usefixtures("colourful")
def test_second_ctrl_c_or_ctrl_d_leaves(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice within one answer, and Ctrl-D at the prompt; a line between two Ctrl-C keeps the chat."""
    chat = interactive_chat(target, monkeypatch, ["hello", "never asked"])

    def twice(*_: object) -> None:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(terminal.TokenPrinter, "write", twice)
    chat.run()
    assert chat.messages == []
    lines: list[object] = [KeyboardInterrupt(), "/help", KeyboardInterrupt(), EOFError(), "never asked"]
    interactive_chat(target, monkeypatch, lines).run()
    assert lines == ["never asked"]
