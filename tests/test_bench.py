"""The benchmark: what is recorded, what is made of it, and that the harness itself is right."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bed
import rivals
from cli_bed import save_target
from flashdraft import cli, drafters
from flashdraft.engine import Engine
from flashdraft.evaluation import machine, report, tables
from flashdraft.evaluation.bench import BenchConfig, run_bench
from flashdraft.evaluation.records import PLAIN, Cell, Record, read_records, round_counts
from flashdraft.evaluation.summary import slots, summarise
from flashdraft.evaluation.tasks import read_tasks, shipped_file
from flashdraft.settings import make_settings
from flashdraft.target import Target
from flashdraft.types import Commit, Draft, FlashdraftError, Request, Round, SamplingParams

BLOCK = 4


class KnownAnswers:
    """Drafts the target's own answer (`right`), or never a token of it: for several prompts."""

    target_layer_ids: tuple[int, ...] = ()
    drafts_trees = False
    bytes_per_context_token = 0

    def __init__(self, target: Target, right: bool) -> None:
        self.name, self.max_draft_tokens = ("echo" if right else "wrong"), BLOCK - 1
        self._target, self._right, self._answers = target, right, {}

    def open(self, rows: int, capacity: int) -> list[list[int]]:
        return [[] for _ in range(rows)]

    def reset(self, state: list[list[int]], row: int, num_context: int, token: int) -> None:
        state[row] = [*state[row][:num_context], token]

    def observe(self, state: list[list[int]], commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            state[row].extend(tokens)

    def _next(self, done: tuple[int, ...], count: int) -> list[int]:
        if done not in self._answers:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            answer = Engine(self._target).run([Request(done, params)])[0].token_ids
            self._answers |= {(*done, *answer[:n]): answer[n:] for n in range(len(answer))}
        right = self._answers[done][:count]
        return [t if self._right else (t + 1) % 90 for t in right]

    def propose(self, state: list[list[int]], rows: Any, samplers: Any, limits: Any) -> Draft:
        import torch

        drafts = [self._next(tuple(state[r]), min(n, BLOCK - 1)) for r, n in zip(rows, limits, strict=True)]
        width = max(map(len, drafts))
        tokens = torch.tensor([d + [0] * (width - len(d)) for d in drafts], dtype=torch.int64).view(len(drafts), width)
        return Draft(tokens, tuple(map(len, drafts)), probs_NV=(None,) * len(drafts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    save_target(folder / "target")
    rows = [{"id": i, "prompt": f"the boats {i} leave"} for i in range(5)]
    (folder / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    rows = [{"id": f"b{i}", "group": "xy"[i % 2], "turns": [f"hello {i}", "again"]} for i in range(4)]
    (folder / "b.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder / "target", dtype="float32")


def settings(folder: Path, out: Path | str, **changes: Any) -> BenchConfig:
    values: dict[str, Any] = {
        "out": str(out), "tasks": {"a": str(folder / "a.jsonl"), "b": str(folder / "b.jsonl")},
        "drafters": [{"drafter": "ngram", "block_sizes": [3, 5]}], "prompts": 2, "temperatures": [1],
        "rows": [1, 2], "max_tokens": 10, "repeats": 2, **changes,
    }  # fmt: skip
    return make_settings(BenchConfig, values)


@pytest.fixture(scope="module")
def measured(folder: Path, target: Target) -> Path:
    run_bench(settings(folder, folder / "measured.jsonl"), target=target)
    return folder / "measured.jsonl"


def test_every_cell_has_a_record_for_every_request(measured: Path) -> None:
    recorded = read_records(measured)
    cells = {Cell(PLAIN, 0, 1.0, r) for r in (1, 2)}
    cells |= {Cell("ngram", b, 1.0, r) for b in (3, 5) for r in (1, 2)}
    prompts = [("a", "0"), ("a", "2"), ("b/x", "b0"), ("b/x", "b2"), ("b/y", "b1"), ("b/y", "b3")]
    expected = sorted(itertools.product(cells, prompts, range(2)))
    assert sorted((r.cell, (r.task, r.prompt), r.repeat) for r in recorded.records) == expected
    assert recorded.header["environment"]["dtype"] == "float32"
    for record in recorded.records:
        assert 1 + sum(committed for _, _, committed in record.rounds) == record.num_tokens <= 10
        assert record.draft_seconds is not None and record.verify_seconds is not None
        assert record.decode_seconds >= record.draft_seconds + record.verify_seconds > 0
        assert record.draft_bytes_per_context_token == 0 and record.first_token_seconds is None
        text = "".join(piece for piece, _ in record.pieces)
        assert (record.repeat == 0 and record.group == 0 and bool(text)) or not record.pieces or record.cell.rows == 2


def test_texts_equal_plain_decoding_in_every_cell(measured: Path) -> None:
    for summary in summarise(read_records(measured).records):
        assert summary.equal == (None if summary.cell.arm == PLAIN else 1.0)


def test_a_killed_run_goes_on_where_it_was(measured: Path, folder: Path, target: Target, tmp_path: Path) -> None:
    """Nothing that is there is measured again; a group that is only half there is."""
    whole = measured.read_text()
    config = settings(folder, tmp_path / "again.jsonl")
    (tmp_path / "again.jsonl").write_text(whole)
    calls = []
    original = Engine.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "run", lambda self, requests: calls.append(1) or original(self, requests))
        run_bench(config, target=target)
        assert not calls
        lines = whole.splitlines(keepends=True)
        (tmp_path / "again.jsonl").write_text("".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
        run_bench(config, target=target)
    assert len(calls) == 3 + 1  # warming all arms up, and the one group
    pairs = [
        [(r.cell, r.prompt, r.repeat) for r in read_records(p).records] for p in (measured, tmp_path / "again.jsonl")
    ]
    assert pairs[0] == pairs[1]


def test_other_settings_do_not_mix(measured: Path, folder: Path, target: Target) -> None:
    before = measured.read_text()
    with pytest.raises(FlashdraftError, match="max_tokens: 10 -> 12"):
        run_bench(settings(folder, measured, max_tokens=12), target=target)
    assert measured.read_text() == before


@pytest.mark.parametrize("right", [True, False])
def test_echo_and_wrong(right: bool, folder: Path, target: Target, tmp_path: Path, monkeypatch: Any) -> None:
    """D15: tau and speedup counted wrongly. Echo gives tau = B exactly, Wrong gives 1 exactly, in the
    table, in Markdown and in the summary."""
    monkeypatch.setitem(drafters.DRAFTERS, "ngram", lambda t, draft, size: KnownAnswers(t, right))
    # 1 + 4 x 3 tokens: the prefill's, and three whole rounds
    config = settings(
        folder,
        tmp_path / "x.jsonl",
        drafters=[{"drafter": "ngram", "name": "known"}],
        temperatures=[0],
        max_tokens=13,
        repeats=1,
    )
    monkeypatch.setattr(target, "eos_ids", frozenset())
    run_bench(config, target=target)
    recorded = read_records(tmp_path / "x.jsonl")
    tau = float(BLOCK if right else 1)
    found = [s for s in summarise(recorded.records) if s.cell.arm == "known"]
    assert len(found) == 6 and all((s.tau.value, s.tau.low, s.tau.high, s.tau_mean) == (tau,) * 4 for s in found)
    assert all(slot.survival == float(right) for s in found for slot in s.slots)
    lines = [line.split(" | ") for line in tables.markdown(recorded).splitlines() if " | known | " in line]
    assert [line[6] for line in lines] == [f"{tau:.2f} [{tau:.2f}, {tau:.2f}]"] * 6


def tensors(state: Any) -> list[Any]:
    """All tensors an object holds, in lists, dicts and attributes."""
    import torch

    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else None
    return [t for part in (parts if parts is not None else vars(state).values() if hasattr(state, "__dict__") else ())
            for t in tensors(part)]  # fmt: skip


def held(drafter: Any, target: Target, slots: int) -> int:
    """Bytes of a drafter's state in an engine of two rows that has decoded a little."""
    engine = Engine(target, drafter, max_rows=2, max_context=slots)
    engine.run([Request(prompt, SamplingParams(max_tokens=4)) for prompt in bed.PROMPTS[:2]])
    return sum(t.nbytes for t in tensors(engine.session.state))


@pytest.mark.parametrize(
    "name", ["none", "ngram", "medusa", "draft_model", "eagle3", "tree", "dflash", "fused", "own", "block of 1"]
)
def test_bytes_of_a_context_token_are_those_of_the_tensors(name: str) -> None:
    """What a state grows by when its engine holds 128 tokens more, in two rows."""
    target = bed.tiny_target("llama", "float32")
    eagle = rivals.Eagle3Network(rivals.eagle_config(target))
    heads = rivals.MedusaNetwork(rivals.MedusaConfig(target.hidden_size, bed.VOCAB, 3, 1, bias=True, choices=()))
    own = {context: bed.random_network(target, context=context, target_layer_ids=(0, 1) if context == "fused" else ())
           for context in ("fused", "none")}  # fmt: skip
    drafter: Any = {
        "none": drafters.NoDrafter,
        "ngram": drafters.NGramDrafter,
        "medusa": lambda: rivals.MedusaDrafter(heads, target),
        "draft_model": lambda: rivals.DraftModelDrafter(bed.tiny_target("qwen3", "float32"), target),
        "eagle3": lambda: rivals.Eagle3Drafter(eagle, target, bed_ids(), 4),
        "tree": lambda: rivals.Eagle3Drafter(eagle, target, bed_ids(), None, rivals.TREE),
        "dflash": lambda: bed.dflash_drafter(target),
        "fused": lambda: rivals.OwnContextDrafter(own["fused"], target),
        "own": lambda: rivals.OwnContextDrafter(own["none"], target),
        "block of 1": lambda: rivals.OwnContextDrafter(own["fused"], target, 1),
    }[name]()
    grown = held(drafter, target, 64 + 2 * 64) - held(drafter, target, 64)
    assert grown == 2 * 128 * drafter.bytes_per_context_token
    assert (drafter.bytes_per_context_token == 0) == (name in ("none", "ngram", "medusa", "block of 1"))


def bed_ids() -> Any:
    import torch

    return torch.tensor(rivals.EAGLE_IDS)


# -- figures from records ----------------------------------------------------------------------


def record(arm: str, prompt: int, seconds: float, tokens: int = 11, **changes: Any) -> Record:
    values = {
        "cell": Cell(arm, 0 if arm == PLAIN else 4, 0.0, 1), "task": "a", "prompt": str(prompt), "group": prompt,
        "group_size": 1, "repeat": 0, "num_prompt_tokens": 3, "num_tokens": tokens, "ids_sha256": f"text {prompt}",
        "finish_reason": "length", "rounds": ((3, 3, 4), (3, 1, 2), (3, 0, 1), (2, 2, 3)), "prefill_seconds": 9.0,
        "draft_seconds": 0.1, "verify_seconds": 0.2, "decode_seconds": seconds, "peak_mb": 10.0, "load": 0.0,
    }  # fmt: skip
    return Record(**(values | changes))


def test_counts_of_slots() -> None:
    """A round whose draft was cut to two tokens says nothing about slot 3."""
    found = slots([Round(3, 3, 4), Round(3, 1, 2), Round(3, 0, 1), Round(2, 2, 3)])
    assert [(s.drafted, s.kept, s.reached) for s in found] == [(4, 3, 4), (4, 2, 3), (3, 1, 1)]
    assert found[1].survival == 0.5 and found[1].conditional == 2 / 3
    assert slots([]) == ()
    # of a tree of nine nodes slots are its levels
    found = slots([Round(9, 2, 3, depth=2), Round(9, 0, 1, depth=3)])
    assert [(s.drafted, s.kept, s.reached) for s in found] == [(2, 1, 2), (2, 1, 1), (1, 0, 0)]
    tree = record("x", 0, 1.0, rounds=(round_counts(Round(9, 2, 3, depth=2)), round_counts(Round(3, 1, 2))))
    assert tree.rounds == ((9, 2, 3, 2), (3, 1, 2)) and [r.num_slots for r in tree.as_rounds()] == [2, 3]


def test_ratio_is_tokens_a_second_over_plain_decoding_without_prefill() -> None:
    records = [record(PLAIN, 0, 2.0), record(PLAIN, 1, 4.0), record("x", 0, 1.0), record("x", 1, 2.0)]
    plain, x = summarise(records)
    assert plain.ratio is None and plain.tokens_per_second == 20 / 6
    assert x.ratio is not None and (x.ratio.value, x.ratio.low, x.ratio.high) == (2.0, 2.0, 2.0)
    assert x.tau.value == 10 / 4 and x.round_ms == pytest.approx((25.0, 50.0, 3000 / 8 - 75))
    assert summarise([*records, record("x", 2, 500.0)])[1].ratio == x.ratio  # plain decoding never saw prompt 2


def test_repeats_become_their_median() -> None:
    """One run that the machine slept through does not count."""
    seconds = (2.0, 2.2, 900.0)
    records = [record(PLAIN, 0, s, repeat=i) for i, s in enumerate(seconds)]
    records += [record("x", 0, s / 2, repeat=i) for i, s in enumerate(seconds)]
    plain, x = summarise(records)
    assert plain.tokens_per_second == 10 / 2.2 and x.ratio is not None and x.ratio.value == 2.0
    assert x.num_prompts == 1 and x.num_rounds == 12


def test_two_plain_arms_have_a_ratio_of_one_in_their_interval() -> None:
    noise = [0.9, 1.1, 1.02, 0.97, 1.05, 0.93, 1.0, 1.08]
    records = [record(PLAIN, i, 2 * n) for i, n in enumerate(noise)]
    records += [record("again", i, 2 * n) for i, n in enumerate(reversed(noise))]
    ratio = summarise(records)[1].ratio
    assert ratio is not None and ratio.low < 1 < ratio.high
    faster = [record("x", i, n) for i, n in enumerate(reversed(noise))]
    ratio = summarise([*records[:8], *faster])[1].ratio
    assert ratio is not None and 1 < ratio.low < 2 < ratio.high < 2.5


def test_texts_that_differ_are_counted() -> None:
    records = [record(PLAIN, i, 1.0) for i in range(4)]
    records += [record("x", i, 1.0, ids_sha256="another" if i == 1 else f"text {i}") for i in range(4)]
    assert summarise(records)[1].equal == 0.75


def test_a_table_has_every_domain_and_says_what_is_wrong() -> None:
    """D18: one mean hides that chat is far under maths. Losing lines are named, and so is a busy machine."""
    records = [record(PLAIN, 0, 1.0), record(PLAIN, 1, 1.0, task="chat"), record("x", 0, 0.5)]
    records += [record("x", 1, 3.0, task="chat", load=1.4)]
    header = {
        "environment": {"dtype": "float32", "threads": 1, "device": "a CPU", "torch": "2", "flashdraft": "0"},
        "settings": {"target": "t", "repeats": 1},
    }
    text = tables.markdown(tables.Recorded(header, tuple(records)))
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| a", "| chat", "| a", "| chat"]
    assert "Slower than plain decoding: x on chat." in text and "Other programs were running" in text
    calm = tables.markdown(tables.Recorded(header, tuple(replace(r, load=0.0) for r in records)))
    assert "Other programs" not in calm


def test_bytes_of_a_context_token_are_shown() -> None:
    """Of drafters; a column that nobody has a figure for is not there."""
    records = [
        record(PLAIN, 0, 1.0, draft_bytes_per_context_token=0),
        record("x", 0, 0.5, draft_bytes_per_context_token=640),
    ]
    header = {
        "environment": {"dtype": "float32", "threads": 1, "device": "a CPU", "torch": "2", "flashdraft": "0"},
        "settings": {"target": "t", "repeats": 1},
    }
    text = tables.markdown(tables.Recorded(header, tuple(records)))
    lines = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("|")
    ]
    assert [line[-1] for line in lines if line[0] != "---"] == ["draft bytes a token", "", "640"]
    assert "| 640 |" in report.markdown_page([("r", tables.Recorded(header, tuple(records)))], "t")
    older = [replace(r, draft_bytes_per_context_token=None) for r in records]  # files of before there was the figure
    assert "draft bytes" not in tables.markdown(tables.Recorded(header, tuple(older)))


def test_work_of_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that counts: CPU seconds of all, minus our own, by the clock."""
    times = iter([100.0, 103.0])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(times))
    monkeypatch.setattr(machine.time, "process_time", iter([5.0, 6.0]).__next__)
    monkeypatch.setattr(machine.time, "perf_counter", iter([50.0, 52.0]).__next__)
    assert machine.OtherWork().load() == 1.0


# -- settings and tasks ------------------------------------------------------------------------


def test_what_cannot_be_measured_is_one_sentence(folder: Path, target: Target, tmp_path: Path) -> None:
    def sentence(**changes: Any) -> str:
        with pytest.raises(FlashdraftError) as error:
            run_bench(settings(folder, tmp_path / "y", **changes), target=target)
        return str(error.value)

    assert "the closest one is 'drafter'" in sentence(drafters=[{"draftr": "ngram"}])
    assert "two arms are called 'ngram'" in sentence(drafters=[{"drafter": "ngram"}, {"drafter": "ngram"}])
    same = [{"drafter": "ngram"}, {"drafter": "ngram", "block_size": 8}]
    assert "two arms are called 'ngram' and draft 7 tokens" in sentence(drafters=same)
    assert "'plain'" in sentence(drafters=[{"drafter": "ngram", "name": "plain"}])
    assert "cannot be read" in sentence(tasks={"a": str(tmp_path / "none.jsonl")})
    assert "expected at least 1" in sentence(repeats=0)
    (tmp_path / "bad.jsonl").write_text('{"question": 1}\n')
    assert "line 1: no prompt" in sentence(tasks={"a": str(tmp_path / "bad.jsonl")})
    (tmp_path / "y").write_text("hello\n")
    assert "expected a file of" in sentence()


def test_the_shipped_prompts(target: Target) -> None:
    tasks = read_tasks({"ours": "ours"}, None, target)
    assert {name: len(prompts) for name, prompts in tasks.items()} == {
        "ours/maths": 4, "ours/code": 4, "ours/chat": 4, "ours/from a text": 4,
    }  # fmt: skip
    assert shipped_file().is_file()


def test_command(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    args = ["bench", "--target", str(folder / "target"), "--dtype", "float32", "--drafter", "ngram", "--task",
            f"boats={folder / 'a.jsonl'}", "--prompts", "2", "--max-tokens", "6", "--repeat", "1", "--out", str(out)]  # fmt: skip
    result = CliRunner().invoke(cli.app, args, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    assert "boats" in result.stdout and "ngram" in result.stdout and "ratio to plain" in result.stdout
    assert "Medians of 1" in result.stdout and "2 of 2 groups" in result.stderr
    assert not math.isnan(summarise(read_records(out).records)[0].tokens_per_second)
    (tmp_path / "c.yaml").write_text(f"target: {folder / 'target'}\nrepeat: 3\n")
    result = CliRunner().invoke(cli.app, ["bench", str(tmp_path / "c.yaml")])
    assert result.exit_code == 2 and "the closest one is 'repeats'" in result.stderr
