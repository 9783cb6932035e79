"""Is speculative decoding of the real model the model's own text? 100 prompts x 64 tokens.

    python scripts/check_smollm2.py DATA [--dtype float32] [--rows 4] [--only NAME...] [--json FILE]

DATA is a folder of JSONL prompt files (fields `turns` or `prompt`; the project's shared/data/eval).
Decodes plainly, and with n-gram drafting (ngram), a DFlash network of random weights and block 8 (random), and the
draft that ships, as chains (chain) and as trees of 12 nodes with a branch of lookup (tree); and compares token by token. In float32 all must
be equal, and the script exits with 1 if they are not. In bfloat16 the width of a pass can decide how it is rounded
(on a CPU above some 32 tokens, all requests of a pass counted), so that a near-tie falls the other way: every
such place is listed with the gap between the two best logits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from flashdraft.checkpoint import DraftConfig
from flashdraft.drafters import Drafter, NoDrafter, make_drafter
from flashdraft.drafters.dflash import DFlashDrafter, DFlashNetwork
from flashdraft.drafters.ngram import NGramDrafter
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.text import encode_chat
from flashdraft.types import Request, Result, SamplingParams

FILES = ("gsm8k", "mt_bench", "humaneval", "mbpp_sanitized", "heldout_train_mix")


def read_prompts(data: Path, count: int) -> list[tuple[str, str]]:
    """(id, first turn) of `count` prompts, the same number from each file, in file order."""
    prompts = []
    for name in FILES:
        with (data / f"{name}.jsonl").open(encoding="utf-8") as lines:
            rows = [json.loads(line) for _, line in zip(range(count // len(FILES)), lines, strict=False)]
        prompts += [(row["id"], row["turns"][0] if "turns" in row else row["prompt"]) for row in rows]
    return prompts


def random_dflash(target: Target) -> DFlashDrafter:
    """A DFlash draft of the target's shape with random weights: what it proposes is nearly noise."""
    torch.manual_seed(0)
    config = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.config.intermediate_size,
        num_heads=target.config.num_attention_heads,
        num_kv_heads=target.config.num_key_value_heads,
        head_dim=target.config.head_dim,
        vocab_size=target.vocab_size,
        target_layer_ids=(1, 9, 17, 27),
        num_target_layers=target.num_layers,
        block_size=8,
        mask_token_id=3,
        windows=(None, None),
        causal=(False, False),
        max_context=target.max_context,
    )
    return DFlashDrafter(DFlashNetwork(config).to(target.dtype), target)


ARMS: dict[str, Callable[[Target], Drafter]] = {
    "ngram": lambda target: NGramDrafter(8),
    "random": random_dflash,
    "chain": lambda target: make_drafter(target, draft="smollm2"),
    "tree": lambda target: make_drafter(target, draft="smollm2", tree=True, ngram=6),
}


def decode(
    target: Target, drafter: Drafter, prompts: list[list[int]], args: argparse.Namespace, name: str = "plain"
) -> list[Result]:
    engine = Engine(target, drafter, max_rows=args.rows, max_context=2048, reuse_prefix=False)
    params = SamplingParams(max_tokens=args.tokens, logprobs=2)
    ids = [engine.submit(Request(prompt, params)) for prompt in prompts]
    results: dict[int, Result] = {}
    for request_id in track(ids, description=f"{name:>7}", console=Console(stderr=True)):
        while request_id not in results:
            results |= {delta.request_id: delta.result for delta in engine.step() if delta.result is not None}
    return [results[i] for i in ids]


def divergences(names: list[str], plain: list[Result], other: list[Result]) -> list[dict[str, object]]:
    """Per answer that differs: where first, and how close the plain run's choice was."""
    found = []
    for name, a, b in zip(names, plain, other, strict=True):
        if a.token_ids == b.token_ids:
            continue
        same = zip(a.token_ids, b.token_ids, strict=False)
        at = next((i for i, (x, y) in enumerate(same) if x != y), min(len(a.token_ids), len(b.token_ids)))
        top = a.tokens[at].top_logprobs
        found.append({"prompt": name, "position": at, "gap": round(top[0][1] - top[1][1], 4)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    target = Target.load(args.target, dtype=args.dtype)
    named = read_prompts(args.data, args.prompts)
    prompts = [encode_chat(target.tokenizer, [{"role": "user", "content": text}]) for _, text in named]
    names = [name for name, _ in named]
    plain = decode(target, NoDrafter(), prompts, args)
    console = Console()
    table = Table("draft", "prompts", "tokens", "equal", "tau", "drafted", "accepted")
    record: dict[str, object] = {"dtype": str(target.dtype), "prompts": len(prompts), "tokens": args.tokens}
    different = []
    for name in args.only:
        results = decode(target, ARMS[name](target), prompts, args, name)
        differing = divergences(names, plain, results)
        rounds = [r for result in results for r in result.stats.rounds]
        drafted, accepted = sum(r.num_drafted for r in rounds), sum(r.num_accepted for r in rounds)
        tau = sum(r.num_committed for r in rounds) / len(rounds)
        tokens = sum(len(result.token_ids) for result in results)
        equal = f"{len(prompts) - len(differing)} of {len(prompts)}"
        table.add_row(name, str(len(prompts)), str(tokens), equal, f"{tau:.2f}", str(drafted), str(accepted))
        record[name] = {"equal": equal, "tau": tau, "divergences": differing}
        different += [(name, d) for d in differing]
    console.print(table)
    for name, place in different:
        console.print(f"{name}: {place['prompt']} differs at token {place['position']}, logit gap {place['gap']}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if different and target.dtype in (torch.float32, torch.float64):
        sys.exit(1)


if __name__ == "__main__":
    main()
