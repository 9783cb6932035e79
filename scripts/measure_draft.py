"""What a draft is worth on held-out prompts: acceptance by decoding, and wall clock against plain decoding.

    python scripts/measure_draft.py DRAFT DATA_DIR --out FILE.json [--rows 8] [--check-plain]
    python scripts/measure_draft.py DRAFT DATA_DIR --out FILE.json --time      # on an idle machine

Two runs of `flashdraft bench` with the settings that a model card needs. DRAFT is a folder or the alias of a
draft that ships; DATA_DIR holds NAME.jsonl prompt files, of which --domains takes the first turns of so many
prompts, evenly spread. Acceptance is measured greedily and at T=1 (coupled), and does not depend on --rows.
--time decodes one prompt at a time, plainly and with the draft in turns, and leaves the prompt's pass out.
--tree nodes=12 ngram=6 measures drafts with these options beside the chains.

The records are FILE.acceptance.jsonl and FILE.time.jsonl (`flashdraft report` draws them): started again after
a kill, the same command goes on. FILE.json gets the figures of both kinds that were measured so far.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flashdraft.checkpoint import target_digest
from flashdraft.evaluation.bench import BenchConfig, run_bench
from flashdraft.evaluation.records import PLAIN, Record, Recorded, read_records
from flashdraft.evaluation.summary import Interval, Summary, summarise
from flashdraft.evaluation.tables import Counter, show_summaries
from flashdraft.locate import locate_draft
from flashdraft.settings import read_overrides
from flashdraft.target import Target
from flashdraft.terminal import console
from flashdraft.types import FlashdraftError

DOMAINS = "gsm8k=100,mt_bench=80,humaneval=100,heldout_train_mix=200"
ARM = "draft"

Row = dict[str, Any]


def acceptance(own: Summary, records: Sequence[Record]) -> Row:
    line: Row = {
        **_arm(own),
        "temperature": own.cell.temperature,
        "prompts": own.num_prompts,
        "tokens": sum(record.num_tokens for record in records),
        "rounds": own.num_rounds,
        "tau": round(own.tau.value, 4),
        "tau_interval": _ends(own.tau, own),
        "survival": [round(slot.survival, 4) for slot in own.slots],
        "survival_counts": [[slot.kept, slot.drafted] for slot in own.slots],
    }
    return line | ({} if own.equal is None else {"equal_to_plain": _equal(own)})


def speed(own: Summary, plain: Summary, records: Sequence[Record]) -> Row:
    assert own.ratio is not None
    load = [record.load for record in records if record.load is not None]
    return {
        **_arm(own),
        "prompts": own.num_prompts,
        "tau": round(own.tau.value, 4),
        "plain_tokens_per_second": round(plain.tokens_per_second, 2),
        "draft_tokens_per_second": round(own.tokens_per_second, 2),
        "ratio": round(own.ratio.value, 4),
        "ratio_interval": _ends(own.ratio, own),
        "equal_to_plain": _equal(own),
        "cpus_of_others": [min(load), max(load)],
    }


def _arm(own: Summary) -> Row:
    """The domain, and of a tree what it was asked for: its arm is called so."""
    return {"domain": own.task, **({"options": own.cell.arm} if own.cell.arm != ARM else {})}


def _ends(interval: Interval, own: Summary) -> list[float] | None:
    return [round(interval.low, 4), round(interval.high, 4)] if own.num_prompts > 1 else None


def _equal(own: Summary) -> list[int]:
    """[prompts whose text equals plain decoding's in every run, prompts]"""
    return [int((own.equal or 0.0) * own.num_prompts + 1e-9), own.num_prompts]


# -- the command -------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft")
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--domains", help=f"default {DOMAINS}; with --time 8 prompts of each")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tree", nargs="+", metavar="KEY=VALUE", default=[], help="options of trees to measure, too")
    parser.add_argument("--rows", type=int, default=8, help="prompts decoded at a time")
    parser.add_argument("--check-plain", action="store_true", help="decode plainly too, and compare the texts")
    parser.add_argument("--time", action="store_true", help="measure the wall clock instead")
    parser.add_argument("--repeat", type=int, default=3, help="with --time: runs of each prompt and arm")
    parser.add_argument("--anyway", action="store_true", help="with --time: on a busy machine, too")
    args = parser.parse_args(argv)
    default = ",".join(f"{part.partition('=')[0]}=8" for part in DOMAINS.split(",")) if args.time else DOMAINS
    try:
        args.counts = {name: int(n) for name, _, n in (p.partition("=") for p in (args.domains or default).split(","))}
    except ValueError:
        parser.error(f"--domains {args.domains} is no list such as {DOMAINS}")
    return args


def configuration(args: Any, kind: str) -> BenchConfig:
    own = read_overrides(args.tree, "--tree")
    return BenchConfig(
        out=str(args.out.with_suffix(f".{kind}.jsonl")),
        target=args.target,
        drafters=(
            {"name": ARM, "draft": args.draft},
            *([{"name": " ".join(args.tree), "draft": args.draft, "options": own}] if own else []),
        ),
        plain=args.time or args.check_plain,
        tasks={name: f"{args.data / name}.jsonl:{count}" for name, count in args.counts.items()},
        prompts=None,
        temperatures=(0.0,) if args.time else tuple(args.temperatures),
        rows=(1 if args.time else args.rows,),
        max_tokens=args.tokens,
        repeats=args.repeat if args.time else 1,
        dtype=args.dtype,
        threads=args.threads,
        keep_texts=0,
    )


def measure(args: Any) -> None:
    kind = "time" if args.time else "acceptance"
    if args.time:
        refuse_if_busy(args.anyway, args.threads or torch.get_num_threads())
    target = Target.load(args.target, dtype=args.dtype)
    with Counter(console()) as counter:
        recorded = read_records(run_bench(configuration(args, kind), counter.advance, target).path)
    made = recorded.header["environment"]
    settings = {
        "draft_sha256": hashlib.sha256((locate_draft(args.draft) / "model.safetensors").read_bytes()).hexdigest(),
        "target": args.target, "target_sha256": target_digest(target),
        "dtype": made["dtype"], "max_new_tokens": args.tokens, "domains": args.counts,
        "prompts_sha256": recorded.header["digests"]["prompts"],
        "block_size": next(r.cell.block_size for r in recorded.records if r.cell.arm == ARM),
        **({"threads": made["threads"], "repeat": args.repeat} if args.time else {}),
    }  # fmt: skip
    report = read_report(args.out, settings["draft_sha256"])
    report |= {kind: figures(recorded, args), f"{kind}_settings": settings}
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show_summaries(console(sys.stdout), recorded)


def figures(recorded: Recorded, args: Any) -> list[Row]:
    """A line for every temperature and domain, in the order of --domains."""
    lines = []
    order = list(args.counts)
    summaries = sorted(
        summarise(recorded.records), key=lambda s: (s.cell.temperature, s.cell.arm != ARM, order.index(s.task))
    )
    plain = {s.task: s for s in summaries if s.cell.arm == PLAIN}
    for own in (s for s in summaries if s.cell.arm != PLAIN):
        records = [r for r in recorded.records if r.cell == own.cell and r.task == own.task]
        lines.append(speed(own, plain[own.task], records) if args.time else acceptance(own, records))
    return lines


def refuse_if_busy(anyway: bool, threads: int) -> None:
    load = os.getloadavg()[0]
    if load <= threads + 0.5:
        return
    sentence = f"the machine is busy: load average {load:.1f}, and this run uses {threads} threads"
    if not anyway:
        raise FlashdraftError(f"{sentence}; wait until it is idle, or take times that mean little with --anyway.")
    print(f"warning: {sentence}; the times mean little.", file=sys.stderr)


def read_report(path: Path, draft_sha256: str) -> Row:
    """What was measured before, of the other kind as well; of this draft only."""
    if not path.is_file():
        return {"acceptance": [], "time": []}
    report: Row = json.loads(path.read_text(encoding="utf-8"))
    others = {v["draft_sha256"] for k, v in report.items() if k.endswith("_settings")} - {draft_sha256}
    if others:
        raise FlashdraftError(f"{path} has figures of another draft; take another --out.")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        measure(args)
    except FlashdraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the prompts that are left.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
