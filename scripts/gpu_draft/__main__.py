"""The commands: prepare and join here; receive, smoke and run on the machine with the GPU.

python3 scripts/gpu_draft prepare --train FILE... --eval FILE:COUNT...
python3 scripts/gpu_draft receive PART
python3 scripts/gpu_draft run --out OUT
python3 scripts/gpu_draft join OUT DRAFT
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# the package may not be installed on that machine
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "src")]

from flashdraft.types import FlashdraftError  # noqa: E402
from gpu_draft import commands  # noqa: E402

WORK = Path("runs") / "gpu_draft"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="gpu_draft", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parts = parser.add_subparsers(dest="command", required=True)
    prepare = parts.add_parser("prepare", help="here: pack target and prompts into parts")
    prepare.add_argument("--target", default="smollm2")
    prepare.add_argument("--train", nargs="+", type=Path, required=True, help="prompt files")
    prepare.add_argument(
        "--eval", nargs="+", required=True, help="prompt files, each FILE or FILE:COUNT, a domain each"
    )
    prepare.add_argument("--manifest", type=Path, help="licences of the training files; only free ones are taken")
    prepare.add_argument("--to", type=Path, default=WORK)
    prepare.add_argument("--prompts", type=int, default=45_000, help="at most so many")
    receive = parts.add_parser("receive", help="there: keep a part, unpack after the last one")
    receive.add_argument("part", type=Path)
    for name, text in (("run", "there: everything, by the clock"), ("smoke", "there: the same with a random target")):
        run = parts.add_parser(name, help=text)
        run.add_argument("--out", type=Path, required=name == "run")
        run.add_argument("--seconds", type=float, default=560.0 if name == "run" else 60.0)
        run.add_argument("--toy", action="store_true", help="toy sizes, for a CPU")
        run.add_argument("--shapes", nargs="+", metavar="LAYERSxBLOCK", help="drafts to train")
        run.add_argument("--device")
        run.add_argument("--dtype", default="auto")
    for command in (receive, *(parts.choices[name] for name in ("run", "smoke"))):
        command.add_argument("--work", type=Path, default=WORK / "work")
    join = parts.add_parser("join", help="here: check what came back, make a draft folder of it")
    join.add_argument("out", type=Path)
    join.add_argument("draft", type=Path)
    try:
        getattr(commands, parser.parse_args().command)(parser.parse_args())
    except FlashdraftError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
