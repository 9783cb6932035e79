"""Validation by real decoding: held-out prompts through the engine, with the draft as it is.

Per domain (a prompt file): pooled acceptance length, and the share of rounds in which the first k
drafted tokens were all kept. These are joint counts, never products of marginals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..drafters import Drafter
from ..engine import Engine
from ..target import Target
from ..types import FlashdraftError, Request, Round, SamplingParams
from .data import ChatTemplate, Prompt, read_prompts

_ROWS = 8


@dataclass(frozen=True)
class DomainScore:
    """rounds: counted; survival[k]: share of rounds that could, in which k + 1 tokens were kept."""

    tau: float
    rounds: int
    survival: tuple[float, ...]


@dataclass(frozen=True)
class Score:
    domains: dict[str, DomainScore]

    @property
    def tau(self) -> float:
        """Mean of the domains' pooled acceptance lengths: what the best checkpoint is chosen by."""
        return sum(d.tau for d in self.domains.values()) / len(self.domains)

    def as_json(self) -> dict[str, Any]:
        return {
            name: {"tau": round(d.tau, 4), "rounds": d.rounds, "survival": [round(s, 4) for s in d.survival]}
            for name, d in self.domains.items()
        }


def score_rounds(rounds: Sequence[Round], num_slots: int) -> DomainScore:
    """tau = committed tokens / rounds; survival over the rounds whose draft was that long."""
    survival = []
    for k in range(1, num_slots + 1):
        able = [r for r in rounds if r.num_slots >= k]
        survival.append(sum(r.num_accepted >= k for r in able) / len(able) if able else 0.0)
    tau = sum(r.num_committed for r in rounds) / len(rounds) if rounds else 0.0
    return DomainScore(tau, len(rounds), tuple(survival))


def load_prompts(paths: Sequence[str], target: Target, count: int) -> dict[str, list[list[int]]]:
    """Token ids of `count` prompts of each file, evenly spread over it, by the file's name."""
    template = ChatTemplate(target.tokenizer, target.eos_ids)
    found: dict[str, list[list[int]]] = {}
    for path in paths:
        rows = list(read_prompts([path], _refuse))
        if not rows:
            raise FlashdraftError(f"{path} has no prompt to validate on.")
        chosen = rows if len(rows) <= count else [rows[i * len(rows) // count] for i in range(count)]
        found[Path(path).name.split(".")[0]] = [_opening(prompt, template) for prompt in chosen]
    return found


def _opening(prompt: Prompt, template: ChatTemplate) -> list[int]:
    system = [{"role": "system", "content": prompt.system}] if prompt.system else []
    return template.opening([*system, {"role": "user", "content": prompt.turns[0]}])


def _refuse(rejected: Any) -> None:
    raise FlashdraftError(rejected.sentence)


def validate(drafter: Drafter, target: Target, prompts: dict[str, list[list[int]]], max_tokens: int) -> Score:
    """Greedy decoding of all prompts, several at a time: what is accepted does not depend on it."""
    longest = max(len(p) for group in prompts.values() for p in group)
    rows = min(_ROWS, max(map(len, prompts.values())))
    engine = Engine(target, drafter, max_rows=rows, max_context=min(target.max_context, longest + max_tokens))
    domains = {}
    for name, group in prompts.items():
        results = engine.run([Request(p, SamplingParams(max_tokens=max_tokens)) for p in group])
        rounds = [r for result in results for r in result.stats.rounds]
        domains[name] = score_rounds(rounds, drafter.max_draft_tokens)
    return Score(domains)
