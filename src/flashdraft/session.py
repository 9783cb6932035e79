"""One round: propose, verify in one pass, commit. Plain decoding is the round without a draft.

A session owns the target's cache, the drafter's state and the committed tokens of its rows. It
picks no request and cuts no answer: the engine does, between `verify` and `commit`.

Invariant of every row between calls: the target's cache and the drafter's context hold all
committed tokens but the last, the anchor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .drafters import Drafter
from .sampling import ACCEPT, RESIDUAL, RowSampler, uniform
from .target import Target, padded_width
from .tree import chain, check, depths, paths
from .types import Commit, Draft, FlashdraftError, TargetOutput, Verdict
from .verify import accept_matching, accept_rejection


@dataclass(frozen=True)
class Proposal:
    """A row's verified tokens, not yet final: the accepted ones and the bonus token last.

    logits_TV: the target's logits each of them was picked from (T = len(tokens)).
    slots: where in the verify pass those logits, and the tokens' features, came from; None: 0, 1, ...
    depth: levels of the draft's tree; None for a chain.
    """

    tokens: tuple[int, ...]
    num_drafted: int
    logits_TV: torch.Tensor
    slots: tuple[int, ...] | None = None
    depth: int | None = None


# rows, features, and per row the slots that its proposal came from (None: chains)
_Verified = tuple[tuple[int, ...], torch.Tensor | None, tuple[tuple[int, ...], ...] | None]


class Session:
    """Rows of a batch that advance together, each by its own number of tokens.

    Args:
        context: committed tokens a row can hold.
        prefill_chunk: prompt tokens in one pass.
    """

    def __init__(self, target: Target, drafter: Drafter, rows: int, context: int, prefill_chunk: int = 512) -> None:
        slack = max(64, drafter.max_draft_tokens + 1)
        self.target = target
        self.drafter = drafter
        self.cache = target.new_cache(rows, context, slack)
        self.state = drafter.open(rows, context)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.samplers: list[RowSampler | None] = [None] * rows
        self.draft_seconds = self.verify_seconds = 0.0
        self._chunk = prefill_chunk
        self._verified: _Verified = ((), None, None)

    def prefill(self, row: int, prompt: Sequence[int], sampler: RowSampler, reuse: int = 0) -> Proposal:
        """Commit a prompt, behind the row's first `reuse` tokens which it shares, and propose the
        target's first token (committed too: a round has to have an anchor)."""
        assert 0 <= reuse < len(prompt) and list(prompt[:reuse]) == self.tokens[row][:reuse]
        # What this prefill overwrites is forgotten first: if it fails half way, nobody goes on from it.
        self.tokens[row] = list(prompt[:reuse])
        self.cache.roll_back(row, reuse)
        self.drafter.reset(self.state, row, reuse, prompt[reuse])
        self.samplers[row] = sampler
        layer_ids = self.drafter.target_layer_ids
        for start in range(reuse, len(prompt), self._chunk):
            chunk = list(prompt[start : start + self._chunk])
            end = start + len(chunk)
            final = end == len(prompt)
            out = self._prefill_pass(row, chunk, len(chunk) - 1 if final else slice(0, 0), layer_ids)
            self.cache.keep(row, len(chunk))
            first = self._pick(sampler, out.logits_BTV[0], ()).bonus if final else prompt[end]
            self._observe_chunk(row, (*prompt[start + 1 : end], first), out)
        sampler.commit([first])
        self.tokens[row] = [*prompt, first]
        return Proposal((first,), 0, out.logits_BTV[0])

    def _prefill_pass(self, row: int, chunk: list[int], keep: int | slice, layer_ids: Sequence[int]) -> TargetOutput:
        padding = [0] * (padded_width(len(chunk), self.target.dtype) - len(chunk))
        ids = torch.tensor([chunk + padding], dtype=torch.int64, device=self.target.device)
        return self.target.forward(ids, self.cache, [row], valid=[len(chunk)], keep=keep, layer_ids=layer_ids)

    def _observe_chunk(self, row: int, tokens: tuple[int, ...], out: TargetOutput) -> None:
        features = out.features_BTF[0, : len(tokens)] if out.features_BTF is not None else None
        self.drafter.observe(self.state, Commit((row,), (tokens,), features))

    def verify(self, rows: Sequence[int], limits: Sequence[int]) -> list[Proposal]:
        """One round for `rows`: a draft at most limits[i] tokens deep each, checked in one pass."""
        samplers = self._samplers_of(rows)
        began = self._now()
        draft = self.drafter.propose(self.state, rows, samplers, limits)
        trees = _trees(draft, limits)
        drafted = [tokens[:n] for tokens, n in zip(draft.tokens_BN.tolist(), draft.lengths_B, strict=True)]
        proposed = self._now()
        anchors = torch.tensor([[self.tokens[row][-1]] for row in rows], device=self.target.device)
        tokens_BT = torch.cat([anchors, draft.tokens_BN.to(self.target.device)], dim=1)
        valid = [1 + len(tokens) for tokens in drafted]
        layer_ids = self.drafter.target_layer_ids
        out = self.target.forward(tokens_BT, self.cache, rows, valid=valid, layer_ids=layer_ids, parents=trees)
        if trees is None:
            proposals = self._judge(out.logits_BTV, draft, drafted, samplers)
            self._verified = (tuple(rows), out.features_BTF, None)
        else:
            proposals = self._judge_trees(out.logits_BTV, draft, drafted, trees, samplers)
            self._verified = (tuple(rows), out.features_BTF, tuple(p.slots or () for p in proposals))
        self.draft_seconds += proposed - began
        self.verify_seconds += self._now() - proposed
        return proposals

    def _judge(
        self, logits_BTV: torch.Tensor, draft: Draft, drafted: list[list[int]], samplers: Sequence[RowSampler]
    ) -> list[Proposal]:
        return [
            self._judge_chain(
                logits_BTV[b, : len(tokens) + 1], tokens, draft.probs_NV[b] if draft.probs_NV else None, s
            )
            for b, (tokens, s) in enumerate(zip(drafted, samplers, strict=True))
        ]

    def _judge_chain(
        self, logits_TV: torch.Tensor, tokens: list[int], probs: torch.Tensor | None, sampler: RowSampler
    ) -> Proposal:
        verdict = self._pick(sampler, logits_TV, tokens, probs)
        kept = (*(tokens[n] for n in verdict.path), verdict.bonus)
        return Proposal(kept, len(tokens), logits_TV[: len(kept)], tuple(range(len(kept))))

    def _judge_trees(
        self,
        logits_BTV: torch.Tensor,
        draft: Draft,
        drafted: list[list[int]],
        trees: Sequence[Sequence[int]],
        samplers: Sequence[RowSampler],
    ) -> list[Proposal]:
        proposals = []
        for b, (sampler, tokens, parents) in enumerate(zip(samplers, drafted, trees, strict=True)):
            logits_TV = logits_BTV[b, : len(tokens) + 1]
            if sampler.rejects:
                assert parents == chain(len(tokens)), "rejection knows chains only"
                proposals.append(
                    self._judge_chain(logits_TV, tokens, draft.probs_NV[b] if draft.probs_NV else None, sampler)
                )
                continue
            ways = paths(tokens, parents)
            own = sampler.choose(logits_TV, paths=ways)
            verdict = accept_matching(tokens, own.tolist(), parents)
            slots = (0, *(node + 1 for node in verdict.path))
            self._check_finite(logits_TV.gather(-1, own[:, None])[list(slots)])
            kept = (*(tokens[n] for n in verdict.path), verdict.bonus)
            proposals.append(Proposal(kept, len(tokens), logits_TV[list(slots)], slots, max(map(len, ways))))
        return proposals

    def _pick(
        self, sampler: RowSampler, logits_TV: torch.Tensor, drafted: Sequence[int], probs: torch.Tensor | None = None
    ) -> Verdict:
        """What the target keeps of a draft, by the request's own acceptance rule."""
        if not sampler.rejects:
            own = sampler.choose(logits_TV, drafted)
            verdict = accept_matching(drafted, own.tolist())
            proof = logits_TV.gather(-1, own[:, None])
        else:
            position = sampler.next_position
            slots = range(position, position + len(drafted) + 1)
            proof = sampler.scores(logits_TV, drafted).softmax(-1)
            verdict = accept_rejection(
                drafted,
                proof,
                probs,
                [uniform(sampler.seed, t, ACCEPT) for t in slots[:-1]],
                [uniform(sampler.seed, t, RESIDUAL) for t in slots],
            )
        # Only of the slots that count: a wrong draft may lead the target anywhere.
        self._check_finite(proof[: verdict.num_accepted + 1])
        return verdict

    def _check_finite(self, proof: torch.Tensor) -> None:
        if not bool(proof[:, 0].isfinite().all()):
            raise FlashdraftError(
                f"{self.target.name} gives logits from which no token can be chosen (nan, or all of them infinite); "
                "load it in a wider dtype (float32), and see that its weights are whole."
            )

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Make the first tokens of the last proposals final: kept[i] for the i-th row of `verify`.

        The only place where a round changes state: caches, samplers, the drafter.
        """
        rows, features_BTF, slots = self._verified
        for b, (row, sampler, tokens) in enumerate(zip(rows, self._samplers_of(rows), kept, strict=True)):
            if slots is not None:
                self.cache.keep_path(row, slots[b][: len(tokens)])
            else:
                self.cache.keep(row, len(tokens))
            self.tokens[row].extend(tokens)
            sampler.commit(tokens)
        features = None
        if features_BTF is not None and slots is not None:
            features = torch.cat([features_BTF[b, list(slots[b][: len(tokens)])] for b, tokens in enumerate(kept)])
        elif features_BTF is not None:
            features = torch.cat([features_BTF[b, : len(tokens)] for b, tokens in enumerate(kept)])
        began = self._now()
        self.drafter.observe(self.state, Commit(rows, tuple(map(tuple, kept)), features))
        self.draft_seconds += self._now() - began
        self._verified = ((), None, None)

    def forget(self, row: int) -> None:
        """Nothing of a row may be reused: a prefill or round of it was interrupted."""
        self.tokens[row] = []

    def _samplers_of(self, rows: Sequence[int]) -> list[RowSampler]:
        samplers = [self.samplers[row] for row in rows]
        return [sampler for sampler in samplers if sampler is not None]

    def _now(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _trees(draft: Draft, limits: Sequence[int]) -> list[list[int]] | None:
    """The parents of every row's own nodes, or None if the draft is chains; checked."""
    if draft.parents_BN is None:
        assert all(n <= limit for n, limit in zip(draft.lengths_B, limits, strict=True)), "more than was asked for"
        return None
    trees = [parents[:n] for parents, n in zip(draft.parents_BN.tolist(), draft.lengths_B, strict=True)]
    for parents, limit in zip(trees, limits, strict=True):
        check(parents)
        assert max(depths(parents), default=0) <= limit, "deeper than was asked for"
    # chains in disguise take the shorter way
    return None if all(parents == chain(len(parents)) for parents in trees) else trees
