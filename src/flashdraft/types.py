"""Values that cross module borders: all frozen, none with behaviour beyond checking itself.

Shape letters used everywhere in the package: B rows, T tokens of a forward pass, N draft nodes,
V vocabulary, D hidden, F feature width (tapped layers x D), S cache slots, C committed tokens.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # for annotations only: errors and parameters are to be had without loading torch
    import torch

Origin = Literal["prefill", "draft", "bonus"]
FinishReason = Literal["stop", "length"]


class FlashdraftError(ValueError):
    """Something a user can mend; the message says what was found, what was expected, what to do."""


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise FlashdraftError(f"{name} is {value!r}; expected {expected}.")


def _whole(value: object, least: float, most: float = math.inf) -> bool:
    """Whether a value is an integer in a range (True and False are no integers here)."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) <= most


def _number(value: object, least: float, most: float) -> bool:
    """Whether a value is a number in a range; nan is in none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and least <= float(value) <= most


# Beyond these, fp32 scores overflow: temperatures, penalties and biases stay well inside.
_WIDEST = 1e6


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
        self._check_numbers()
        self._check_lists()
        _require(
            self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})",
        )  # fmt: skip
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        _require(
            self.acceptance in ("coupled", "rejection"),
            "acceptance", self.acceptance, '"coupled" or "rejection"',
        )  # fmt: skip

    def _check_numbers(self) -> None:
        widest = _WIDEST
        checks: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", _whole(self.max_tokens, 1), "a whole number of at least 1"),
            ("min_tokens", _whole(self.min_tokens, 0), "a whole number of 0 or more"),
            ("top_k", _whole(self.top_k, 0), "0 (off) or a positive count"),
            (
                "temperature",
                self.temperature == 0 or _number(self.temperature, 1 / widest, widest),
                f"0 (greedy) or a number from {1 / widest:g} to {widest:g}",
            ),
            ("top_p", _number(self.top_p, 0, 1) and self.top_p > 0, "a number above 0 and at most 1 (off)"),
            ("min_p", _number(self.min_p, 0, 1), "a number from 0 (off) to 1"),
            (
                "repetition_penalty",
                _number(self.repetition_penalty, 1e-3, 1e3),
                "a number from 0.001 to 1000 (1 is off)",
            ),
            *(
                (name, _number(getattr(self, name), -widest, widest), f"a number within +-{widest:g} (0 is off)")
                for name in ("presence_penalty", "frequency_penalty")
            ),
            (
                "seed",
                self.seed is None or _whole(self.seed, -(2**63), 2**63 - 1),
                "none or a whole number of 64 bits (-2^63 to 2^63 - 1)",
            ),
            ("logprobs", self.logprobs is None or _whole(self.logprobs, 0, 100), "none or a count from 0 to 100"),
        )
        for name, ok, expected in checks:
            _require(ok, name, getattr(self, name), expected)

    def _check_lists(self) -> None:
        """Check the fields that hold several values, and take copies that nobody else can change."""
        expected = f"a map from token ids to numbers within +-{_WIDEST:g} or -inf"
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, expected)
        for token, bias in self.logit_bias.items():
            ok = _whole(token, 0) and (_number(bias, -_WIDEST, _WIDEST) or bias == -math.inf)
            _require(ok, "logit_bias", {token: bias}, expected)
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        ok = isinstance(stops, Sequence) and all(isinstance(stop, str) and stop for stop in stops)
        _require(ok, "stop", self.stop, "a string or a list of strings that are not empty")
        object.__setattr__(self, "stop", tuple(stops))
        ids = self.stop_token_ids
        ok = isinstance(ids, Sequence) and all(_whole(token, 0) for token in ids)
        _require(ok, "stop_token_ids", ids, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(ids))


@dataclass(frozen=True)
class Request:
    """One prompt (token ids) and how to go on from it."""

    prompt_ids: Sequence[int]
    params: SamplingParams = SamplingParams()

    def __post_init__(self) -> None:
        # A copy: a conversation's list grows on while its request still runs.
        try:
            ids = tuple(operator.index(token) for token in self.prompt_ids)
        except TypeError:
            raise FlashdraftError("the prompt is no list of token ids; encode text with the tokenizer first.") from None
        object.__setattr__(self, "prompt_ids", ids)


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes in one round, for the rows it was asked about, in their order.

    tokens_BN: int64. Row b proposes its first `lengths_B[b]` tokens; what follows is padding.
    parents_BN: int64, node -> index of its parent among the nodes, -1 for the anchor; parents come
        before their children. None is a chain.
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
    """One draft + verify of one request: tokens proposed (all nodes of a tree), and tokens kept (bonus
    not counted). `depth`: levels of the tree; None for a chain, which has as many as tokens."""

    num_drafted: int
    num_accepted: int
    num_committed: int
    depth: int | None = None

    @property
    def num_slots(self) -> int:
        """The most tokens that could have been kept."""
        return self.num_drafted if self.depth is None else self.depth


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
