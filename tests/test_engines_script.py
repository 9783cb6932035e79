"""scripts/engines.py without engines: its arguments, its bounded parts, its table."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashdraft.evaluation.records import Cell
from flashdraft.evaluation.summary import Interval, Summary

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import importlib

    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("engines")
    for name in [name for name in sys.modules if name.split("_")[0] == "engines"]:
        sys.modules.pop(name, None)


def test_parts_and_their_order(engines: Any) -> None:
    assert engines.chosen(None) == list(engines.PARTS)
    assert engines.chosen("vllm, transformers") == ["transformers", "vllm"]
    for wrong in ("vllm,sglong", "", ","):
        with pytest.raises(ValueError, match="no part is called"):
            engines.chosen(wrong)


def test_list_runs_nothing(engines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert engines.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(engines.PARTS)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a folder"),
        (["x", "--only", "llama"], "no part is called 'llama'"),
        (["x", "--seconds", "0"], "above 0"),
    ],
)
def test_wrong_arguments(arguments: list[str], sentence: str, engines: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        engines.main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def failing(_: Path) -> None:
    raise AssertionError("112 drafts, expected 113\nand more")


def test_outcomes(engines: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def skipping(_: Path) -> None:
        raise engines.Skipped("no such thing here")

    found = [
        engines.work("vllm", lambda _: {"drafts": 112, "accepted": 411}, tmp_path),
        engines.work("speculators", failing, tmp_path),
        engines.work("sglang", skipping, tmp_path),
    ]
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "skipped"
    assert "and more" in capsys.readouterr().err  # the whole story is in the log
    assert engines.table(found).splitlines() == [
        "part         result   time",
        "vllm         ok       0 s   drafts 112, accepted 411",
        "speculators  failed   0 s   AssertionError: 112 drafts, expected 113",
        "sglang       skipped  0 s   no such thing here",
    ]


def test_a_part_without_a_module_is_skipped(engines: Any, tmp_path: Path) -> None:
    outcome = engines.run_part("none", engines.Part("engines_nowhere", 1, ""), tmp_path, 1)
    assert (outcome.status, outcome.reason) == ("skipped", "there is no scripts/engines_nowhere.py")


def test_a_command_is_ended_with_its_children(engines: Any, tmp_path: Path) -> None:
    """It starts a child that would write a file after it was killed itself."""
    late = tmp_path / "late"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(late)!r}).touch()"
    parent = f"import subprocess, sys; print('on', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    start = time.monotonic()
    assert engines.bounded([sys.executable, "-c", parent], tmp_path / "log", 0.8) is None
    time.sleep(max(0.0, 3.5 - (time.monotonic() - start)))
    assert not late.exists()
    assert engines.bounded([sys.executable, "-c", "print('out'); raise SystemExit(3)"], tmp_path / "log", 60) == 3
    assert (tmp_path / "log").read_text() == "out\n"


def test_every_part_is_written_and_can_be_run(engines: Any) -> None:
    for name, part in engines.PARTS.items():
        file = SCRIPTS / f"{part.module}.py"
        if file.exists():
            assert "def run(folder: Path)" in file.read_text(), name
    written = {f.stem for f in SCRIPTS.glob("engines_*.py") if "def run(" in f.read_text()}
    assert written <= {part.module for part in engines.PARTS.values()}


def test_requirements_left_out(engines: Any) -> None:
    tools = sys.modules["engines_tools"]
    assert tools.named('Torch_Vision>=1; python_version > "3.11"') == "torch-vision"
    assert tools.named("fastapi[standard]<0.137.0,>=0.133.0") == "fastapi"


def test_a_server_that_ends_is_noticed(engines: Any) -> None:
    tools = sys.modules["engines_tools"]
    url = f"http://127.0.0.1:{tools.free_port()}/"
    with (
        pytest.raises(RuntimeError, match="ended with 4"),
        tools.serving([sys.executable, "-c", "raise SystemExit(4)"], url, seconds=60),
    ):
        pass


def test_what_is_compared_with_vllm(engines: Any) -> None:
    """D7, D15: equal texts are not enough; the counts by position and the law of samples must be ours."""
    import importlib

    pair, vllm = importlib.import_module("engines_pair"), importlib.import_module("engines_vllm")
    # the first token and two rounds are more than enough; a third is after the end
    assert pair.whole_rounds([pair.MAX_TOKENS - 2, 4, 3]) == [pair.MAX_TOKENS - 3, 3]
    law = {"5 6 7": 0.75, "5 6 8": 0.25}
    bundle = pair.Bundle(4, 9, [[4, 5]], [[1] * 9], [[3, 0, 2]], law)
    assert (bundle.num_drafts, bundle.per_position()) == (3, [2, 2, 1])
    counts = {"num_drafts": 3, "num_accepted": 5, "per_position": [2, 2, 1]}
    good = {"answers": [[1] * 9], "counts": counts, "texts": {"5 6 7": 290, "5 6 8": 110}}
    vllm.compare_pair(good, bundle)
    for wrong, sentence in (
        ({"answers": [[1] * 8 + [2]]}, "texts differ"),
        ({"counts": {**counts, "per_position": [2, 1, 1]}}, "accepted"),
        ({"texts": {"5 6 7": 230, "5 6 8": 170}}, "law"),
        ({"texts": {"5 6 9": 1}}, "law"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            vllm.compare_pair({**good, **wrong}, bundle)


def test_what_is_compared_by_the_benchmark(engines: Any) -> None:
    """Acceptance of all domains together; what was not counted, failed, or is another draft's does not pass."""
    import importlib

    bench = importlib.import_module("engines_bench")
    nan = math.nan
    base = Summary(
        Cell("x", 0, 0.0, 1, "x"),
        "a",
        4,
        100,
        Interval(2.0, 1.9, 2.1),
        2.0,
        (),
        (nan,) * 3,
        50.0,
        None,
        0.75,
        None,
        0.0,
    )
    other, plain = (
        replace(base, task="b", num_rounds=300, tau=Interval(1.6, 1.5, 1.7)),
        replace(base, cell=base.cell.plain),
    )
    ours = replace(base, cell=Cell("dflash", 6, 0.0, 1), tau=Interval(1.75, 1.7, 1.8), equal=None)
    found = bench.compared([plain, base, other, ours], "x")
    assert found == {
        "bench: acceptance": 1.7, "bench: ours": 1.75, "bench: texts as without the draft": "6 of 8"
    }  # fmt: skip
    unknown = Interval(nan, nan, nan)
    for wrong, sentence in (
        ([plain, base], "one is not"),
        ([base, ours], "one is not"),
        ([plain, ours], "one is not"),
        ([plain, base, replace(other, num_failed=1), ours], "1 requests to x failed"),
        ([plain, base, replace(other, tau=unknown, num_rounds=0), ours], "did not say"),
        ([plain, base, ours, replace(ours, task="b", tau=Interval(1.2, 1.1, 1.3))], "accepts 2.000 tokens a pass, we"),
    ):
        with pytest.raises(AssertionError, match=sentence):
            bench.compared(wrong, "x")


def test_the_plugins_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's temperature for each of its drafted tokens; a value that stands for greedy is replaced."""
    import importlib

    import torch

    monkeypatch.syspath_prepend(str(Path(__file__).parent / "vllm_plugin"))
    expand = importlib.import_module("flashdraft_vllm_cpu").expand_batch_to_tokens
    ends = torch.tensor([2, 5, 6])
    assert expand(torch.tensor([0.5, 0.0, 2.0]), ends, 6, 0, 1).tolist() == [0.5, 0.5, 1, 1, 1, 2]
    assert expand(torch.tensor([7, 0, 3]), ends, 6).tolist() == [7, 7, 0, 0, 0, 3]
    mended = importlib.import_module("flashdraft_vllm_cpu").without_drafts(lambda logits, k: logits + k.max())
    assert mended(torch.zeros(0, 5), torch.zeros(0)).shape == (0, 5)
    assert mended(torch.zeros(1, 2), torch.tensor([3])).tolist() == [[3, 3]]
