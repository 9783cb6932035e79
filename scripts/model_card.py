"""Writes a draft's README.md from what lies beside it: training.json, measured.json, card.json.

    python scripts/model_card.py DRAFT
    python scripts/model_card.py DRAFT --sequences FILE --manifest FILE --runs RUN... [--note TEXT]

training.json comes from `flashdraft train`, measured.json from scripts/measure_draft.py. The second form
makes card.json: where the training prompts come from, counted in the sequences, with the licences of the
manifest; and steps, anchors and hours of the runs that led to the draft, from their metrics.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flashdraft.training.progress import read_metrics

KEYS = (
    "num_layers", "block_size", "target_layer_ids", "draft_vocab", "init", "ce_weight", "kl_weight", "dpace_alpha",
    "optimizer", "lr", "schedule", "ema",
)  # fmt: skip


def sources(sequences: Path, manifest: Path) -> list[dict[str, Any]]:
    """What the prompts of a file of sequences are taken from. Raises KeyError for an unknown source."""
    rows, tokens = Counter[str](), Counter[str]()
    with gzip.open(sequences, "rt") if sequences.suffix == ".gz" else sequences.open() as file:
        for line in file:
            row = json.loads(line)
            rows[row["source"]] += 1
            tokens[row["source"]] += len(row["token_ids"]) - row["num_prompt_tokens"]
    known = json.loads(manifest.read_text())["train"]
    return [
        {"source": name, "from": known[name]["source"], "licence": known[name]["licence"], "sequences": n, "tokens": tokens[name]}
        for name, n in rows.most_common()
    ]  # fmt: skip


def stage(run: Path) -> dict[str, Any]:
    """Steps, anchors and hours of a run. Anchors a second are known for every line of the metrics."""
    training = json.loads((run / "latest" / "training.json").read_text())
    config = training["config"]
    seconds, anchors, before = 0.0, 0.0, 0
    for line in read_metrics(run / "metrics.jsonl"):
        if "anchors_per_second" in line and line["step"] <= training["step"]:
            blocks = (line["step"] - before) * config["blocks_per_batch"] * config["accumulate"]
            seconds, anchors, before = seconds + blocks / line["anchors_per_second"], anchors + blocks, line["step"]
    return {
        "steps": training["step"], "block_size": config["block_size"], "anchors": round(anchors),
        "hours": round(seconds / 3600, 2), "schedule": config["schedule"], "lr": config["lr"],
    }  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))


def acceptance_table(lines: Sequence[dict[str, Any]]) -> str:
    return table(
        ("domain", "draft", "T", "prompts", "rounds", "tau", "95 %", "survival of slots 1, 2, ... in %", "equal to plain"),
        [
            (
                a["domain"], _shape(a), f"{a['temperature']:g}", a["prompts"], a["rounds"], f"{a['tau']:.2f}",
                _range(a["tau_interval"]), " ".join(f"{100 * s:.0f}" for s in a["survival"]),
                _share(a.get("equal_to_plain")),
            )
            for a in lines
        ],
    )  # fmt: skip


def time_table(lines: Sequence[dict[str, Any]]) -> str:
    return table(
        ("domain", "draft", "prompts", "tau", "tok/s plain", "tok/s with the draft", "ratio", "95 %", "equal to plain"),
        [
            (
                t["domain"], _shape(t), t["prompts"], f"{t['tau']:.2f}" if "tau" in t else "-", f"{t['plain_tokens_per_second']:.1f}",
                f"{t['draft_tokens_per_second']:.1f}", f"{t['ratio']:.2f}", _range(t["ratio_interval"]),
                _share(t["equal_to_plain"]),
            )
            for t in lines
        ],
    )  # fmt: skip


def _shape(line: dict[str, Any]) -> str:
    return f"tree, {line['options']}" if "options" in line else "chain"


def _range(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}"


def _share(pair: Sequence[int] | None) -> str:
    return "-" if pair is None else f"{pair[0]} of {pair[1]}"


def card(folder: Path) -> str:
    """The text of README.md."""
    training, measured, made = (
        json.loads((folder / name).read_text()) for name in ("training.json", "measured.json", "card.json")
    )
    config, settings = training["config"], measured["acceptance_settings"]
    size = (folder / "model.safetensors").stat().st_size / 1e6
    hours, anchors = (sum(s[key] for s in made["stages"]) for key in ("hours", "anchors"))
    sequences = sum(s["sequences"] for s in made["sources"])
    timed = measured.get("time_settings", {})
    parts = [
        f"# A DFlash draft for {training['target']}\n",
        f"{config['num_layers']} layers, block {config['block_size']}, {size:.1f} MB in bfloat16, made with flashdraft on a "
        f"CPU. It drafts {config['block_size'] - 1} tokens in one pass; the target checks them, so the text is the target's "
        "own. It works for this target alone, and proposes the "
        f"{config['draft_vocab']} most frequent ids (`draft_vocab.safetensors`; programs that do not know that file "
        "use the whole head).\n",
        "```sh\nflashdraft chat                       # drafts with it\nflashdraft demo                       # beside "
        "plain decoding\n```\n",
        "## What it is worth\n",
        "Acceptance length (tau, committed tokens a round) on prompts it was never trained on, at most "
        f"{settings['max_new_tokens']} new tokens, {settings['dtype']}"
        + (", T=1 with coupled sampling" if any(line["temperature"] for line in measured["acceptance"]) else ", greedy")
        + "; 95 % bootstrap intervals over prompts; survival of slot k: share of rounds that kept slots 1 to k. "
        "`python scripts/measure_draft.py smollm2 DATA --out FILE`:\n",
        acceptance_table(measured["acceptance"]),
    ]
    if measured.get("time"):
        parts += [
            f"\nWall clock against plain decoding by the same program, {timed['threads']} CPU threads, one request at a time, "
            f"at most {timed['max_new_tokens']} new tokens, prefill apart, median of {timed['repeat']} runs in turns (`--time`):\n",
            time_table(measured["time"]),
        ]
    parts += [
        "\n## How it was made\n",
        f"{anchors / 1e6:.1f} million anchors in {hours:.1f} hours on one CPU core, in {len(made['stages'])} stage(s); "
        "each starts from the one before:\n",
        table(
            ("stage", "block", "steps", "anchors", "hours", "learning rate"),
            [
                (i, s["block_size"], s["steps"], s["anchors"], s["hours"], s["lr"])
                for i, s in enumerate(made["stages"], 1)
            ],
        ),
        "\nThe last stage's settings: "
        + ", ".join(f"`{key}: {config[key]}`" for key in KEYS)
        + ". All of them, of all "
        "stages, are in `training.json`.\n",
        *(f"{note}\n" for note in made["notes"]),
        "![curves](curves.svg)\n",
        "## Data\n",
        f"{sequences} answers that the target itself wrote (`flashdraft regenerate`, greedy and at T=0.7) to prompts from:\n",
        table(
            ("prompts", "from", "licence", "answers", "tokens"),
            [(s["source"], s["from"], s["licence"], s["sequences"], s["tokens"]) for s in made["sources"]],
        ),
        "\nNo prompt of the measured sets is among them. The draft's weights are under Apache-2.0, as the target's.\n",
    ]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--sequences", type=Path)
    parser.add_argument("--manifest", type=Path)
    parser.add_argument("--runs", type=Path, nargs="+", default=[])
    parser.add_argument("--note", action="append", default=[], help="a sentence for the recipe; may be repeated")
    args = parser.parse_args()
    if args.sequences and args.manifest:
        made = {
            "sources": sources(args.sequences, args.manifest), "stages": [stage(run) for run in args.runs],
            "notes": args.note,
        }  # fmt: skip
        (args.draft / "card.json").write_text(json.dumps(made, indent=1) + "\n")
    (args.draft / "README.md").write_text(card(args.draft))
    return 0


if __name__ == "__main__":
    sys.exit(main())
