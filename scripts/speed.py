"""Plain decoding through our engine against transformers' generate, and the price of a verify pass.

    python scripts/speed.py [--target smollm2] [--repeat 5] [--products] [--json FILE]

Per context length: tokens a second of both, interleaved, medians; then the time of a pass over 8
and 16 tokens divided by a pass over one, for both. Run it on an otherwise idle machine.

--products times instead the target's products alone, torch's Linear against one whose weight is in the processor's
order (flashdraft/packing.py), with weights that are in the cache and with so many that they come from memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

from flashdraft.engine import Engine
from flashdraft.locate import locate_target
from flashdraft.packing import PackedLinear, packed_linear
from flashdraft.target import Target
from flashdraft.types import Request, SamplingParams

NEW_TOKENS = 32


def timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def decode_seconds(target: Target, model: transformers.PreTrainedModel, context: int, repeat: int) -> dict[str, float]:
    """Median seconds per new token, prefill taken off by a run of one token."""
    ids = torch.randint(3, target.num_tokens, (context,), generator=torch.Generator().manual_seed(context)).tolist()
    engine = Engine(target, max_context=context + NEW_TOKENS, reuse_prefix=False)
    tensor = torch.tensor([ids])

    def ours(count: int) -> float:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        return engine.run([Request(ids, params)])[0].stats.decode_seconds

    def theirs(count: int) -> float:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "use_cache": True}
        mask = torch.ones_like(tensor)
        return timed(lambda: model.generate(tensor, attention_mask=mask, pad_token_id=0, **options))

    ours(NEW_TOKENS), theirs(NEW_TOKENS)
    runs: dict[str, list[float]] = {"flashdraft": [], "transformers": []}
    for _ in range(repeat):
        runs["flashdraft"].append(ours(NEW_TOKENS + 1) / NEW_TOKENS)
        runs["transformers"].append((theirs(NEW_TOKENS + 1) - theirs(1)) / NEW_TOKENS)
    return {name: statistics.median(values) for name, values in runs.items()}


def pass_seconds(target: Target, model: transformers.PreTrainedModel, context: int, repeat: int) -> dict[str, dict]:
    """Median seconds of a pass over 1, 8 and 16 tokens behind `context` cached ones."""
    cache = target.new_cache(1, context + 64)
    ids = torch.randint(3, target.num_tokens, (1, context), generator=torch.Generator().manual_seed(1))
    for start in range(0, context, 512):
        part = ids[:, start : start + 512]
        target.forward(part, cache, [0], keep=slice(0, 0))
        cache.keep(0, part.shape[1])
    with torch.inference_mode():
        past = transformers.DynamicCache(config=model.config)
        model(ids, past_key_values=past, logits_to_keep=1)

    def theirs(width: int) -> None:
        with torch.inference_mode():
            model(ids[:, :width], past_key_values=past)
            past.crop(-width)

    out: dict[str, dict[int, float]] = {"flashdraft": {}, "transformers": {}}
    for width in (1, 8, 16):
        arms = {
            "flashdraft": lambda width=width: target.forward(ids[:, :width], cache, [0]),
            "transformers": lambda width=width: theirs(width),
        }
        for name, run in arms.items():
            for _ in range(3):
                run()
            out[name][width] = statistics.median(timed(run) for _ in range(5 * repeat))
    return out


def product_seconds(shape: tuple[int, int], width: int, copies: int, repeat: int) -> tuple[float, float]:
    """Median seconds of a product [width, in] x [in, out] of either kind, in turns, going round `copies` weights."""
    num_out, num_in = shape
    plain = [nn.Linear(num_in, num_out, bias=False, dtype=torch.bfloat16).requires_grad_(False) for _ in range(copies)]
    packed = [packed_linear(linear.weight, None) for linear in plain]
    if not isinstance(packed[0], PackedLinear):
        raise SystemExit("weights are not packed here: this takes bfloat16 units (AVX512-BF16 or AMX) and memory.")
    x = torch.randn(width, num_in).to(torch.bfloat16)

    def run(linears: list[nn.Module]) -> Callable[[], object]:
        return lambda: [linear(x) for linear in linears]

    rounds = max(1, 200 // copies)
    seconds: list[list[float]] = [[], []]
    with torch.inference_mode():
        for i in range(repeat + 1):
            for found, linears in zip(seconds, (plain, packed), strict=True):
                took = sum(timed(run(linears)) for _ in range(rounds)) / (rounds * copies)
                if i:  # the first one warms up
                    found.append(took)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def show_products(target: Target, repeat: int, console: Console) -> None:
    shapes = sorted({(m.out_features, m.in_features) for m in target.model.modules() if isinstance(m, nn.Linear)})
    table = Table(
        "weight", "tokens", "in cache: plain us", "packed us", "ratio", "from memory: plain us", "packed us", "ratio"
    )
    for shape in shapes:
        many = max(1, min(64, (400 << 20) // (2 * shape[0] * shape[1])))
        for width in (1, 8, 16):
            cells = []
            for copies in (1, many):
                plain, packed = product_seconds(shape, width, copies, repeat)
                cells += [f"{1e6 * plain:.0f}", f"{1e6 * packed:.0f}", f"{plain / packed:.2f}"]
            table.add_row(f"{shape[0]} x {shape[1]}", str(width), *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--products", action="store_true", help="time products alone")
    args = parser.parse_args()
    console = Console()
    target = Target.load(args.target, dtype=args.dtype)
    if args.products:
        show_products(target, args.repeat, console)
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(
        locate_target(args.target), dtype=target.dtype, attn_implementation="sdpa"
    ).eval()
    console.print(f"{args.target}, {target.dtype}, {torch.get_num_threads()} threads, medians of {args.repeat}")
    table = Table(
        "context", "flashdraft tok/s", "transformers tok/s", "ratio", "8 over 1", "16 over 1", "8 over 1 (hf)"
    )
    record = []
    for context in args.contexts:
        tokens = decode_seconds(target, model, context, args.repeat)
        passes = pass_seconds(target, model, context, args.repeat)
        ours, theirs = passes["flashdraft"], passes["transformers"]
        table.add_row(
            str(context),
            f"{1 / tokens['flashdraft']:.1f}",
            f"{1 / tokens['transformers']:.1f}",
            f"{tokens['transformers'] / tokens['flashdraft']:.2f}",
            f"{ours[8] / ours[1]:.2f}",
            f"{ours[16] / ours[1]:.2f}",
            f"{theirs[8] / theirs[1]:.2f}",
        )
        record.append({"context": context, "seconds_per_token": tokens, "pass_seconds": passes})
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
