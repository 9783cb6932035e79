"""Train a toy draft with the package speculators on a CPU, which it was not made for.

    python speculators_train.py STATES OUT TARGET BLOCK_SIZE MASK_ID LAYERS     # with speculators' Python

STATES: the folder of scripts/engines_pair.py. Layers there are numbered from 1 (2,3 are our 1,2).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors.torch import load_file, save_file


def prepare(states: Path, out: Path) -> None:
    """Its own layout: a dataset, and hidden_states [T, layers + 1, D], the last before the final norm."""
    rows = []
    (out / "hidden_states").mkdir(parents=True, exist_ok=True)
    for i, file in enumerate(sorted(states.glob("*.safetensors"), key=lambda f: int(f.stem))):
        each = load_file(file)
        tokens, hidden = each["input_ids"], each["states"]
        rows.append({"input_ids": tokens.tolist(), "loss_mask": each["loss_mask"].tolist(), "seq_len": len(tokens)})
        stacked = hidden.unflatten(-1, (3, -1)).contiguous()
        save_file({"hidden_states": stacked, "token_ids": tokens}, out / "hidden_states" / f"hs_{i}.safetensors")
    data = datasets.Dataset.from_list(rows)
    data.set_format("torch")
    data.save_to_disk(str(out))


def pretend_there_is_an_accelerator() -> None:
    """Its trainer asks torch for one and moves the model there; the CPU is told to be it."""
    from speculators.train import trainer

    def nothing(*_: Any, **__: Any) -> None:
        return None

    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: False
    accelerator.current_accelerator = lambda *_, **__: torch.device("cpu")
    accelerator.current_device_index = lambda: 0
    accelerator.set_device_index = accelerator.synchronize = nothing
    torch.cpu.empty_cache = nothing  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]
    trainer.get_local_rank = lambda: "cpu"


def main(states: str, out: str, target: str, block_size: str, mask_id: str, layers: str) -> None:
    data, saved = Path(out) / "data", Path(out) / "saved"
    prepare(Path(states), data)
    pretend_there_is_an_accelerator()
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    train(TrainConfig.resolve([
        "--verifier-name-or-path", target, "--data-path", str(data), "--save-path", str(saved),
        "--log-dir", str(Path(out) / "logs"), "--speculator-type", "dflash", "--num-layers", "2",
        "--block-size", block_size, "--mask-token-id", mask_id, "--draft-attn-impl", "sdpa",
        "--target-layer-ids", *layers.split(","), "--full-attention-indices", "0", "1",
        "--loss-implementation", "eager", "--loss-fn", "ce", "--hidden-states-dtype", "float32",
        "--total-seq-len", "512", "--max-anchors", "256", "--num-workers", "0", "--prefetch-factor", "0",
        "--on-missing", "raise", "--epochs", "60", "--checkpoint-freq", "60", "--optimizer", "adamw",
        "--lr", "0.003", "--no-resume-from-checkpoint",
    ]))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
