"""Training data: prompts, and sequences with the spans that a loss may touch, from JSON lines.

A loss span holds what the target itself wrote, one span an answer, its end of turn included. Spans
come from the chat template by the prefix-stability check: an answer belongs to a sequence only if the
next turn's prompt begins with exactly these tokens. A template that rewrites what was said before
(drops the thinking, trims an answer) splits the conversation there; loss is never put on a prompt.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..text import Message, encode_chat, template_digest
from ..types import FlashdraftError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reason = Literal["bad row", "empty", "duplicate id", "too long", "template", "loop", "endpoint"]


@dataclass(frozen=True)
class TokenSequence:
    """Token ids, and the half-open spans of them that the target wrote: ascending, never empty."""

    id: str
    source: str
    token_ids: tuple[int, ...]
    loss_spans: tuple[tuple[int, int], ...]
    temperature: float | None = None
    finished: bool = True

    @property
    def num_loss_tokens(self) -> int:
        return sum(end - start for start, end in self.loss_spans)


@dataclass(frozen=True)
class Prompt:
    """What a person says in a conversation, turn by turn; `file` and `line` say where it was read.
    group: of its own within the file, if the rows have one."""

    id: str
    source: str
    turns: tuple[str, ...]
    system: str | None
    file: str
    line: int
    group: str | None = None


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used, and why. `answered`: the target had answered it, so that trying
    again with the same settings gives the same."""

    file: str
    line: int
    id: str
    reason: Reason
    detail: str
    answered: bool = False

    @property
    def sentence(self) -> str:
        return f"{self.file}, line {self.line}: {self.detail}"


OnReject = Callable[[Rejected], None]


class _Bad(Exception):
    """A row's problem, in words; becomes a Rejected."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason


# -- JSON lines --------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, text) of the lines of a file, gzipped or not, that are not blank."""
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FlashdraftError(
            f"{path} is damaged after line {number} ({error}); expected a whole gzip file."
        ) from error
    except OSError as error:
        raise FlashdraftError(f"{path} cannot be read: {error.strerror or error}.") from error


def _row(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig")
        row = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is no text
    except UnicodeError:
        raise _Bad("bad row", "not UTF-8 text; save the file as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        cut = "" if line.endswith(b"\n") else " The line is cut off; if it is being written, wait or write it again."
        raise _Bad("bad row", f"not JSON ({error}).{cut}") from None
    if not isinstance(row, dict):
        raise _Bad("bad row", f"found a {type(row).__name__}; expected a JSON object.")
    return row


def _name(row: Mapping[str, Any], fallback: str, *keys: str) -> str:
    """The first of these fields that is there, as text."""
    for key in keys:
        if isinstance(row.get(key), (str, int)) and not isinstance(row[key], bool):
            return str(row[key])
    return fallback


def _stem(path: Path) -> str:
    return path.name.split(".")[0]


# -- prompts -----------------------------------------------------------------------------------


def read_prompts(paths: Iterable[str | Path], on_reject: OnReject) -> Iterator[Prompt]:
    """Prompts of files, in order: rows with `prompt`, `turns` or `messages`.

    Of `messages` the user's turns are kept and the assistant's are dropped: the target writes its own.
    A row without `id` gets the hash of what it says. An id seen before is rejected.
    """
    seen: dict[str, str] = {}
    for path in map(Path, paths):
        for number, line in _lines(path):
            name = ""
            try:
                row = _row(line)
                name = _name(row, "", "id")
                system, turns = _turns(row)
                name = name or hashlib.sha256(json.dumps([system, turns]).encode()).hexdigest()[:16]
                if name in seen:
                    raise _Bad("duplicate id", f"id {name} was used before ({seen[name]}); ids have to differ.")
            except _Bad as problem:
                on_reject(Rejected(str(path), number, name, problem.reason, str(problem)))
                continue
            seen[name] = f"{path.name}, line {number}"
            source, group = _name(row, _stem(path), "source", "category"), _name(row, "", "group") or None
            yield Prompt(name, source, tuple(turns), system, str(path), number, group)


def _turns(row: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """(system message, the user's turns) of a row."""
    system = row.get("system")
    if "messages" in row:
        messages = _messages(row)
        if messages[0]["role"] == "system":
            system = messages[0]["content"] if system is None else system
            messages = messages[1:]
        strange = [message["role"] for message in messages if message["role"] not in ("user", "assistant")]
        if strange:
            raise _Bad("bad row", f"a message has the role {strange[0]!r}; expected user or assistant.")
        turns = [message["content"] for message in messages if message["role"] == "user"]
    elif "turns" in row:
        turns = row["turns"]
    elif "prompt" in row:
        turns = [row["prompt"]]
    else:
        raise _Bad("bad row", "no prompt; expected one of the fields prompt, turns, messages.")
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise _Bad("bad row", "the prompt is no text; expected a string, or a list of strings in turns.")
    if system is not None and not isinstance(system, str):
        raise _Bad("bad row", "system is no text; expected a string.")
    if not turns or not all(turn.strip() for turn in turns):
        raise _Bad("empty", "the prompt is empty; expected at least one character in every turn.")
    return system, turns


def _messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = row["messages"]
    ok = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not ok:
        raise _Bad("bad row", "messages is no conversation; expected a list of objects with role and content.")
    if not messages:
        raise _Bad("empty", "messages is empty; expected at least one.")
    return messages


# -- the chat template -------------------------------------------------------------------------


class ChatTemplate:
    """A target's chat template, with the choices that change what it writes.

    Args:
        eos_ids: ids that end an answer.
        system: a system message for conversations that bring none.
        thinking: the template's thinking mode on or off; None leaves it to the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_ids: Iterable[int],
        *,
        system: str | None = None,
        thinking: bool | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.system = system
        self.thinking = thinking
        self.sha256 = template_digest(tokenizer)
        if thinking is not None and "thinking" not in json.dumps(getattr(tokenizer, "chat_template", None)):
            raise FlashdraftError("this target's chat template has no thinking mode; leave the choice out.")

    def opening(self, messages: Iterable[Message]) -> list[int]:
        """Token ids of a conversation, open for the assistant to go on."""
        return encode_chat(self.tokenizer, list(messages), thinking=self.thinking)

    def last_turn(self, messages: list[Message]) -> tuple[list[int], list[int]]:
        """(ids before, ids of) the last message, the assistant's, with its end of turn.

        Raises FlashdraftError if the opening is no prefix of the whole: then no token of the whole
        can be told to be the assistant's.
        """
        opening = self.opening(messages[:-1])
        whole = encode_chat(self.tokenizer, messages, answered=True, thinking=self.thinking)
        if whole[: len(opening)] != opening:
            raise FlashdraftError(
                "the chat template does not put this answer behind the opening that it gives the model; "
                "no loss can be placed on it."
            )
        answer = whole[len(opening) :]
        ends = [i for i, token in enumerate(answer) if token in self.eos_ids]
        return opening, answer[: ends[0] + 1] if ends else answer


@dataclass
class Joined:
    """Turns that one sequence can hold; `last` counts the last of them."""

    token_ids: list[int]
    loss_spans: list[tuple[int, int]]
    last: int


def join_turns(turns: Iterable[tuple[list[int], list[int]]]) -> list[Joined]:
    """(prompt ids, answer ids) of each turn -> as few sequences as hold them exactly.

    A turn goes on in the sequence before it if its prompt begins with that whole sequence, and opens
    a new one otherwise: there the template, or the text's tokens, changed what had been said.
    """
    joined: list[Joined] = []
    for number, (prompt, answer) in enumerate(turns):
        span = (len(prompt), len(prompt) + len(answer))
        if joined and prompt[: len(joined[-1].token_ids)] == joined[-1].token_ids:
            joined[-1] = Joined([*prompt, *answer], [*joined[-1].loss_spans, span], number)
        else:
            joined.append(Joined([*prompt, *answer], [span], number))
    return joined


# -- sequences ---------------------------------------------------------------------------------


def read_sequences(
    paths: Iterable[str | Path],
    *,
    vocab_size: int | None = None,
    template: ChatTemplate | None = None,
    on_reject: OnReject | None = None,
) -> Iterator[TokenSequence]:
    """Sequences of files, one line at a time: rows of `regenerate` (`token_ids`), with or without
    loss spans, and conversations (`messages`), which need a template.

    Args:
        vocab_size: ids have to be below it.
        on_reject: gets every row that cannot be used; without it the first one raises FlashdraftError.
    """
    for path in map(Path, paths):
        for number, line in _lines(path):
            name = ""
            try:
                row = _row(line)
                name = _name(row, f"{_stem(path)}:{number}", "id")
                sequences = _sequences(row, name, _name(row, _stem(path), "source", "category"), template)
                for sequence in sequences:
                    _check_ids(sequence.token_ids, vocab_size)
            except _Bad as problem:
                rejected = Rejected(str(path), number, name, problem.reason, str(problem))
                if on_reject is None:
                    raise FlashdraftError(rejected.sentence) from None
                on_reject(rejected)
                continue
            yield from sequences


def _sequences(row: Mapping[str, Any], name: str, source: str, template: ChatTemplate | None) -> list[TokenSequence]:
    if "token_ids" in row:
        tokens = row["token_ids"]
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise _Bad("bad row", "token_ids is no list of whole numbers.")
        temperature, finished = row.get("temperature"), row.get("finished", True) is True
        return [TokenSequence(name, source, tuple(tokens), _spans(row, len(tokens)), temperature, finished)]
    if "messages" in row:
        if template is None:
            raise _Bad("bad row", "a conversation has to be tokenised, and no chat template was given.")
        return [
            TokenSequence(name, source, tuple(part.token_ids), tuple(part.loss_spans))
            for part in _conversation(row, template)
        ]
    raise _Bad("bad row", "no sequence; expected the field token_ids (or messages).")


def _spans(row: Mapping[str, Any], length: int) -> tuple[tuple[int, int], ...]:
    """The row's loss spans; without any, all that follows the prompt."""
    if "loss_spans" in row:
        spans = row["loss_spans"]
    elif type(row.get("num_prompt_tokens")) is int:
        spans = [[row["num_prompt_tokens"], length]]
    else:
        raise _Bad("bad row", "no loss_spans and no num_prompt_tokens; expected one of them.")
    ok = isinstance(spans, list) and all(
        isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span) for span in spans
    )
    if not ok:
        raise _Bad("bad row", "loss_spans is no list of [start, end].")
    if not spans or all(start == end for start, end in spans):
        raise _Bad("empty", "the response is empty; expected at least one token to learn.")
    edges = [0, *(edge for span in spans for edge in span)]
    if not all(1 <= start < end <= length for start, end in spans) or edges != sorted(edges):
        raise _Bad("bad row", f"loss_spans {spans} are out of range; expected rising spans within 1 to {length}.")
    return tuple((start, end) for start, end in spans)


def _check_ids(tokens: tuple[int, ...], vocab_size: int | None) -> None:
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        wrong = lowest if lowest < 0 else highest
        limit = f"the target's vocabulary of {vocab_size}" if vocab_size is not None else "any vocabulary"
        raise _Bad("bad row", f"token id {wrong} is outside {limit}; was it written by another target?")


def _conversation(row: Mapping[str, Any], template: ChatTemplate) -> list[Joined]:
    messages = _messages(row)
    if template.system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": template.system}, *messages]
    turns = []
    for k, message in enumerate(messages):
        if message["role"] == "assistant" and k > 0:
            try:
                turn = template.last_turn([*messages[: k + 1]])
            except FlashdraftError as error:
                raise _Bad("template", f"message {k + 1}: {error}") from error
            if message["content"].strip() and turn[1]:
                turns.append(turn)
    if not turns:
        raise _Bad("empty", "the conversation has no answer; expected an assistant message with text.")
    return join_turns(turns)


def read_meta(path: str | Path) -> dict[str, Any] | None:
    """What made a file of sequences (target, template hash, system prompt, thinking mode, sampling),
    from the sidecar beside it; None if there is none."""
    sidecar = Path(f"{str(path).removesuffix('.gz')}.meta.json")
    try:
        meta = json.loads(sidecar.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FlashdraftError(f"{sidecar} cannot be read ({error}); expected JSON.") from error
    return meta if isinstance(meta, dict) else None
