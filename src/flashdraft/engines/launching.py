"""How an exported draft is served: the exact command, and a request that shows that it answers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

PORTS = {"vllm": 8000, "speculators": 8000, "sglang": 30000, "llama.cpp": 8080}


def launch_line(engine: str, folder: Path, target: str, block_size: int) -> str:
    """`block_size` counts the anchor; engines that count drafted tokens get one less. llama.cpp: `folder` and
    `target` are GGUF files."""
    draft, model, drafted = shlex.quote(str(folder)), shlex.quote(target), block_size - 1
    if engine in ("vllm", "speculators"):
        spec = json.dumps({"method": "dflash", "model": str(folder), "num_speculative_tokens": drafted})
        return f"vllm serve {model} --speculative-config {shlex.quote(spec)} --port {PORTS[engine]}"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {model} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {draft} --speculative-num-draft-tokens {block_size} --port {PORTS[engine]}"
        )
    if engine == "llama.cpp":
        return (
            f"llama-server -m {model} -md {draft} --spec-type draft-dflash --spec-draft-n-max {drafted} "
            f"--port {PORTS[engine]}"
        )
    return f"dflash generate transformers --model {model} --draft {draft} --block-size {block_size} 'Hello'"


def request_line(engine: str, target: str) -> str | None:
    """A test request in the OpenAI form; None where nothing serves."""
    port = PORTS.get(engine)
    if port is None:
        return None
    message = {"role": "user", "content": "What is 17 times 23? Show the steps."}
    body = json.dumps({"model": target, "messages": [message], "max_tokens": 64, "temperature": 0})
    return f"curl -s http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}"
