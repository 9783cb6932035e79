"""scripts/measure_draft.py on a tiny target: its figures are the engine's, and a kill costs one group."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cli_bed import load_script
from flashdraft.drafters import make_drafter
from flashdraft.engine import Engine
from flashdraft.evaluation import bench, tables
from flashdraft.evaluation.records import RecordFile, read_records
from flashdraft.evaluation.tasks import read_tasks
from flashdraft.target import Target
from flashdraft.training.validation import score_rounds
from flashdraft.types import Request, SamplingParams


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_draft")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, count in (("maths", 4), ("talk", 3)):
        rows = [{"id": f"{name}/{i}", "turns": [f"{name} {'boats ' * i}and harbour", "again"]} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def measure(
    script: ModuleType, data: Path, draft: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.setattr(Target, "load", lambda *_args, **_options: target)

    def run(*more: Any, out: str = "out.json") -> tuple[int, Any]:
        argv = [draft, data, "--out", tmp_path / out, "--target", "tiny", "--dtype", "float32", "--tokens", 10,
                "--rows", 3, "--domains", "talk=2,maths=4", *more]  # fmt: skip
        code = script.main([str(arg) for arg in argv])
        file = tmp_path / out
        return code, json.loads(file.read_text()) if file.is_file() else None

    return run


def test_figures_are_the_engines(
    measure: Any, data: Path, draft: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = measure("--check-plain", "--tree", "nodes=9", "ngram=3")
    assert code == 0
    assert [(a["domain"], a["temperature"], a.get("options")) for a in report["acceptance"]] == [
        (name, temperature, tree)
        for temperature in (0.0, 1.0)
        for tree in (None, "nodes=9 ngram=3")
        for name in ("talk", "maths")
    ]
    chains, trees = make_drafter(target, draft=draft), make_drafter(target, draft=draft, nodes=9, ngram=3)
    for line in report["acceptance"]:
        drafter = trees if "options" in line else chains
        count = {"maths": 4, "talk": 2}[line["domain"]]
        name = line["domain"]
        prompts = read_tasks({name: f"{data / name}.jsonl:{count}"}, None, target)[name]
        assert len(prompts) == count
        asked = [
            SamplingParams(max_tokens=10, temperature=line["temperature"], seed=bench._seed(0, p)) for p in prompts
        ]
        results = Engine(target, drafter, max_context=200).run(
            [Request(prompt.token_ids, params) for prompt, params in zip(prompts, asked, strict=True)]
        )
        rounds = [r for result in results for r in result.stats.rounds]
        score = score_rounds(rounds, max(r.num_slots for r in rounds))
        assert (line["prompts"], line["rounds"]) == (count, score.rounds)
        assert line["tokens"] == sum(len(result.token_ids) for result in results)
        assert line["tau"] == pytest.approx(score.tau, abs=1e-4)
        assert line["survival"] == pytest.approx(score.survival, abs=1e-4)
        assert [kept / able if able else 0 for kept, able in line["survival_counts"]] == pytest.approx(score.survival)
        assert line["tau_interval"][0] <= line["tau"] <= line["tau_interval"][1]
        assert line["equal_to_plain"] == [count, count]
    settings = report["acceptance_settings"]
    assert settings["draft_sha256"] == hashlib.sha256((draft / "model.safetensors").read_bytes()).hexdigest()
    assert settings["block_size"] == chains.max_draft_tokens + 1 and settings["domains"] == {"talk": 2, "maths": 4}
    said = capsys.readouterr().out
    heads = next(line for line in said.splitlines() if line.strip())  # not cut to eighty columns
    assert heads.split() == " ".join(h for h in tables.HEADS if h != "first token ms").split()
    assert "\u2026" not in said


def test_a_kill_repeats_no_finished_group(measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does acceptance need plain decoding."""
    _, whole = measure(out="whole.json")
    file = tmp_path / "out.acceptance.jsonl"
    add, groups = RecordFile.add, iter(range(100))

    def dying(self: RecordFile, records: Any) -> None:
        if next(groups) == 4:
            raise KeyboardInterrupt
        add(self, records)

    monkeypatch.setattr(RecordFile, "add", dying)
    assert measure()[0] == 130
    monkeypatch.setattr(RecordFile, "add", add)
    kept = len(read_records(file).records)
    with file.open("a") as lines:
        lines.write('{"cell": ["draft", ')  # and a line was being written
    decoded: list[int] = []
    run = Engine.run
    monkeypatch.setattr(
        Engine, "run", lambda self, requests: decoded.append(requests[0].params.max_tokens) or run(self, requests)
    )
    code, report = measure()
    # 3 groups at each temperature, of 3 and 1 and 2 prompts; the fifth was lost
    assert code == 0 and decoded.count(10) == 2 and kept == 6 + 2
    assert report == whole and len(read_records(file).records) == 2 * 6
    assert {r.cell.arm for r in read_records(file).records} == {"draft"}
    decoded.clear()
    assert measure()[1] == whole and not decoded


def test_other_settings_are_refused(
    measure: Any, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure("--temperatures", 0)[0] == 0
    code, _ = measure("--temperatures", 0, "--tokens", 11)
    assert code == 2 and "max_tokens: 10 -> 11" in capsys.readouterr().err
    # the same folder with other weights
    monkeypatch.setattr(bench, "_weights_digest", lambda arm: ("draft of draft", "another"))
    code, _ = measure("--temperatures", 0)
    assert code == 2 and "another content of: draft of draft" in capsys.readouterr().err
    (tmp_path / "out.acceptance.jsonl").unlink()
    report = json.loads((tmp_path / "out.json").read_text())
    report["acceptance_settings"]["draft_sha256"] = "0"
    (tmp_path / "out.json").write_text(json.dumps(report))
    code, _ = measure("--temperatures", 0)
    assert code == 2 and "has figures of another draft" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        measure("--domains", "maths")
    assert "is no list such as" in capsys.readouterr().err


def test_times_of_both_arms(
    measure: Any, script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused on a busy machine; else a line a domain beside the acceptance, and resumable as well."""
    measure("--temperatures", 0)
    monkeypatch.setattr(script.os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    code, _ = measure("--time")
    assert code == 2 and "the machine is busy: load average 99.0" in capsys.readouterr().err
    code, report = measure("--time", "--anyway", "--repeat", 2)
    assert code == 0 and "the times mean little" in capsys.readouterr().err
    monkeypatch.setattr(script.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(Engine, "run", lambda *_: pytest.fail("decoded again"))
    assert measure("--time", "--repeat", 2)[1] == report
    assert len(report["acceptance"]) == len(report["time"]) == 2
    assert report["time_settings"]["repeat"] == 2 and report["time_settings"]["threads"] >= 1
    for line in report["time"]:
        assert line["equal_to_plain"] == [line["prompts"]] * 2
        low, high = line["ratio_interval"]
        assert 0 < low <= line["ratio"] <= high
        plain, drafted = line["plain_tokens_per_second"], line["draft_tokens_per_second"]
        assert line["ratio"] == pytest.approx(drafted / plain, rel=0.01)


def test_one_prompt_has_no_interval(measure: Any) -> None:
    _, report = measure("--temperatures", 0, "--domains", "maths=1")
    assert report["acceptance"][0]["tau_interval"] is None and "equal_to_plain" not in report["acceptance"][0]


def test_the_card_reads_what_is_written(measure: Any) -> None:
    """scripts/model_card.py makes its tables of these lines."""
    card = load_script("model_card")
    measure("--temperatures", 0, "--check-plain")
    _, report = measure("--time", "--anyway", "--repeat", 1, "--tree", "nodes=9")
    lines = card.acceptance_table(report["acceptance"]).splitlines()
    assert len(lines) == 4 and lines[2].startswith("| talk | chain | 0 | 2 | ") and lines[2].endswith("| 2 of 2 |")
    lines = card.time_table(report["time"]).splitlines()
    assert (
        len(lines) == 6
        and lines[3].startswith("| maths | chain | 4 | ")
        and lines[4].startswith("| talk | tree, nodes=9 |")
    )


def test_it_is_a_script(script: ModuleType) -> None:
    assert "measure_draft" not in sys.modules
    assert script.parse(["d", "x", "--out", "o", "--time"]).counts == {
        "gsm8k": 8, "mt_bench": 8, "humaneval": 8, "heldout_train_mix": 8,
    }  # fmt: skip
    assert script.parse(["d", "x", "--out", "o"]).counts["heldout_train_mix"] == 200
