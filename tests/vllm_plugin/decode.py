"""Decode a list of prompts with vLLM in this process, and print what it drafted and accepted.

    python decode.py JOB.json OUT.json     # with vLLM's Python

JOB: {"model", "draft" or null, "num_speculative_tokens", "prompts": token ids, "max_tokens", "samples",
"plugin"}. With "samples" n, prompt 0 is then sampled n times for three tokens from the likeliest two.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # whether the plugin is on is the job's to say, not what is installed
}


def counted(llm: Any) -> dict[str, Any]:
    found = {metric.name: metric for metric in llm.get_metrics()}
    names = {
        "num_drafts": "vllm:spec_decode_num_drafts",
        "num_accepted": "vllm:spec_decode_num_accepted_tokens",
        "per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
    }
    values = {key: found.get(name) for key, name in names.items()}
    return {key: getattr(m, "values", getattr(m, "value", None)) for key, m in values.items()}


def main(job_file: str, out_file: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    if job["plugin"]:
        import flashdraft_vllm_cpu

        flashdraft_vllm_cpu.register()
    import vllm

    speculation = {
        "method": "dflash", "model": job["draft"], "num_speculative_tokens": job["num_speculative_tokens"],
    } if job["draft"] else None  # fmt: skip
    llm = vllm.LLM(
        model=job["model"], dtype="float32", max_model_len=512, enforce_eager=True, max_num_seqs=4,
        disable_log_stats=False, speculative_config=speculation,
    )  # fmt: skip
    prompts = [vllm.TokensPrompt(prompt_token_ids=ids) for ids in job["prompts"]]
    greedy = vllm.SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    made: dict[str, Any] = {"vllm": vllm.__version__}
    made["answers"] = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, greedy, use_tqdm=False)]
    made["counts"] = counted(llm)
    Path(out_file).write_text(json.dumps(made) + "\n", encoding="utf-8")
    if job["samples"]:
        drawn = [
            vllm.SamplingParams(temperature=1, top_k=2, max_tokens=3, ignore_eos=True, seed=seed)
            for seed in range(job["samples"])
        ]
        texts: dict[str, int] = {}
        for out in llm.generate([prompts[0]] * len(drawn), drawn, use_tqdm=False):
            text = " ".join(map(str, out.outputs[0].token_ids))
            texts[text] = texts.get(text, 0) + 1
        made["texts"] = texts
        Path(out_file).write_text(json.dumps(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
