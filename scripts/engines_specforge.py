"""SpecForge 0.2.0 trains a toy draft on a CPU, in an environment of its own: a part of engines.py.

What it exports is imported, and accepts here what z-lab's own code accepts with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines_pair import MASK, make_bundle
from engines_speculators import imported
from engines_tools import ROOT, TORCH, call, environment, requirements

from flashdraft import Target, checkpoint

SPECFORGE = "specforge==0.2.0"
# it pins older ones of the first two, and needs a server only for data it does not have here
WITHOUT = ("torch", "transformers", "sglang", "yunchang")
PEERS = ROOT / "tests" / "engine_peers"
STEPS = 480


def run(folder: Path) -> dict[str, Any]:
    bundle, pair = make_bundle(folder.parent / "pair"), folder.parent / "pair"
    listed = requirements(folder, SPECFORGE, WITHOUT)
    python = environment(folder / "env", [TORCH], ["transformers==5.19.0", *listed], ["--no-deps", SPECFORGE])
    call([python, PEERS / "specforge_data.py", pair / "states", folder / "data"])
    shape = folder / "draft.json"
    shape.write_text(json.dumps(draft_json(pair)), encoding="utf-8")
    settings = folder / "run.json"
    settings.write_text(json.dumps(run_json(folder, pair, shape, len(bundle.prompts))), encoding="utf-8")
    env = {"SPECFORGE_DEVICE": "cpu", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    specforge = python.parent / "specforge"
    call([specforge, "train", "-c", settings], cwd=folder, env=env)
    made = max((folder / "out").glob("*step*"), key=lambda path: path.stat().st_mtime)
    exported = folder / "exported"
    call(
        [specforge, "export", "--to", "hf", "--checkpoint", made, "--draft-config", shape, "--output-dir", exported],
        cwd=folder,
        env=env,
    )
    target = Target.load(pair / "target", dtype="float32", device="cpu")
    return imported(exported, folder / "imported", pair, target, bundle)


def draft_json(pair: Path) -> dict[str, Any]:
    """The pair's own draft in z-lab's layout, which is SpecForge's."""
    config, weights = checkpoint.read(pair / "draft")
    raw = checkpoint.config_json(config, next(iter(weights.values())).dtype)
    return {**raw, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}


def run_json(folder: Path, pair: Path, shape: Path, num_sequences: int) -> dict[str, Any]:
    return {
        "model": {
            "target_model_path": str(pair / "target"),
            "draft_model_config": str(shape),
            "torch_dtype": "float32",
            "mask_token_id": MASK,
        },
        "data": {
            "hidden_states_path": str(folder / "data"),
            "max_length": 128,
            "dataloader_num_workers": 0,
            "cache_dir": str(folder / "cache"),
        },
        "training": {
            "strategy": "dflash",
            "num_epochs": STEPS // num_sequences,
            "learning_rate": 3e-3,
            "attention_backend": "sdpa",
            "fsdp_sharding": "NO_SHARD",  # its other ways are FSDP's, which needs an accelerator
            "log_interval": 60,
            "save_interval": STEPS,
        },
        "output_dir": str(folder / "out"),
    }
