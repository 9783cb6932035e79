"""Values that cross module borders: all frozen, none with behaviour beyond checking itself.

Shape letters used everywhere in the package: B rows, T tokens of a forward pass, N draft nodes,
V vocabulary, D hidden, F feature width (tapped layers x D), S cache slots, C committed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Origin = Literal["prefill", "draft", "bonus"]
FinishReason = Literal["stop", "length"]


class FlashdraftError(ValueError):
    """Something a user can mend; the message says what was found, what was expected, what to do."""


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise FlashdraftError(f"{name} is {value!r}; expected {expected}.")


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens; the same for plain and speculative decoding.

    temperature 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `repetition_penalty` counts
    prompt and answer (CTRL, arXiv 1909.05858), the presence and frequency penalties the answer alone.
    `seed` None draws one, and the result names it. `logprobs` n returns the n likeliest tokens of
    the model's own distribution (before any processing) beside the chosen one.
    `acceptance` rules T > 0: "coupled" gives the same text as plain decoding with the same seed;
    "rejection" (Leviathan et al., arXiv 2211.17192) the same law, another text, more accepted tokens.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    acceptance: Literal["coupled", "rejection"] = "coupled"

    def __post_init__(self) -> None:
        finite = math.isfinite
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _require(
            finite(self.temperature) and self.temperature >= 0,
            "temperature", self.temperature, "a number of 0 (greedy) or more",
        )  # fmt: skip
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or a positive count")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0 and at most 1 (off)")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "a number from 0 (off) to 1")
        _require(
            finite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty", self.repetition_penalty, "a number above 0 (1 is off)",
        )  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(finite(value), name, value, "a finite number (0 is off)")
        for token, bias in self.logit_bias.items():
            _require(
                token >= 0 and not math.isnan(bias) and bias != math.inf,
                "logit_bias", dict(self.logit_bias), "token ids with finite numbers or -inf",
            )  # fmt: skip
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "0 or more")
        _require(
            self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})",
        )  # fmt: skip
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        _require(all(stops), "stop", list(stops), "strings that are not empty")
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.logprobs is not None:
            _require(0 <= self.logprobs <= 100, "logprobs", self.logprobs, "a count from 0 to 100")
        _require(
            self.acceptance in ("coupled", "rejection"),
            "acceptance", self.acceptance, '"coupled" or "rejection"',
        )  # fmt: skip


@dataclass(frozen=True)
class Request:
    """One prompt (token ids) and how to go on from it."""

    prompt_ids: Sequence[int]
    params: SamplingParams = SamplingParams()


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes in one round, for the rows it was asked about, in their order.

    tokens_BN: int64. Row b proposes its first `lengths_B[b]` tokens; what follows is padding.
    parents_BN: node -> index of its parent among the nodes, -1 for the anchor; None is a chain.
    probs_NV: per row, the fp32 distribution each token was drawn from; None is a point mass.
    """

    tokens_BN: torch.Tensor
    lengths_B: tuple[int, ...]
    parents_BN: torch.Tensor | None = None
    probs_NV: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True)
class TargetOutput:
    """logits_BTV as the model gives them (its own dtype); features_BTF if layers were tapped."""

    logits_BTV: torch.Tensor
    features_BTF: torch.Tensor | None


@dataclass(frozen=True)
class Verdict:
    """Per row: the nodes of the draft that were kept, in order, and the target's own next token."""

    path: tuple[int, ...]
    bonus: int

    @property
    def num_accepted(self) -> int:
        return len(self.path)


@dataclass(frozen=True)
class Commit:
    """Tokens that became final, row after row: `tokens[i]` are those of `rows[i]`.

    features_CF: for every token, in the same order, the target state that predicted it, i.e. the
    state at the position before it; None if the drafter taps no layer.
    """

    rows: tuple[int, ...]
    tokens: tuple[tuple[int, ...], ...]
    features_CF: torch.Tensor | None


@dataclass(frozen=True)
class Token:
    """One token of an answer: its id, the text it made visible, how it came, its logprobs."""

    id: int
    text: str
    origin: Origin
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Round:
    """One draft + verify of one request: tokens proposed, and tokens kept (bonus not counted)."""

    num_drafted: int
    num_accepted: int
    num_committed: int


@dataclass(frozen=True)
class Stats:
    """What one request cost. Seconds are shares of the batch's wall clock while it was running."""

    num_prompt_tokens: int
    num_reused_tokens: int
    rounds: tuple[Round, ...]
    prefill_seconds: float
    draft_seconds: float
    verify_seconds: float
    decode_seconds: float

    @property
    def acceptance_length(self) -> float:
        """tau: committed tokens per round, pooled over the rounds (nan before the first one)."""
        if not self.rounds:
            return math.nan
        return sum(r.num_committed for r in self.rounds) / len(self.rounds)

    @property
    def rest_seconds(self) -> float:
        return max(0.0, self.decode_seconds - self.draft_seconds - self.verify_seconds)


@dataclass(frozen=True)
class Result:
    """A finished answer. `text` is what the tokens' texts concatenate to."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason
    seed: int
    stats: Stats


@dataclass(frozen=True)
class Delta:
    """What one round added to one request; `result` is set on the last one."""

    request_id: int
    tokens: tuple[Token, ...]
    result: Result | None = None

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)
