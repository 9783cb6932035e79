"""Logits -> processed fp32 scores -> token, one function for plain and speculative decoding.

Order: logit bias, repetition, presence and frequency penalties, minimum length, temperature,
top-k, top-p, min-p. Scores are unnormalised log-probabilities: softmax of them is `target_probs`,
and -inf marks what was cut. Ties at a cut are kept, so the result never depends on a sort's order.

Randomness is counter-based: the noise at (seed, position) is a function of these two alone, so the
text does not depend on how many tokens a round tried, on the drafter, or on the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from .types import SamplingParams

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

# Top-p looks at this many tokens first; only a flatter distribution pays for a full sort.
_NUCLEUS_PROBE = 512

# Streams keep the draws of one position independent of each other.
NOISE, ACCEPT, RESIDUAL, DRAFT = range(4)


def _mix(z: int) -> int:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014) on a Python integer."""
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK64
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK64
    return z ^ (z >> 31)


def counter_key(seed: int, position: int, stream: int = NOISE) -> int:
    """The 64-bit key of one draw: a hash chain over seed, stream and position."""
    key = _mix((seed + _GOLDEN) & _MASK64)
    key = _mix((key + _GOLDEN * (stream + 1)) & _MASK64)
    return _mix((key + _GOLDEN * (position + 1)) & _MASK64)


def uniform(seed: int, position: int, stream: int) -> float:
    """One float in [0, 1), a function of its arguments alone."""
    return (counter_key(seed, position, stream) >> 11) * 2.0**-53


def _signed(z: int) -> int:
    return z - (1 << 64) if z >> 63 else z


@functools.lru_cache(maxsize=8)
def _counters(vocab_size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, vocab_size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def gumbel_noise(
    seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu", stream: int = NOISE
) -> torch.Tensor:
    """Standard Gumbel noise [V], fp32: SplitMix64 over the token ids, keyed on (seed, position).

    The exponential is -log1p(-v) of v in (0, 1): fp32 is fine-grained near 0, where the large
    Gumbel values that decide an argmax come from. v is kept below 1, so no value is infinite.
    """
    z = _counters(vocab_size, torch.device(device)) + _signed(counter_key(seed, position, stream))
    # torch shifts int64 arithmetically: the mask makes the shift logical.
    z = z ^ ((z >> 30) & ((1 << 34) - 1))
    z = z.mul_(_signed(_MIX1))
    z = z ^ ((z >> 27) & ((1 << 37) - 1))
    z = z.mul_(_signed(_MIX2))
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    v = (z >> 11).bitwise_and_((1 << 53) - 1).add_(1).to(torch.float32).mul_(2.0**-53)
    exponential = v.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
    return exponential.log_().neg_()


def _cut_top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    if not 0 < k < scores.shape[-1]:
        return scores
    kth = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < kth, -torch.inf)


def _cut_top_p(scores: torch.Tensor, p: float) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens whose probability reaches p (arXiv 1904.09751)."""
    if p >= 1:
        return scores
    probs = scores.softmax(-1)
    size = min(_NUCLEUS_PROBE, probs.shape[-1])
    top = probs.topk(size, dim=-1).values
    floor = top.new_empty(probs.shape[0], 1)
    for t in range(probs.shape[0]):
        # A row decides for itself, so its result does not depend on the rows beside it.
        row = top[t]
        mass = row.cumsum(-1)
        if float(mass[-1]) < p and size < probs.shape[-1]:
            row = probs[t].sort(descending=True).values
            mass = row.cumsum(-1)
        last = int((mass < p).sum().clamp(max=row.shape[0] - 1))
        floor[t] = row[last]
    return scores.masked_fill(probs < floor, -torch.inf)


def _cut_min_p(scores: torch.Tensor, p: float) -> torch.Tensor:
    """Keep tokens of at least p times the likeliest one's probability (arXiv 2407.01082)."""
    if p <= 0:
        return scores
    probs = scores.softmax(-1)
    return scores.masked_fill(probs < p * probs.amax(-1, keepdim=True), -torch.inf)


class RowSampler:
    """Picks the tokens of one request: its parameters, seed and the counts penalties need.

    The counts hold committed tokens only. What a draft would add is a function argument, so that
    rejected tokens never reach the state.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        stop_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.num_generated = 0
        self.next_position = len(prompt_ids)
        self._stop_ids = torch.tensor(
            [i for i in sorted(set(stop_ids)) if 0 <= i < vocab_size], dtype=torch.int64, device=self.device
        )
        self._bias = [(i, b) for i, b in params.logit_bias.items() if i < vocab_size]
        self._penalised = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._noise: dict[int, torch.Tensor] = {}
        if self._penalised:
            self._counts_V = torch.zeros(vocab_size, dtype=torch.int32, device=self.device)
            self._in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=self.device)
            self._in_prompt_V[torch.tensor(list(prompt_ids), dtype=torch.int64, device=self.device)] = True

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0

    @property
    def rejects(self) -> bool:
        """Whether drafts are accepted by rejection, which knows chains only, each token with its distribution."""
        return not self.greedy and self.params.acceptance == "rejection"

    @property
    def plain_argmax(self) -> bool:
        """True if the choice is the argmax of the untouched logits (the common fast path)."""
        return self.greedy and not (self._penalised or self._bias or self.params.min_tokens)

    def scores(
        self, logits_TV: torch.Tensor, drafted: Sequence[int] = (), paths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """Processed fp32 scores [T, V]; slot t follows the committed tokens and `drafted[:t]`, or
        `paths[t]` where slots are no chain."""
        scores = logits_TV.to(torch.float32, copy=True)
        for token, bias in self._bias:
            scores[:, token] += bias
        if self._penalised:
            scores = self._penalise(scores, drafted, paths)
        if paths is not None:
            for t, path in enumerate(paths):
                if self.num_generated + len(path) < self.params.min_tokens:
                    scores[t, self._stop_ids] = -torch.inf
        else:
            for t in range(min(len(scores), self.params.min_tokens - self.num_generated)):
                scores[t, self._stop_ids] = -torch.inf
        if self.greedy:
            return scores
        scores /= self.params.temperature
        scores = _cut_top_k(scores, self.params.top_k)
        scores = _cut_top_p(scores, self.params.top_p)
        return _cut_min_p(scores, self.params.min_p)

    def _penalise(
        self, scores: torch.Tensor, drafted: Sequence[int], paths: Sequence[Sequence[int]] | None
    ) -> torch.Tensor:
        params = self.params
        counts = self._counts_V.expand(scores.shape[0], -1).clone()
        if paths is not None:
            for t, path in enumerate(paths):
                for token in path:
                    counts[t, token] += 1
        else:
            for t, token in enumerate(drafted[: scores.shape[0] - 1]):
                counts[t + 1 :, token] += 1
        seen = (counts > 0) | self._in_prompt_V
        penalty = params.repetition_penalty
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        return scores - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty

    def choose(
        self, logits_TV: torch.Tensor, drafted: Sequence[int] = (), paths: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """The request's own token for every slot [T]: argmax of the scores plus the slot's noise.

        With T > 0 this is a draw from softmax(scores) (the Gumbel-max trick); greedy has no noise.
        Ties go to the lowest id. Noise belongs to a position: slots with paths of one length share it.
        """
        if self.plain_argmax:
            # float64 is rounded first, as everywhere: all choices are made on fp32 scores.
            narrow = logits_TV.float() if logits_TV.dtype == torch.float64 else logits_TV
            return narrow.argmax(-1)
        scores = self.scores(logits_TV, drafted, paths)
        if not self.greedy:
            for t, ahead in enumerate(range(len(scores)) if paths is None else map(len, paths)):
                scores[t] += self.noise(self.next_position + ahead)
        return scores.argmax(-1)

    def lead(self, logits_V: torch.Tensor, path: Sequence[int]) -> float:
        """By how much, in logits, the chosen token behind `path` leads the next one."""
        scores = self.scores(logits_V[None], paths=[path])[0]
        if not self.greedy:
            scores += self.noise(self.next_position + len(path))
        best = scores.topk(min(2, len(scores))).values
        return float(best[0] - best[-1]) * (self.params.temperature or 1.0) if len(best) > 1 else math.inf

    def noise(self, position: int) -> torch.Tensor:
        """Noise [V] of a position; kept for the round, since drafter and target use the same."""
        if position not in self._noise:
            self._noise[position] = gumbel_noise(self.seed, position, self.vocab_size, self.device)
        return self._noise[position]

    def commit(self, tokens: Sequence[int]) -> None:
        """These tokens are final: count them, and move the position on."""
        self.num_generated += len(tokens)
        self.next_position += len(tokens)
        self._noise.clear()
        if self._penalised and tokens:
            ids = torch.tensor(list(tokens), dtype=torch.int64, device=self.device)
            self._counts_V.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
