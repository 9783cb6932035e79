"""scripts/ablations.py: its acceptance length is that of decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli_bed import load_script, save_target
from flashdraft.drafters import make_drafter
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.training.validation import load_prompts
from flashdraft.types import Request, Result, SamplingParams

VARIANTS = [
    "base",
    "block 4",
    "EAGLE-3",
    "Medusa",
    "draft model",
    "fused at the input",
    "no features",
    "autoregressive",
]


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("ablations")


def whole(result: Result, count: int) -> list[int]:
    """Tokens that each round committed until there are `count` behind the prefill's."""
    found: list[int] = []
    for made in result.stats.rounds:
        if sum(found) < count:
            found.append(min(made.num_committed, count - sum(found)))
    return found


def test_tau_is_that_of_decoding(script: Any, tmp_path: Path, capsys: Any) -> None:
    target = Target.load(save_target(tmp_path / "target", num_hidden_layers=8), dtype="float32")
    prompts = tmp_path / "sea.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the boats {word} the harbour"}) + "\n" for word in "abc"))
    [group] = load_prompts([str(prompts)], target, 3).values()
    answers = [r.token_ids for r in Engine(target).run([Request(p, SamplingParams(max_tokens=30)) for p in group])]
    rows = [
        {"id": str(i), "token_ids": [*p, *a], "num_prompt_tokens": len(p)}
        for i, (p, a) in enumerate(zip(group, answers, strict=True))
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    values = {
        "run": str(tmp_path / "runs"), "target": str(tmp_path / "target"), "data": [str(tmp_path / "data.jsonl")],
        "dtype": "float32", "num_layers": 1, "block_size": 5, "target_layer_ids": [0], "anchors_per_piece": 4,
        "blocks_per_batch": 16, "accumulate": 1, "max_steps": 40, "lr": 1e-2, "warmup_steps": 1, "draft_vocab": 200,
    }  # fmt: skip
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(values))
    command = [str(tmp_path / "base.yaml"), str(prompts), "--out", str(tmp_path / "out.jsonl"), "--tokens", "24", "--count",
               "3", "--only", *VARIANTS]  # fmt: skip
    assert script.main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    base = rows[0]
    assert f"| base |  | {base['parameters'] / 1e6:.1f} | {base['tau']['sea']:.2f} |" in capsys.readouterr().out
    for name, found in zip(VARIANTS, rows, strict=True):
        own = {"tree": False} if name == "Medusa" else {}
        drafter = make_drafter(target, draft=tmp_path / "runs" / name.replace(" ", "-") / "latest", **own)
        # longer answers: decoding makes the last block shorter, and a network that sees the whole block may then draft
        # another token
        results = Engine(target, drafter).run([Request(p, SamplingParams(max_tokens=40)) for p in group])
        rounds = [whole(result, 24 - 1) for result in results]
        assert found["tau"]["sea"] == round(sum(map(sum, rounds)) / sum(map(len, rounds)), 4) > 1.2, name
    before = (tmp_path / "out.jsonl").read_text()
    assert script.main(command) == 0 and (tmp_path / "out.jsonl").read_text() == before  # nothing is trained twice
