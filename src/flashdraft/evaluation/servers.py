"""Arms that are OpenAI-compatible servers: requests streamed, timed from here, and what the servers
themselves count of their drafts.

Where acceptance comes from: counters at `/metrics` that grow by a group's passes (vLLM; SGLang), what an
answer says of itself (SGLang's `meta_info`, llama.cpp's `timings`). A figure that a server does not give
stays unknown. Only time that the reader of a stream sees is measured, so a server on another machine is
measured with its network.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from ..text import encode_chat
from ..training.endpoints import Endpoint, Failed, Refused, Unusable, shortened
from ..training.ways import load_tokenizer
from ..types import FlashdraftError
from .counters import Metrics, counts_between, number, of_answer, used_by_others
from .records import PLAIN, Cell, Record
from .streams import Answer, Broken, ChatReader, GenerateReader, events
from .tasks import Group, TaskPrompt

WARM_UP = 16  # tokens
_PROBE = 5.0  # seconds a question about the server may take
_LARGEST_REPLY = 64 << 20
_SPLIT = 8  # pieces of text that may come on top of the tokens: one may be sent in two
_OFF = 1.2  # a server's count of tokens, over a tokenizer's; the same text has several spellings


@dataclass(frozen=True)
class ServerSpec:
    """A server to measure.

    Attributes:
        url: such as http://localhost:8000/v1. plain_url: the same engine without a draft, to compare with.
        name: what records call it; None is the URL's host and port.
        model: its name there; None is the first one the server lists. plain_model: at plain_url.
        api: "chat", or "generate": SGLang's own, which says more of a request.
        tokenizer: a model's folder, to count tokens for a server that does not; "generate" needs it.
        timeout: seconds for an answer.
    """

    url: str
    name: str | None = None
    plain_url: str | None = None
    model: str | None = None
    plain_model: str | None = None
    api: str = "chat"
    tokenizer: str | None = None
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for url in (self.url, self.plain_url or ""):
            if "@" in urlsplit(url if "://" in url else f"//{url}").netloc:
                raise FlashdraftError("a server's URL holds a password; set FLASHDRAFT_API_KEY instead.")
        if self.api not in ("chat", "generate"):
            raise FlashdraftError(f"a server's api is {self.api!r}; expected chat or generate.")
        if self.api == "generate" and self.tokenizer is None:
            raise FlashdraftError("a server's api generate takes token ids; name its model's folder with tokenizer.")
        if self.timeout <= 0:
            raise FlashdraftError(f"a server's timeout is {self.timeout:g}; expected seconds above 0.")

    @property
    def label(self) -> str:
        return self.name or urlsplit(self.url if "://" in self.url else f"//{self.url}").netloc

    def arms(self) -> list[tuple[str, Server]]:
        """(arm, server): with the draft, and the plain one if there is any."""
        found = [(self.label, Server(self.label, self.url, self.model, self))]
        if self.plain_url is not None:
            name = f"{self.label} {PLAIN}"
            found.append((PLAIN, Server(name, self.plain_url, self.plain_model or self.model, self)))
        return found


# An answer with its tokens, why there is none, or why there will not be any.
Outcome = tuple[Answer, int] | str | Exception


class Server:
    """One server, asked as an arm of a benchmark."""

    def __init__(self, name: str, url: str, model: str | None, spec: ServerSpec) -> None:
        self.name, self.url, self._spec = name, url, spec
        self._endpoint = Endpoint(url, model, spec.timeout)
        self._root = self._endpoint.path.rsplit("/", 1)[0]
        self._tokenizer: Any = None

    def begin(self) -> None:
        """Find the model, and the tokenizer. Raises FlashdraftError where the server is of no use."""
        try:
            self._endpoint.find_model()
        except Unusable as error:
            raise self._error(str(error)) from None
        if self._spec.tokenizer is not None and self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._spec.tokenizer)[0]

    def describe(self) -> dict[str, Any]:
        """What it says of itself."""
        self.begin()
        version = None
        for path, key in (("version", "version"), ("get_server_info", "version"), ("props", "build_info")):
            found = self._told(path) if version is None else None
            version = found.get(key) if isinstance(found, dict) else version
        before = self._read_metrics()
        return {
            "url": self.url, "model": self._endpoint.model,
            "version": shortened(str(version)) if version is not None else None,
            "metrics": before.source if before is not None else None,
        }  # fmt: skip

    def warm_up(self, prompt: TaskPrompt, temperature: float, is_plain: bool) -> None:
        """A first answer. Raises FlashdraftError if there is none, or if a plain server drafts."""
        self.begin()
        before = self._read_metrics()
        try:
            answer = self._ask(prompt, temperature, WARM_UP, 0)
            tokens = self._count(answer, WARM_UP)
        except (Broken, Refused, Failed, Unusable) as error:
            raise self._error(str(error)) from None
        counts = of_answer(answer.said, tokens) or counts_between(before, self._settled(before), tokens)
        if is_plain and counts is not None and counts.drafted:
            raise self._error(f"it drafts ({counts.drafted} tokens by its {counts.source}), and plain_url must not")

    def measure(self, cell: Cell, repeat: int, group: Group, max_tokens: int, seeds: Sequence[int]) -> list[Record]:
        """A group's requests at the same time, a record each. Raises FlashdraftError if nobody answers there
        any more; other failures are counted."""
        before = self._read_metrics()
        found = together(
            [partial(self._try, p, cell.temperature, max_tokens, s) for p, s in zip(group.prompts, seeds, strict=True)]
        )
        gone = next((outcome for outcome in found if isinstance(outcome, Exception)), None)
        if gone is not None:
            raise self._error(f"{gone}; finished groups are kept, run the same command again to go on")
        records = self._records(cell, repeat, group, [o for o in found if not isinstance(o, Exception)])
        return self._with_counts(records, before)

    def _try(self, prompt: TaskPrompt, temperature: float, max_tokens: int, seed: int) -> Outcome:
        """An answer and its tokens; a sentence for one that failed; an exception if the server is of no use."""
        try:
            answer = self._ask(prompt, temperature, max_tokens, seed)
            return answer, self._count(answer, max_tokens)
        except (Broken, Refused) as error:
            return str(error)
        except Failed as error:
            return str(error) if error.reached else error
        except Unusable as error:
            return error

    def _records(
        self, cell: Cell, repeat: int, group: Group, found: Sequence[tuple[Answer, int] | str]
    ) -> list[Record]:
        answers = [pair[0] for pair in found if not isinstance(pair, str)]
        seconds = round(covered([(a.first, a.end) for a in answers]), 6)
        records = []
        for prompt, pair in zip(group.prompts, found, strict=True):
            blank = Record(
                cell, group.task, prompt.id, group.number, len(group.prompts), repeat, None, 0, "", "error", (), None,
                None, None, 0.0, None, None, failure=pair if isinstance(pair, str) else "",
            )  # fmt: skip
            if not isinstance(pair, str):
                answer, tokens = pair
                blank = replace(
                    blank,
                    num_prompt_tokens=number((answer.said.get("usage") or {}).get("prompt_tokens")),
                    num_tokens=tokens,
                    ids_sha256=hashlib.sha256(answer.text.encode(errors="replace")).hexdigest()[:16],
                    finish_reason=answer.finish_reason,
                    decode_seconds=seconds,
                    first_token_seconds=round(answer.first - answer.asked, 6),
                    counts=of_answer(answer.said, tokens),
                )
            records.append(blank)
        return records

    def _with_counts(self, records: list[Record], before: Metrics | None) -> list[Record]:
        """What the server counted meanwhile, in the group's first record, unless its answers say it."""
        if any(record.failure or record.counts for record in records) or before is None:
            return records
        tokens = sum(record.num_tokens for record in records)
        after = self._settled(before)
        if used_by_others(before, after, tokens):
            note = "other clients used the server meanwhile; its counters say nothing of these requests"
            return [replace(records[0], note=note), *records[1:]]
        counts = counts_between(before, after, tokens, len(records))
        return [replace(records[0], counts=counts), *records[1:]]

    # -- asking --------------------------------------------------------------------------------

    def _ask(self, prompt: TaskPrompt, temperature: float, max_tokens: int, seed: int) -> Answer:
        drawn = {"seed": seed} if temperature else {}
        if self._spec.api == "generate":
            params = {"temperature": temperature, "max_new_tokens": max_tokens}
            ids = encode_chat(self._tokenizer, prompt.messages)
            path, body = f"{self._root}/generate", {"input_ids": ids, "sampling_params": params, "stream": True}
        else:
            path, body = f"{self._endpoint.path}/chat/completions", {
                "model": self._endpoint.model, "messages": list(prompt.messages), "temperature": temperature,
                "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}, **drawn,
            }  # fmt: skip
        reader, answered = (GenerateReader() if self._spec.api == "generate" else ChatReader()), False
        asked = time.perf_counter()
        try:
            with self._endpoint.exchange("POST", path, body) as response:
                answered = True
                for at, event in events(response.readline, asked + self._spec.timeout):
                    reader.take(at, event)
        except Failed as error:
            if answered:  # it was there, and went away in the middle
                raise Broken(f"the stream was cut after {reader.num_pieces} pieces ({error})") from None
            raise
        return reader.answer(asked)

    def _count(self, answer: Answer, max_tokens: int) -> int:
        """Tokens of an answer. Raises Broken where nobody counts them, or a count cannot be."""
        said = answer.said.get("usage") or {}
        tokens = number(said.get("completion_tokens"))
        own = len(self._tokenizer(answer.text, add_special_tokens=False)["input_ids"]) if self._tokenizer else None
        if said.get("completion_tokens") is not None and tokens is None:
            raise Broken(f"it counts {shortened(repr(said['completion_tokens']))} tokens; expected a whole number")
        if tokens is None:
            tokens = answer.said.get("num_ids") or own
        if tokens is None:
            raise Broken(
                "it does not count its tokens (no usage in the stream); name its model's folder with tokenizer"
            )
        if tokens > max_tokens:
            raise Broken(f"it counts {tokens} tokens where at most {max_tokens} were asked for")
        if tokens + _SPLIT < answer.num_pieces or (answer.text and not tokens):
            raise Broken(f"it counts {tokens} tokens, but streamed {answer.num_pieces} pieces of text")
        if own is not None and max(tokens, own) > _OFF * min(tokens, own) + _SPLIT:
            raise Broken(f"it counts {tokens} tokens, and its tokenizer {own}")
        return tokens

    # -- the server's own figures --------------------------------------------------------------

    def _told(self, path: str) -> Any:
        """JSON at a path that only some servers have."""
        try:
            with self._endpoint.exchange("GET", f"{self._root}/{path}", timeout=_PROBE) as response:
                return json.loads(response.read(_LARGEST_REPLY))
        except (Failed, Refused, Unusable, ValueError, RecursionError):
            return None

    def _read_metrics(self) -> Metrics | None:
        try:
            with self._endpoint.exchange("GET", f"{self._root}/metrics", timeout=_PROBE) as response:
                return Metrics.read(response.read(_LARGEST_REPLY).decode(errors="replace"))
        except (Failed, Refused, Unusable):
            return None

    def _settled(self, before: Metrics | None) -> Metrics | None:
        """Counters after requests: they may be a moment late, so until two readings are equal."""
        after = self._read_metrics() if before is not None else None
        for _ in range(10):
            time.sleep(0.05)
            later = self._read_metrics() if after is not None else None
            if later == after:
                break
            after = later
        return after

    def _error(self, detail: str) -> FlashdraftError:
        return FlashdraftError(f"the server {self.name} ({self.url}) cannot be measured: {detail}.")


def together(calls: Sequence[Callable[[], Outcome]]) -> list[Outcome]:
    """What each call returns, all at the same time. Daemon threads: an interrupted program does not wait."""
    if len(calls) == 1:
        return [calls[0]()]
    found: list[Outcome] = ["no answer"] * len(calls)

    def run(at: int) -> None:
        found[at] = calls[at]()

    threads = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one span runs."""
    total, reached = 0.0, float("-inf")
    for first, end in sorted(spans):
        total += max(end - max(first, reached), 0.0)
        reached = max(reached, end)
    return total
