"""The commands that measure; like cli.py it imports what is slow inside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..options import (
    BlockSize,
    Device,
    DrafterName,
    DrafterOptions,
    DraftFolder,
    Dtype,
    MaxTokens,
    TargetName,
    Threads,
    option,
)
from ..settings import read_overrides
from ..types import FlashdraftError

if TYPE_CHECKING:
    from .planner import CostTable

Config = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="Arms, tasks and settings.", show_default=False)
]
Settings = Annotated[
    list[str] | None,
    option("--set", metavar="KEY=VALUE", help="Overrules a line of the file; may be repeated.", show_default=False),
]
Tasks = Annotated[
    list[str] | None,
    option("--task", metavar="NAME=FILE", help="Prompts as JSON lines; may be repeated.", show_default="a small set"),
]
Out = Annotated[Path, option("--out", metavar="FILE", help="Records; started again, the run goes on.")]
Prompts = Annotated[int, option("--prompts", metavar="N", min=1, help="Of each domain, evenly spread over its file.")]
Rows = Annotated[list[int] | None, option("--rows", metavar="N", help="Batch size; may be repeated.", show_default="1")]
Temperatures = Annotated[
    list[float] | None, option("--temperature", metavar="X", help="0 is greedy; may be repeated.", show_default="0")
]
Servers = Annotated[
    list[str] | None,
    option(
        "--server", metavar="[NAME=]URL", show_default=False,
        help="An OpenAI-compatible server to measure (then only drafters that are named); may be repeated.",
    ),
]  # fmt: skip
PlainServer = Annotated[
    str | None,
    option("--plain-server", metavar="URL", help="The same without a draft, to compare it with.", show_default=False),
]
Repeats = Annotated[int, option("--repeat", metavar="N", min=1, help="Timed runs of everything.")]


def bench(
    config: Config = None,
    set_: Settings = None,
    target: TargetName = "smollm2",
    draft: DraftFolder = None,
    drafter: DrafterName = None,
    drafter_option: DrafterOptions = None,
    block_size: BlockSize = None,
    task: Tasks = None,
    prompts: Prompts = 4,
    rows: Rows = None,
    temperature: Temperatures = None,
    max_tokens: MaxTokens = 128,
    repeat: Repeats = 3,
    server: Servers = None,
    plain_server: PlainServer = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    out: Out = Path("bench.jsonl"),
) -> None:
    """Measure drafters against plain decoding, per domain; servers, too. A CONFIG.yaml holds several arms;
    without one, the options name one arm."""
    import sys

    from ..settings import make_settings, read_yaml
    from ..terminal import console
    from .bench import BenchConfig, run_bench
    from .records import read_records
    from .tables import Counter, show_summaries

    if config is not None:
        raw = {"out": str(out), **read_yaml(config, set_ or [])}
    else:
        chosen = drafter or (None if draft else "ngram")
        arm = {"drafter": chosen, "draft": draft, "block_size": block_size, "options": _own(drafter_option)}
        raw = {
            "out": str(out), "target": target, "drafters": [arm] if drafter or draft or not server else [],
            "servers": _servers(server or [], plain_server),
            "prompts": prompts, "rows": rows or [1], "temperatures": temperature or [0.0], "max_tokens": max_tokens,
            "repeats": repeat, "dtype": dtype, "device": device, "threads": threads,
            **({"tasks": _task_files(task)} if task else {}), **read_overrides(set_ or []),
        }  # fmt: skip
    with Counter(console()) as counter:
        settings = make_settings(BenchConfig, raw, str(config or "the command line"))
        file = run_bench(settings, counter.advance, warn=counter.warn)
    show_summaries(console(sys.stdout), read_records(file.path))


def _own(drafter_option: list[str] | None) -> dict[str, Any]:
    return read_overrides(drafter_option or [], "--drafter-option")


def _servers(given: list[str], plain: str | None) -> list[dict[str, Any]]:
    """NAME=URL, or a URL alone; what stands before a `=` in a URL's own query has a slash."""
    if plain is not None and len(given) != 1:
        raise FlashdraftError("--plain-server belongs to one --server; name several pairs in a CONFIG.yaml.")
    named = [text.partition("=") if "/" not in text.partition("=")[0] else ("", "=", text) for text in given]
    return [{"url": url or name, "name": name if url and name else None, "plain_url": plain} for name, _, url in named]


def _task_files(tasks: list[str]) -> dict[str, str]:
    """NAME=FILE, or a file whose name is the task's."""
    named = [task.partition("=") if "=" in task else (Path(task).name.split(".")[0], "=", task) for task in tasks]
    return {name: file for name, _, file in named}


# -- report ------------------------------------------------------------------------------------

Records = Annotated[list[Path], typer.Argument(metavar="RECORDS...", help="Files of `flashdraft bench`.")]
SomeRecords = Annotated[
    list[Path] | None, typer.Argument(metavar="[RECORDS...]", help="Files of `flashdraft bench`.", show_default=False)
]
Page = Annotated[Path, option("--out", metavar="FILE", help="The HTML file.")]
MarkdownFile = Annotated[Path | None, option("--markdown", metavar="FILE", help="The tables as Markdown, too.")]
Title = Annotated[str, option("--title", metavar="TEXT", help="Of the page.")]
Domains = Annotated[
    list[str] | None, option("--domain", metavar="NAME", help="Only this one; may be repeated.", show_default="all")
]
Mean = Annotated[bool, option("--mean", help="A mean below the domains it is made of; never without them.")]
CostsFile = Annotated[Path | None, option("--costs", metavar="FILE", help="Predict with this table of `plan --out`.")]


def report(
    records: Records,
    out: Page = Path("report.html"),
    markdown: MarkdownFile = None,
    title: Title = "flashdraft benchmark",
    costs: CostsFile = None,
    domain: Domains = None,
    mean: Mean = False,
) -> None:
    """Draw benchmarks: one HTML file that needs no network, and Markdown."""
    from .costs import read_costs
    from .records import read_records
    from .report import filtered, markdown_page, page, write

    runs = [(path.name, filtered(read_records(path), domain or [], mean)) for path in records]
    table = read_costs(costs) if costs is not None else None
    write(out, page(runs, title, table, mean))
    typer.echo(f"wrote {out}")
    if markdown is not None:
        write(markdown, markdown_page(runs, title, table, mean))
        typer.echo(f"wrote {markdown}")


# -- plan --------------------------------------------------------------------------------------

MeasuredCosts = Annotated[
    Path | None, option("--out", metavar="FILE", help="Measure what rounds cost here, into this.")
]
Contexts = Annotated[
    list[int] | None,
    option("--context", metavar="N", min=1, help="Tokens; may be repeated.", show_default="128 and 1024; memory: 4096"),
]
PlanRows = Annotated[
    list[int] | None, option("--rows", metavar="N", min=1, help="Batch size; may be repeated.", show_default="1")
]
Rounds = Annotated[int, option("--rounds", metavar="N", min=1, help="Timed rounds of each arm.")]
Widest = Annotated[int, option("--widest", metavar="N", min=2, max=256, help="Widest pass to time without a draft.")]
Memory = Annotated[bool, option("--memory", help="What target and draft take of memory, from config.json alone.")]
Curves = Annotated[
    Path | None, option("--curves", metavar="FILE", help="The curves of the first plan, as an SVG file.")
]


def plan(
    records: SomeRecords = None,
    costs: CostsFile = None,
    out: MeasuredCosts = None,
    memory: Memory = False,
    curves: Curves = None,
    target: TargetName = "smollm2",
    draft: DraftFolder = None,
    drafter: DrafterName = None,
    drafter_option: DrafterOptions = None,
    block_size: BlockSize = None,
    context: Contexts = None,
    rows: PlanRows = None,
    rounds: Rounds = 15,
    widest: Widest = 16,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """The arithmetic of speculation: predicted speed for every block size beside the measured one, and
    which block to take. --out times rounds on this machine first; --memory counts bytes instead."""
    if memory:
        _memory(target, draft, drafter, context or [4096], rows or [1], dtype, block_size)
        return
    if not records and out is None:
        raise FlashdraftError(
            "plan needs records of `flashdraft bench`, or --out FILE to time rounds here, or --memory; got none of them."
        )
    if costs is not None and out is not None:
        raise FlashdraftError("--costs reads a table and --out measures one; give one of them.")
    if curves is not None and not records:
        raise FlashdraftError("--curves draws what records say; name a file of `flashdraft bench`.")
    table = None
    if out is not None:
        arm = {"drafter": drafter, "draft": draft, "block_size": block_size, "options": _own(drafter_option)}
        table = _measure(out, target, arm, context, rows, rounds, widest, dtype, device, threads)
    if records:
        from .costs import read_costs

        _predict(records, read_costs(costs) if costs is not None else table, curves)


def _measure(
    out: Path, target: str, arm: dict[str, Any], context: list[int] | None, rows: list[int] | None, rounds: int,
    widest: int, dtype: str, device: str | None, threads: int | None,
) -> CostTable:  # fmt: skip
    import json
    import sys

    from ..terminal import console, waiting
    from .bench import Arm, arm_name, make_arm
    from .costs import measure, measured_json
    from .machine import OtherWork
    from .plan_view import show_costs
    from .report import write

    with waiting(f"loading {target}"):
        import torch

        from ..target import Target

        if threads is not None:
            torch.set_num_threads(threads)
        loaded = Target.load(target, dtype=dtype, device=device)
        wanted = Arm(**arm)
        arms = [(arm_name(wanted), make_arm(wanted, loaded))] if wanted.drafter or wanted.draft else []
    others = OtherWork()
    table = measure(
        loaded, arms, context or [128, 1024], rows or [1], rounds, widest, lambda said: typer.echo(said, err=True)
    )
    write(out, json.dumps(measured_json(loaded, table, others), indent=1) + "\n")
    show_costs(console(sys.stdout), table)
    return table


def _predict(records: list[Path], table: CostTable | None, curves: Path | None) -> None:
    import sys

    from ..terminal import console
    from .figures import block_plot
    from .plan_view import show_plans
    from .predictions import plans
    from .records import read_records
    from .report import write
    from .svg import standalone

    found = [(path, plans(read_records(path), table)) for path in records]
    for path, made in found:
        if not made:
            raise FlashdraftError(
                f"nothing can be predicted from {path}: it has no arm with a block that was timed beside plain decoding, "
                "in the same domain and batch size."
            )
        show_plans(console(sys.stdout), made)
    if curves is not None:
        write(curves, standalone(block_plot(found[0][1][0], 0)) + "\n")


def _memory(
    target: str, draft: str | None, drafter: str | None, context: list[int], rows: list[int], dtype: str, block_size: int | None
) -> None:  # fmt: skip
    import sys

    from ..terminal import console
    from .memory import parts
    from .plan_view import show_memory

    name = "bfloat16" if dtype == "auto" else dtype
    for tokens in context:
        for count in rows:
            made = parts(target, draft, drafter, context=tokens, rows=count, dtype=name, block_size=block_size)
            show_memory(console(sys.stdout), made, tokens, name)
