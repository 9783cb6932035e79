"""`flashdraft plan`: what rounds cost on this machine, what memory is needed, and what the command says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import report_bed
from bed import CONFIGS, dflash_drafter, make_model
from cli_bed import save_draft, save_target
from flashdraft import cli
from flashdraft.drafters.ngram import NGramDrafter
from flashdraft.engine import Engine
from flashdraft.evaluation import costs, figures, memory, planner
from flashdraft.evaluation.planner import RoundCost
from flashdraft.evaluation.records import PLAIN, RecordFile
from flashdraft.target import Target
from flashdraft.types import FlashdraftError, Request, SamplingParams

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    save_target(folder / "target")
    save_draft(folder / "draft", Target.load(folder / "target", dtype="float32"), mask_token_id=5)
    recorded = report_bed.made({"maths": 0.85, "chat": 0.1}, prompts=4)
    RecordFile(folder / "bench.jsonl", dict(recorded.header)).add(list(recorded.records))
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target.load(folder / "target", dtype="float32")


def run(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *args], env={"COLUMNS": "200"})


# -- costs -------------------------------------------------------------------------------------


def test_every_arm_is_timed_at_every_context_and_batch_size(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that we turn: the round's parts are those of the session and the rest; medians, warm-up apart."""
    seen: list[tuple[int, int]] = []
    original = costs._round

    def timed(engine: Engine) -> RoundCost:
        original(engine)
        seen.append((engine.drafter.max_draft_tokens + 1, len(engine.session.tokens)))
        number = len(seen)
        return RoundCost(engine.drafter.max_draft_tokens, 10.0 if number > 3 * 5 else 900.0, 0.5)

    monkeypatch.setattr(costs, "_round", timed)
    drafter = NGramDrafter(4)
    table = costs.measure(target, [("ngram", drafter)], [20, 40], [2], rounds=2, widest=3)
    arms = [(PLAIN, 1), (costs.FREE, 2), (costs.FREE, 3), ("ngram", 2), ("ngram", 4)]
    assert [(p.arm, p.block_size) for p in table.points] == arms * 2
    assert {(p.context, p.rows) for p in table.points} == {(20.0, 2), (40.0, 2)}
    assert all(p.cost == RoundCost(p.block_size - 1, 10.0, 0.5) for p in table.points[:5])
    assert len(seen) == 2 * 5 * (3 + 2)
    # who begins rotates
    assert [seen[5 * n][0] for n in range(5)] == [1, 2, 3, 2, 4]


def test_a_round_has_three_parts(target: Target) -> None:
    engine = Engine(target, dflash_drafter(target, mask_token_id=5, vocab_size=target.vocab_size), max_context=64)
    engine.submit(Request([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)))
    engine.step()
    cost = costs._round(engine)
    assert cost.draft > 0 and cost.verify > 0 and cost.rest >= 0


@pytest.mark.parametrize("block", [2, 5, 9])
def test_a_cut_drafter_drafts_a_smaller_block(target: Target, block: int) -> None:
    whole = NGramDrafter(8)
    cut = costs.Cut(whole, block)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 5, 6, 7]
    result = Engine(target, cut, max_context=64).run([Request(prompt, SamplingParams(max_tokens=12, ignore_eos=True))])[
        0
    ]
    assert max(r.num_drafted for r in result.stats.rounds) <= min(block, 8) - 1
    assert result.token_ids == Engine(target, max_context=64).run(
        [Request(prompt, SamplingParams(max_tokens=12, ignore_eos=True))]
    )[0].token_ids  # fmt: skip


def test_block_sizes() -> None:
    assert costs.block_sizes(16) == [2, 4, 8, 16] and costs.block_sizes(7) == [2, 4, 7] and costs.block_sizes(1) == []


def test_command_measures_writes_and_predicts(folder: Path) -> None:
    out = folder / "costs.json"
    result = run(
        str(folder / "bench.jsonl"), "--out", str(out), "--target", str(folder / "target"), "--draft", str(folder / "draft"),
        "--dtype", "float32", "--context", "16", "--rounds", "1", "--widest", "2", "--threads", "1",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    raw = json.loads(out.read_text())
    assert raw["kind"] == "flashdraft costs" and raw["environment"]["dtype"] == "float32" and raw["load"] >= 0
    table = costs.read_costs(out)
    assert {p.arm for p in table.points} == {PLAIN, costs.FREE, "dflash"} and table.largest("dflash", 1) == 8
    assert "tokens to break even" in result.stdout and "maths: dflash, greedy" in result.stdout
    again = run(str(folder / "bench.jsonl"), "--costs", str(out))
    assert again.exit_code == 0 and "maths: dflash, greedy" in again.stdout
    assert "draft_model" not in again.stdout  # its rounds were not timed


# -- predictions -------------------------------------------------------------------------------


def test_command_predicts_from_records_alone(folder: Path) -> None:
    result = run(str(folder / "bench.jsonl"), "--curves", str(folder / "c.svg"))
    assert result.exit_code == 0, result.stderr
    for said in ("pass per token, iid", "chat: ngram, greedy, one request at a time", "Plain decoding is better",
                 "Take a block of 8"):  # fmt: skip
        assert said in result.stdout, said
    drawn = (folder / "c.svg").read_text()
    assert drawn.startswith("<svg") and "prefers-color-scheme" in drawn and "measured" in drawn


def test_docs_have_the_curves_that_the_code_draws() -> None:
    """docs/plan-formulas.svg is `figures.formula_file()`."""
    assert (ROOT / "docs" / "plan-formulas.svg").read_text() == figures.formula_file()


def test_the_imagined_curve_says_what_the_formulas_say() -> None:
    drawn = figures.formula_plot(0.8, 0.2, RoundCost(0.2, 1.3, 0.05))
    for block in (8, 16):
        assert f"{planner.autoregressive_speedup(0.8, block - 1, 0.2):.2f} at block 8" in drawn or block == 16
        assert f"and {planner.one_pass_speedup(0.8, block - 1, 0.2):.2f} at 16" in drawn or block == 8


# -- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_memory_is_that_of_real_networks(family: str, tmp_path: Path) -> None:
    """From config.json alone, against the model itself and a cache that it has filled."""
    model = make_model(CONFIGS[family](vocab_size=96), torch.float32)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    part = memory.parts(str(tmp_path), None, None, context=100, rows=3, dtype="float32")[0]
    assert part.parameters == sum(p.numel() for p in model.parameters()) and part.weights == 4 * part.parameters
    target = Target(model)
    cache = target.new_cache(3, 100)
    target.forward(torch.ones(1, 2, dtype=torch.int64), cache, [0])
    assert part.cache_per_token == cache.bytes_per_slot
    assert part.cache == sum(t.numel() * 4 for i in range(3) for t in cache.layer(i))


def test_memory_of_a_draft(folder: Path, target: Target, tmp_path: Path) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((folder / name / "config.json").read_bytes())
    found = memory.parts(str(tmp_path / "target"), str(tmp_path / "draft"), None, context=200, rows=2, dtype="float32")
    from flashdraft.drafters.dflash import DFlashDrafter

    drafter = DFlashDrafter.load(folder / "draft", target)
    assert found[1].parameters == sum(p.numel() for p in drafter.network.parameters())
    engine = Engine(target, drafter, max_rows=2, max_context=200)
    engine.run([Request([5, 6, 7], SamplingParams(max_tokens=4))])
    cache = engine.session.state.cache
    assert (found[1].cache_per_token, found[1].slots) == (cache.bytes_per_slot, cache.slots)
    assert found[1].cache_per_token == 2 * 2 * 2 * 8 * 4  # keys and values x layers x heads x width x bytes
    result = run("--memory", "--target", str(tmp_path / "target" / "config.json"), "--draft", str(tmp_path / "draft"),
                 "--context", "200", "--rows", "2", "--dtype", "float32")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "256 B" in result.stdout and "in all" in result.stdout and "2 row(s) of 200 tokens" in result.stdout
    assert "kept twice" not in result.stdout
    assert (
        "kept twice" in run("--memory", "--target", str(tmp_path / "target" / "config.json"), "--dtype", "bf16").stdout
    )
    small = memory.parts(
        str(tmp_path / "target"), str(tmp_path / "target"), "draft_model", context=9, rows=1, dtype="bf16"
    )
    assert small[0].parameters == small[1].parameters


def test_bytes_as_people_read_them() -> None:
    assert [memory.gib(n) for n in (12, 2048, 3 * 2**20, 5 * 2**30)] == ["12 B", "2.00 KiB", "3.00 MiB", "5.00 GiB"]


# -- what cannot be done -----------------------------------------------------------------------


def test_what_cannot_be_planned_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    def sentence(*args: str) -> str:
        result = run(*args)
        assert result.exit_code == 2 and result.stderr.strip().count("\n") == 0, result.stderr
        return str(result.stderr)

    records = str(folder / "bench.jsonl")
    assert "got none of them" in sentence()
    assert "give one of them" in sentence(records, "--costs", "a", "--out", "b")
    assert "name a file of `flashdraft bench`" in sentence("--out", str(tmp_path / "c.json"), "--curves", "x.svg")
    assert "cannot be read" in sentence(str(tmp_path / "none.jsonl"))
    assert "cannot be read" in sentence(records, "--costs", str(tmp_path / "none.json"))
    for bad, said in (
        ("[]", "no cost table of this version"),
        ('{"kind": "flashdraft costs", "version": 1, "points": [{}]}', "a row that is no cost"),
        ('{"kind": "flashdraft costs", "version": 1, "points": 3}', "a row that is no cost"),
    ):
        (tmp_path / "costs.json").write_text(bad)
        assert said in sentence(records, "--costs", str(tmp_path / "costs.json"))
    plain = [
        line for line in Path(records).read_text().splitlines() if '"cell": ["plain"' in line or '"version"' in line
    ]
    (tmp_path / "plain.jsonl").write_text("\n".join(plain) + "\n")
    assert "nothing can be predicted" in sentence(str(tmp_path / "plain.jsonl"))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 90000}')
    assert "90000 layers; expected 1 to 1024" in sentence("--memory", "--target", str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    assert "does not know" in sentence("--memory", "--target", str(tmp_path))
    with pytest.raises(FlashdraftError, match="expected at least 1"):
        memory.parts(str(folder / "target"), None, None, context=0, rows=1, dtype="float32")


def test_a_context_that_does_not_fit(target: Target) -> None:
    with pytest.raises(FlashdraftError, match="context is 500; with 2 rounds of blocks of up to 4 expected 1 to 488"):
        costs.measure(target, [], [500], [1], rounds=2, widest=4)
