"""Records made up for tests of the report: several domains and arms, known costs, hostile answers."""

from __future__ import annotations

import random
from typing import Any

from flashdraft.evaluation.records import PLAIN, Cell, Record, Recorded

DOMAINS = {"maths": 0.85, "code": 0.8, "from a text": 0.72, "chat": 0.2}
ARMS = (("dflash", 4, 0.0, 1.5), ("dflash", 8, 0.0, 1.7), ("draft_model", 4, -0.05, 9.0), ("ngram", 8, -0.4, 0.05))
WORDS = ["The ", "sum ", "of ", "the ", "first ", "numbers ", "is ", "n(n+1)", "/2", ".\n", "So ", "x", " = ", "7"]
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\u202egnp.exe",
    "\x00\x1b[31m",
    "\ud800",
    "&lt;",
]
HEADER: dict[str, Any] = {
    "version": 1,
    "settings": {
        "target": "a target", "max_tokens": 64, "repeats": 1, "temperatures": [0.0, 1.0], "rows": [1],
        "drafters": [
            {"draft": "d", "block_sizes": [4, 8]}, {"drafter": "draft_model", "draft": "m", "block_size": 4},
            {"drafter": "ngram", "block_size": 8},
        ],
    },
    "environment": {
        "flashdraft": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "python": "3.11", "device": "a made-up CPU",
        "cpus": 2, "threads": 1, "dtype": "bfloat16", "chat_template_sha256": "0123",
    },
}  # fmt: skip


def answer_rounds(draw: random.Random, chance: float, block: int, tokens: int) -> list[tuple[int, int, int]]:
    """Rounds of an answer of `tokens` tokens, as the engine counts them."""
    rounds, have = [], 1
    while have < tokens:
        limit = min(block - 1, tokens - have - 1) if block else 0
        kept = 0
        while kept < limit and draw.random() < chance * 0.97**kept:
            kept += 1
        rounds.append((limit, kept, kept + 1))
        have += kept + 1
    return rounds


def _pieces(rounds: list[tuple[int, int, int]], hostile: bool) -> tuple[tuple[str, str], ...]:
    kinds = ["prefill", *(k for _, kept, _ in rounds for k in [*["draft"] * kept, "bonus"])]
    words = [*(HOSTILE if hostile else []), *WORDS]
    return tuple((words[i % len(words)], kind) for i, kind in enumerate(kinds))


def made(
    domains: dict[str, float] | None = None, prompts: int = 6, busy: bool = False, hostile: bool = True
) -> Recorded:
    draw = random.Random(5)
    records = []
    for temperature in (0.0, 1.0):
        for task, chance in (domains or DOMAINS).items():
            for prompt in range(prompts):
                for arm, block, less, draft_ms in ((PLAIN, 0, 0.0, 0.0), *ARMS):
                    rounds = answer_rounds(draw, max(chance + less - 0.1 * temperature, 0.02), block, 64)
                    noise = draw.uniform(0.97, 1.03)
                    ms = (draft_ms, 12 + 0.25 * max(block - 1, 0), 0.8)
                    draft, verify, rest = (noise * len(rounds) * part / 1e3 for part in ms)
                    keep = arm != PLAIN and prompt == 0 and temperature == 0
                    records.append(
                        Record(
                            Cell(arm, block, temperature, 1), task, f"{task} {prompt}", prompt, 1, 0, 30, 64,
                            f"text {task} {prompt}", "length", tuple(rounds), 0.05, draft, verify, draft + verify + rest,
                            900.0, 1.5 if busy and task == "chat" else 0.0, _pieces(rounds, hostile) if keep else (),
                        )
                    )  # fmt: skip
    return Recorded(HEADER, tuple(records))
