"""Load a draft with the package speculators, and write what it made of it as JSON.

python speculators_load.py DRAFT OUT.json     # with speculators' Python
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from speculators import SpeculatorModel


def main(draft: str, out: str) -> None:
    model = SpeculatorModel.from_pretrained(draft)
    config = model.config
    made = {
        "class": type(model).__name__,
        "block_size": config.block_size,
        "layer_ids": list(config.aux_hidden_state_layer_ids),
        "mask_token_id": config.mask_token_id,
        "fc": model.state_dict()["fc.weight"].double().sum().item(),
    }
    Path(out).write_text(json.dumps(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
