"""The trainer on tiny targets: it learns what it is given, and decoding agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bed import PROMPTS, VOCAB, decode, tiny_target
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.training.config import TrainConfig, make_config
from flashdraft.training.run import build_trainer, exported
from flashdraft.training.trainer import Trainer


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def answers(count: int = 6, tokens: int = 40, family: str = "llama") -> list[dict[str, Any]]:
    """Greedy answers of a tiny target to the bed's prompts."""
    target = tiny_target(family, "float32")
    rows = []
    for i, prompt in enumerate(PROMPTS[:count]):
        answer = decode(target, None, [prompt], max_tokens=tokens, ignore_eos=True)[0].token_ids
        rows.append({"id": f"r{i}", "source": "bed", "temperature": 0.0, "num_prompt_tokens": len(prompt),
                     "finished": False, "token_ids": [*prompt, *answer]})  # fmt: skip
    return rows


def tiny_config(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "run": str(folder / "run"), "target": "tiny", "data": [str(write_rows(folder / "data.jsonl", rows))],
        "num_layers": 2, "block_size": 8, "target_layer_ids": [0, 1], "mask_token_id": VOCAB - 1,
        "anchors_per_piece": 16, "blocks_per_batch": 32, "accumulate": 1, "mix": 4, "lr": 3e-3, "warmup_steps": 5,
        "max_steps": 20, "log_steps": 5, **changes,
    }  # fmt: skip
    return make_config(values)


def tiny_trainer(folder: Path, rows: list[dict[str, Any]], dtype: str = "float32", **changes: Any) -> Trainer:
    return build_trainer(tiny_config(folder, rows, **changes), target=tiny_target("llama", dtype))


@pytest.mark.parametrize("changes", [{}, {"draft_vocab": 48}], ids=["whole vocabulary", "part of it"])
def test_a_learnt_sequence_is_accepted_whole(tmp_path: Path, changes: dict[str, Any]) -> None:
    """T1: 70 % accuracy in training, tau 1.02 when served. One sequence is trained until every slot
    is right; real decoding of it then accepts every draft: tau = block_size."""
    rows = answers(1, tokens=41)
    trainer = tiny_trainer(tmp_path, rows, max_steps=400, **changes)
    in_a_row = 0
    while in_a_row < 5 and trainer.step < trainer.num_steps:  # a report is about the weights before its step
        report = trainer.train_step()
        in_a_row = in_a_row + 1 if torch.equal(report.right_L, report.labels_L) else 0
    assert in_a_row == 5
    trainer.write_draft(tmp_path / "draft")
    drafter = DFlashDrafter.load(tmp_path / "draft", trainer.target)
    # 1 token of the prefill, then 5 rounds of 8
    result = decode(trainer.target, drafter, [PROMPTS[0]], max_tokens=41, ignore_eos=True)[0]
    assert result.stats.acceptance_length == 8.0
    assert list(result.token_ids) == rows[0]["token_ids"][len(PROMPTS[0]) :]
    assert exported(trainer) is not trainer.network
