"""The commands that measure; like cli.py it imports what is slow inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import BlockSize, Device, DrafterName, DraftFolder, Dtype, MaxTokens, TargetName, Threads, option

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
Repeats = Annotated[int, option("--repeat", metavar="N", min=1, help="Timed runs of everything.")]


def bench(
    config: Config = None,
    set_: Settings = None,
    target: TargetName = "smollm2",
    draft: DraftFolder = None,
    drafter: DrafterName = None,
    block_size: BlockSize = None,
    task: Tasks = None,
    prompts: Prompts = 4,
    rows: Rows = None,
    temperature: Temperatures = None,
    max_tokens: MaxTokens = 128,
    repeat: Repeats = 3,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    out: Out = Path("bench.jsonl"),
) -> None:
    """Measure drafters against plain decoding, per domain. A CONFIG.yaml holds several arms; without
    one, the options name one arm."""
    import sys

    from ..settings import make_settings, read_overrides, read_yaml
    from ..terminal import console
    from .bench import BenchConfig, run_bench
    from .records import read_records
    from .tables import Counter, show_summaries

    if config is not None:
        raw = {"out": str(out), **read_yaml(config, set_ or [])}
    else:
        arm = {"drafter": drafter, "draft": draft, "block_size": block_size}
        raw = {
            "out": str(out), "target": target, "drafters": [arm] if drafter or draft else [{"drafter": "ngram"}],
            "prompts": prompts, "rows": rows or [1], "temperatures": temperature or [0.0], "max_tokens": max_tokens,
            "repeats": repeat, "dtype": dtype, "device": device, "threads": threads,
            **({"tasks": _task_files(task)} if task else {}), **read_overrides(set_ or []),
        }  # fmt: skip
    with Counter(console()) as counter:
        file = run_bench(make_settings(BenchConfig, raw, str(config or "the command line")), counter.advance)
    show_summaries(console(sys.stdout), read_records(file.path))


def _task_files(tasks: list[str]) -> dict[str, str]:
    """NAME=FILE, or a file whose name is the task's."""
    named = [task.partition("=") if "=" in task else (Path(task).name.split(".")[0], "=", task) for task in tasks]
    return {name: file for name, _, file in named}
