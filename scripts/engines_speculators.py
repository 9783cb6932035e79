"""The package speculators 0.9.0 and ours, both ways, in an environment of its own: a part of engines.py.

Its converter takes our draft and we take the result back, bit by bit; it loads what we export; a toy draft
that it trains on a CPU is imported and accepts here what z-lab's own code accepts with it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from engines_pair import LAYER_IDS, MASK, Bundle, decoded, make_bundle, reference_accepted
from engines_tools import ROOT, TORCH, call, environment, requirements

from flashdraft import Target, checkpoint
from flashdraft.engines.transfer import export_draft, import_draft

SPECULATORS = "speculators==0.9.0"
WITHOUT = ("torch", "torchvision", "torchaudio")
PEERS = ROOT / "tests" / "engine_peers"


def run(folder: Path) -> dict[str, Any]:
    bundle, pair = make_bundle(folder.parent / "pair"), folder.parent / "pair"
    listed = requirements(folder, SPECULATORS, WITHOUT)
    python = environment(folder / "env", [TORCH], listed, ["--no-deps", SPECULATORS])
    target = Target.load(pair / "target", dtype="float32", device="cpu")
    check_converted(folder, python, pair, target, bundle)
    check_exported(folder, python, pair)
    call([
        python, PEERS / "speculators_train.py", pair / "states", folder / "trained", pair / "target",
        str(bundle.block_size), str(MASK), ",".join(str(i + 1) for i in LAYER_IDS),
    ], env={"HF_HUB_OFFLINE": "1"})  # fmt: skip
    return imported(newest(folder / "trained" / "saved"), folder / "trained-here", pair, target, bundle)


def check_converted(folder: Path, python: Path, pair: Path, target: Target, bundle: Bundle) -> None:
    out, back = folder / "converted", folder / "back"
    call([
        python.parent / "speculators", "convert", pair / "draft", "--algorithm", "dflash", "--verifier",
        pair / "target", "--output-path", out, "--validate-device", "cpu",
    ], env={"HF_HUB_OFFLINE": "1"})  # fmt: skip
    import_draft(out, back, str(pair / "target"))
    same_draft(pair / "draft", back)
    assert decoded(target, back, bundle.prompts).accepted == bundle.accepted, "the draft drafts differently now"


def same_draft(one: Path, other: Path) -> None:
    """Raises AssertionError unless both folders hold the same weights, in either's precision, and network."""
    (config, weights), (other_config, others) = checkpoint.read(one), checkpoint.read(other)
    assert config == other_config, f"{config} became {other_config}"
    changed = [name for name, w in weights.items() if not torch.equal(w.to(others[name].dtype), others[name])]
    assert not changed, f"weights changed on the way: {', '.join(changed)}"


def check_exported(folder: Path, python: Path, pair: Path) -> None:
    exported = export_draft(pair / "draft", "speculators", folder / "exported", str(pair / "target")).folder
    call([python, PEERS / "speculators_load.py", exported, folder / "loaded.json"], env={"HF_HUB_OFFLINE": "1"})
    found = json.loads((folder / "loaded.json").read_text(encoding="utf-8"))
    config, weights = checkpoint.read(pair / "draft")
    expected = {
        "block_size": config.block_size,
        "layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
    }
    assert {key: found[key] for key in expected} == expected, f"speculators read {found}, expected {expected}"
    total = weights["fc.weight"].double().sum().item()
    assert abs(found["fc"] - total) < 1e-3 * max(1, abs(total)), "speculators has another fc.weight"


def newest(folder: Path) -> Path:
    """The last folder under another that holds a draft."""
    found = [file.parent for file in folder.rglob("config.json") if (file.parent / "model.safetensors").exists()]
    assert found, f"no draft was saved under {folder}"
    return max(found, key=lambda path: (path / "model.safetensors").stat().st_mtime)


def imported(draft: Path, out: Path, pair: Path, target: Target, bundle: Bundle) -> dict[str, Any]:
    """Import a draft that others trained; our counts are those of z-lab's code, where it is installed."""
    import_draft(draft, out, str(pair / "target"))
    ours = decoded(target, out, bundle.prompts)
    assert ours.answers == bundle.answers, "texts changed with another draft"
    facts = {"trained drafts": ours.num_drafts, "trained accepted": sum(map(sum, ours.accepted))}
    assert facts["trained accepted"] > ours.num_drafts // 2, f"a trained draft accepts next to nothing: {facts}"
    theirs = reference_accepted(out, pair / "target", bundle)
    assert theirs is None or theirs == ours.accepted, f"z-lab's code accepts {theirs}, ours {ours.accepted}"
    return facts | {"reference": "equal" if theirs is not None else "not installed (dflash==0.1.0)"}
