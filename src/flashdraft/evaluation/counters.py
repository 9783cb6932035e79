"""What servers count of their drafts, in one form: vLLM's and SGLang's counters at /metrics (Prometheus text),
SGLang's `meta_info` and llama.cpp's `timings` in an answer.

A pass of the target over a draft commits what it accepts and one token more; the first token of an answer is
its prompt's. What cannot be (more accepted than drafted, a counter that fell) is taken as not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .records import Counts

_LINE = re.compile(r"((?:vllm|sglang):\w+)(\{.*\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d{1,3})"')
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
# Tokens a server may have made beyond those that were sent here, before others are thought to use it.
_SHARE, _SOME = 1.05, 8
# Names of SGLang's versions for the same: tokens accepted, tokens drafted.
_ACCEPTED = ("spec_num_correct_drafts", "spec_accept_token_num")
_DRAFTED = ("spec_num_proposed_drafts", "spec_draft_token_num")


@dataclass(frozen=True)
class Metrics:
    """A reading: sums over all labels, per slot where there is one; `means` are for what is no counter."""

    engine: str
    sums: Mapping[str, float]
    means: Mapping[str, float]
    by_slot: Mapping[int, float]

    @property
    def source(self) -> str:
        return f"{_ENGINES[self.engine]} /metrics"

    @classmethod
    def read(cls, text: str) -> Metrics | None:
        """None if it is the text of no engine that is known here."""
        values: dict[str, list[float]] = {}
        by_slot: dict[int, float] = {}
        for name, labels, value in _values(text):
            values.setdefault(name, []).append(value)
            position = _POSITION.search(labels)
            if name == "vllm:spec_decode_num_accepted_tokens_per_pos_total" and position:
                slot = int(position[1])
                by_slot[slot] = by_slot.get(slot, 0.0) + value
        if not values:
            return None
        engine = next(iter(values)).partition(":")[0]
        sums = {name: sum(found) for name, found in values.items()}
        return cls(engine, sums, {name: sums[name] / len(found) for name, found in values.items()}, by_slot)


def _values(text: str) -> Iterator[tuple[str, str, float]]:
    """(name, labels, value) of the engines' lines."""
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield found[1], found[2] or "", value


def used_by_others(before: Metrics, after: Metrics | None, tokens: int) -> bool:
    """Whether the server made more tokens meanwhile than were received here."""
    made = _grown(before, after, f"{before.engine}:generation_tokens_total")
    return made is not None and made > _SHARE * tokens + _SOME


def counts_between(before: Metrics | None, after: Metrics | None, tokens: int, requests: int = 1) -> Counts | None:
    """What counters grew by, for requests that received `tokens` tokens in all."""
    if before is None or after is None or before.engine != after.engine:
        return None
    return (_vllm if before.engine == "vllm" else _sglang)(before, after, tokens, requests)


def _vllm(before: Metrics, after: Metrics, tokens: int, requests: int) -> Counts | None:
    passes, drafted, accepted = (
        _grown(before, after, f"vllm:spec_decode_num_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if not passes or drafted is None or accepted is None or accepted > drafted:
        return None
    slots = [after.by_slot[k] - before.by_slot.get(k, 0.0) for k in sorted(after.by_slot)]
    kept = tuple(map(round, slots)) if all(0 <= n <= passes for n in slots) else ()
    return Counts(before.source, passes, passes + accepted, round(drafted), round(accepted), kept)


def _sglang(before: Metrics, after: Metrics, tokens: int, requests: int) -> Counts | None:
    """A pass over a batch may count once, so calls say nothing of several requests; the mean length does."""
    passes = _grown(before, after, "sglang:spec_verify_calls_total")
    if passes and requests == 1 and tokens > passes:
        return Counts(before.source, passes, tokens - 1)
    length = after.means.get("sglang:spec_accept_length", 0.0)
    return _by_length(f"{before.source}, a mean of its last passes", length, tokens)


def _by_length(source: str, length: Any, tokens: int) -> Counts | None:
    """From an acceptance length as SGLang has it: all tokens of an answer over its passes."""
    known = isinstance(length, int | float) and math.isfinite(length) and length >= 1
    return Counts(source, tokens / length, tokens) if known and tokens else None


def _grown(before: Metrics, after: Metrics | None, name: str) -> float | None:
    if after is None or name not in before.sums or name not in after.sums:
        return None
    grown = after.sums[name] - before.sums[name]
    return grown if grown >= 0 else None


def of_answer(said: Mapping[str, Any], tokens: int) -> Counts | None:
    """What an answer says of its own drafts."""
    timings, meta = said.get("timings") or {}, said.get("meta_info") or {}
    drafted, accepted = number(timings.get("draft_n")), number(timings.get("draft_n_accepted"))
    if drafted and accepted is not None and accepted <= drafted and tokens > 1:
        # every pass gives one token that was not drafted; an end inside a draft leaves the last one's out
        passes = max(tokens - 1 - accepted, 1)
        return Counts("llama.cpp timings", passes, tokens - 1, drafted, accepted)
    passes = number(meta.get("spec_verify_ct")) or 0
    drafted, accepted = (_first(meta, names) for names in (_DRAFTED, _ACCEPTED))
    if passes and accepted is not None and accepted <= (accepted if drafted is None else drafted):
        return Counts("SGLang meta_info", passes, passes + accepted, drafted, accepted)
    if passes and tokens > passes:
        return Counts("SGLang meta_info", passes, tokens - 1)
    return _by_length("SGLang meta_info", meta.get("spec_accept_length"), tokens)


def _first(meta: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((n for name in names if (n := number(meta.get(name))) is not None), None)


def number(value: Any) -> int | None:
    """A count that came as JSON; None for anything else."""
    return value if type(value) is int and value >= 0 else None
