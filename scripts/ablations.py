"""Trains one draft for every line of a table, everything else fixed, and says what each is worth.

    python scripts/ablations.py BASE.yaml PROMPTS... --out FILE.jsonl [--only NAME...] [--prompts 20]

BASE.yaml is a configuration of `flashdraft train`; a variant changes the keys named in VARIANTS
(whose rates are meant for a base of lr 3e-3). The target
answers the prompts greedily once; a draft's acceptance length is then that of greedy decoding of these
answers, found from its drafts at all their positions (rounds jump from anchor to anchor as decoding does),
which costs seconds instead of minutes. Blocks are whole up to the end, where decoding would make the last one shorter. A variant that is in the file is not trained again; a run that was
killed goes on from its checkpoint. Sets of N sequences are drawn once, and contain each other.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.training import run as training_run
from flashdraft.training.blocks import Blocks, make_blocks
from flashdraft.training.config import TrainConfig, load_config
from flashdraft.training.data import TokenSequence
from flashdraft.training.features import Features, FeatureSource
from flashdraft.training.methods.base import Method
from flashdraft.training.methods.dflash import reveal
from flashdraft.training.plan import Plan, permutation
from flashdraft.training.progress import Progress
from flashdraft.training.trainer import Trainer
from flashdraft.training.validation import load_prompts
from flashdraft.types import FlashdraftError, Request, SamplingParams

_RIVAL = ["target_layer_ids=null", "draft_vocab=null", "num_layers=1"]  # what DFlash's base sets and they have not

# name -> what it changes. Batches keep the anchors of a step; N... is the number of sequences.
VARIANTS: dict[str, list[str]] = {
    "base": [],
    "from random weights": ["init=random"],
    "1 layer": ["num_layers=1"],
    "3 layers": ["num_layers=3"],
    "5 layers": ["num_layers=5"],
    "block 4": ["block_size=4"],
    "block 16": ["block_size=16"],
    "a third of the rate": ["lr=1e-3", "lr_copied=1e-3"],
    "three times the rate": ["lr=9e-3", "lr_copied=9e-3"],
    "AdamW": ["optimizer=adamw", "lr=1e-3", "lr_copied=1e-3"],
    "AdamW, a third of its rate": ["optimizer=adamw", "lr=3e-4", "lr_copied=3e-4"],
    "cross-entropy alone": ["ce_weight=1", "kl_weight=0"],
    "KL alone": ["ce_weight=0", "kl_weight=1"],
    "cross-entropy and total variation": ["kl_weight=0", "tv_weight=1"],
    "paper's decay for D-PACE": ["dpace_alpha=null"],
    "a tenth of the rate for copies": ["lr_copied=3e-4"],
    "one tapped layer": ["target_layer_ids=[27]"],
    "draft vocabulary 4096": ["draft_vocab=4096"],
    "draft vocabulary 16384": ["draft_vocab=16384"],
    "16 sequences": [],
    "64 sequences": [],
    "256 sequences": [],
    "1024 sequences": [],
    # rivals, with the rates that a short run of each liked best
    "Medusa": ["method=medusa", *_RIVAL, "lr_head=1e-3"],
    "EAGLE-3": ["method=eagle3", "target_layer_ids=null", "num_layers=1", "lr_head=3e-4"],
    "draft model": ["method=draft_model", *_RIVAL, "num_layers=2", "anchors_per_piece=1024", "blocks_per_batch=4096"],
    # DFlash without one of its parts
    "fused at the input": ["context=fused"],
    "no features": ["context=none", "target_layer_ids=null"],
    "autoregressive": ["autoregressive=true"],
}


def answers(target: Target, files: Sequence[str], count: int, tokens: int, path: Path) -> list[TokenSequence]:
    """The target's greedy answers, kept in a file; `source` is the domain."""
    if not path.is_file():
        prompts = load_prompts(files, target, count)
        longest = max(len(p) for group in prompts.values() for p in group)
        engine = Engine(target, max_rows=8, max_context=min(target.max_context, longest + tokens))
        rows = []
        for domain, group in prompts.items():
            results = engine.run([Request(p, SamplingParams(max_tokens=tokens)) for p in group])
            rows += [[domain, len(p), [*p, *r.token_ids]] for p, r in zip(group, results, strict=True)]
        path.write_text(json.dumps(rows))
    return [
        TokenSequence(str(i), domain, tuple(ids), ((start, len(ids)),), 0.0)
        for i, (domain, start, ids) in enumerate(json.loads(path.read_text()))
    ]


@torch.inference_mode()
def leading_runs(trainer: Trainer, sequences: Sequence[TokenSequence]) -> dict[tuple[int, int], int]:
    """(sequence, anchor) -> how many drafted tokens are right before the first wrong one. The trainer's
    network gets the weights that are exported."""
    method = copy.copy(trainer.method)
    method.sequences = sequences
    for name, weight in trainer.masters.best_weights.items():
        method.network.get_parameter(name).copy_(weight)
    config = dataclasses.replace(
        trainer.config,
        mix=1,
        feature_cache=None,
        ce_weight=1.0,
        kl_weight=0.0,
        tv_weight=0.0,
        anchors_per_sequence=None,
    )
    features = FeatureSource(trainer.target, sequences, method.layer_ids, config)
    plan = Plan(sequences, config)
    found: dict[tuple[int, int], int] = {}
    for pieces in (batch for step in range(plan.steps_per_epoch) for batch in plan.batches(step)):
        blocks = make_blocks(pieces, sequences, method.block_size, method.mask_token_id, config.anchors_per_piece)
        drafts = drafted(method, blocks, features.of(blocks.sequences), config.autoregressive)
        right = ((drafts == blocks.labels_AL) & (blocks.labels_AL >= 0)).int().cumprod(-1).sum(-1)
        for piece, runs in zip(pieces, right.view(len(pieces), -1).tolist(), strict=True):
            found |= {(piece.sequence, anchor): run for anchor, run in zip(piece.anchors, runs, strict=False)}
    return found if method.block_size == config.block_size else joined(found, config.block_size - 1)


def drafted(method: Method, blocks: Blocks, features: Mapping[int, Features], one_by_one: bool) -> torch.Tensor:
    """Drafts [A, L]. Those of a network that fills its slots one by one are what it says behind the right ones:
    only runs of right ones count."""
    if not one_by_one:
        drafts = method.head.logits(method.states(blocks, features)).argmax(-1)
    else:
        count = blocks.labels_AL.shape[1]
        slots = []
        for k in range(count):
            told = reveal(blocks, torch.full((len(blocks.labels_AL),), k))
            slots.append(method.head.logits(method.states(told, features)[:, k : k + 1]).argmax(-1))
        drafts = torch.cat(slots, dim=1)
    return drafts if method.vocab_ids is None else method.vocab_ids[drafts]


def joined(runs: dict[tuple[int, int], int], longest: int) -> dict[tuple[int, int], int]:
    """Runs of a method that is trained a token at a time (a draft model): its next token is what it says
    behind the right ones."""
    found: dict[tuple[int, int], int] = {}
    for sequence, anchor in runs:
        run = 0
        while run < longest and runs.get((sequence, anchor + run), 0):
            run += 1
        found[sequence, anchor] = run
    return found


def decoded(runs: dict[tuple[int, int], int], sequences: Sequence[TokenSequence]) -> dict[str, list[int]]:
    """Per domain (committed, rounds) of greedy decoding."""
    totals: dict[str, list[int]] = {}
    for i, sequence in enumerate(sequences):
        at, end = sequence.loss_spans[0][0], len(sequence.token_ids) - 1
        count = totals.setdefault(sequence.source, [0, 0])
        while at < end:
            committed = min(runs.get((i, at), 0) + 1, end - at)
            at += committed
            count[0] += committed
            count[1] += 1
    return totals


def train(config: TrainConfig, target: Target, count: int | None) -> Trainer:
    """One variant, to its end. `count`: of sequences, None is all."""
    load = training_run.load_sequences

    def some(config: TrainConfig, target: Target) -> list[TokenSequence]:
        found = load(config, target)
        return [found[i] for i in permutation(0, len(found), 99)[:count]]

    training_run.load_sequences = some if count else load
    try:
        trainer = training_run.build_trainer(config, target=target)
    finally:
        training_run.load_sequences = load
    trainer.resume()
    if trainer.config.threads == 1:  # its own time, so that other work beside it costs no run a part of its budget
        trainer.length.clock = time.process_time
    with Progress(Console(stderr=True), trainer.length.known_steps, trainer.step) as progress:
        trainer.run(progress)
    if trainer.interrupted:
        raise KeyboardInterrupt
    return trainer


def row(name: str, trainer: Trainer, sequences: Sequence[TokenSequence], seconds: float) -> dict[str, Any]:
    totals = decoded(leading_runs(trainer, sequences), sequences)
    tau = {domain: round(committed / rounds, 4) for domain, (committed, rounds) in totals.items()}
    return {
        "name": name,
        "set": VARIANTS[name],
        "tau": tau,
        "mean": round(sum(tau.values()) / len(tau), 4),
        "parameters": sum(p.numel() for p in trainer.method.network.parameters() if p.requires_grad),
        "steps": trainer.step,
        "seconds": round(seconds),
    }


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    domains = list(rows[0]["tau"])
    head = ["variant", "changes", "M parameters", *domains, "mean"]
    lines = [head, ["---"] * len(head)]
    lines += [
        [r["name"], f"`{', '.join(r['set'])}`" if r["set"] else "", f"{r['parameters'] / 1e6:.1f}"]
        + [f"{r['tau'][d]:.2f}" for d in domains]
        + [f"{r['mean']:.2f}"]
        for r in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("prompts", nargs="+", metavar="PROMPTS", help="JSON lines, a domain each")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--count", type=int, default=20, help="prompts of each domain")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all variants")
    args = parser.parse_args(argv)
    try:
        rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.is_file() else []
        base = load_config(args.config, args.set)
        training_run.keep_freed_memory()
        if base.threads is not None:
            torch.set_num_threads(base.threads)
        target = Target.load(base.target, dtype=base.dtype)
        sequences = answers(target, args.prompts, args.count, args.tokens, args.out.with_suffix(".answers.json"))
        for name in args.only:
            if any(r["name"] == name for r in rows):
                continue
            count = re.fullmatch(r"(\d+) sequences", name)
            where = f"run={Path(base.run) / name.replace(' ', '-')}"
            began = time.monotonic()
            trainer = train(
                load_config(args.config, [*args.set, *VARIANTS[name], where, "validation=[]"]), target,
                int(count[1]) if count else None,
            )  # fmt: skip
            rows.append(row(name, trainer, sequences, time.monotonic() - began))
            with args.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    except FlashdraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on.", file=sys.stderr)
        return 130
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
