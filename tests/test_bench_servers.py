"""Servers as arms of a benchmark: what is sent, what is timed and counted, and servers that misbehave."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli_bed import trained_tokenizer
from flashdraft import cli
from flashdraft.evaluation import counters, report, streams, tables
from flashdraft.evaluation.bench import BenchConfig, run_bench
from flashdraft.evaluation.counters import Metrics, counts_between, of_answer, used_by_others
from flashdraft.evaluation.records import PLAIN, Cell, Record, RecordFile, read_records
from flashdraft.evaluation.servers import Server, ServerSpec, covered
from flashdraft.evaluation.summary import Summary, summarise
from flashdraft.evaluation.tasks import Group, TaskPrompt
from flashdraft.settings import make_settings
from flashdraft.types import FlashdraftError

# Every answer: the prompt's token, then passes that keep so many of three drafted tokens.
KEPT = (2, 0, 3, 1)
TOKENS = 1 + sum(n + 1 for n in KEPT)
PASSES, ACCEPTED, DRAFTED = len(KEPT), sum(KEPT), 3 * len(KEPT)
TAU = (TOKENS - 1) / PASSES
TEXT = "QZXJKVWUYOQ"  # as many tokens of cli_bed's tokenizer, which has no merges of these letters

React = Callable[["Fake", dict[str, Any], Any], bool]


class Fake:
    """An OpenAI-compatible server with the figures of an engine.

    Args:
        engine: vllm, sglang (counters), mean (SGLang's gauge alone), meta (SGLang's answers), llama, or bare.
        drafts: whether it counts drafts, and sends several tokens a piece.
        react: sees a request before it is answered; True if it has dealt with it.
    """

    def __init__(self, engine: str = "bare", drafts: bool = True, react: React | None = None) -> None:
        self.engine, self.drafts, self.react = engine, drafts, react
        self.requests: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.counts = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens", "generation"), 0)
        self.slots = [0, 0, 0]
        self.foreign = 0
        self.running = self.most_at_once = 0
        self.lock = threading.Lock()
        self.usage: Callable[[int], Any] = lambda tokens: {"prompt_tokens": 7, "completion_tokens": tokens}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                found = outer.told(self.path)
                self.send(200 if found is not None else 404, found if found is not None else b"nothing here")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(body)
                    outer.paths.append(self.path)
                    outer.running += 1
                    outer.most_at_once = max(outer.most_at_once, outer.running)
                try:
                    if outer.react is None or not outer.react(outer, body, self):
                        self.stream(outer.events(body, self.path))
                finally:
                    with outer.lock:
                        outer.running -= 1

            def send(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def stream(self, events: list[Any], end: bytes = b"data: [DONE]\n\n") -> None:
                self.begin()
                for event in events:
                    self.piece(b": a comment\n" + b"data: " + json.dumps(event).encode() + b"\n\n")
                self.piece(end)
                self.wfile.write(b"0\r\n\r\n")

            def begin(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()

            def piece(self, content: bytes) -> None:
                if content:
                    self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def told(self, path: str) -> bytes | None:
        """What a GET finds."""
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "small"}]}).encode()
        if path == "/version" and self.engine == "vllm":
            return b'{"version": "0.32.0"}'
        if path == "/metrics" and self.engine in ("vllm", "sglang", "mean"):
            return self.metrics().encode()
        return None

    def metrics(self) -> str:
        made = self.counts["generation"] + self.foreign
        if self.engine == "vllm":
            lines = [f'vllm:generation_tokens_total{{engine="0",model_name="small"}} {made}.0']
            if self.drafts:
                lines += [
                    f'vllm:spec_decode_num_{name}_total{{engine="0"}} {float(self.counts[name])}'
                    for name in ("drafts", "draft_tokens", "accepted_tokens")
                ]
                lines += [
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{k}"}} {float(n)}'
                    for k, n in enumerate(self.slots)
                ]
            return "# HELP vllm:x words\n" + "\n".join(lines)
        calls = f"sglang:spec_verify_calls_total {self.counts['drafts']}\n" if self.engine == "sglang" else ""
        length = f'sglang:spec_accept_length{{tp_rank="0"}} {TOKENS / PASSES}\n' if self.drafts else ""
        return f"sglang:generation_tokens_total {made}\n" + length + (calls if self.drafts else "")

    def events(self, body: dict[str, Any], path: str) -> list[Any]:
        """The stream of an answer, and its figures."""
        words, at, pieces = list(TEXT), 1, []
        pieces.append(words[:1])
        for kept in KEPT:
            pieces.append(words[at : at + kept + 1])
            at += kept + 1
        if not self.drafts:
            pieces = [[word] for word in words]
        with self.lock:
            self.counts["generation"] += TOKENS
            if self.drafts:
                for name, n in (("drafts", PASSES), ("draft_tokens", DRAFTED), ("accepted_tokens", ACCEPTED)):
                    self.counts[name] += n
                for k in range(3):
                    self.slots[k] += sum(kept > k for kept in KEPT)
        if path == "/generate":
            return self._generated(pieces)
        events: list[Any] = [{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}]
        events += [{"choices": [{"delta": {"content": "".join(piece)}, "finish_reason": None}]} for piece in pieces]
        last: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "length"}]}
        if self.engine == "llama" and self.drafts:
            last["timings"] = {"predicted_n": TOKENS, "draft_n": DRAFTED, "draft_n_accepted": ACCEPTED}
        usage = self.usage(TOKENS)
        return [*events, last, *([{"choices": [], "usage": usage}] if usage is not None else [])]

    def _generated(self, pieces: list[list[str]]) -> list[Any]:
        """SGLang's own: the text so far, with the figures so far."""
        events, done = [], 0
        for n, _ in enumerate(pieces, 1):
            done += len(pieces[n - 1])
            meta: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": done, "finish_reason": None}
            if n == len(pieces):
                meta["finish_reason"] = {"type": "length", "length": TOKENS}
            if self.drafts:
                meta |= {"spec_verify_ct": n - 1, "spec_accept_length": done / max(n - 1, 1)}
                meta |= {"spec_num_correct_drafts": sum(KEPT[: n - 1]), "spec_num_proposed_drafts": 3 * (n - 1)}
            events.append({"text": "".join(w for piece in pieces[:n] for w in piece), "meta_info": meta})
        return events


@pytest.fixture
def serve() -> Iterator[Callable[..., Fake]]:
    fakes: list[Fake] = []

    def start(*args: Any, **kwargs: Any) -> Fake:
        fakes.append(Fake(*args, **kwargs))
        return fakes[-1]

    yield start
    for fake in fakes:
        fake.stop()


@pytest.fixture
def task(tmp_path: Path) -> Path:
    rows = [{"id": i, "prompt": f"boats {i}", **({"system": "Be brief."} if i == 0 else {})} for i in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "a.jsonl"


@pytest.fixture
def bench(task: Path, tmp_path: Path) -> Callable[..., Any]:
    """Runs a benchmark of servers and reads its file."""

    def run(*servers: dict[str, Any], out: str = "x.jsonl", **changes: Any) -> Any:
        values = {
            "out": str(tmp_path / out),
            "tasks": {"a": str(task)},
            "prompts": None,
            "max_tokens": 20,
            "repeats": 1,
        }
        config = make_settings(BenchConfig, {**values, "servers": list(servers), **changes})
        return read_records(run_bench(config).path)

    return run


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder without weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    trained_tokenizer().save_pretrained(folder)
    return folder


def of(recorded: Any, arm: str) -> Summary:
    return next(s for s in summarise(recorded.records) if s.cell.arm == arm)


# -- what is measured --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "source"),
    [("vllm", "vLLM /metrics"), ("sglang", "SGLang /metrics"), ("mean", "SGLang /metrics, a mean of its last passes"),
     ("meta", "SGLang meta_info"), ("llama", "llama.cpp timings")],
)  # fmt: skip
def test_acceptance_is_what_the_server_counts(
    engine: str, source: str, serve: Any, bench: Any, tokenizer: Path
) -> None:
    """D15: the acceptance length of a known sequence of passes, by every engine's own figures."""
    fake, plain = serve(engine), serve(engine, drafts=False)
    own = {"api": "generate", "tokenizer": str(tokenizer)} if engine == "meta" else {}
    recorded = bench({"url": fake.url, "name": "fake", "plain_url": plain.url, **own})
    assert {r.cell for r in recorded.records} == {Cell(arm, 0, 0.0, 1, "fake") for arm in ("fake", PLAIN)}
    with_draft, without = of(recorded, "fake"), of(recorded, PLAIN)
    # SGLang's mean counts the prompt's token too
    expected = TOKENS / PASSES if engine == "mean" else TAU
    assert with_draft.tau.value == pytest.approx(expected) and with_draft.tau.low == pytest.approx(expected)
    assert with_draft.num_rounds == 4 * PASSES and math.isnan(without.tau.value)
    assert {r.counts.source for r in recorded.records if r.counts} == {source}
    survival = [slot.survival for slot in with_draft.slots]
    assert survival == ([3 / 4, 2 / 4, 1 / 4] if engine == "vllm" else [])
    assert with_draft.ratio is not None and with_draft.ratio.value > 0 and with_draft.equal == 1.0
    assert with_draft.first_token_ms is not None and with_draft.first_token_ms > 0
    assert all(math.isnan(ms) for ms in with_draft.round_ms) and with_draft.draft_bytes is None
    for record in recorded.records:
        assert record.num_tokens == TOKENS and record.num_prompt_tokens == 7 and record.finish_reason == "length"
        assert record.decode_seconds > 0 and record.first_token_seconds and record.load is None
        assert not record.rounds and record.draft_seconds is None and record.peak_mb is None


def test_what_is_sent(serve: Any, bench: Any) -> None:
    fake = serve()
    bench({"url": f"{fake.url}/v1", "model": "large"}, temperatures=[0, 0.5])
    greedy = [r for r in fake.requests if r["temperature"] == 0]
    drawn = [r for r in fake.requests if r["temperature"] == 0.5]
    assert len(greedy) == len(drawn) == 1 + 4 and set(fake.paths) == {"/v1/chat/completions"}
    assert [r["max_tokens"] for r in greedy] == [16, 20, 20, 20, 20]  # the warm-up first
    assert greedy[1]["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "boats 0"},
    ]  # fmt: skip
    for request in fake.requests:
        assert request["model"] == "large" and request["stream"] is True
        assert request["stream_options"] == {"include_usage": True}
    assert not any("seed" in r for r in greedy)
    seeds = [r["seed"] for r in drawn[1:]]
    assert len(set(seeds)) == 4 and all(0 <= seed < 2**31 for seed in seeds)


def test_sglangs_own_way_sends_ids(serve: Any, bench: Any, tokenizer: Path) -> None:
    fake = serve("meta")
    bench({"url": fake.url, "api": "generate", "tokenizer": str(tokenizer)}, temperatures=[0.5])
    assert set(fake.paths) == {"/generate"}
    text = trained_tokenizer().decode(fake.requests[1]["input_ids"])
    assert "Be brief." in text and "boats 0" in text and text.rstrip().endswith("assistant")
    assert fake.requests[1]["sampling_params"] == {"temperature": 0.5, "max_new_tokens": 20}


def test_rows_are_requests_at_the_same_time(serve: Any, bench: Any) -> None:
    """And counters of the whole group are counted once."""
    together = threading.Barrier(2)

    def wait(fake: Fake, body: dict[str, Any], handler: Any) -> bool:
        if body["max_tokens"] == 20:
            together.wait(timeout=20)
        return False

    fake = serve("vllm", react=wait)
    recorded = bench({"url": fake.url, "name": "fake"}, rows=[2])
    assert fake.most_at_once == 2 and len(recorded.records) == 4
    assert [r.counts is not None for r in recorded.records] == [True, False, True, False]
    summary = of(recorded, "fake")
    assert summary.tau.value == pytest.approx(TAU) and summary.num_rounds == 4 * PASSES
    assert len({r.decode_seconds for r in recorded.records if r.group == 0}) == 1


def test_a_server_without_counters_has_no_acceptance(serve: Any, bench: Any) -> None:
    """What is not given is left out, not made up."""
    recorded = bench({"url": serve().url, "name": "fake"})
    assert math.isnan(of(recorded, "fake").tau.value)
    text = tables.markdown(recorded)
    line = next(line for line in text.splitlines() if "| fake |" in line)
    heads = [head.strip() for head in text.splitlines()[0].strip("| ").split("|")]
    figures = dict(zip(heads, [cell.strip() for cell in line.strip("| ").split("|")], strict=True))
    assert figures["acceptance length"] == "-" and figures["ratio to plain"] == "-" and float(figures["tok/s"]) > 0
    assert float(figures["first token ms"]) > 0 and not {"draft ms", "draft bytes a token"} & figures.keys()
    assert "No acceptance is known of fake" in text and "small at http://127.0.0.1" in text


def test_an_engine_beside_a_server(serve: Any, bench: Any, folder: Path) -> None:
    """The same prompts, in turns; the server is not compared with our plain decoding."""
    recorded = bench({"url": serve("llama").url, "name": "fake"}, target=str(folder), dtype="float32", max_tokens=12,
                     drafters=[{"drafter": "ngram", "block_size": 3}])  # fmt: skip
    assert [s.cell.name for s in summarise(recorded.records)] == ["plain", "fake", "ngram"]
    assert of(recorded, "ngram").ratio is not None and of(recorded, "fake").ratio is None
    assert of(recorded, "ngram").draft_bytes == 0
    order = [r.cell.arm for r in recorded.records]
    assert order[:3] == ["plain", "ngram", "fake"] and order[3:6] == ["ngram", "fake", "plain"]
    page = report.page([("x", recorded)], "t")
    assert "fake" in page and "Servers" in page and not re.search(r"\bnan\b", page)


# -- going on ----------------------------------------------------------------------------------


def test_a_killed_run_goes_on(serve: Any, bench: Any, tmp_path: Path) -> None:
    fake = serve("vllm")
    server = {"url": fake.url, "name": "fake"}
    whole = bench(server)
    sent = len(fake.requests)
    assert bench(server) == whole and len(fake.requests) == sent
    file = tmp_path / "x.jsonl"
    text = file.read_text()
    file.write_text(text[: len(text) - 40])
    again = bench(server)
    assert len(fake.requests) == sent + 2  # a warm-up, and the request that was cut off
    assert [r.prompt for r in again.records] == [r.prompt for r in whole.records]
    with pytest.raises(FlashdraftError, match="holds runs with other settings: servers"):
        bench({**server, "model": "another"})
    fake.stop()
    assert bench(server) == again  # nothing is left to do, so nobody need be there


def test_prompts_that_changed_are_another_benchmark(serve: Any, bench: Any, task: Path) -> None:
    fake = serve()
    bench({"url": fake.url})
    task.write_text(task.read_text().replace("boats 3", "ships 3"))
    with pytest.raises(FlashdraftError, match="another content of: prompts"):
        bench({"url": fake.url})


# -- servers that misbehave --------------------------------------------------------------------


def cut(fake: Fake, body: dict[str, Any], handler: Any) -> None:
    handler.begin()
    for event in fake.events(body, "")[:4]:
        handler.piece(b"data: " + json.dumps(event).encode() + b"\n\n")
    handler.connection.shutdown(2)


def with_usage(value: Any) -> Any:
    def react(fake: Fake, body: dict[str, Any], handler: Any) -> None:
        events = fake.events(body, "")[:-1]
        handler.stream([*events, {"choices": [], "usage": value}] if value is not None else events)

    return react


def slow(fake: Fake, body: dict[str, Any], handler: Any) -> None:
    time.sleep(0.9)
    handler.send(500, b"too late")


FAULTS = {
    "HTTP 400: the prompt is too long": lambda f, b, h: h.send(400, b"the prompt is too long"),
    "HTTP 500: out of memory": lambda f, b, h: h.send(500, b"out of memory"),
    "cut after 3 pieces": cut,
    "holds an error.*no room": lambda f, b, h: h.stream([f.events(b, "")[0], {"error": {"message": "no room"}}]),
    "is no JSON: {oops": lambda f, b, h: h.stream([], b"data: {oops\n\n"),
    "holds no event of a chat completion": lambda f, b, h: h.send(200, b'{"choices": []}'),
    "counts 500 tokens where at most 20": with_usage({"completion_tokens": 500}),
    "counts 1 tokens, but streamed 11 pieces": with_usage({"completion_tokens": 1}),
    "counts 'many' tokens": with_usage({"completion_tokens": "many"}),
    "counts True tokens": with_usage({"completion_tokens": True}),
    "does not count its tokens": with_usage(None),
    "no answer within 0.5 s": slow,
}


@pytest.mark.parametrize("sentence", list(FAULTS))
def test_a_request_that_fails_is_counted(sentence: str, serve: Any, bench: Any) -> None:
    """And its group has no speed; the others have."""

    def react(fake: Fake, body: dict[str, Any], handler: Any) -> bool:
        if body["messages"][-1]["content"] != "boats 2":
            return False
        FAULTS[sentence](fake, body, handler)
        return True

    fake = serve(drafts="1 tokens" not in sentence, react=react)
    recorded = bench({"url": fake.url, "name": "fake", "timeout": 0.5 if "0.5" in sentence else 60})
    failed = [r for r in recorded.records if r.failure]
    assert [r.prompt for r in failed] == ["2"] and failed[0].num_tokens == 0 and failed[0].finish_reason == "error"
    assert re.search(sentence, failed[0].failure), failed[0].failure
    summary = of(recorded, "fake")
    assert (summary.num_failed, summary.num_prompts) == (1, 3) and summary.tokens_per_second > 0
    assert "1 of 4 requests to fake failed, and their groups have no speed; 1 of them: " in tables.markdown(recorded)
    sent = len(fake.requests)
    assert bench({"url": fake.url, "name": "fake", "timeout": 0.5 if "0.5" in sentence else 60}) == recorded
    assert len(fake.requests) == sent  # counted, not tried until it works


def test_servers_of_no_use_are_one_sentence(serve: Any, bench: Any) -> None:
    def sentence(**server: Any) -> str:
        with pytest.raises(FlashdraftError) as error:
            bench(server)
        assert "\n" not in str(error.value)
        return str(error.value)

    gone = serve()
    gone.stop()
    assert "is no endpoint; expected something like http://localhost" in sentence(url="ftp://there")
    assert f"the server fake ({gone.url}) cannot be measured: " in sentence(url=gone.url, name="fake")
    assert "refused" in sentence(url=gone.url, model="m")
    closed = serve(react=lambda f, b, h: h.send(401, b"no key") or True)
    assert "HTTP 401: no key" in sentence(url=closed.url)
    empty = serve()
    empty.told = lambda path: b'{"data": []}' if path == "/v1/models" else None  # type: ignore[method-assign]
    assert "it lists no model" in sentence(url=empty.url)
    drafting = serve("llama")
    assert "plain_url must not" in sentence(url=serve().url, plain_url=drafting.url)
    assert "holds a password" in sentence(url="http://me:secret@localhost:1/v1")
    assert "expected chat or generate" in sentence(url=gone.url, api="native")
    assert "name its model's folder with tokenizer" in sentence(url=gone.url, api="generate")
    assert "the closest one is 'plain_url'" in sentence(url=gone.url, plain="http://x")
    with pytest.raises(FlashdraftError, match="two arms are called 'a'"):
        bench({"url": gone.url, "name": "a"}, {"url": gone.url, "name": "a"})
    assert len(bench({"url": serve().url}).records) == 4  # nothing of them is in the way


def test_a_server_that_goes_away_leaves_what_was_measured(serve: Any, bench: Any, tmp_path: Path) -> None:
    def leave(fake: Fake, body: dict[str, Any], handler: Any) -> bool:
        if body["messages"][-1]["content"] == "boats 1":
            threading.Thread(target=fake.stop).start()
        return False

    fake = serve(react=leave)
    with pytest.raises(FlashdraftError, match="finished groups are kept, run the same command again"):
        bench({"url": fake.url, "name": "fake"}, repeats=50)
    kept = read_records(tmp_path / "x.jsonl").records
    assert 1 <= len(kept) < 200 and not any(r.failure.startswith("the server") for r in kept)
    fake._server.server_close()


def test_other_clients_are_noticed(serve: Any, bench: Any) -> None:
    """vLLM's counters are the whole server's: with other clients they say nothing of these requests."""

    def busy(fake: Fake, body: dict[str, Any], handler: Any) -> bool:
        fake.foreign += 100 * (body["messages"][-1]["content"] == "boats 1")
        return False

    recorded = bench({"url": serve("vllm", react=busy).url, "name": "fake"})
    assert [r.counts is None for r in recorded.records] == [False, True, False, False]
    assert "fake, 1 group(s): other clients used the server meanwhile" in tables.markdown(recorded)
    assert of(recorded, "fake").tau.value == pytest.approx(TAU)


def test_tokens_are_counted_for_a_server_that_does_not(serve: Any, bench: Any, tokenizer: Path) -> None:
    fake = serve()
    fake.usage = lambda tokens: None
    recorded = bench({"url": fake.url, "name": "fake", "tokenizer": str(tokenizer)}, max_tokens=100)
    assert {r.num_tokens for r in recorded.records} == {TOKENS}
    again = serve()
    again.usage = lambda tokens: {"completion_tokens": 99 if len(again.requests) > 1 else TOKENS}
    lied = bench({"url": again.url, "name": "fake", "tokenizer": str(tokenizer)}, max_tokens=100, out="y.jsonl")
    assert all("counts 99 tokens, and its tokenizer" in r.failure for r in lied.records)


# -- counters and times ------------------------------------------------------------------------


def test_counters_that_cannot_be_are_not_known() -> None:
    def vllm(drafts: float, drafted: float, accepted: float) -> Metrics:
        names = zip(("drafts", "draft_tokens", "accepted_tokens"), (drafts, drafted, accepted), strict=True)
        found = Metrics.read("".join(f'vllm:spec_decode_num_{n}_total{{engine="{e}"}} {v / 2}\n' for n, v in names for e in "01"))  # fmt: skip
        assert found is not None
        return found

    before = vllm(10, 30, 12)
    made = counts_between(before, vllm(14, 42, 18), 11)
    assert made is not None and (made.passes, made.committed, made.drafted, made.accepted) == (4, 10, 12, 6)
    for after in (vllm(10, 30, 12), vllm(2, 6, 3), vllm(14, 31, 18)):  # nothing, a restart, more kept than drafted
        assert counts_between(before, after, 11) is None
    assert counts_between(before, None, 11) is None and not used_by_others(before, None, 11)
    assert Metrics.read("process_open_fds 3\nvllm:x NaN\nvllm:y nothing\n") is None
    for said in (
        {"timings": {"draft_n": 3, "draft_n_accepted": 4}}, {"timings": {"draft_n": "3", "draft_n_accepted": 1}},
        {"timings": {"predicted_n": 11}}, {"meta_info": {"spec_accept_length": "2"}}, {"meta_info": {"spec_verify_ct": 0}},
        {"meta_info": {"spec_accept_length": 0.5}}, {},
    ):  # fmt: skip
        assert of_answer(said, 11) is None, said
    older = of_answer({"meta_info": {"spec_verify_ct": 4, "spec_accept_token_num": 6, "spec_draft_token_num": 12}}, 11)
    assert older is not None and (older.passes, older.committed, older.drafted) == (4, 10, 12)
    length = of_answer({"meta_info": {"spec_accept_length": 2.75}}, 11)
    assert length is not None and length.committed / length.passes == 2.75
    assert counters.number(True) is None and counters.number(-1) is None and counters.number(4) == 4


def test_time_in_which_something_is_decoded() -> None:
    assert covered([]) == 0 and covered([(1, 3)]) == 2
    assert covered([(1, 3), (2, 5), (7, 8)]) == 5 and covered([(1, 9), (2, 3)]) == 8


def test_times_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first text, not the first event; the end is the last piece, not what follows it."""
    clock = iter(map(float, range(10, 99)))
    monkeypatch.setattr(streams.time, "perf_counter", lambda: next(clock))
    lines = [
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n',
        b'data: {"choices": [{"delta": {"reasoning_content": "hm "}}]}\n',
        b'data: {"choices": [{"delta": {"content": "yes"}, "finish_reason": null}]}\n',
        b'data: {"choices": [{"delta": {"content": null}, "finish_reason": "stop"}]}\n',
        b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n',
        b"data: [DONE]\n",
    ]
    reader = streams.ChatReader()
    for at, event in streams.events(lambda limit: lines.pop(0) if lines else b"", 99.0):
        reader.take(at, event)
    answer = reader.answer(9.0)
    assert (answer.first, answer.end, answer.text, answer.num_pieces) == (11.0, 13.0, "hm yes", 2)
    assert answer.finish_reason == "stop" and answer.said["usage"] == {"completion_tokens": 3}
    with pytest.raises(streams.Broken, match="longer than the time"):
        list(streams.events(lambda limit: b"data: {}\n", 14.0))


def test_a_group_is_timed_from_its_first_texts() -> None:
    """Not from when it was asked, and not twice where requests overlap."""
    server = Server("s", "http://localhost:1", None, ServerSpec("http://localhost:1"))
    prompts = tuple(TaskPrompt("a", str(i), ()) for i in range(3))
    answers = [(streams.Answer("t", "stop", 0.0, first, end, 5, {}), 5) for first, end in ((3.0, 5.0), (4.0, 8.0))]
    records = server._records(Cell("s", 0, 0.0, 3, "s"), 1, Group("a", 2, prompts), [*answers, "it failed"])
    assert [r.decode_seconds for r in records] == [5.0, 5.0, 0.0]
    assert [r.first_token_seconds for r in records] == [3.0, 4.0, None]
    assert [(r.group, r.group_size, r.repeat, r.failure) for r in records][1:] == [
        (2, 3, 1, ""),
        (2, 3, 1, "it failed"),
    ]


def test_speed_by_hand(tmp_path: Path) -> None:
    """Tokens behind each first one over the time; an answer without decoding has no speed and no ratio."""

    def record(arm: str, group: int, tokens: int, seconds: float, **more: Any) -> Record:
        values: dict[str, Any] = {"failure": "", **more}
        return Record(
            Cell(arm, 0, 0.0, 2, "s"), "a", f"{group}", group, 1, 0, 5, tokens, "t", "stop", (), None, None, None,
            seconds, None, None, first_token_seconds=0.25, **values,
        )  # fmt: skip

    records = [
        record("s", 0, 11, 2.0),
        record("s", 1, 1, 0.0),
        record("s", 2, 21, 1.0),
        record("s", 3, 0, 0.0, failure="no"),
        record("s", 3, 101, 1.0),  # its group's other request
    ]
    records += [record(PLAIN, g, 11, 4.0) for g in range(4)]
    plain, own = summarise(records)
    assert own.tokens_per_second == 30 / 3 and own.first_token_ms == 250 and own.num_failed == 1
    assert own.ratio is not None and own.ratio.value == pytest.approx((30 / 3) / (20 / 8)) and plain.ratio is None
    RecordFile(tmp_path / "r.jsonl", {"settings": {}}).add(records)
    assert read_records(tmp_path / "r.jsonl").records == tuple(records)


# -- the command -------------------------------------------------------------------------------


def test_command(serve: Any, task: Path, tmp_path: Path) -> None:
    fake, plain, out = serve("vllm"), serve("vllm", drafts=False), tmp_path / "r.jsonl"
    args = ["bench", "--server", f"mine={fake.url}", "--plain-server", plain.url, "--task", f"boats={task}:2",
            "--max-tokens", "20", "--repeat", "1", "--out", str(out)]  # fmt: skip
    result = CliRunner().invoke(cli.app, args, env={"COLUMNS": "240"})
    assert result.exit_code == 0, result.stderr
    for said in (
        "mine plain",
        "2.50 [2.50, 2.50]",
        "version 0.32.0",
        "mine: acceptance by its vLLM /metrics",
        "first token ms",
    ):
        assert said in result.stdout, said
    assert "2 of 2 groups" in result.stderr and "draft ms" not in result.stdout
    assert len(read_records(out).records) == 4
    html, text = tmp_path / "r.html", tmp_path / "r.md"
    result = CliRunner().invoke(cli.app, ["report", str(out), "--out", str(html), "--markdown", str(text)])
    assert result.exit_code == 0, result.stderr
    assert "mine plain" in html.read_text() and "Where a round" not in html.read_text()
    assert "| boats | mine |" in text.read_text()
    result = CliRunner().invoke(cli.app, ["plan", str(out)])
    assert result.exit_code == 2 and "nothing can be predicted" in result.stderr
    result = CliRunner().invoke(cli.app, ["bench", "--plain-server", plain.url])
    assert result.exit_code == 2 and "belongs to one --server" in result.stderr
