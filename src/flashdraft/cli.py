"""The command `flashdraft`: options, and how a run ends. What takes time to import is imported in
the commands, so that --help answers at once.

Exit codes: 0; 1 what `doctor` and `demo` found wrong; 2 something the user can mend, in one sentence
on standard error; 130 interrupted; 141 whoever read the output has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from .engines.commands import export, import_
from .evaluation.commands import bench, plan, report
from .locate import DEFAULT_TARGET, locate_draft_of, shipped_draft
from .options import (
    SAMPLING,
    Acceptance,
    BlockSize,
    Device,
    DrafterName,
    DrafterOptions,
    DraftFolder,
    Dtype,
    FrequencyPenalty,
    MaxTokens,
    MinP,
    MinTokens,
    OwnDrafterName,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Stop,
    System,
    TargetName,
    Temperature,
    Threads,
    TopK,
    TopP,
    option,
)
from .settings import read_overrides
from .training.commands import regenerate, train
from .types import FlashdraftError, Request, SamplingParams

if TYPE_CHECKING:
    from .drafters import Drafter
    from .target import Target

# The base of what typer raises at a wrong command line; where it lives depends on typer's version.
_UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])


class _Commands(TyperGroup):
    """Ends whatever a user can mend as one sentence and an exit code, without a traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False  # typer's own ending would box a usage error
        try:
            code = super().main(*args, **kwargs)
        except _UsageError as error:
            code = _usage_error(error)
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit:  # a RuntimeError, but how commands say their exit code
            raise
        except FlashdraftError as error:
            code = _fail(str(error))
        except BrokenPipeError:
            # Nobody reads on. What is still buffered may not fail again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 141
        except OSError as error:
            code = _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.")
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "memory" not in str(error):
                raise
            code = _fail("there is not enough memory; take a smaller target, context or number of tokens.")
        except KeyboardInterrupt:
            _say("interrupted")
            code = 130
        raise typer.Exit(code)


def _usage_error(error: Any) -> int:
    path = error.ctx.command_path if error.ctx is not None else "flashdraft"
    sentence = " ".join(error.format_message().split()).rstrip(".?")
    mark = "?" if "Did you mean" in sentence else "."
    return _fail(f"{sentence}{mark} See {path} --help.")


def _fail(sentence: str) -> int:
    _say(f"error: {sentence}")
    return 2


def _say(line: str) -> None:
    typer.echo(line, err=True)


app = typer.Typer(
    name="flashdraft",
    cls=_Commands,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """The entry point."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that lacks a character shows "?"
            stream.reconfigure(errors="replace")
    app(prog_name="flashdraft")


def _sampling(ctx: typer.Context, **more: Any) -> SamplingParams:
    """Sampling parameters from the options, which have the same names."""
    names = {field.name for field in fields(SamplingParams)}
    values = {name: value for name, value in ctx.params.items() if name in names and value is not None}
    if values["temperature"] > 0:
        values.setdefault("seed", secrets.randbits(32))  # short enough to type again
    return SamplingParams(**values, **more)


def load_target(name: str, dtype: str, device: str | None, threads: int | None) -> Target:
    """The target, with a note on the terminal while it loads."""
    from .terminal import waiting

    with waiting(f"loading {name}"):
        import torch

        from .target import Target

        if threads is not None:
            torch.set_num_threads(threads)
        return Target.load(name, dtype=dtype, device=device)


def _with_own_draft(ctx: typer.Context) -> None:
    """Without a choice, a target that a draft ships for is decoded with it."""
    options = ctx.params
    if options["draft"] is None and options["drafter"] in (None, "dflash"):
        options["draft"] = shipped_draft(options["target"])


def _open(ctx: typer.Context) -> tuple[Target, Drafter]:
    """Target and drafter of a command's options; what cannot work is said before anything loads."""
    options = ctx.params
    name, draft, block_size = options["drafter"], options["draft"], options["block_size"]
    own = read_overrides(options["drafter_option"] or [], "--drafter-option")
    for given, option_name in ((block_size, "--block-size"), (own or None, "--drafter-option")):
        if given is not None and name is None and draft is None:
            raise FlashdraftError(f"{option_name} is for drafting; add --drafter ngram or --draft FOLDER.")
    folder = locate_draft_of(name or "", draft) if draft is not None else None
    if name is not None or draft is not None:
        from .terminal import waiting

        with waiting(f"loading {options['target']}"):
            from .drafters import drafter_name, drafter_options

            name = drafter_name(name, draft, options["target"])
            own = drafter_options(name, own)
    target = load_target(options["target"], options["dtype"], options["device"], options["threads"])

    from .drafters import make_drafter, usual_options

    made = make_drafter(target, name, draft, block_size, **(own or usual_options(name or "none", draft, target)))
    if folder is not None:
        from .provenance import draft_warnings

        for warning in draft_warnings(folder, target):
            _say(f"warning: {warning}")
    return target, made


# -- commands ----------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"flashdraft {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    ctx: typer.Context,
    version: Annotated[bool, option("--version", help="Show the version.", callback=_version, is_eager=True)] = False,
) -> None:
    """Lossless speculative decoding: the target's own text, in less time."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@app.command()
def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[Path | None, option("--file", "-f", metavar="FILE", help="Read the prompt from this file.")] = None,
    system: System = None,
    raw: Annotated[bool, option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    as_json: Annotated[bool, option("--json", help="Print one JSON object instead of text.")] = False,
    no_stream: Annotated[bool, option("--no-stream", help="Print the text when it is complete.")] = False,
    target: TargetName = DEFAULT_TARGET,
    draft: DraftFolder = None,
    drafter: OwnDrafterName = None,
    drafter_option: DrafterOptions = None,
    block_size: BlockSize = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    max_tokens: MaxTokens = 256,
    min_tokens: MinTokens = 0,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logprobs: Annotated[
        int | None, option("--logprobs", metavar="N", help="With --json: the N likeliest tokens, too.", panel=SAMPLING)
    ] = None,
    acceptance: Acceptance = "coupled",
) -> None:
    """Answer one prompt. The text goes to standard output, a line about its cost to standard error."""
    from .terminal import read_prompt

    text = read_prompt(prompt, file, raw)
    if raw and system is not None:
        raise FlashdraftError("--system needs the chat template, which --raw leaves out; drop one of them.")
    if logprobs is not None and not as_json:
        raise FlashdraftError("--logprobs are shown by --json only; add it.")
    params = _sampling(ctx)
    _with_own_draft(ctx)
    loaded, made = _open(ctx)

    from .engine import Engine
    from .text import encode_chat, encode_text

    start = [{"role": "system", "content": system}] if system is not None else []
    messages = [*start, {"role": "user", "content": text}]
    ids = encode_text(loaded.tokenizer, text) if raw else encode_chat(loaded.tokenizer, messages)
    # The cache is as large as this request needs, no larger.
    engine = Engine(loaded, made, max_context=min(loaded.max_context, len(ids) + max_tokens))
    _print_answer(engine, Request(ids, params), as_json=as_json, stream=not no_stream)


def _print_answer(engine: Any, request: Request, *, as_json: bool, stream: bool) -> None:
    from .terminal import TokenPrinter, console, print_line, result_json, summary

    sampled = request.params.temperature > 0
    drafter = engine.drafter.name if engine.drafter.max_draft_tokens > 0 else None
    printer = TokenPrinter(sys.stdout, colours=drafter is not None)
    result = None
    try:
        with contextlib.closing(engine.stream(request)) as deltas:
            for delta in deltas:
                result = delta.result
                if stream and not as_json:
                    printer.write(delta.tokens)
    finally:
        printer.end()
    assert result is not None
    if as_json:
        typer.echo(json.dumps(result_json(result, sampled=sampled), ensure_ascii=False, allow_nan=False))
        return
    if not stream:
        printer.write(result.tokens)
        printer.end()
    print_line(console(), summary(result, drafter=drafter, sampled=sampled))


@app.command()
def chat(
    ctx: typer.Context,
    system: System = None,
    context: Annotated[
        int | None,
        option("--context", min=2, metavar="N", help="Longest conversation, in tokens.", show_default="at most 8192"),
    ] = None,
    target: TargetName = DEFAULT_TARGET,
    draft: DraftFolder = None,
    drafter: OwnDrafterName = None,
    drafter_option: DrafterOptions = None,
    block_size: BlockSize = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    max_tokens: MaxTokens = 512,
    min_tokens: MinTokens = 0,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    acceptance: Acceptance = "coupled",
) -> None:
    """Talk; every turn goes on from the cache of the one before. Piped input is a turn a line."""
    params = _sampling(ctx)
    _with_own_draft(ctx)
    loaded, made = _open(ctx)

    from .chat import Chat
    from .engine import Engine

    Chat(Engine(loaded, made, max_context=context), params, system).run()


app.command()(regenerate)
app.command()(train)
app.command()(bench)
app.command()(report)
app.command()(plan)
app.command()(export)
app.command("import")(import_)


@app.command()
def doctor(
    target: TargetName = DEFAULT_TARGET,
    draft: DraftFolder = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    as_json: Annotated[bool, option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what is found on this machine, what is wrong, and what to do about it."""
    from .doctor import examine, show

    findings = examine(target, draft or shipped_draft(target), dtype=dtype, device=device, threads=threads)
    show(findings, as_json=as_json)
    raise typer.Exit(int(any(finding.problem for finding in findings)))


@app.command()
def demo(
    ctx: typer.Context,
    prompts: Annotated[
        Path | None, option("--prompts", metavar="FILE", help="JSON file of prompts.", show_default="built in")
    ] = None,
    repeat: Annotated[int, option("--repeat", metavar="N", min=1, help="Timed runs of each prompt and arm.")] = 3,
    target: TargetName = DEFAULT_TARGET,
    draft: DraftFolder = None,
    drafter: DrafterName = None,
    drafter_option: DrafterOptions = None,
    block_size: BlockSize = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    max_tokens: MaxTokens = 40,
) -> None:
    """Decode the same prompts plainly and with speculation, and compare texts and speed."""
    from .demo import read_prompts, run
    from .drafters.ngram import NGramDrafter

    cases = read_prompts(prompts)
    if drafter == "none":
        raise FlashdraftError("the demo compares a drafter with none; expected --drafter ngram, or --draft FOLDER.")
    _with_own_draft(ctx)
    if ctx.params["draft"] is None:
        ctx.params["drafter"] = drafter or "ngram"
    params = SamplingParams(max_tokens=max_tokens)
    loaded, made = _open(ctx)
    more = [NGramDrafter()] if drafter is None and made.name != "ngram" else []
    raise typer.Exit(int(not run(loaded, [made, *more], cases, params, repeat)))
