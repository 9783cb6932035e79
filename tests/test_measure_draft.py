"""scripts/measure_draft.py on a tiny target: its figures are the engine's, and a kill costs one prompt."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flashdraft.drafters import make_drafter
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.training.validation import load_prompts, score_rounds
from flashdraft.types import Request, SamplingParams

SCRIPT = Path(__file__).parent.parent / "scripts" / "measure_draft.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_draft", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
                "--rows", 3, "--domains", "maths=4,talk=2", *more]  # fmt: skip
        code = script.main([str(arg) for arg in argv])
        file = tmp_path / out
        return code, json.loads(file.read_text()) if file.is_file() else None

    return run


def test_figures_are_the_engines(
    measure: Any, data: Path, draft: Path, target: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = measure("--check-plain")
    assert code == 0
    assert [(a["domain"], a["temperature"]) for a in report["acceptance"]] == [
        ("maths", 0.0), ("talk", 0.0), ("maths", 1.0), ("talk", 1.0),
    ]  # fmt: skip
    drafter = make_drafter(target, draft=draft)
    for line in report["acceptance"]:
        count = {"maths": 4, "talk": 2}[line["domain"]]
        prompts = load_prompts([str(data / f"{line['domain']}.jsonl")], target, count)[line["domain"]]
        asked = [SamplingParams(max_tokens=10, temperature=line["temperature"], seed=i) for i in range(count)]
        results = Engine(target, drafter, max_context=200).run(
            [Request(*pair) for pair in zip(prompts, asked, strict=True)]
        )
        rounds = [r for result in results for r in result.stats.rounds]
        score = score_rounds(rounds, drafter.max_draft_tokens)
        assert (line["prompts"], line["rounds"]) == (count, score.rounds)
        assert line["tau"] == pytest.approx(score.tau, abs=1e-4)
        assert line["survival"] == pytest.approx(score.survival, abs=1e-4)
        assert [kept / able if able else 0 for kept, able in line["survival_counts"]] == pytest.approx(score.survival)
        assert line["tau_interval"][0] <= line["tau"] <= line["tau_interval"][1]
        assert line["equal_to_plain"] == [count, count]
    said = capsys.readouterr().out
    assert said.startswith("| domain | T | prompts | rounds | tau | 95 % |") and "| 4 of 4 |" in said


def test_a_kill_repeats_no_finished_prompt(
    measure: Any, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = measure(out="whole.json")
    file = tmp_path / "out.acceptance.rows.jsonl"
    submitted: list[int] = []
    add = script.Rows.add

    def dying(rows: Any, row: Any) -> None:
        if len(rows.all) == 5:
            raise KeyboardInterrupt
        add(rows, row)

    monkeypatch.setattr(script.Rows, "add", dying)
    assert measure()[0] == 130
    monkeypatch.setattr(script.Rows, "add", add)
    with file.open("a") as lines:
        lines.write('{"kind": "draft", "dom')  # and the last line was being written
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda *args: submitted.append(1) or submit(*args))
    code, report = measure()
    assert code == 0 and len(submitted) == 2 * 6 - 5
    assert report == whole
    assert len(file.read_text().splitlines()) == 1 + 2 * 6
    submitted.clear()
    assert measure()[1] == whole and not submitted


def test_other_settings_are_refused(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure("--temperatures", 0)[0] == 0
    code, _ = measure("--temperatures", 0, "--tokens", 11)
    assert (
        code == 2 and "was measured otherwise (max_new_tokens: 10 -> 11); take another --out" in capsys.readouterr().err
    )
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
    compared: list[int] = []
    monkeypatch.setattr(script, "compare", lambda *_: compared.append(1))
    assert measure("--time", "--repeat", 2)[1] == report and not compared
    assert len(report["acceptance"]) == len(report["time"]) == 2
    for line in report["time"]:
        assert line["equal_to_plain"] == [line["prompts"]] * 2
        assert line["load_average"] == [99.0, 99.0]
        low, high = line["ratio_interval"]
        assert 0 < low <= line["ratio"] <= high
        plain, drafted = line["plain_tokens_per_second"], line["draft_tokens_per_second"]
        assert line["ratio"] == pytest.approx(drafted / plain, rel=0.01)


def test_intervals(script: ModuleType) -> None:
    assert script.interval([(3, 2)]) is None
    assert script.interval([(3, 2)] * 9) == [1.5, 1.5]
    low, high = script.interval([(1, 1), (3, 1)] * 50)  # a mean of 100: 2 +- 1.96 * 0.1
    assert low == pytest.approx(1.8, abs=0.03) and high == pytest.approx(2.2, abs=0.03)


def test_it_is_a_script(script: ModuleType) -> None:
    assert "measure_draft" not in sys.modules
    assert script.parse(["d", "x", "--out", "o", "--time"]).counts == {
        "gsm8k": 8, "mt_bench": 8, "humaneval": 8, "heldout_train_mix": 8,
    }  # fmt: skip
    assert script.parse(["d", "x", "--out", "o"]).counts["heldout_train_mix"] == 200
