"""Requests to OpenAI-compatible servers: several at once, over several servers, with retries.

Threads and http.client of the standard library. huggingface_hub brings an HTTP client, but another
one in every major version (httpx, httpx2), so none can be relied on; and a request takes seconds, so a
thread for each of a few hundred costs nothing.

Who is to blame when a request fails? A server that fails one worker `retries` times in a row, while
nobody else gets an answer from it, is dropped, and its requests go to the others. A request that
failed `retries` times at servers which do answer others is given up.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..types import FlashdraftError

# Sent as a bearer token if it is set; it is written nowhere.
KEY_VARIABLE = "FLASHDRAFT_API_KEY"

_LARGEST_REPLY = 64 << 20
_LONGEST_WAIT = 60.0
_LONGEST_PROBE = 20.0


@dataclass(frozen=True)
class Reply:
    """What a server answered. `cut`: at the length limit. Counts and ids are the server's own, if it
    gives any."""

    text: str
    reasoning: str | None
    cut: bool
    num_prompt_tokens: int | None
    endpoint: str
    prompt_ids: list[int] | None = None
    token_ids: list[int] | None = None


@dataclass(frozen=True)
class Refusal:
    """A request that no server answers, and why."""

    detail: str


class Failed(Exception):
    """Worth another try. `wait`: seconds the server asked for. `reached`: it did answer something."""

    def __init__(self, detail: str, *, wait: float = 0.0, reached: bool = True) -> None:
        super().__init__(detail)
        self.wait, self.reached = wait, reached


class Refused(Exception):
    """The request is at fault: another try gives the same."""


class Unusable(Exception):
    """The server is at fault, for every request."""


@dataclass
class _Job:
    key: int
    body: Mapping[str, Any]
    failures: int = 0
    # the server that failed it last, and how many answers that one had given when it first did
    failed_at: Endpoint | None = None
    answers_then: dict[str, int] = field(default_factory=dict)


class Endpoint:
    """One server. `failing`: requests that failed since its last answer."""

    def __init__(self, url: str, model: str | None, timeout: float) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FlashdraftError(f"{url!r} is no endpoint; expected something like http://localhost:8000/v1.")
        self.url = url
        self.model = model
        self.answers = 0
        self.failing: set[int] = set()
        self.live = True
        self._timeout = timeout
        secure = parts.scheme == "https"
        self._connect: Callable[..., http.client.HTTPConnection] = (
            http.client.HTTPSConnection if secure else http.client.HTTPConnection
        )
        try:
            self._host, self._port = parts.hostname, parts.port
        except ValueError as error:
            raise FlashdraftError(f"{url!r} is no endpoint: {error}.") from error
        path = parts.path.rstrip("/")
        self.path = path if re.fullmatch(r"v\d+", path.rsplit("/", 1)[-1]) else f"{path}/v1"

    def find_model(self) -> None:
        """Ask which model is served, unless a name was given; raises Unusable."""
        try:
            listed = self.ask("GET", "models", timeout=min(self._timeout, _LONGEST_PROBE))
        except (Failed, Refused, Unusable) as error:
            if self.model is not None and getattr(error, "reached", True):
                return  # it is there, and what it lists is not needed
            raise Unusable(str(error)) from error
        if self.model is None:
            try:
                self.model = str(listed["data"][0]["id"])
            except (KeyError, IndexError, TypeError):
                raise Unusable("it lists no model; name one with --model") from None

    def chat(self, body: Mapping[str, Any]) -> Reply:
        return _reply(self.ask("POST", "chat/completions", {"model": self.model, **body}), self.url)

    @contextlib.contextmanager
    def exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """A reply with status 200 that is still to be read; `path` is the whole one. What goes wrong until
        it is read raises Failed, Refused or Unusable."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {os.environ[KEY_VARIABLE]}"
        data = None if body is None else json.dumps(body).encode()
        connection = self._connect(self._host, self._port, timeout=timeout or self._timeout)
        try:
            connection.request(method, path, data, headers)
            response = connection.getresponse()
            if response.status != 200:
                content = response.read(_LARGEST_REPLY)
                raise _status_error(response.status, content, response.getheader("Retry-After"))
            yield response
        except TimeoutError:
            raise Failed(f"no answer within {timeout or self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Failed(shortened(str(error) or type(error).__name__), reached=False) from error
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The JSON a server answers with; raises Failed, Refused or Unusable."""
        with self.exchange(method, f"{self.path}/{path}", body, timeout) as response:
            content = response.read(_LARGEST_REPLY)
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            raise Failed(f"the answer is no JSON: {shortened(content[:200].decode(errors='replace'))}") from None


def _status_error(status: int, content: bytes, retry_after: str | None) -> Exception:
    detail = f"HTTP {status}: {shortened(content[:2000].decode(errors='replace'))}"
    if status in (400, 413, 422):
        return Refused(detail)
    if status in (401, 403, 404, 405) or 300 <= status < 400:
        return Unusable(detail)
    wait = 0.0
    with contextlib.suppress(TypeError, ValueError):  # absent, or a date
        wait = min(max(float(retry_after or 0), 0.0), _LONGEST_WAIT)
    return Failed(detail, wait=wait)


def _reply(value: Any, url: str) -> Reply:
    try:
        choice = value["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
        text = message["content"]
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        usage = value.get("usage") or {}
        counted = usage.get("prompt_tokens")
        if not isinstance(text, str | None) or not isinstance(reasoning, str | None):
            raise TypeError
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Failed(f"the answer is no chat completion: {shortened(json.dumps(value)[:200])}") from None
    if reason not in ("stop", "length"):
        raise Refused(f"the answer ended with {shortened(str(reason))!r}; expected stop or length")
    return Reply(
        text or "", reasoning, reason == "length", counted if isinstance(counted, int) else None, url,
        _ids(value.get("prompt_token_ids")), _ids(choice.get("token_ids")),
    )  # fmt: skip


def _ids(value: Any) -> list[int] | None:
    return value if isinstance(value, list) and all(type(token) is int for token in value) else None


def shortened(text: str) -> str:
    """What a server wrote, made fit for a message on a terminal."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= 200 else text[:197] + "..."


class EndpointPool:
    """Chat requests over several servers.

    Args:
        model: name of the model there; None asks every server for its first.
        concurrency: requests at a time, per server.
        retries: see the module's docstring. backoff: seconds before the second try; doubles each time.
        say: is told when a server is dropped, and why.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        model: str | None = None,
        concurrency: int = 16,
        retries: int = 6,
        timeout: float = 600.0,
        backoff: float = 0.5,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._endpoints = [Endpoint(url, model, timeout) for url in dict.fromkeys(urls)]
        self._retries, self._backoff, self._say = retries, backoff, say
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._results: queue.Queue[tuple[int, Reply | Refusal]] = queue.Queue()
        self._stopped = False
        self._last_words = ""
        for endpoint in self._endpoints:
            try:
                endpoint.find_model()
            except Unusable as error:
                self._drop(endpoint, str(error))
        self._require_one()
        for endpoint in self._live:
            for _ in range(concurrency):
                threading.Thread(target=self._work, args=(endpoint,), daemon=True).start()

    @property
    def _live(self) -> list[Endpoint]:
        return [endpoint for endpoint in self._endpoints if endpoint.live]

    @property
    def models(self) -> list[str]:
        """Names of the models the servers offer."""
        return sorted({str(endpoint.model) for endpoint in self._live})

    def submit(self, key: int, body: Mapping[str, Any]) -> None:
        with self._changed:
            self._jobs.append(_Job(key, body))
            self._changed.notify_all()  # workers that pause wait here too: one of them would not take it

    def poll(self) -> list[tuple[int, Reply | Refusal]]:
        """Wait for answers. Raises FlashdraftError when no server is left to give one."""
        while True:
            with contextlib.suppress(queue.Empty):
                results = [self._results.get(timeout=0.2)]
                while not self._results.empty():
                    results.append(self._results.get())
                return results
            self._require_one()

    def close(self) -> None:
        """Take no more jobs. Requests under way are left to themselves: they end with the process."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _require_one(self) -> None:
        if not self._live:
            raise FlashdraftError(
                f"no endpoint is left ({self._last_words}). All finished rows are kept; "
                "run the same command again to go on."
            )

    def _work(self, endpoint: Endpoint) -> None:
        """One worker: takes jobs, until its server is dropped."""
        streak, answers = 0, 0
        while (job := self._take(endpoint)) is not None:
            try:
                reply = endpoint.chat(job.body)
            except Refused as error:
                self._results.put((job.key, Refusal(str(error))))
            except Unusable as error:
                self._put_back(job)
                self._drop(endpoint, str(error))
            except Failed as error:
                if endpoint.answers != answers:
                    streak, answers = 0, endpoint.answers
                streak += self._speaks_against(endpoint, job, error)
                self._try_again(endpoint, job, error, streak)
                self._pause(endpoint, error, streak)
            else:
                streak = 0
                with self._changed:
                    endpoint.answers += 1
                    endpoint.failing.clear()
                self._results.put((job.key, reply))

    def _take(self, endpoint: Endpoint) -> _Job | None:
        """The next job for a server: one that it failed last goes to another, if there is one."""
        with self._changed:
            while endpoint.live and not self._stopped:
                alone = len(self._live) == 1
                for job in self._jobs:
                    if job.failed_at is not endpoint or alone:
                        self._jobs.remove(job)
                        return job
                self._changed.wait()
        return None

    def _put_back(self, job: _Job) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _speaks_against(self, endpoint: Endpoint, job: _Job, error: Failed) -> bool:
        """Note a failure; False if the server answered others since this request first failed there."""
        with self._changed:
            endpoint.failing.add(job.key)
            job.failures += error.reached
            job.failed_at = endpoint
            then = job.answers_then.setdefault(endpoint.url, endpoint.answers)
            return not (error.reached and endpoint.answers > then)

    def _try_again(self, endpoint: Endpoint, job: _Job, error: Failed, streak: int) -> None:
        """Give a request up, or put it back; drop a server that fails all the time."""
        with self._changed:
            own_fault = endpoint.answers > job.answers_then[endpoint.url] or endpoint.failing == {job.key}
        if error.reached and job.failures >= self._retries and own_fault:
            self._results.put((job.key, Refusal(f"{endpoint.url} failed {job.failures} times: {error}")))
            return
        self._put_back(job)
        if streak >= self._retries:
            self._drop(endpoint, f"failed {streak} times in a row, the last time with: {error}")

    def _pause(self, endpoint: Endpoint, error: Failed, streak: int) -> None:
        wait = min(self._backoff * 2 ** min(streak, 16) / 2, _LONGEST_WAIT) * random.uniform(0.5, 1.5)  # noqa: S311
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not endpoint.live, max(wait, error.wait))

    def _drop(self, endpoint: Endpoint, reason: str) -> None:
        with self._changed:
            if not endpoint.live:
                return
            endpoint.live = False
            self._last_words = f"{endpoint.url}: {reason}"
            self._changed.notify_all()
        self._say(f"endpoint dropped: {self._last_words}")
