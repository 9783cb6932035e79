"""The target writes the training data: many rows at a time, finished ones refilled, rows of `regenerate`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from flashdraft.target import Target
from flashdraft.training.regenerate import ends_in_loop

from .decoder import StaticDecoder
from .settings import Settings
from .unpack import Prompts

# Prompts of about the same length start together; among so many they are sorted.
_WINDOW = 4096


def generate(target: Target, prompts: Prompts, settings: Settings, out: Path, seconds: float) -> dict[str, Any]:
    """Append rows to `out` (and write its sidecar) until there are enough tokens, or the time is over.

    Goes on where an earlier call on this machine stopped. Returns what was written, in numbers.
    """
    began = time.monotonic()
    done, before = _written(out)
    meta = {
        "target": prompts.facts["target"], "written_by": "gpu_draft", "template_sha256": prompts.facts["template_sha256"],
        "system": None, "thinking": None, "max_tokens": settings.max_new, "temperatures": list(settings.temperatures),
        "seed": settings.seed, "drop_loops": True, "licences": prompts.facts.get("licences", {}),
    }  # fmt: skip
    Path(f"{out}.meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")
    totals = {"rows": len(done), "answer_tokens": before, "loops": 0, "cut_by_the_clock": 0}
    torch.manual_seed(settings.seed)
    with out.open("a", encoding="utf-8") as file:
        for row, cut in _rows(target, prompts, settings, done, began + seconds, settings.num_tokens - before):
            answer = row["token_ids"][row["num_prompt_tokens"] :]
            if len(answer) < 2 or ends_in_loop(answer):
                totals["loops"] += len(answer) >= 2
                continue
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            totals["rows"] += 1
            totals["answer_tokens"] += len(answer)
            totals["cut_by_the_clock"] += cut
    took = time.monotonic() - began
    totals["seconds"] = round(took, 1)
    totals["tokens_per_second"] = round((totals["answer_tokens"] - before) / max(took, 1e-9))
    return totals


def _written(out: Path) -> tuple[set[str], int]:
    """Names and answer tokens of rows that are there; a torn last line is cut."""
    done: set[str] = set()
    tokens = whole = 0
    if out.exists():
        with out.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = json.loads(line)
                done.add(row["id"])
                tokens += len(row["token_ids"]) - row["num_prompt_tokens"]
                whole += len(line)
        with out.open("r+b") as file:
            file.truncate(whole)
    return done, tokens


def _rows(
    target: Target, prompts: Prompts, settings: Settings, done: set[str], deadline: float, wanted: int
) -> Iterator[tuple[dict[str, Any], bool]]:
    """(row, whether the clock cut it)."""
    queue = _queue(prompts, settings, done)
    rows = min(settings.rows, len(queue))
    if not rows or wanted <= 0:
        return
    decoder = StaticDecoder(target, rows, settings.max_prompt + settings.max_new + 1, settings.max_new)
    held: dict[int, int] = {}  # row -> index of its prompt
    finished: list[tuple[int, list[int], bool]] = []
    written, late = 0, False
    while (queue or held) and written < wanted and not late:
        free = [row for row in range(rows) if row not in held]
        while queue and free and (len(free) >= settings.prefill_rows or len(queue) < settings.prefill_rows or not held):
            batch = [queue.pop() for _ in range(min(len(free), settings.prefill_rows, len(queue)))]
            into, free = free[: len(batch)], free[len(batch) :]
            temperatures = [_temperature(prompts.names[i], settings) for i in batch]
            decoder.admit(
                [prompts.token_ids[i] for i in batch], into, [settings.max_new] * len(batch), temperatures,
                room=settings.prefill_rows,
            )  # fmt: skip
            held.update(zip(into, batch, strict=True))
        decoder.steps(settings.stride)
        for index, answer, cut in finished:  # while the GPU works
            yield _row(prompts, settings, target, index, answer), cut
        active = decoder.active.tolist()
        finished = _harvest(decoder, {row: index for row, index in held.items() if not active[row]}, False)
        held = {row: index for row, index in held.items() if active[row]}
        written += sum(len(answer) for _, answer, _ in finished)
        late = time.monotonic() > deadline
    for index, answer, cut in [*finished, *_harvest(decoder, held, True)]:
        yield _row(prompts, settings, target, index, answer), cut


def _queue(prompts: Prompts, settings: Settings, done: set[str]) -> list[int]:
    """Prompts to answer, the first one last."""
    todo = [
        i for i, name in enumerate(prompts.names)
        if name not in done and len(prompts.token_ids[i]) <= settings.max_prompt
    ]  # fmt: skip
    windows = [todo[i : i + _WINDOW] for i in range(0, len(todo), _WINDOW)]
    return [i for window in windows for i in sorted(window, key=lambda i: len(prompts.token_ids[i]))][::-1]


def _harvest(decoder: StaticDecoder, rows: dict[int, int], cut: bool) -> list[tuple[int, list[int], bool]]:
    if not rows:
        return []
    at = torch.tensor(list(rows), device=decoder.answers.device)
    counts = decoder.count[at].tolist()
    answers = decoder.answers[at, : max(counts)].tolist()
    return [(index, answers[n][: counts[n]], cut) for n, index in enumerate(rows.values())]


def _temperature(name: str, settings: Settings) -> float:
    draw = hashlib.sha256(f"{settings.seed}/{name}".encode()).digest()
    return settings.temperatures[int.from_bytes(draw[4:8]) % len(settings.temperatures)]


def _row(prompts: Prompts, settings: Settings, target: Target, index: int, answer: list[int]) -> dict[str, Any]:
    prompt = prompts.token_ids[index]
    ended = bool(answer) and answer[-1] in target.eos_ids
    return {
        "id": prompts.names[index],
        "source": prompts.sources[index],
        "temperature": _temperature(prompts.names[index], settings),
        "num_prompt_tokens": len(prompt),
        "finished": ended,
        "finish_reason": "stop" if ended else "length",
        "seed": settings.seed,
        "loss_spans": [[len(prompt), len(prompt) + len(answer)]],
        "token_ids": [*prompt, *answer],
    }
