"""Runs pytest again and again in forks of one process that has imported what is slow to import.

Started by test_planted_bugs.py: importing torch and transformers takes longer than most of its runs. A request
is a line of JSON on stdin: {"package": folder, "arguments": [...], "log": file}; the answer, a line on stdout, is
the exit code. Neither flashdraft nor a module of the tests is imported here: a fork gets them from `package`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

import hypothesis  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import tokenizers  # noqa: F401
import transformers

LONGEST = 300  # seconds a run may take


def run(package: str, arguments: list[str], log: str) -> int:
    """In a fork: the exit code of pytest, with its output in a file."""
    signal.alarm(LONGEST)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["PYTHONPATH"] = package  # for processes that tests start
    sys.path.insert(0, package)
    # its own plugins would be rewritten, had they not been imported before
    code = int(pytest.main([*arguments, "-W", "ignore::pytest.PytestAssertRewriteWarning"]))
    import flashdraft

    return code if str(flashdraft.__file__).startswith(package) else 99


def main() -> None:
    for family in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2"):  # lazy modules, read when first asked for
        getattr(transformers, f"{family}ForCausalLM")
    assert "flashdraft" not in sys.modules
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 98
            try:
                code = run(**json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
