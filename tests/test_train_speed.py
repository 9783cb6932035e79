"""scripts/train_speed.py: every part of a step is timed once, and the trainer is left as it was."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cli_bed import load_script, save_target
from flashdraft.packing import pack


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("train_speed")


def test_shares_and_rates(script: Any, tmp_path: Path, capsys: Any) -> None:
    save_target(tmp_path / "target")
    rows = [{"id": str(i), "token_ids": list(range(5 + i, 45 + i)), "num_prompt_tokens": 5} for i in range(6)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    values = {
        "run": str(tmp_path / "run"), "target": str(tmp_path / "target"), "data": [str(tmp_path / "data.jsonl")],
        "dtype": "float32", "num_layers": 1, "block_size": 4, "target_layer_ids": [0], "anchors_per_piece": 8,
        "blocks_per_batch": 16, "accumulate": 2, "kl_weight": 0.5,
    }  # fmt: skip
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(values))
    backward = torch.autograd.backward
    assert script.main([str(tmp_path / "base.yaml"), "--steps", "3", "--ops", "4"]) == 0
    assert torch.autograd.backward is backward and not (tmp_path / "run").exists()
    out = capsys.readouterr().out
    parts = {name: float(ms) for name, ms in re.findall(r"^\| ([a-z' ]+) \| (\d+) \| \d+ % \|$", out, re.M)}
    assert list(parts) == [*script.PARTS, "rest"] and parts["draft backward"] > 0
    # forward and backward of a step's 32 blocks of 4: no fewer products than the weights have, six times over
    [(gflop, share)] = re.findall(r"^(\S+) GFLOP a step: .*, (\d+) % of the", out, re.M)
    assert float(gflop) > 0.003 and 0 <= int(share) <= 100
    assert len(re.findall(r"^\| `.+` \| \d+ \| [\d.]+ % \|$", out, re.M)) == 4


def test_wrong_configuration_is_one_sentence(script: Any, tmp_path: Path, capsys: Any) -> None:
    assert script.main([str(tmp_path / "none.yaml")]) == 2
    assert re.fullmatch(r"error: .*none\.yaml.*\n", capsys.readouterr().err)


def test_packed_products_are_counted_like_others(script: Any) -> None:
    """torch's counter does not know their kernel."""
    linear = nn.Linear(32, 48, dtype=torch.bfloat16).requires_grad_(False)
    found = []
    for _ in range(2):
        with torch.inference_mode(), FlopCounterMode(display=False, custom_mapping=script.packed_products()) as counter:
            linear(torch.zeros(2, 5, 32, dtype=torch.bfloat16))
        found.append(counter.get_total_flops())
        pack(linear)
    assert found == [2 * 10 * 32 * 48] * 2
