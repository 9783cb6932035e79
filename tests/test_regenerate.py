"""`flashdraft regenerate`: what is written is the target's, and nothing is lost or doubled, whatever
kills the run or breaks on the other side."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from rich.console import Console
from typer.testing import CliRunner

from bed import CONFIGS, DTYPES, decode, make_model
from flashdraft import cli
from flashdraft.drafters import NoDrafter
from flashdraft.target import Target
from flashdraft.text import encode_chat
from flashdraft.training.data import ChatTemplate, read_meta, read_sequences
from flashdraft.training.output import Output
from flashdraft.training.regenerate import RegenerateOptions, Report, ends_in_loop, run_regenerate
from flashdraft.types import FlashdraftError
from test_data import FORGETFUL, PLAIN, tokenizer_with

VOCAB, EOS, NUM_TOKENS = 99, 2, 14
WORDS = ["sun", "moon", "river", "stone", "bread", "glass", "wind", "seven", "nine", "paper"]


def ascii_tokenizer() -> Any:
    """A token for every printable character and newline: text and tokens say the same."""
    letters = ["\n", *map(chr, range(32, 127))]
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + i for i, letter in enumerate(letters)}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def make_target(folder: Path, template: str) -> Path:
    """A tiny random target whose answers sometimes come to an end."""
    model = make_model(CONFIGS["llama"](vocab_size=VOCAB, max_position_embeddings=512), DTYPES["float32"])
    head = model.get_output_embeddings().weight.data
    head[:EOS] = 0.0  # <pad> and <s> have no text: saying them would split every conversation
    head[EOS] *= 1.3
    model.save_pretrained(folder)
    tokenizer_with(template, ascii_tokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"), PLAIN)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target with a template that keeps only the end of earlier answers."""
    return make_target(tmp_path_factory.mktemp("forgetful"), FORGETFUL.replace("'#'", "'e'"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder, dtype="float64", device="cpu")


def prompts_file(path: Path, count: int, turns: int = 1, seed: int = 0) -> Path:
    rng = random.Random(seed)
    rows = [
        {
            "id": f"p{i}",
            "source": f"s{i % 3}",
            "turns": [" ".join(rng.choices(WORDS, k=4)) for _ in range(1 + i % turns)],
        }
        for i in range(count)
    ]
    return write(path, *rows)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def options(folder: Path, prompts: Path, out: Path, **changes: Any) -> RegenerateOptions:
    values = {"max_tokens": NUM_TOKENS, "dtype": "float64", "device": "cpu", "rows": 3, "context": 256, **changes}
    return RegenerateOptions(str(folder), [prompts], out, **values)


def run(made: RegenerateOptions) -> tuple[Report, str]:
    """The report, and what was said."""
    said = io.StringIO()
    report = run_regenerate(made, Console(file=said, width=200))
    return report, said.getvalue()


def lines(out: Path) -> list[str]:
    """The lines of a file, sorted, after a check that none is there twice."""
    found = out.read_text().splitlines()
    assert len(set(found)) == len(found)
    return sorted(found)


def rows(out: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({row["id"] for row in found}) == len(found)
    return {row["id"]: row for row in found}


def rejected(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{out}.rejected.jsonl").read_text().splitlines()]


# -- the local engine --------------------------------------------------------------------------


def turns_of(out: Path) -> dict[str, list[tuple[list[int], list[int]]]]:
    """(what the target was given, what it answered) of every turn, by prompt, parts put together."""
    turns: dict[str, list[tuple[list[int], list[int]]]] = {}
    for name, row in rows(out).items():
        number, count = row.get("part", (1, 1))
        prompt = name.rsplit("#", 1)[0] if count > 1 else name
        assert name == (f"{prompt}#{number}" if count > 1 else prompt) and ("part" in row) is (count > 1)
        ids = row["token_ids"]
        turns.setdefault(prompt, []).extend((ids[:start], ids[start:end]) for start, end in row["loss_spans"])
        assert row["num_prompt_tokens"] == row["loss_spans"][0][0] and row["loss_spans"][-1][1] == len(ids)
    return turns


def by_hand(target: Target, prompt: dict[str, Any], **sampling: Any) -> list[tuple[list[int], list[int]]]:
    """The turns of a conversation by plain decoding, one request at a time."""
    messages: list[dict[str, str]] = []
    turns = []
    for text in prompt["turns"]:
        messages.append({"role": "user", "content": text})
        ids = encode_chat(target.tokenizer, messages)
        (result,) = decode(target, NoDrafter(), [ids], max_tokens=NUM_TOKENS, **sampling)
        if result.token_ids == (EOS,):
            break
        turns.append((ids, list(result.token_ids)))
        messages.append({"role": "assistant", "content": result.text})
    return turns


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("template", ["folder", "forgetful"])
def test_every_answer_is_what_plain_decoding_says(
    request: pytest.FixtureRequest, tmp_path: Path, template: str, temperature: float
) -> None:
    """Each turn's prompt is the template's text of all that was said before, each answer is that of
    plain decoding, each is learned once. T8: where the template (or a token without text) changes
    what had been said, the conversation is split."""
    made = request.getfixturevalue(template)
    target = Target.load(made, dtype="float64", device="cpu")
    prompts, out = prompts_file(tmp_path / "p.jsonl", 9, turns=3), tmp_path / "o.jsonl"
    report, _ = run(options(made, prompts, out, temperatures=[temperature]))
    seeds = {name.split("#")[0]: row["seed"] for name, row in rows(out).items()}
    given = {prompt["id"]: prompt for prompt in map(json.loads, prompts.read_text().splitlines())}
    expected = {
        name: turns
        for name, prompt in given.items()
        if (turns := by_hand(target, prompt, temperature=temperature, seed=seeds.get(name, 0))) or name in seeds
    }
    assert turns_of(out) == expected
    assert len(expected) + sum(report.rejected.values()) == 9
    for name, row in rows(out).items():
        assert row["finished"] is (row["token_ids"][-1] == EOS) is (row["finish_reason"] == "stop")
        assert row["source"] == given[name.split("#")[0]]["source"] and row["temperature"] == temperature
    lengths = Counter(len(row["loss_spans"]) for row in rows(out).values())
    assert lengths[2] + lengths[3] > 0, "some turns have to stay together"
    if template == "forgetful":
        assert any("part" in row for row in rows(out).values()), "some have to be split"
    if temperature:
        assert len({row["finish_reason"] for row in rows(out).values()}) == 2


def test_speculation_rows_and_order_change_nothing(folder: Path, tmp_path: Path) -> None:
    """D8: a row is a function of its prompt and the settings: not of batch, order or drafter."""
    prompts = prompts_file(tmp_path / "p.jsonl", 12, turns=2)
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text("".join(reversed(prompts.read_text().splitlines(keepends=True))))
    temperatures = [0.0, 0.7, 1.3]
    run(options(folder, prompts, tmp_path / "a.jsonl", temperatures=temperatures, rows=1))
    ngram = {"drafter": "ngram", "block_size": 4}
    run(options(folder, shuffled, tmp_path / "b.jsonl", temperatures=temperatures, rows=5, **ngram))
    assert lines(tmp_path / "a.jsonl") == lines(tmp_path / "b.jsonl")
    found = rows(tmp_path / "a.jsonl").values()
    assert {row["temperature"] for row in found} == set(temperatures)
    assert len({row["seed"] for row in found}) == len(turns_of(tmp_path / "a.jsonl"))
    run(options(folder, prompts, tmp_path / "c.jsonl", temperatures=temperatures, seed=1))
    assert lines(tmp_path / "a.jsonl") != lines(tmp_path / "c.jsonl")


def test_the_reader_takes_what_is_written(folder: Path, tmp_path: Path) -> None:
    prompts = prompts_file(tmp_path / "p.jsonl", 4, turns=2)
    run(options(folder, prompts, tmp_path / "o.jsonl"))
    found = rows(tmp_path / "o.jsonl")
    for sequence in read_sequences([tmp_path / "o.jsonl"], vocab_size=VOCAB):
        row = found[sequence.id]
        assert list(sequence.token_ids) == row["token_ids"]
        assert [list(span) for span in sequence.loss_spans] == row["loss_spans"]
    meta = read_meta(tmp_path / "o.jsonl")
    assert meta is not None and meta["target"] == str(folder) and meta["system"] is meta["thinking"] is None
    assert meta["template_sha256"] == ChatTemplate(tokenizer_with(PLAIN), [EOS]).sha256


def test_raw_prompts_go_on_without_a_template(folder: Path, target: Target, tmp_path: Path) -> None:
    system = {"prompt": "x", "system": "s"}
    prompts = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "sun moon"}, {"turns": ["a", "b"]}, system)
    report, _ = run(options(folder, prompts, tmp_path / "o.jsonl", raw=True))
    row = rows(tmp_path / "o.jsonl")["a"]
    ids = target.tokenizer("sun moon")["input_ids"]  # type: ignore[misc]
    assert row["token_ids"] == [*ids, *decode(target, NoDrafter(), [ids], max_tokens=NUM_TOKENS)[0].token_ids]
    assert report.rejected == {"bad row": 2}
    with pytest.raises(FlashdraftError, match="--system"):
        options(folder, prompts, tmp_path / "o.jsonl", raw=True, system="x")


def test_every_rejected_row_is_reported_once_with_its_reason(folder: Path, tmp_path: Path) -> None:
    given = [
        {"id": "long", "prompt": "x" * 300},
        {"id": "good", "prompt": "sun"},
        {"id": "good", "prompt": "moon"},
        {"id": "blank", "prompt": " "},
        {"id": "long later", "turns": ["sun", "x" * 300]},
    ]
    prompts = write(tmp_path / "p.jsonl", *given)
    out = tmp_path / "o.jsonl"
    reasons = [("blank", "empty", 4), ("good", "duplicate id", 3), ("long", "too long", 1)]
    for attempt in range(2):  # going on says the same
        report, said = run(options(folder, prompts, out))
        assert report.rows == (2, 0)[attempt] and report.before == (0, 2)[attempt]
        assert sorted((r["id"], r["reason"], r["line"]) for r in rejected(out)) == reasons
        assert report.rejected == {"empty": 1, "duplicate id": 1, "too long": 1}
        assert all(f"{r['file']}, line {r['line']}: {r['detail']}" in said for r in rejected(out))
    # what was answered before the context was full is kept
    assert len(rows(out)["long later"]["loss_spans"]) == 1
    with pytest.raises(FlashdraftError, match="no usable prompt"):
        run(options(folder, write(tmp_path / "none.jsonl", {"prompt": ""}), tmp_path / "n.jsonl"))


def test_the_command_line_says_the_same(folder: Path, tmp_path: Path) -> None:
    first, second = prompts_file(tmp_path / "a.jsonl", 3), write(tmp_path / "b.jsonl", {"id": "b", "prompt": "sun"})
    command = (
        f"regenerate --prompts {first} {second} --out {tmp_path / 'o.jsonl'} --target {folder} --dtype float64 -n 9"
    )
    more = "--temperature 0 --temperature 0.9 --rows 2 --drafter ngram --context 200 --device cpu --seed 3"
    done = CliRunner().invoke(cli.app, [*command.split(), *more.split(), "--system", "Be brief."])
    assert done.exit_code == 0 and "4 rows" in done.stderr and not done.stdout, done.output
    made = RegenerateOptions(
        str(folder), [first, second], tmp_path / "w.jsonl", max_tokens=9, temperatures=[0.0, 0.9], seed=3,
        system="Be brief.", context=200, dtype="float64", device="cpu",
    )  # fmt: skip
    run(made)
    assert lines(tmp_path / "o.jsonl") == lines(tmp_path / "w.jsonl")
    assert read_meta(tmp_path / "o.jsonl") == read_meta(tmp_path / "w.jsonl")
    refused = CliRunner().invoke(cli.app, ["regenerate", "--out", str(tmp_path / "x.jsonl")])
    assert (
        refused.exit_code == 2
        and refused.stderr == "error: there are no prompts; name at least one file with --prompts.\n"
    )


def test_the_longest_prompt_leaves_room_for_one_token(folder: Path, target: Target, tmp_path: Path) -> None:
    """D11: at the border of the context."""
    prompts = write(tmp_path / "p.jsonl", {"id": "a", "prompt": "sun"})
    length = len(encode_chat(target.tokenizer, [{"role": "user", "content": "sun"}]))
    run(options(folder, prompts, tmp_path / "fits.jsonl", context=length + 1))
    assert rows(tmp_path / "fits.jsonl")["a"]["loss_spans"] == [[length, length + 1]]
    run(options(folder, prompts, tmp_path / "long.jsonl", context=length))
    assert [r["reason"] for r in rejected(tmp_path / "long.jsonl")] == ["too long"]


def test_prompts_up_to_the_limit_and_then_more(folder: Path, tmp_path: Path) -> None:
    prompts, out = prompts_file(tmp_path / "p.jsonl", 6), tmp_path / "o.jsonl"
    assert run(options(folder, prompts, out, limit=2))[0].rows == 2
    assert run(options(folder, prompts, out))[0].rows == 4
    run(options(folder, prompts, tmp_path / "whole.jsonl"))
    assert lines(out) == lines(tmp_path / "whole.jsonl")


def test_a_loop_is_a_short_period_to_the_end() -> None:
    tail = list(range(16)) * 3
    assert ends_in_loop(tail) and ends_in_loop([99, *tail]) and ends_in_loop([7] * 48)
    assert not ends_in_loop(tail[1:])  # too short
    assert not ends_in_loop([*tail[:-1], 99]) and not ends_in_loop([99, *tail[1:]])
    assert not ends_in_loop(list(range(17)) * 3)


def test_loops_are_flagged_or_dropped_and_not_tried_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, kept, dropped = prompts_file(tmp_path / "p.jsonl", 8), tmp_path / "k.jsonl", tmp_path / "d.jsonl"
    monkeypatch.setattr("flashdraft.training.regenerate.ends_in_loop", lambda tokens: tokens[-1] % 2 == 1)
    report, _ = run(options(folder, prompts, kept))
    flagged = {name for name, row in rows(kept).items() if row.get("looping")}
    assert flagged == {name for name, row in rows(kept).items() if row["token_ids"][-1] % 2}
    assert 0 < len(flagged) == report.looping < 8
    report, _ = run(options(folder, prompts, dropped, drop_loops=True))
    assert rows(dropped).keys() == rows(kept).keys() - flagged
    assert {r["id"] for r in rejected(dropped)} == flagged and report.rejected == {"loop": len(flagged)}
    again, said = run(options(folder, prompts, dropped, drop_loops=True))
    assert again.tokens == 0 and again.rejected == report.rejected and "loop" in said
    assert {r["id"] for r in rejected(dropped)} == flagged


# -- going on ----------------------------------------------------------------------------------


def test_other_settings_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    prompts, out = prompts_file(tmp_path / "p.jsonl", 2), tmp_path / "o.jsonl"
    run(options(folder, prompts, out))
    before = out.read_bytes()
    changes: dict[str, Any] = {"max_tokens": 9, "temperatures": [0.5], "seed": 3, "system": "x", "top_p": 0.5}
    for name, value in changes.items():
        with pytest.raises(FlashdraftError, match=f"other settings .*{name} .* then and .* now"):
            run(options(folder, prompts, out, **{name: value}))
    with pytest.raises(
        FlashdraftError, match=r"max_tokens 14 then and 9 now, dtype \"float64\" then and \"float32\" now"
    ):
        run(options(folder, prompts, out, max_tokens=9, dtype="float32"))
    run(options(folder, prompts, out, rows=1, drafter="ngram"))  # these change no row
    Path(f"{out}.meta.json").unlink()
    with pytest.raises(FlashdraftError, match=r"without o\.jsonl\.meta\.json"):
        run(options(folder, prompts, out))
    with pytest.raises(FlashdraftError, match="gzip"):
        run(options(folder, prompts, tmp_path / "o.jsonl.gz"))
    assert out.read_bytes() == before


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    with Output(tmp_path / "o.jsonl", {}), pytest.raises(FlashdraftError, match="another run"):
        Output(tmp_path / "o.jsonl", {})
    Output(tmp_path / "o.jsonl", {}).close()


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    Output(out, {}).close()
    out.write_text('{"id": "a", "token_ids": [1]}\n{"name": "x"}\n')
    with pytest.raises(FlashdraftError, match="line 2 is no row"):
        Output(out, {})
    assert out.read_text().count("\n") == 2


def test_a_cut_at_any_byte_loses_nothing_but_the_torn_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place where a kill can stop a write: whole prompts stay, the torn one is done again."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    split = [{"id": f"b#{i}", "part": [i, 3], "token_ids": [i, 5]} for i in (1, 2, 3)]
    prompts = [[{"id": "a", "token_ids": [1]}], split, [{"id": "c#1", "token_ids": [2, 3, 4]}]]
    whole = tmp_path / "whole.jsonl"
    ends = [0]
    with Output(whole, {}) as output:
        for group in prompts:
            output.write(group)
            ends.append(whole.stat().st_size)
    data = whole.read_bytes()
    names = ["a", "b", "c#1"]
    for cut in range(len(data) + 1):
        out = tmp_path / "cut.jsonl"
        out.write_bytes(data[:cut])
        Path(f"{out}.meta.json").write_text("{}")
        with Output(out, {}) as output:
            count = sum(end <= cut for end in ends) - 1
            assert output.done == set(names[:count])
            assert out.read_bytes() == data[: ends[count]]
            assert output.num_rows == (0, 1, 4, 5)[count]
            for group in prompts[count:]:
                output.write(group)
        assert out.read_bytes() == data


def test_torn_rejections_are_forgotten(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    final = {"file": "f", "line": 1, "id": "a", "reason": "loop", "detail": "d", "answered": True}
    Output(out, {}).close()
    rejections = [final, {**final, "id": "b", "answered": False}, {**final, "id": "c"}]
    Path(f"{out}.rejected.jsonl").write_text("\n".join(map(json.dumps, rejections))[:-3])
    with Output(out, {}) as output:
        assert output.done == {"a"} and [r.id for r in output.rejected_before] == ["a"]
    assert [r["id"] for r in rejected(out)] == ["a"]


def _child(made: RegenerateOptions) -> None:
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        run_regenerate(made, Console(file=nowhere))


@pytest.fixture(scope="module")
def processes() -> Any:
    """Starts processes that have everything imported: real ones, to be killed."""
    context = multiprocessing.get_context("forkserver")
    # whatever a child imports late costs seconds each time
    context.set_forkserver_preload([
        "pytest", "hypothesis", "flashdraft.training.regenerate", "flashdraft.engine", "flashdraft.target",
        "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
        "transformers.tokenization_utils_tokenizers",
    ])  # fmt: skip
    return context


def kill_after(process: Any, out: Path, num_rows: int, rng: random.Random) -> bool:
    """kill -9 a process soon after `out` has grown by some rows; whether it was still running."""
    start = out.read_bytes().count(b"\n") if out.exists() else 0
    while process.is_alive() and (out.read_bytes().count(b"\n") if out.exists() else 0) < start + num_rows:
        time.sleep(0.001)
    time.sleep(rng.random() * 0.02)
    with_pid = process.pid
    os.kill(with_pid, signal.SIGKILL)
    process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 there")
def test_killed_five_times_nothing_is_lost_or_doubled(processes: Any, folder: Path, tmp_path: Path) -> None:
    prompts, out, whole = prompts_file(tmp_path / "p.jsonl", 40, turns=2), tmp_path / "o.jsonl", tmp_path / "w.jsonl"
    made = options(folder, prompts, out, drafter="ngram", max_tokens=8)
    rng = random.Random(5)
    kills = 0
    while kills < 5:
        process = processes.Process(target=_child, args=(made,))
        process.start()
        assert kill_after(process, out, rng.randrange(3), rng), "it ended before it was killed"
        kills += 1
    assert 0 < out.read_bytes().count(b"\n") < 40
    report, _ = run(made)
    assert report.rows > 0 and report.before > 0
    expected, _ = run(options(folder, prompts, whole, max_tokens=8))
    assert lines(out) == lines(whole) and report.rejected == expected.rejected
    assert len(turns_of(out)) + sum(report.rejected.values()) == 40


def test_an_interrupt_keeps_what_was_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = prompts_file(tmp_path / "p.jsonl", 8), tmp_path / "o.jsonl"
    count = 0
    write_rows = Output.write

    def interrupted(self: Output, group: Any) -> None:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        write_rows(self, group)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Output, "write", interrupted)
        run(options(folder, prompts, out))
    report, _ = run(options(folder, prompts, out))
    assert (report.before, report.rows) == (3, 5)


# -- endpoints ---------------------------------------------------------------------------------

Reaction = Callable[["Server", dict[str, Any], BaseHTTPRequestHandler], bool]


def answer_to(messages: list[dict[str, str]]) -> str:
    """What the fake servers say: a function of the conversation, as a greedy model would."""
    return f"I heard {messages[-1]['content']!r} as message {len(messages)}."


class Server:
    """An OpenAI-compatible server that knows one answer, and misbehaves as it is told.

    Args:
        react: sees every request before it is answered; True if it has dealt with it.
    """

    def __init__(self, react: Reaction = lambda server, body, handler: False, model: str = "fake") -> None:
        self.react, self.model = react, model
        self.requests: list[dict[str, Any]] = []
        self.running = self.most_at_once = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.send(200, {"data": [{"id": outer.model}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(body)
                    outer.running += 1
                    outer.most_at_once = max(outer.most_at_once, outer.running)
                try:
                    dealt_with = outer.react(outer, body, self)
                finally:
                    with outer.lock:
                        outer.running -= 1
                if not dealt_with:
                    self.send(200, reply(body))

            def send(self, status: int, value: Any, **headers: str) -> None:
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name.replace("_", "-"), text)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that was killed

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def reply(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    text = answer_to(body["messages"])
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop", **changes}
    return {"choices": [choice], "usage": {}}


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*args: Any, **kwargs: Any) -> Server:
        servers.append(Server(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def tokenizer_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder without weights: endpoints need none."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_with(PLAIN).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off in milliseconds."""
    from flashdraft.training import endpoints

    whole = endpoints.EndpointPool.__init__

    def quick(self: Any, urls: Any, **kwargs: Any) -> None:
        whole(self, urls, **{"backoff": 0.002, **kwargs})

    monkeypatch.setattr(endpoints.EndpointPool, "__init__", quick)


def remote(folder: Path, prompts: Path, out: Path, *servers: Server | str, **changes: Any) -> RegenerateOptions:
    urls = [server if isinstance(server, str) else server.url for server in servers]
    values = {"max_tokens": 50, "concurrency": 3, "context": 512, "timeout": 20.0, **changes}
    return RegenerateOptions(str(folder), [prompts], out, endpoints=urls, **values)


def check_remote(prompts: Path, out: Path) -> None:
    """Every prompt has the one row that the fake model's answers make."""
    found = rows(out)
    tokenizer = tokenizer_with(PLAIN)
    for line in prompts.read_text().splitlines():
        prompt = json.loads(line)
        messages: list[dict[str, str]] = []
        spans = []
        for text in prompt["turns"]:
            messages.append({"role": "user", "content": text})
            start = len(encode_chat(tokenizer, messages))
            messages.append({"role": "assistant", "content": answer_to(messages)})
            whole = encode_chat(tokenizer, messages, answered=True)[:-1]  # without the newline behind </s>
            spans.append([start, len(whole)])
        row = found.pop(prompt["id"])
        assert row["token_ids"] == whole and row["loss_spans"] == spans and row["finished"] is True
    assert not found


def test_endpoints_write_the_same_kind_of_rows(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    def together(server: Server, body: dict[str, Any], handler: Any) -> bool:
        """The first ones are answered when three are there."""
        deadline = time.monotonic() + 20
        while server.most_at_once < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
        return False

    servers = [serve(together, model="one"), serve(together, model="two")]
    prompts, out = prompts_file(tmp_path / "p.jsonl", 20, turns=3), tmp_path / "o.jsonl"
    made = remote(tokenizer_only, prompts, out, *servers, temperatures=[0.4], top_p=0.9)
    report, _ = run(made)
    check_remote(prompts, out)
    assert report.rows == 20 and report.tokens == sum(e - s for row in rows(out).values() for s, e in row["loss_spans"])
    for server, model in zip(servers, ("one", "two"), strict=True):  # both took part, under their own names
        assert server.requests and server.most_at_once == 3
        assert {body["model"] for body in server.requests} == {model}
    body = servers[0].requests[0]
    assert (body["temperature"], body["max_tokens"], body["top_p"]) == (0.4, 50, 0.9)
    assert "chat_template_kwargs" not in body and isinstance(body["seed"], int)
    assert len(servers[0].requests) + len(servers[1].requests) == sum(1 + i % 3 for i in range(20))
    meta = read_meta(out)
    assert meta is not None and meta["written_by"] == "endpoints" and meta["endpoint_models"] == ["one", "two"]
    assert run(made)[0].rows == 0


def test_answers_at_the_length_limit_have_no_end_of_turn(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    def cut(server: Server, body: dict[str, Any], handler: Any) -> bool:
        handler.send(200, reply(body, finish_reason="length"))
        return True

    prompts, out = prompts_file(tmp_path / "p.jsonl", 2, turns=2), tmp_path / "o.jsonl"
    run(remote(tokenizer_only, prompts, out, serve(cut)))
    for row in rows(out).values():
        assert EOS not in [row["token_ids"][i] for start, end in row["loss_spans"] for i in range(start, end)]
        assert row["finished"] is False and row["finish_reason"] == "length"


class Trouble:
    """Fails requests in turn in every way there is, some share of the time."""

    def __init__(self, share: float) -> None:
        self.share, self.rng, self.seen = share, random.Random(1), Counter[str]()

    def __call__(self, server: Server, body: dict[str, Any], handler: Any) -> bool:
        with server.lock:
            if self.rng.random() >= self.share:
                return False
            kind = ["500", "429", "garbage", "shape", "types", "close", "short", "slow"][self.seen.total() % 8]
            self.seen[kind] += 1
        if kind == "500":
            handler.send(500, b"oh \x1b[2Jno")
        elif kind == "429":
            handler.send(429, {"error": "busy"}, Retry_After="0")
        elif kind == "garbage":
            handler.send(200, b"<html>")
        elif kind == "shape":
            handler.send(200, {"choices": []})
        elif kind == "types":
            handler.send(200, reply(body, message={"content": 7}))
        elif kind == "close":
            handler.connection.close()
        elif kind == "short":
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
            handler.wfile.write(b"{")
        else:
            time.sleep(0.6)
            handler.send(200, reply(body))
        return True


def test_servers_that_fail_now_and_then_cost_no_row(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    trouble = [Trouble(0.35), Trouble(0.35)]
    prompts, out = prompts_file(tmp_path / "p.jsonl", 40, turns=2), tmp_path / "o.jsonl"
    made = remote(tokenizer_only, prompts, out, *map(serve, trouble), timeout=0.3, retries=12)
    report, said = run(made)
    check_remote(prompts, out)
    assert not report.rejected and "dropped" not in said
    assert all(len(part.seen) >= 6 for part in trouble)  # most kinds came up


def dies_after(count: int) -> Reaction:
    """Answers `count` requests, and nothing any more."""

    def react(server: Server, body: dict[str, Any], handler: Any) -> bool:
        if len(server.requests) <= count:
            return False
        handler.connection.close()
        return True

    return react


def test_a_dead_endpoint_is_dropped_and_the_others_do_its_work(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    prompts, out = prompts_file(tmp_path / "p.jsonl", 30, turns=2), tmp_path / "o.jsonl"
    closed = serve()
    closed.stop()
    dying, well = serve(dies_after(7)), serve()

    def busy(server: Server, body: dict[str, Any], handler: Any) -> bool:
        time.sleep(0.005)
        return False

    well.react = busy
    report, said = run(remote(tokenizer_only, prompts, out, closed, dying, well, retries=3))
    check_remote(prompts, out)
    assert report.rows == 30 and not report.rejected
    assert f"endpoint dropped: {closed.url}: " in said
    assert f"endpoint dropped: {dying.url}: failed 3 times in a row" in said
    assert well.url not in said


def test_without_any_endpoint_left_it_stops_and_can_go_on(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    prompts, out = prompts_file(tmp_path / "p.jsonl", 20), tmp_path / "o.jsonl"
    with pytest.raises(FlashdraftError, match=r"no endpoint is left .*3 times in a row.*same command"):
        run(remote(tokenizer_only, prompts, out, serve(dies_after(8)), retries=3))
    assert len(rows(out)) == 8
    report, _ = run(remote(tokenizer_only, prompts, out, serve()))
    assert (report.before, report.rows) == (8, 12)
    check_remote(prompts, out)
    with pytest.raises(FlashdraftError, match="no endpoint is left"):
        run(remote(tokenizer_only, prompts, out, "http://127.0.0.1:1"))
    with pytest.raises(FlashdraftError, match="is no endpoint"):
        run(remote(tokenizer_only, prompts, out, "ftp://x"))


@pytest.mark.parametrize(("status", "body"), [(400, {"error": "too long"}), (500, {"error": "bug"})])
def test_a_prompt_that_no_server_answers_is_given_up(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path, status: int, body: Any
) -> None:
    """The others are answered; the next run tries it again."""
    poison = "seven"

    def react(server: Server, request: dict[str, Any], handler: Any) -> bool:
        if request["messages"][-1]["content"] != poison:
            return False
        handler.send(status, body)
        return True

    given = [{"id": str(i), "turns": [text]} for i, text in enumerate(["sun", poison, "moon", "wind", "river"])]
    prompts, out = write(tmp_path / "p.jsonl", *given), tmp_path / "o.jsonl"
    report, said = run(remote(tokenizer_only, prompts, out, serve(react), retries=3))
    assert report.rows == 4 and report.rejected == {"endpoint": 1} and "dropped" not in said
    assert rejected(out)[0]["id"] == "1" and f"HTTP {status}" in rejected(out)[0]["detail"]
    assert run(remote(tokenizer_only, prompts, out, serve()))[0].rows == 1
    check_remote(prompts, out)
    assert not rejected(out)


def test_bad_prompts_do_not_bring_a_good_server_down(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    """Prompts that fail again and again, beside others that do not, are to blame themselves."""

    def react(server: Server, body: dict[str, Any], handler: Any) -> bool:
        if "poison" not in body["messages"][-1]["content"]:
            return False
        handler.send(500, b"bug")
        return True

    given = [{"id": text, "turns": [text]} for text in ["poison one", "poison two", "poison three", *WORDS]]
    prompts, out = write(tmp_path / "p.jsonl", *given), tmp_path / "o.jsonl"
    report, said = run(remote(tokenizer_only, prompts, out, serve(react), retries=12, concurrency=2))
    assert report.rows == len(WORDS) and report.rejected == {"endpoint": 3} and "dropped" not in said


def test_a_server_that_refuses_everything_is_dropped_at_once(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    def locked(server: Server, body: dict[str, Any], handler: Any) -> bool:
        handler.send(401, {"error": "no key"})
        return True

    prompts, out = prompts_file(tmp_path / "p.jsonl", 10), tmp_path / "o.jsonl"
    shut = serve(locked)
    _, said = run(remote(tokenizer_only, prompts, out, shut, serve(), concurrency=1))
    check_remote(prompts, out)
    assert "HTTP 401" in said and len(shut.requests) == 1


def test_answers_that_are_no_answers_are_rejected(
    serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    replies: dict[str, dict[str, Any]] = {
        "empty": {"message": {"content": ""}},
        "none": {"message": {"content": None}},
        "filtered": {"finish_reason": "content_filter"},
    }

    def react(server: Server, body: dict[str, Any], handler: Any) -> bool:
        handler.send(200, reply(body, **replies[body["messages"][-1]["content"]]))
        return True

    prompts = write(tmp_path / "p.jsonl", *({"id": name, "prompt": name} for name in replies))
    run(remote(tokenizer_only, prompts, tmp_path / "o.jsonl", serve(react)))
    reasons = {r["id"]: r["reason"] for r in rejected(tmp_path / "o.jsonl")}
    assert reasons == {"empty": "empty", "none": "empty", "filtered": "endpoint"}


def test_thinking_is_asked_for_and_another_template_is_noticed(serve: Callable[..., Server], tmp_path: Path) -> None:
    """T11: rows say which thinking mode they were written in. A server whose prompt has another
    length than ours uses another template or mode, and that is said once."""
    switched = PLAIN.replace(
        "{{ m.content }}", "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    ).replace("assistant\n{% endif %}", "assistant\n{% if enable_thinking %}{% endif %}{% endif %}")
    tokenizer_with(switched).save_pretrained(tmp_path / "target")

    def react(server: Server, body: dict[str, Any], handler: Any) -> bool:
        value = reply(body, message={"content": "said", "reasoning_content": "thought"})
        handler.send(200, {**value, "usage": {"prompt_tokens": 5}})
        return True

    prompts, out = prompts_file(tmp_path / "p.jsonl", 4), tmp_path / "o.jsonl"
    server = serve(react)
    _, said = run(remote(tmp_path / "target", prompts, out, server, thinking=True))
    assert all(body["chat_template_kwargs"]["enable_thinking"] is True for body in server.requests)
    meta = read_meta(out)
    assert meta is not None and meta["thinking"] is True
    assert said.count("counts 5 prompt tokens") == 1
    tokenizer = tokenizer_with(PLAIN)
    for row in rows(out).values():
        ((start, end),) = row["loss_spans"]
        assert tokenizer.decode(row["token_ids"][start:end]) == "[thought]said</s>"


def test_exact_ids_are_taken_as_they_come(serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path) -> None:
    """T8: ids that are not those of the text stay what they are; ids of another prompt are refused."""
    tokenizer = tokenizer_with(PLAIN)
    said = [7, 8, 9, EOS]

    def react(server: Server, body: dict[str, Any], handler: Any) -> bool:
        assert body["return_token_ids"] is True
        text = body["messages"][-1]["content"]
        ids = encode_chat(tokenizer, body["messages"]) if text != "other" else [1, 2, 3]
        own = {} if text == "none" else {"token_ids": said}
        handler.send(200, {**reply(body, **own), "prompt_token_ids": ids})
        return True

    prompts = write(tmp_path / "p.jsonl", *({"id": text, "prompt": text} for text in ("good", "other", "none")))
    out = tmp_path / "o.jsonl"
    run(remote(tokenizer_only, prompts, out, serve(react), exact_ids=True))
    opening = encode_chat(tokenizer, [{"role": "user", "content": "good"}])
    assert turns_of(out) == {"good": [(opening, said)]}
    assert {r["id"]: "no token ids" in r["detail"] for r in rejected(out)} == {"other": False, "none": True}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 there")
def test_killed_while_endpoints_answer(
    processes: Any, serve: Callable[..., Server], tokenizer_only: Path, tmp_path: Path
) -> None:
    def slow(server: Server, body: dict[str, Any], handler: Any) -> bool:
        time.sleep(0.01)
        return False

    prompts, out = prompts_file(tmp_path / "p.jsonl", 60, turns=2), tmp_path / "o.jsonl"
    made = remote(tokenizer_only, prompts, out, serve(slow), serve(slow))
    rng = random.Random(7)
    for _ in range(2):
        process = processes.Process(target=_child, args=(made,))
        process.start()
        assert kill_after(process, out, 1 + rng.randrange(8), rng)
    report, _ = run(made)
    assert report.before > 0 and report.before + report.rows == 60
    check_remote(prompts, out)
