"""A streamed answer (server-sent events), piece by piece, with the times at which its text came."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..training.endpoints import shortened

_LARGEST_LINE, _LARGEST_STREAM = 4 << 20, 64 << 20


class Broken(Exception):
    """An answer that cannot be counted, and why, in words."""


@dataclass(frozen=True)
class Answer:
    """A streamed answer. Times are on the clock of perf_counter. said: what the server told besides the
    text: usage, timings, meta_info, token ids."""

    text: str
    finish_reason: str
    asked: float
    first: float
    end: float
    num_pieces: int
    said: Mapping[str, Any]


def events(readline: Callable[[int], bytes], deadline: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """(when it came, object) of every event of a stream (SSE), up to its end."""
    size = 0
    while line := readline(_LARGEST_LINE):
        at, size = time.perf_counter(), size + len(line)
        if at > deadline:
            raise Broken("the answer took longer than the time that was given")
        if size > _LARGEST_STREAM:
            raise Broken(f"the stream is longer than {_LARGEST_STREAM >> 20} MiB")
        kind, _, rest = line.partition(b":")
        if kind.strip() not in (b"data", b"error"):
            continue
        if rest.strip() == b"[DONE]":
            return
        try:
            event = json.loads(rest)
        except (ValueError, RecursionError):
            raise Broken(
                f"a piece of the stream is no JSON: {shortened(rest[:200].decode(errors='replace'))}"
            ) from None
        if not isinstance(event, dict) or event.get("error") or kind.strip() == b"error":
            raise Broken(f"the stream holds an error: {shortened(json.dumps(event)[:300])}")
        yield at, event


class ChatReader:
    """Collects the pieces of a chat completion."""

    def __init__(self) -> None:
        self.num_pieces = 0
        self._texts: list[str] = []
        self._first: float | None = None
        self._end = 0.0
        self._reason: str | None = None
        self._said: dict[str, Any] = {}

    def take(self, at: float, event: dict[str, Any]) -> None:
        for key in ("usage", "timings"):
            if isinstance(event.get(key), dict):
                self._said[key] = event[key]
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        choice = choices[0]
        delta = choice["delta"] if isinstance(choice.get("delta"), dict) else {}
        parts = [delta.get(key) for key in ("reasoning_content", "reasoning", "content")]
        self._add(at, "".join(part for part in parts if isinstance(part, str)), choice.get("finish_reason"))
        if isinstance(choice.get("token_ids"), list):
            self._said["num_ids"] = self._said.get("num_ids", 0) + len(choice["token_ids"])
        if isinstance(choice.get("meta_info"), dict):
            self._said["meta_info"] = choice["meta_info"]

    def _add(self, at: float, text: str, reason: Any) -> None:
        if text:
            self._texts.append(text)
            self.num_pieces += 1
            self._first, self._end = self._first if self._first is not None else at, at
        if reason is not None:
            self._reason, self._end = shortened(str(reason)), at

    def answer(self, asked: float) -> Answer:
        if self._reason is None:
            said = (
                f"was cut after {self.num_pieces} pieces" if self.num_pieces else "holds no event of a chat completion"
            )
            raise Broken(f"the stream {said}, and gives no reason why it ends")
        first = self._first if self._first is not None else self._end
        return Answer("".join(self._texts), self._reason, asked, first, self._end, self.num_pieces, self._said)


class GenerateReader(ChatReader):
    """Collects SGLang's own stream, whose text grows from piece to piece or is the piece alone."""

    def take(self, at: float, event: dict[str, Any]) -> None:
        meta = event["meta_info"] if isinstance(event.get("meta_info"), dict) else {}
        text, so_far = event.get("text"), "".join(self._texts)
        text = text if isinstance(text, str) else ""
        reason = meta.get("finish_reason")
        self._add(at, text[len(so_far) :] if text.startswith(so_far) else text, reason)
        if isinstance(reason, dict):
            self._reason = shortened(str(reason.get("type")))
        self._said["meta_info"] = meta
        self._said["usage"] = {key: meta[key] for key in ("prompt_tokens", "completion_tokens") if key in meta}
