"""Acceptance lengths by real decoding, per domain, and what a round costs against what it has to read."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.training.validation import score_rounds
from flashdraft.types import Request, Result, Round, SamplingParams

from .decoder import StaticDecoder
from .settings import Settings

Prompts = Mapping[str, Sequence[list[int]]]


def acceptance(
    target: Target, drafter: DFlashDrafter, prompts: Prompts, temperatures: Sequence[float], settings: Settings,
    deadline: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """A line per domain and temperature, pooled over as many prompts as there was time for.

    Domains take turns, so that a deadline leaves all of them with about as many prompts; even late, a
    few of each are decoded at the first temperature, or there would be nothing to choose a draft by.
    """
    # spread over the file, so that the first ones are a fair sample too
    order = {name: _spread(rows) for name, rows in prompts.items()}
    rounds: dict[tuple[str, float], list[list[Round]]] = {(n, t): [] for t in temperatures for n in prompts}
    longest = max(len(p) for rows in prompts.values() for p in rows)
    engine = Engine(
        target, drafter, max_rows=settings.eval_rows,
        max_context=min(target.max_context, longest + settings.eval_tokens), reuse_prefix=False,
    )  # fmt: skip
    busy = True
    while busy:
        busy = False
        for (name, temperature), done in rounds.items():
            late = time.monotonic() > deadline
            few = 0 if done or temperature != temperatures[0] else min(4, settings.eval_rows)
            batch = order[name][len(done) : len(done) + (few if late else settings.eval_rows)]
            if batch:
                busy = True
                results = _decode(engine, batch, settings.eval_tokens, temperature, len(done))
                done += [list(result.stats.rounds) for result in results]
    return [
        _line(name, temperature, done, drafter.max_draft_tokens, len(prompts[name]))
        for (name, temperature), done in rounds.items()
        if any(done)
    ]


def _spread(rows: Sequence[list[int]]) -> list[list[int]]:
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    return [rows[i] for i in order]


def _decode(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, temperature: float, first_seed: int = 0
) -> list[Result]:
    return engine.run(
        [
            Request(prompt, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=first_seed + i))
            for i, prompt in enumerate(prompts)
        ]
    )


def _line(name: str, temperature: float, done: list[list[Round]], slots: int, of: int) -> dict[str, Any]:
    score = score_rounds([r for rounds in done for r in rounds], slots)
    low, high = _interval(done)
    return {
        "domain": name, "temperature": temperature, "prompts": len(done), "of": of, "rounds": score.rounds,
        "tau": round(score.tau, 3), "low": low, "high": high, "survival": [round(s, 4) for s in score.survival],
    }  # fmt: skip


def _interval(done: list[list[Round]], draws: int = 400) -> tuple[float, float]:
    """95 % by bootstrap over prompts (rounds of one prompt are alike)."""
    sums = [(sum(r.num_committed for r in rounds), len(rounds)) for rounds in done if rounds]
    rng = random.Random(0)
    found = []
    for _ in range(draws):
        drawn = rng.choices(sums, k=len(sums))
        found.append(sum(tokens for tokens, _ in drawn) / sum(count for _, count in drawn))
    found.sort()
    return round(found[int(0.025 * draws)], 3), round(found[int(0.975 * draws) - 1], 3)


def mean_tau(lines: Sequence[Mapping[str, Any]]) -> float:
    """What the best draft is chosen by: the mean of the domains, greedy."""
    greedy = [line["tau"] for line in lines if line["temperature"] == 0]
    return sum(greedy) / len(greedy) if greedy else 0.0


def round_times(
    target: Target, drafter: DFlashDrafter, prompts: Sequence[list[int]], settings: Settings, deadline: float
) -> dict[str, Any]:
    """Rounds and tokens a second, plain and speculative, one row and eight, against the floor: the time
    that the memory needs to hand over all weights once. One warm-up and one timed run each."""
    copied = _bandwidth(target.device)
    weights = _bytes(target.model.parameters())
    drafted = weights + _bytes(drafter.network.parameters())
    lines: list[dict[str, Any]] = []
    for rows in (1, 8):
        group = (list(prompts) * 8)[: max(rows, min(4, len(prompts)))]
        for name, used, read in (("plain", None, weights), ("speculative", drafter, drafted)):
            if time.monotonic() > deadline:
                break
            longest = max(map(len, group)) + settings.eval_tokens
            engine = Engine(target, used, max_rows=rows, max_context=longest, reuse_prefix=False)
            _decode(engine, group[:rows], settings.eval_tokens // 4, 0.0)
            began = time.perf_counter()
            results = _decode(engine, group, settings.eval_tokens, 0.0)
            lines.append(_timed(name, rows, results, time.perf_counter() - began, read / copied))
        if target.device.type == "cuda" and time.monotonic() < deadline:
            lines.append(_timed_graph(target, group[:rows], rows, settings, weights / copied))
    return {"bytes_a_second": round(copied), "target_bytes": weights, "lines": lines}


def _timed(name: str, rows: int, results: Sequence[Result], wall: float, floor: float) -> dict[str, Any]:
    """A row's round is a round of the whole batch; prefills are taken off the wall clock."""
    rounds = max(1, sum(len(r.stats.rounds) for r in results))
    tokens = sum(len(r.token_ids) - 1 for r in results)  # the first one is the prefill's
    seconds = wall - sum(r.stats.prefill_seconds for r in results)
    draft, verify, whole = (
        round(1000 * sum(getattr(r.stats, f"{part}_seconds") for r in results) / rounds, 3)
        for part in ("draft", "verify", "decode")
    )
    return {
        "way": name, "rows": rows, "round_ms": whole, "floor_ms": round(1000 * floor, 4),
        "tokens_per_second": round(tokens / max(seconds, 1e-9), 1), "tau": round(tokens / rounds, 3),
        "draft_ms": draft, "verify_ms": verify,
    }  # fmt: skip


def _timed_graph(
    target: Target, prompts: Sequence[list[int]], rows: int, settings: Settings, floor: float
) -> dict[str, Any]:
    """Plain decoding as the data is written: a captured step, nothing on the CPU."""
    steps = settings.eval_tokens
    decoder = StaticDecoder(target, rows, max(map(len, prompts)) + steps + 1, steps)
    decoder.admit(list(prompts), list(range(rows)), [steps] * rows, [0.0] * rows)
    decoder.steps(4)
    torch.cuda.synchronize()
    began = time.perf_counter()
    decoder.steps(steps)
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / steps
    return {
        "way": "plain, captured", "rows": rows, "round_ms": round(1000 * took, 3), "floor_ms": round(1000 * floor, 3),
        "tokens_per_second": round(rows / took, 1), "tau": 1.0,
    }  # fmt: skip


def _bytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy moves, reads and writes counted."""
    size = (1 << 31) if device.type == "cuda" else (1 << 25)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)

    def copy(times: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            to.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    copy(2)
    return 2 * size * 5 / copy(5)
