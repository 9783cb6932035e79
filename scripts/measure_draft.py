"""What a draft is worth on held-out prompts: acceptance by decoding, and wall clock against plain decoding.

    python scripts/measure_draft.py DRAFT DATA_DIR --out FILE.json [--rows 8] [--check-plain]
    python scripts/measure_draft.py DRAFT DATA_DIR --out FILE.json --time      # on an idle machine

DRAFT is a folder or the alias of a draft that ships; DATA_DIR holds NAME.jsonl prompt files, of which
--domains takes the first turns of so many prompts, evenly spread. Acceptance is measured greedily and at
T=1 (coupled): tau is committed tokens over rounds, pooled over a domain's prompts; its interval is a
bootstrap over prompts; survival of slot k is the share of rounds that drafted k tokens or more in which
the first k were kept. It does not depend on --rows. --time decodes one prompt at a time, plainly and with
the draft in turns, and leaves the prompt's pass out.

Every finished prompt is a line of FILE.rows.jsonl at once: started again after a kill, the same command
goes on. FILE.json gets all that was measured so far of both kinds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashdraft.checkpoint import target_digest
from flashdraft.demo import Case, compare
from flashdraft.drafters import Drafter, make_drafter
from flashdraft.engine import Engine
from flashdraft.locate import locate_draft
from flashdraft.target import Target
from flashdraft.training.validation import load_prompts, score_rounds
from flashdraft.types import FlashdraftError, Request, Result, Round, SamplingParams

DOMAINS = "gsm8k=100,mt_bench=80,humaneval=100,heldout_train_mix=200"
RESAMPLES = 2000

Prompts = dict[str, list[list[int]]]
Row = dict[str, Any]


# -- rows on the disk --------------------------------------------------------------------------


class Rows:
    """Lines of finished prompts under a first line that says what was measured how."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        found = self._read()
        if not found:
            path.write_text(json.dumps({"settings": settings}) + "\n", encoding="utf-8")
        elif found[0].get("settings") != settings:
            old = found[0].get("settings") or {}
            changed = [f"{k}: {old.get(k)!r} -> {v!r}" for k, v in settings.items() if old.get(k) != v]
            raise FlashdraftError(f"{path} was measured otherwise ({'; '.join(changed)}); take another --out.")
        else:  # a line that a kill cut short is taken back
            path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
        self.all = found[1:]

    def _read(self) -> list[Row]:
        rows = []
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
        return rows

    def add(self, row: Row) -> None:
        self.all.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, kind: str, domain: str, temperature: float = 0.0) -> dict[int, Row]:
        wanted = (kind, domain, temperature)
        return {row["prompt"]: row for row in self.all if (row["kind"], row["domain"], row["temperature"]) == wanted}


def left(prompts: Prompts, rows: Rows, kind: str, temperature: float = 0.0) -> list[tuple[str, int, list[int]]]:
    """(domain, number, token ids) of the prompts that have no row of a kind yet."""
    found = []
    for name, group in prompts.items():
        done = rows.of(kind, name, temperature)
        found += [(name, i, prompt) for i, prompt in enumerate(group) if i not in done]
    return found


# -- acceptance --------------------------------------------------------------------------------


def decode(
    target: Target, drafter: Drafter | None, prompts: Prompts, temperature: float, rows: Rows, args: Any
) -> None:
    """Decode what has no row yet, several prompts at a time, and write a row as each one ends."""
    kind = "draft" if drafter is not None else "plain"
    todo = left(prompts, rows, kind, temperature)
    if not todo:
        return
    longest = max(len(prompt) for _, _, prompt in todo)
    context = min(target.max_context, longest + args.tokens)
    engine = Engine(target, drafter, max_rows=min(args.rows, len(todo)), max_context=context, reuse_prefix=False)
    asked = {
        engine.submit(Request(prompt, SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=i))): (name, i)
        for name, i, prompt in todo
    }  # fmt: skip
    with bar() as progress:
        task = progress.add_task(f"{kind}, T={temperature:g}", total=len(todo))
        while asked:
            for delta in engine.step():
                if delta.result is not None:
                    name, i = asked.pop(delta.request_id)
                    rows.add(
                        {"kind": kind, "domain": name, "temperature": temperature, "prompt": i} | row_of(delta.result)
                    )
                    progress.advance(task)


def row_of(result: Result) -> Row:
    rounds = [[r.num_drafted, r.num_accepted, r.num_committed] for r in result.stats.rounds]
    return {"rounds": rounds, "token_ids": list(result.token_ids)}


def acceptance(found: Mapping[int, Row], plain: Mapping[int, Row], num_slots: int) -> Row:
    """A domain's figures from its rows, and from plain decoding's if there are any."""
    rounds = {i: [Round(*r) for r in row["rounds"]] for i, row in found.items()}
    every = [r for group in rounds.values() for r in group]
    score = score_rounds(every, num_slots)
    counts = [
        [sum(r.num_drafted >= k and r.num_accepted >= k for r in every), sum(r.num_drafted >= k for r in every)]
        for k in range(1, num_slots + 1)
    ]
    pairs = [(sum(r.num_committed for r in group), len(group)) for group in rounds.values() if group]
    line: Row = {
        "prompts": len(found),
        "tokens": sum(len(row["token_ids"]) for row in found.values()),
        "rounds": score.rounds,
        "tau": round(score.tau, 4),
        "tau_interval": interval(pairs),
        "survival": [round(s, 4) for s in score.survival],
        "survival_counts": counts,
    }
    both = sorted(found.keys() & plain.keys())
    if both:
        line["equal_to_plain"] = [sum(found[i]["token_ids"] == plain[i]["token_ids"] for i in both), len(both)]
    return line


def interval(pairs: Sequence[tuple[float, float]]) -> list[float] | None:
    """95 % bootstrap interval over prompts of (sum of the first) / (sum of the second)."""
    if len(pairs) < 2:
        return None
    values = torch.tensor(pairs, dtype=torch.float64)
    drawn = torch.randint(len(pairs), (RESAMPLES, len(pairs)), generator=torch.Generator().manual_seed(0))
    sums = values[drawn].sum(1)
    ratios = sums[:, 0] / sums[:, 1]
    return [round(float(x), 4) for x in ratios.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))]


# -- wall clock --------------------------------------------------------------------------------


def time_domains(target: Target, drafter: Drafter, prompts: Prompts, rows: Rows, args: Any) -> None:
    longest = max(len(prompt) for group in prompts.values() for prompt in group)
    context = min(target.max_context, longest + args.tokens)
    plain, speculative = (Engine(target, made, max_context=context, reuse_prefix=False) for made in (None, drafter))
    todo = left(prompts, rows, "time")
    with bar() as progress:
        task = progress.add_task("both ways in turns", total=len(todo))
        for name, i, prompt in todo:
            request = Request(prompt, SamplingParams(max_tokens=args.tokens))
            found = compare(plain, speculative, Case(name, "", False), request, args.repeat)
            row = {"kind": "time", "domain": name, "temperature": 0.0, "prompt": i, "equal": found.differs_at is None}
            for arm, results in (("plain", found.plain), ("draft", found.speculative)):
                # the prompt's pass gives the first token; its time is not counted
                row[arm] = [len(results[0].token_ids) - 1, [r.stats.decode_seconds for r in results]]
            rows.add(row | {"load": os.getloadavg()[0]})
            progress.advance(task)


def speeds(found: Mapping[int, Row]) -> Row | None:
    """Tokens a second of both arms, pooled over prompts with each one's median time, and their ratio."""
    usable = [row for row in found.values() if row["plain"][0] > 0 and row["draft"][0] > 0]
    if not usable:
        return None
    seconds = {arm: [median(row[arm][1]) for row in usable] for arm in ("plain", "draft")}
    tokens = {arm: [row[arm][0] for row in usable] for arm in ("plain", "draft")}
    rate = {arm: sum(tokens[arm]) / sum(seconds[arm]) for arm in ("plain", "draft")}
    # texts may part at a near-tie: then each arm's time is that of as many tokens as the plain one has
    scaled = [
        (p, d * n / m)
        for p, d, n, m in zip(seconds["plain"], seconds["draft"], tokens["plain"], tokens["draft"], strict=True)
    ]
    return {
        "prompts": len(usable),
        "plain_tokens_per_second": round(rate["plain"], 2),
        "draft_tokens_per_second": round(rate["draft"], 2),
        "ratio": round(sum(p for p, _ in scaled) / sum(d for _, d in scaled), 4),
        "ratio_interval": interval(scaled),
        "equal_to_plain": [sum(row["equal"] for row in usable), len(usable)],
        "load_average": [round(min(r["load"] for r in usable), 2), round(max(r["load"] for r in usable), 2)],
    }


def refuse_if_busy(anyway: bool) -> None:
    load, threads = os.getloadavg()[0], torch.get_num_threads()
    if load <= threads + 0.5:
        return
    sentence = f"the machine is busy: load average {load:.1f}, and this run uses {threads} threads"
    if not anyway:
        raise FlashdraftError(f"{sentence}; wait until it is idle, or take times that mean little with --anyway.")
    print(f"warning: {sentence}; the times mean little.", file=sys.stderr)


# -- tables ------------------------------------------------------------------------------------


def bar() -> Progress:
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))


def markdown(report: Row) -> str:
    lines = []
    if report["acceptance"]:
        lines += table(
            ("domain", "T", "prompts", "rounds", "tau", "95 %", "survival of slots 1, 2, ... in %", "equal to plain"),
            (
                (
                    a["domain"], f"{a['temperature']:g}", a["prompts"], a["rounds"], f"{a['tau']:.2f}",
                    _range(a["tau_interval"]), " ".join(f"{100 * s:.0f}" for s in a["survival"]),
                    _share(a.get("equal_to_plain")),
                )
                for a in report["acceptance"]
            ),
        )  # fmt: skip
    if report["time"]:
        lines += ["", *table(
            ("domain", "prompts", "tok/s plain", "tok/s with the draft", "ratio", "95 %", "equal to plain"),
            (
                (
                    t["domain"], t["prompts"], f"{t['plain_tokens_per_second']:.1f}",
                    f"{t['draft_tokens_per_second']:.1f}", f"{t['ratio']:.2f}", _range(t["ratio_interval"]),
                    _share(t["equal_to_plain"]),
                )
                for t in report["time"]
            ),
        )]  # fmt: skip
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def _range(pair: Sequence[float] | None) -> str:
    return "-" if pair is None else f"{pair[0]:.2f} to {pair[1]:.2f}"


def _share(pair: Sequence[int] | None) -> str:
    return "-" if pair is None else f"{pair[0]} of {pair[1]}"


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


def measure(args: Any) -> Row:
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.time:
        refuse_if_busy(args.anyway)
    folder = locate_draft(args.draft)
    target = Target.load(args.target, dtype=args.dtype)
    drafter = make_drafter(target, draft=folder)
    prompts: Prompts = {}
    for name, count in args.counts.items():
        prompts |= load_prompts([str(args.data / f"{name}.jsonl")], target, count)
    settings = {
        "draft_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "target": args.target,
        "target_sha256": target_digest(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "block_size": drafter.max_draft_tokens + 1,
        "max_new_tokens": args.tokens,
        "domains": args.counts,
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }
    kind = "time" if args.time else "acceptance"
    timing = {"threads": torch.get_num_threads(), "repeat": args.repeat} if args.time else {}
    rows = Rows(args.out.with_suffix(f".{kind}.rows.jsonl"), settings | timing)
    report = read_report(args.out, settings["draft_sha256"])
    if args.time:
        time_domains(target, drafter, prompts, rows, args)
        lines = [{"domain": name} | line for name in prompts if (line := speeds(rows.of("time", name))) is not None]
    else:
        lines = []
        for temperature in args.temperatures:
            for made in (drafter, None) if args.check_plain else (drafter,):
                decode(target, made, prompts, temperature, rows, args)
            lines += [
                {"domain": name, "temperature": temperature}
                | acceptance(rows.of("draft", name, temperature), rows.of("plain", name, temperature), settings["block_size"] - 1)
                for name in prompts
            ]  # fmt: skip
    report |= {kind: lines, f"{kind}_settings": settings | timing}
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


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
        report = measure(args)
    except FlashdraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with the prompts that are left.", file=sys.stderr)
        return 130
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
