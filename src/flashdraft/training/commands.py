"""The training commands of the command line; like cli.py it imports what is slow inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..options import (
    MODEL,
    SAMPLING,
    BlockSize,
    Device,
    DrafterName,
    DrafterOptions,
    DraftFolder,
    Dtype,
    MaxTokens,
    System,
    TargetName,
    Threads,
    TopK,
    TopP,
    option,
)
from ..settings import read_overrides
from ..types import FlashdraftError

Config = Annotated[
    Path | None, typer.Argument(metavar="CONFIG.yaml", help="What to train on what, and how.", show_default=False)
]
Demo = Annotated[
    bool, option("--demo", help="Train a small draft for smollm2 in a few minutes, on rows that ship with the package.")
]
Settings = Annotated[
    list[str] | None,
    option("--set", metavar="KEY=VALUE", help="Overrules a line of the file; may be repeated.", show_default=False),
]


def train(config: Config = None, demo: Demo = False, set_: Settings = None, threads: Threads = None) -> None:
    """Train a draft, from the run's last checkpoint if there is one. Ctrl-C saves; the same command
    goes on."""
    if demo and config is not None:
        raise FlashdraftError("--demo brings its own configuration; leave CONFIG.yaml out, and change lines by --set.")
    if not demo and config is None:
        raise FlashdraftError("there is nothing to train; expected a CONFIG.yaml (docs/training.md has one) or --demo.")

    from rich.console import Console

    from .run import run_demo, run_training

    settings = [*(set_ or []), *([f"threads={threads}"] if threads is not None else [])]
    ended = run_demo(settings, Console()) if config is None else run_training(config, settings, Console())
    if not ended:
        raise typer.Exit(130)


ENDPOINTS = "Endpoints"

PromptFiles = Annotated[
    list[str] | None,
    option(
        "--prompts", metavar="FILE...", help="JSON lines with prompt, turns or messages; .gz too.", show_default=False
    ),
]
MoreFiles = Annotated[
    list[str] | None, typer.Argument(metavar="FILE", help="More files of prompts.", show_default=False)
]
Out = Annotated[Path, option("--out", metavar="FILE", help="Where rows are appended.", show_default=False)]
Temperatures = Annotated[
    list[float] | None,
    option(
        "--temperature", metavar="X", help="0 is greedy; several are split over the prompts.", panel=SAMPLING,
        show_default="0",
    ),
]  # fmt: skip
RunSeed = Annotated[int, option("--seed", metavar="N", min=0, help="Seeds of rows follow from it.", panel=SAMPLING)]
Thinking = Annotated[
    bool | None,
    option("--thinking/--no-thinking", help="The template's thinking mode.", show_default="left to the template"),
]
Raw = Annotated[bool, option("--raw", help="Continue the text as it is, without the chat template.")]
Context = Annotated[
    int | None,
    option("--context", metavar="N", min=2, help="Longest conversation, in tokens.", show_default="at most 2048"),
]
Limit = Annotated[
    int | None, option("--limit", metavar="N", min=1, help="Only the first N prompts.", show_default=False)
]
DropLoops = Annotated[bool, option("--drop-loops", help="Leave out answers that end in a repetition loop.")]
Rows = Annotated[int, option("--rows", metavar="N", min=1, help="Conversations at a time.", panel=MODEL)]
Endpoints = Annotated[
    list[str] | None,
    option(
        "--endpoint", metavar="URL", help="An OpenAI-compatible server of the target; may be repeated.",
        panel=ENDPOINTS, show_default=False,
    ),
]  # fmt: skip
ServedModel = Annotated[
    str | None,
    option("--model", metavar="NAME", help="The target's name there.", panel=ENDPOINTS, show_default="asked"),
]
ExactIds = Annotated[
    bool, option("--exact-ids", help="Have the servers say the token ids (vLLM does).", panel=ENDPOINTS)
]
Concurrency = Annotated[
    int, option("--concurrency", metavar="N", min=1, help="Requests at a time, per server.", panel=ENDPOINTS)
]
Retries = Annotated[int, option("--retries", metavar="N", min=1, help="Failures before giving up.", panel=ENDPOINTS)]
Timeout = Annotated[float, option("--timeout", metavar="S", min=1, help="Seconds for an answer.", panel=ENDPOINTS)]


def regenerate(
    out: Out,
    prompts: PromptFiles = None,
    more: MoreFiles = None,
    system: System = None,
    thinking: Thinking = None,
    raw: Raw = False,
    context: Context = None,
    limit: Limit = None,
    drop_loops: DropLoops = False,
    target: TargetName = "smollm2",
    draft: DraftFolder = None,
    drafter: DrafterName = None,
    drafter_option: DrafterOptions = None,
    block_size: BlockSize = None,
    rows: Rows = 16,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperatures = None,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: RunSeed = 0,
    endpoint: Endpoints = None,
    model: ServedModel = None,
    exact_ids: ExactIds = False,
    concurrency: Concurrency = 16,
    retries: Retries = 6,
    timeout: Timeout = 600.0,
) -> None:
    """Have the target answer prompts, to train a draft on. Started again, it goes on where it was."""
    from ..terminal import console
    from .regenerate import RegenerateOptions, run_regenerate

    options = RegenerateOptions(
        target=target, prompts=[*(prompts or []), *(more or [])], out=out, system=system, thinking=thinking, raw=raw,
        context=context, limit=limit, drop_loops=drop_loops, rows=rows, drafter=drafter, draft=draft,
        drafter_options=read_overrides(drafter_option or [], "--drafter-option"), block_size=block_size, dtype=dtype,
        device=device, threads=threads, max_tokens=max_tokens,
        temperatures=temperature or [0.0], top_p=top_p, top_k=top_k, seed=seed, endpoints=endpoint or [], model=model,
        exact_ids=exact_ids, concurrency=concurrency, retries=retries, timeout=timeout,
    )  # fmt: skip
    run_regenerate(options, console())
