"""A draft trained with a window is served with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.training.run import exported
from test_training_trainer import answers, block_logits, tiny_trainer

WINDOW = 6


@pytest.mark.parametrize("num_context", [2, 12, 30], ids=["inside it", "beyond it", "far beyond it"])
def test_a_trained_window_is_served(num_context: int, tmp_path: Path) -> None:
    """T12: trained with a window, run with full attention. The saved draft says its window; beyond it
    the served logits are those of the trained network, and without it they would be others."""
    rows = answers(2)
    trainer = tiny_trainer(tmp_path, rows, window=WINDOW, num_layers=2, block_size=4)
    for _ in range(3):
        trainer.train_step()
    trainer.write_draft(tmp_path / "draft")
    trained = DFlashDrafter(exported(trainer), trainer.target)
    served = DFlashDrafter.load(tmp_path / "draft", trainer.target)
    assert served.network.config.windows == (WINDOW, WINDOW) and all(served.network.config.causal)
    tokens = rows[0]["token_ids"]
    expected = block_logits(trained, tokens, num_context)
    assert torch.equal(block_logits(served, tokens, num_context), expected)

    # what an engine does that ignores the keys
    file = tmp_path / "draft" / "config.json"
    config = json.loads(file.read_text())
    config |= {
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "use_sliding_window": False,
        "is_causal": True,
    }
    file.write_text(json.dumps(config))
    full = block_logits(DFlashDrafter.load(tmp_path / "draft", trainer.target), tokens, num_context)
    assert torch.allclose(full, expected, rtol=0, atol=1e-5) is (num_context + 4 <= WINDOW)


def test_training_sees_no_further(tmp_path: Path) -> None:
    """T12, the other way round: states before the window of the first anchor's first slot change
    nothing, and the window's first one does."""
    row = answers(6)[5]
    first = row["num_prompt_tokens"] + 1 - WINDOW + 1  # the earliest that slot 1 of the first anchor sees
    losses = []
    for end in (0, first, first + 1):
        folder = tmp_path / str(end)
        folder.mkdir()
        trainer = tiny_trainer(folder, [row], window=WINDOW, num_layers=1, block_size=4)
        trainer.features.get(0).states_TF[:end] += 7.0  # they stay in memory
        losses.append(trainer.train_step().loss)
    assert first > WINDOW
    assert losses[0] == losses[1] != losses[2]
