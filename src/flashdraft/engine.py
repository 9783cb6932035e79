"""The engine: admits requests into rows, runs rounds, ends answers, streams text.

Requests join and leave between rounds. A finished row keeps its cache, and a request whose prompt
begins with the same tokens goes on from there (the next turn of a chat pays for its new tokens only).
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from .drafters import Drafter, NoDrafter
from .sampling import RowSampler
from .session import Proposal, Session
from .target import Target
from .text import TextStream
from .types import Delta, FinishReason, FlashdraftError, Origin, Request, Result, Round, SamplingParams, Stats, Token

DEFAULT_CONTEXT = 8192


@dataclass
class _Answer:
    """A request in progress."""

    request_id: int
    request: Request
    seed: int
    stop_ids: frozenset[int]
    stream: TextStream
    row: int = -1
    num_reused: int = 0
    tokens: list[Token] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_total(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens)


class Engine:
    """Decodes requests with a target and a drafter; the text is the target's alone.

    Args:
        drafter: None is plain decoding, through the same code.
        max_rows: requests decoded at a time; further ones wait.
        max_context: longest sequence, prompt and answer together; default the target's own limit,
            at most 8192 (the cache is allocated up front).
        prefill_chunk: prompt tokens in one pass.
        reuse_prefix: go on from a finished row's cache where a prompt begins with its tokens.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        max_rows: int = 1,
        max_context: int | None = None,
        prefill_chunk: int = 512,
        reuse_prefix: bool = True,
    ) -> None:
        for name, value in (("max_rows", max_rows), ("max_context", max_context), ("prefill_chunk", prefill_chunk)):
            if value is not None and value < 1:
                raise FlashdraftError(f"{name} is {value}; expected at least 1.")
        if max_context is not None and max_context > target.max_context:
            raise FlashdraftError(f"max_context is {max_context}; {target.name} is made for {target.max_context}.")
        self.target = target
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.max_context = max_context or min(target.max_context, DEFAULT_CONTEXT)
        self.session = Session(target, self.drafter, max_rows, self.max_context, prefill_chunk)
        self._reuse = reuse_prefix
        self._free = list(range(max_rows))
        self._waiting: deque[_Answer] = deque()
        self._running: list[_Answer] = []
        # made, but not handed out yet: somebody else's `stream`, or a failure in the same step
        self._mail: dict[int, list[Delta]] = {}
        self._awaited: set[int] = set()
        self._next_id = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to say."""
        return bool(self._waiting or self._running or self._mail.keys() - self._awaited)

    def submit(self, request: Request) -> int:
        """Queue a request; returns its id. Raises FlashdraftError if it can never run here."""
        self._check(request)
        params = request.params
        answer = _Answer(
            request_id=self._next_id,
            request=request,
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stop_ids=self._stop_ids(params),
            stream=TextStream(self.target.tokenizer, params.stop),
        )
        self._next_id += 1
        self._waiting.append(answer)
        return answer.request_id

    def cancel(self, request_id: int) -> None:
        """Drop a request wherever it is; unknown and finished ids are ignored."""
        self._mail.pop(request_id, None)
        self._awaited.discard(request_id)
        self._waiting = deque(a for a in self._waiting if a.request_id != request_id)
        for answer in [a for a in self._running if a.request_id == request_id]:
            self._leave(answer)

    def step(self) -> list[Delta]:
        """Admit what fits, then one round for all running rows; returns what is new, but for
        requests that `stream` or `run` wait for."""
        self._advance()
        mine = [request_id for request_id in self._mail if request_id not in self._awaited]
        return [delta for request_id in mine for delta in self._mail.pop(request_id)]

    def stream(self, request: Request) -> Generator[Delta, None, None]:
        """Deltas of one request as they come; stopping early cancels it. Several streams of one
        engine share its rounds."""
        request_id = self.submit(request)
        self._awaited.add(request_id)
        try:
            finished = False
            while not finished and request_id in self._awaited:  # it is not, once cancelled
                for delta in self._receive(request_id):
                    yield delta
                    finished = delta.result is not None
        finally:
            self.cancel(request_id)

    def run(self, requests: Iterable[Request]) -> list[Result]:
        """Decode requests to the end, batched; results come in the order of the requests."""
        ids: list[int] = []
        results: dict[int, Result] = {}
        try:
            for request in requests:
                ids.append(self.submit(request))  # noqa: PERF401  # if one is refused, those before it have to go
            self._awaited.update(ids)
            for request_id in ids:
                while request_id not in results:
                    for delta in self._receive(request_id):
                        if delta.result is not None:
                            results[request_id] = delta.result
        finally:
            for request_id in ids:
                self.cancel(request_id)
        return [results[request_id] for request_id in ids]

    def _receive(self, request_id: int) -> list[Delta]:
        """What is new of a request that `stream` or `run` waits for; advances all if nothing is."""
        if request_id not in self._mail:
            if all(answer.request_id != request_id for answer in (*self._running, *self._waiting)):
                raise FlashdraftError("a round of this request failed or was interrupted; submit it again.")
            self._advance()
        return self._mail.pop(request_id, [])

    def _advance(self) -> None:
        """Admissions and one round; deltas go to their request's mailbox.

        If anything breaks off in between (out of memory, Ctrl-C), the rows it was about cannot be
        trusted: their requests end, and nothing of them is reused.
        """
        deltas: list[Delta] = []
        try:
            while self._waiting and self._free:
                deltas.append(self._admit(self._waiting.popleft()))
            if self._running:
                deltas += self._round()
        except BaseException:
            for answer in list(self._running):
                self.session.forget(answer.row)
                self._leave(answer)
            raise
        finally:
            for delta in deltas:
                self._mail.setdefault(delta.request_id, []).append(delta)

    def _check(self, request: Request) -> None:
        prompt, vocab = request.prompt_ids, self.target.vocab_size
        if not len(prompt):
            raise FlashdraftError("the prompt is empty; expected at least one token.")
        if not all(0 <= token < vocab for token in prompt):
            raise FlashdraftError(f"the prompt has token ids outside the target's vocabulary of {vocab}.")
        if len(prompt) >= self.max_context:
            raise FlashdraftError(
                f"the prompt has {len(prompt)} tokens; this engine holds {self.max_context} with the answer. "
                f"Shorten it, or raise max_context (at most {self.target.max_context} for {self.target.name})."
            )
        named = [*request.params.logit_bias, *request.params.stop_token_ids]
        if not all(0 <= token < vocab for token in named):
            raise FlashdraftError(f"logit_bias or stop_token_ids name ids outside the vocabulary of {vocab}.")
        banned = {token for token, bias in request.params.logit_bias.items() if bias == -math.inf}
        if request.params.min_tokens:
            banned |= self._stop_ids(request.params)
        if len(banned) >= vocab:
            raise FlashdraftError("logit_bias and min_tokens leave no token to choose; allow at least one.")

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = frozenset() if params.ignore_eos else self.target.eos_ids
        return frozenset(token for token in (*eos, *params.stop_token_ids) if 0 <= token < self.target.vocab_size)

    def _admit(self, answer: _Answer) -> Delta:
        began = time.perf_counter()
        prompt = list(answer.request.prompt_ids)
        answer.row, answer.num_reused = self._best_row(prompt)
        self._free.remove(answer.row)
        self._running.append(answer)
        sampler = RowSampler(
            answer.params, answer.seed, prompt, self.target.vocab_size, sorted(answer.stop_ids), self.target.device
        )
        proposal = self.session.prefill(answer.row, prompt, sampler, answer.num_reused)
        kept = self._take(answer, proposal, ("prefill",))
        answer.prefill_seconds = time.perf_counter() - began
        return self._delta(answer, kept)

    def _best_row(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The free row that shares most with the prompt, and how many tokens; among equals the one
        whose old sequence is shortest, so that long conversations stay."""
        shared = dict.fromkeys(self._free, 0)
        if self._reuse:
            for row in self._free:
                shared[row] = _common_prefix(self.session.tokens[row][: self.session.num_cached(row) + 1], prompt)
        row = max(self._free, key=lambda r: (shared[r], -len(self.session.tokens[r])))
        return row, shared[row]

    def _round(self) -> list[Delta]:
        began = time.perf_counter()
        draft, verify = self.session.draft_seconds, self.session.verify_seconds
        answers = list(self._running)
        rows = [answer.row for answer in answers]
        proposals = self.session.verify(rows, [self._room(answer) - 1 for answer in answers])
        kept = []
        for answer, proposal in zip(answers, proposals, strict=True):
            origins: list[Origin] = ["draft" for _ in proposal.tokens]
            origins[-1] = "bonus"
            tokens = self._take(answer, proposal, origins)
            accepted = sum(token.origin == "draft" for token in tokens)
            answer.rounds.append(Round(proposal.num_drafted, accepted, len(tokens), proposal.depth))
            kept.append(tokens)
        self.session.commit([[token.id for token in tokens] for tokens in kept])
        took = time.perf_counter() - began
        for answer in answers:
            answer.draft_seconds += self.session.draft_seconds - draft
            answer.verify_seconds += self.session.verify_seconds - verify
            answer.decode_seconds += took
        return [self._delta(answer, tokens) for answer, tokens in zip(answers, kept, strict=True)]

    def _room(self, answer: _Answer) -> int:
        """Tokens the answer may still get: what is wanted, and what the context holds."""
        return min(answer.params.max_tokens - len(answer.tokens), self.max_context - answer.num_total)

    def _take(self, answer: _Answer, proposal: Proposal, origins: Sequence[Origin]) -> list[Token]:
        """Append proposed tokens until one ends the answer. All endings are decided here, token by
        token, so a block cannot end an answer elsewhere than plain decoding does."""
        taken: list[Token] = []
        for t, (token, origin) in enumerate(zip(proposal.tokens, origins, strict=True)):
            text, reason = self._end(answer, token)
            logprob, top = _logprobs(proposal.logits_TV[t], token, answer.params.logprobs)
            taken.append(Token(token, text, origin, logprob, top))
            answer.tokens.append(taken[-1])
            if reason is not None:
                answer.finish_reason = reason
                break
        return taken

    def _end(self, answer: _Answer, token: int) -> tuple[str, FinishReason | None]:
        """The text a new token shows, and why the answer ends with it, if it does."""
        count = len(answer.tokens) + 1
        if token in answer.stop_ids:
            return answer.stream.flush(), "stop"
        text, stopped = answer.stream.push(token, armed=count >= answer.params.min_tokens)
        if stopped:
            return text, "stop"
        if self._room(answer) <= 1:
            return text + answer.stream.flush(), "length"
        return text, None

    def _delta(self, answer: _Answer, tokens: Sequence[Token]) -> Delta:
        if answer.finish_reason is None:
            return Delta(answer.request_id, tuple(tokens))
        self._leave(answer)
        stats = Stats(
            num_prompt_tokens=len(answer.request.prompt_ids),
            num_reused_tokens=answer.num_reused,
            rounds=tuple(answer.rounds),
            prefill_seconds=answer.prefill_seconds,
            draft_seconds=answer.draft_seconds,
            verify_seconds=answer.verify_seconds,
            decode_seconds=answer.decode_seconds,
        )
        result = Result(
            request_id=answer.request_id,
            token_ids=tuple(token.id for token in answer.tokens),
            text="".join(token.text for token in answer.tokens),
            tokens=tuple(answer.tokens),
            finish_reason=answer.finish_reason,
            seed=answer.seed,
            stats=stats,
        )
        return Delta(answer.request_id, tuple(tokens), result)

    def _leave(self, answer: _Answer) -> None:
        self._running.remove(answer)
        self._free.append(answer.row)


def _common_prefix(stale: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of a finished row that a prompt can go on from: in its cache (all but the last), and
    not the whole prompt, since a pass needs a token."""
    limit = min(len(stale) - 1, len(prompt) - 1)
    for i in range(max(limit, 0)):
        if stale[i] != prompt[i]:
            return i
    return max(limit, 0)


def _logprobs(
    logits_V: torch.Tensor, token: int, top: int | None
) -> tuple[float | None, tuple[tuple[int, float], ...]]:
    if top is None:
        return None, ()
    logprobs = logits_V.float().log_softmax(-1)
    best = logprobs.topk(min(top, logprobs.shape[-1]))
    pairs = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return float(logprobs[token]), pairs
