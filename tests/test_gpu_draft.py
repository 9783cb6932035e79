"""scripts/gpu_draft from end to end at toy size: packed, carried in parts, generated, trained,
evaluated, sharded, joined, and the draft decodes without changing a token."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import PROMPTS, decode, tiny_target
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.training.data import read_sequences
from flashdraft.types import FlashdraftError, Request, SamplingParams

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from gpu_draft import evaluate, export, pack, unpack  # noqa: E402
from gpu_draft.clock import Clock  # noqa: E402
from gpu_draft.decoder import StaticDecoder, check  # noqa: E402
from gpu_draft.generate import generate  # noqa: E402
from gpu_draft.settings import toy  # noqa: E402

# As on a machine that lacks these packages.
WITHOUT = """
import importlib.machinery, runpy, sys
finder = importlib.machinery.PathFinder
find = finder.find_spec
def present(name, path=None, target=None):
    absent = name.partition(".")[0] in {"pydantic", "pydantic_core", "gguf", "accelerate"}
    return None if absent else find(name, path, target)
finder.find_spec = staticmethod(present)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def carried(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work folder on "that machine" after both parts came."""
    place = tmp_path_factory.mktemp("gpu")
    train, held_out = place / "questions.jsonl", place / "heldout.jsonl"
    train.write_text("".join(json.dumps({"prompt": f"Say {i} words about {i % 7}."}) + "\n" for i in range(60)))
    held_out.write_text("".join(json.dumps({"turns": [f"What is {i}?", "Why?"]}) + "\n" for i in range(6)))
    parts = pack.prepare(str(folder), [train], [f"{held_out}:4"], place / "parts", num_prompts=40)
    assert [part.name for part in parts] == ["part-0", "part-1"]
    assert not unpack.receive(parts[0], place / "work")
    assert unpack.receive(parts[1], place / "work")
    return place / "work"


@pytest.fixture(scope="module")
def came_back(carried: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the command, run without what the machine lacks."""
    out = tmp_path_factory.mktemp("out")
    command = [sys.executable, "-c", WITHOUT, str(SCRIPTS / "gpu_draft"), "run", "--toy", "--device", "cpu"]
    options = ["--dtype", "float32", "--seconds", "150", "--out", str(out), "--work", str(carried)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_parts_hold_the_target_and_the_prompts(carried: Path, folder: Path) -> None:
    target, own = Target.load(carried / "target", dtype="float32"), Target.load(folder, dtype="float32")
    weights = dict(own.model.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in target.model.named_parameters())
    prompts = unpack.read_prompts(carried)
    assert len(prompts.names) == 40 and set(prompts.sources) == {"questions"}
    text = own.tokenizer.decode(prompts.token_ids[0])
    assert "words about" in text and own.tokenizer.encode(text, add_special_tokens=False) == prompts.token_ids[0]
    assert {name: len(rows) for name, rows in unpack.read_evaluation(carried).items()} == {"heldout": 4}


def test_a_damaged_part_is_refused(carried: Path, tmp_path: Path) -> None:
    part = tmp_path / "part-1"
    part.mkdir()
    (part / unpack.PARTS).write_bytes((carried / "parts" / unpack.PARTS).read_bytes())
    data = bytearray((carried / "parts" / "archive.1").read_bytes())
    data[len(data) // 2] ^= 1
    (part / "archive.1").write_bytes(data)
    with pytest.raises(FlashdraftError, match="SHA-256"):
        unpack.receive(part, tmp_path / "work")


def test_what_comes_back_fits_and_says_what_was_done(came_back: Path) -> None:
    files = list(came_back.iterdir())
    assert len(files) <= 8 and all(file.stat().st_size <= 16 << 20 for file in files)
    report = json.loads((came_back / "report.json").read_text())
    assert [(run["layers"], run["block_size"]) for run in report["runs"]] == [(1, 4), (2, 6)]
    assert all(run["steps"] > 0 and run["tau_quick"] >= 1 for run in report["runs"])
    best = max(report["runs"], key=lambda run: run["tau_quick"])
    assert report["best"] == f"layers-{best['layers']}-block-{best['block_size']}"
    assert {(line["domain"], line["temperature"]) for line in report["acceptance"]} == {("heldout", 0), ("heldout", 1)}
    assert {(line["way"], line["rows"]) for line in report["rounds"]["lines"]} >= {("plain", 1), ("speculative", 1)}
    assert list(report["phases"]) == ["load", "generate", "train", "evaluate", "save"][: len(report["phases"])]
    metrics = [json.loads(line) for line in (came_back / "metrics.jsonl").read_text().splitlines()]
    assert {line["run"] for line in metrics} == {"layers-1-block-4", "layers-2-block-6"}
    assert "| heldout | 0.0 |" in (came_back / "report.md").read_text()


def test_rows_are_those_of_regenerate(came_back: Path, carried: Path) -> None:
    """Every greedy answer is the target's own, and the trainer's reader takes the file."""
    target = Target.load(carried / "target", dtype="float32")
    rows = [json.loads(line) for line in (carried / "sequences.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == len(list(read_sequences([carried / "sequences.jsonl"])))
    greedy = [row for row in rows if row["temperature"] == 0 and row["finished"]][:3]
    greedy += [row for row in rows if row["temperature"] == 0][:3]
    for row in greedy:
        prompt, answer = row["token_ids"][: row["num_prompt_tokens"]], row["token_ids"][row["num_prompt_tokens"] :]
        assert list(decode(target, None, [prompt], max_tokens=len(answer))[0].token_ids) == answer
        assert row["loss_spans"] == [[len(prompt), len(row["token_ids"])]]
    assert {row["temperature"] for row in rows} == {0.0, 0.7}


def test_the_joined_draft_decodes_losslessly(came_back: Path, carried: Path, tmp_path: Path) -> None:
    target = Target.load(carried / "target", dtype="float32")
    drafter = DFlashDrafter.load(export.join(came_back, tmp_path / "draft"), target)
    assert json.loads((tmp_path / "draft" / "training.json").read_text())["target"] == "target"
    assert (tmp_path / "draft" / "report.md").is_file()
    prompts = unpack.read_evaluation(carried)["heldout"][:2]
    requests = [Request(p, SamplingParams(max_tokens=20, temperature=t, seed=5)) for p in prompts for t in (0.0, 1.0)]
    plain, drafted = (Engine(target, d, max_rows=4, max_context=512).run(requests) for d in (None, drafter))
    assert [result.token_ids for result in plain] == [result.token_ids for result in drafted]


def test_rounds_are_timed_with_and_without_the_draft(came_back: Path, carried: Path, tmp_path: Path) -> None:
    target = Target.load(carried / "target", dtype="float32")
    drafter = DFlashDrafter.load(export.join(came_back, tmp_path / "draft"), target)
    prompts = unpack.read_evaluation(carried)["heldout"][:2]
    found = evaluate.round_times(target, drafter, prompts, toy(eval_tokens=8), time.monotonic() + 600)
    lines = {(line["way"], line["rows"]): line for line in found["lines"]}
    assert set(lines) == {(way, rows) for way in ("plain", "speculative") for rows in (1, 8)}
    assert all(line["tau"] == 1 for (way, _), line in lines.items() if way == "plain")
    assert lines["speculative", 1]["floor_ms"] > lines["plain", 1]["floor_ms"] > 0
    late = evaluate.acceptance(target, drafter, {"a": prompts}, (0.0, 1.0), toy(), time.monotonic() - 1)
    assert [(line["domain"], line["temperature"], line["prompts"]) for line in late] == [("a", 0.0, 2)]
    assert late[0]["low"] <= late[0]["tau"] <= late[0]["high"]


def test_shards_that_are_damaged_or_missing_are_refused(came_back: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for file in came_back.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    shard = out / "shard-0.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FlashdraftError, match="SHA-256"):
        export.join(out, tmp_path / "draft")
    shard.unlink()
    with pytest.raises(FlashdraftError, match="lacks shard-0"):
        export.join(out, tmp_path / "draft")


def test_large_drafts_are_split_over_shards(monkeypatch: pytest.MonkeyPatch, came_back: Path, tmp_path: Path) -> None:
    draft = export.join(came_back, tmp_path / "draft")
    size = (draft / "model.safetensors").stat().st_size
    monkeypatch.setattr(export, "SHARD_BYTES", size // 2)
    export.write_shards(draft, tmp_path / "again")
    assert 2 <= len(list((tmp_path / "again").glob("shard-*"))) <= export.MOST_SHARDS
    again = export.join(tmp_path / "again", tmp_path / "joined")
    assert (again / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_decoding_in_fixed_shapes_is_plain_decoding(family: str) -> None:
    """Ragged rows that end at different times, in another order than the prompts', then refilled."""
    target = tiny_target(family, "float64")
    assert check(target, PROMPTS[2]) < 1e-9
    decoder = StaticDecoder(target, 3, 80, 20)
    for prompts, limits in ((PROMPTS[:3], (20, 20, 7)), (PROMPTS[2:5], (3, 20, 1))):
        decoder.admit(prompts, [2, 0, 1], list(limits), [0.0] * 3, room=4)
        decoder.steps(25)
        plain = [decode(target, None, [p], max_tokens=n)[0].token_ids for p, n in zip(prompts, limits, strict=True)]
        assert [decoder.answers[row, : decoder.count[row]].tolist() for row in (2, 0, 1)] == list(map(list, plain))
        assert not decoder.active.any()


def test_a_step_has_nothing_that_a_graph_cannot_capture() -> None:
    """No value is read back and nothing is copied between devices: such calls end a capture."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    seen: set[str] = set()
    target = tiny_target("llama", "float32")
    decoder = StaticDecoder(target, 2, 80, 8)
    decoder.admit(PROMPTS[:2], [0, 1], [8, 8], [0.0, 0.7])
    with Watch():
        decoder.steps(1)
    assert any("scaled_dot_product" in name for name in seen)
    banned = ("_local_scalar_dense", "nonzero", "lift_fresh", "is_nonzero", "unique", "masked_select", "equal.default")
    assert not [name for name in seen if any(part in name for part in banned)]


def test_noise_draws_from_the_softmax() -> None:
    target = tiny_target("llama", "float32")
    decoder = StaticDecoder(target, 1, 64, 4)
    torch.manual_seed(0)
    logits = torch.randn(1, target.vocab_size) * 2
    counts = torch.zeros(target.vocab_size)
    for _ in range(40):
        drawn = decoder._choose(logits.expand(500, -1), torch.full((500,), 0.7))
        counts += torch.bincount(drawn, minlength=target.vocab_size)
    expected = (logits[0] / 0.7).softmax(-1)
    assert (counts / counts.sum() - expected).abs().sum() < 0.05


def test_generation_goes_on_without_a_doubled_row(carried: Path, tmp_path: Path) -> None:
    target = Target.load(carried / "target", dtype="float32")
    prompts, out = unpack.read_prompts(carried), tmp_path / "rows.jsonl"
    first = generate(target, prompts, toy(num_tokens=80), out, 60)
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"id": "torn')
    second = generate(target, prompts, toy(num_tokens=200), out, 60)
    assert out.read_bytes().startswith(whole) and second["rows"] > first["rows"] > 0
    names = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert len(set(names)) == len(names) == second["rows"]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_unpack_as_gguf_says(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    values = torch.randn(6, 64).numpy()
    packed = quants.quantize(values, GGMLQuantizationType[kind])
    expected = torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType[kind])).to(torch.bfloat16)
    found = unpack.dequantise(torch.from_numpy(packed).flatten(), {"kind": kind, "shape": [6, 64]})
    assert torch.equal(found, expected)


def test_late_phases_shorten_those_behind_them() -> None:
    now = [0.0]
    clock = Clock(100, {"a": 1, "b": 2, "c": 1}, now=lambda: now[0])
    assert clock.begin("a") == 25
    now[0] = 60.0  # it had 25
    assert clock.begin("b") == pytest.approx(40 * 2 / 3)
    now[0] = 110.0
    assert clock.begin("c") == 0 and clock.spent == {"a": 60.0, "b": 50.0}


def test_nothing_there_runs_foreign_code() -> None:
    text = "".join(file.read_text() for file in (SCRIPTS / "gpu_draft").glob("*.py"))
    assert not any(word in text for word in ("torch.load(", "pickle", "shell=True", "trust_remote_code"))
    assert all(len(file.read_text().splitlines()) < 400 for file in (SCRIPTS / "gpu_draft").glob("*.py"))
