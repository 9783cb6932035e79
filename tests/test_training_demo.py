"""`flashdraft train --demo`: the rows that ship, and the way from them to a draft, on a tiny target."""

from __future__ import annotations

import gzip
import json
from importlib import resources
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cli_bed import save_target
from flashdraft import cli
from flashdraft.training.config import load_config
from flashdraft.training.data import read_meta, read_prompts, read_sequences

DATA = Path(str(resources.files("flashdraft"))) / "data"
ROWS, PROMPTS, CONFIG = DATA / "demo_sequences.jsonl.gz", DATA / "word_problems.jsonl", DATA / "demo_training.yaml"


def invoke(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_the_rows_that_ship() -> None:
    """Small, whole, of one source whose licence is named, and apart from the prompts to validate on."""
    assert ROWS.stat().st_size < 200_000
    sequences = list(read_sequences([ROWS], vocab_size=49152))
    assert len(sequences) > 100 and all(sequence.finished for sequence in sequences)
    prompts = list(read_prompts([PROMPTS], lambda rejected: pytest.fail(rejected.sentence)))
    assert 4 <= len(prompts) <= 16
    assert not {prompt.id for prompt in prompts} & {sequence.id for sequence in sequences}
    assert {sequence.source for sequence in sequences} == {"gsm8k_train"}
    meta = read_meta(ROWS)
    assert meta is not None and "MIT" in meta["licence"] and meta["target"] == "smollm2"
    notice = (DATA / "NOTICE.md").read_text()
    for file in (ROWS, PROMPTS):
        assert file.name in notice
    assert "MIT" in notice and "OpenAI" in notice
    assert ROWS.read_bytes()[:2] == b"\x1f\x8b" and gzip.decompress(ROWS.read_bytes())


def test_the_configuration_that_ships() -> None:
    config = load_config(CONFIG, ["data=[x]"])
    assert config.max_minutes is not None and 3 <= config.max_minutes <= 5
    assert config.validation_minutes * 4 < config.max_minutes, "its rise is to be seen"


def test_demo_trains_a_draft(tmp_path: Path) -> None:
    """The whole way with everything small: a clock of two seconds, and a sentence how to chat."""
    target = save_target(tmp_path / "target")
    row = {"id": "a", "token_ids": [5 + i % 40 for i in range(60)], "num_prompt_tokens": 10}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "The boats"}) + "\n")
    changes = {
        "run": str(tmp_path / "my run"), "target": str(target), "dtype": "float32", "threads": 1,
        "data": [str(tmp_path / "rows.jsonl")],
        "validation": [str(tmp_path / "asked.jsonl")], "target_layer_ids": [0, 1], "draft_vocab": 64,
        "validation_tokens": 6, "max_minutes": 0.02, "blocks_per_batch": 32, "log_steps": 1,
    }  # fmt: skip
    settings = [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    code, out, err = invoke("train", "--demo", *settings)
    assert code == 0, err
    assert "Training a small draft for" in out and "for about 0.02 minutes" in out
    assert "0.02 minutes in all" in out and "step 0: decoded acceptance length" in out
    assert f"flashdraft chat --target {target} --draft '{tmp_path / 'my run' / 'best'}'" in out
    config = json.loads((tmp_path / "my run" / "latest" / "state.json").read_text())["config"]
    assert config["optimizer"] == yaml.safe_load(CONFIG.read_text())["optimizer"]


def test_what_a_user_can_mend_is_one_sentence() -> None:
    code, _, err = invoke("train", "--demo", "run.yaml")
    assert code == 2 and "--demo brings its own configuration" in err
    code, _, err = invoke("train")
    assert code == 2 and "expected a CONFIG.yaml (docs/training.md has one) or --demo" in err
    code, _, err = invoke("train", "--demo", "--set", "max_minuts=1")
    assert code == 2 and "the closest one is 'max_minutes'" in err
