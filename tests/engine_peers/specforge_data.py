"""Write the pair's states as SpecForge reads them offline: one file a sequence, in its own format.

python specforge_data.py STATES OUT     # with SpecForge's Python
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def main(states: str, out: str) -> None:
    Path(out).mkdir(parents=True, exist_ok=True)
    for i, file in enumerate(sorted(Path(states).glob("*.safetensors"), key=lambda f: int(f.stem))):
        each = load_file(file)
        width = each["states"].shape[1] // 3 * 2  # the last layer's are for other trainers
        torch.save(
            {
                "input_ids": each["input_ids"],
                "loss_mask": each["loss_mask"],
                "hidden_states": each["states"][:, :width].contiguous(),
            },
            Path(out) / f"data_{i}.ckpt",
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
