"""One round: propose, verify in one pass, commit. Plain decoding is the round without a draft.

A session owns the target's cache, the drafter's state and the committed tokens of its rows. It
picks no request and cuts no answer: the engine does, between `verify` and `commit`.

Invariant of every row between calls: the drafter's context holds all committed tokens but the last, the
anchor. So does the target's cache, but for tokens of a tree's side branches, which the next pass reads again.

Why again: attention adds up what a token sees in the order of the slots, and on a branch that order has gaps
that it has not in the text. In bfloat16 the difference grows to tenths of a logit, and stays in the cache. The
spine of a tree, its first branch, lies as the text does. With the rest read again where it belongs, and a choice
on a branch that is too close to rely on left to the next round, a tree leaves the cache as plain decoding would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .drafters import Drafter
from .drafters.drawing import padded
from .sampling import ACCEPT, RESIDUAL, RowSampler, uniform
from .target import Target, padded_width
from .tree import chain, check, depths, hang, paths, spine_first
from .types import Commit, Draft, FlashdraftError, TargetOutput, Verdict
from .verify import accept_matching, accept_rejection

# A choice on a branch counts if its lead is more than so many units of rounding (eps of the largest logit, or of one of
# the usual size). On SmolLM2 in bfloat16 the other order moved 3 in 100 of 522 leads, by 1.07 units at most.
_NEAR, _USUAL = 1.5, 16.0


@dataclass(frozen=True)
class Proposal:
    """A row's verified tokens, not yet final: the accepted ones and the bonus token last.

    logits_TV: the target's logits each of them was picked from (T = len(tokens)).
    slots: where in the verify pass, counted from the anchor, those logits and the tokens' features came from.
    depth: levels of the draft's tree; None for a chain.
    """

    tokens: tuple[int, ...]
    num_drafted: int
    logits_TV: torch.Tensor
    slots: tuple[int, ...] = ()
    depth: int | None = None


@dataclass(frozen=True)
class _Verified:
    """A pass that waits for its commit: rows, tapped states, and the slots of each row's proposal."""

    rows: tuple[int, ...] = ()
    features_BTF: torch.Tensor | None = None
    slots: tuple[tuple[int, ...], ...] = ()


class Session:
    """Rows of a batch that advance together, each by its own number of tokens.

    Args:
        context: committed tokens a row can hold.
        prefill_chunk: prompt tokens in one pass.
    """

    def __init__(self, target: Target, drafter: Drafter, rows: int, context: int, prefill_chunk: int = 512) -> None:
        # a pass holds a draft, and what was on the branch of another: at most as much again
        slack = max(64, 2 * drafter.max_draft_tokens + 1)
        self.target = target
        self.drafter = drafter
        self.cache = target.new_cache(rows, context, slack)
        self.state = drafter.open(rows, context)
        self.tokens: list[list[int]] = [[] for _ in range(rows)]
        self.samplers: list[RowSampler | None] = [None] * rows
        self._num_unread = [0] * rows  # committed tokens before the anchor that are not in the cache
        self.draft_seconds = self.verify_seconds = 0.0
        self._chunk = prefill_chunk
        self._verified = _Verified()

    def num_cached(self, row: int) -> int:
        """How many of a row's tokens a prefill can reuse."""
        return min(self.cache.lengths[row], len(self.tokens[row]))

    def prefill(self, row: int, prompt: Sequence[int], sampler: RowSampler, reuse: int = 0) -> Proposal:
        """Commit a prompt, behind the row's first `reuse` tokens which it shares, and propose the
        target's first token (committed too: a round has to have an anchor)."""
        assert 0 <= reuse < len(prompt) and list(prompt[:reuse]) == self.tokens[row][:reuse]
        assert reuse <= self.num_cached(row)
        # What this prefill overwrites is forgotten first: if it fails half way, nobody goes on from it.
        self.tokens[row] = list(prompt[:reuse])
        self.cache.roll_back(row, reuse)
        self._num_unread[row] = 0
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
        trees, drafted = _trees(draft, limits)
        proposed = self._now()
        unread = [self._num_unread[row] for row in rows]
        leads = [self.tokens[row][-1 - count :] for row, count in zip(rows, unread, strict=True)]
        tokens_BT = padded([lead + tokens for lead, tokens in zip(leads, drafted, strict=True)], self.target.device)
        out = self.target.forward(
            tokens_BT, self.cache, rows,
            valid=[len(lead) + len(tokens) for lead, tokens in zip(leads, drafted, strict=True)],
            layer_ids=self.drafter.target_layer_ids,
            parents=trees and [hang(tree, count) for tree, count in zip(trees, unread, strict=True)],
        )  # fmt: skip
        proposals = []
        for b, (sampler, tokens, first) in enumerate(zip(samplers, drafted, unread, strict=True)):
            logits_TV = out.logits_BTV[b, first : first + len(tokens) + 1]
            if trees is None or sampler.rejects:
                assert trees is None or trees[b] == chain(len(tokens)), "rejection knows chains only"
                probs = draft.probs_NV[b] if draft.probs_NV else None
                proposals.append(self._judge_chain(logits_TV, tokens, probs, sampler))
            else:
                proposals.append(self._judge_tree(logits_TV, tokens, trees[b], sampler))
        self._verified = _Verified(tuple(rows), out.features_BTF, tuple(p.slots for p in proposals))
        self.draft_seconds += proposed - began
        self.verify_seconds += self._now() - proposed
        return proposals

    def _judge_chain(
        self, logits_TV: torch.Tensor, tokens: list[int], probs: torch.Tensor | None, sampler: RowSampler
    ) -> Proposal:
        verdict = self._pick(sampler, logits_TV, tokens, probs)
        kept = (*(tokens[n] for n in verdict.path), verdict.bonus)
        return Proposal(kept, len(tokens), logits_TV[: len(kept)], tuple(range(len(kept))))

    def _judge_tree(
        self, logits_TV: torch.Tensor, tokens: list[int], parents: Sequence[int], sampler: RowSampler
    ) -> Proposal:
        ways = paths(tokens, parents)
        own = sampler.choose(logits_TV, paths=ways)

        def reliable(node: int) -> bool:
            """On the spine a choice is the one the text would get; on a branch, where it is clear."""
            if len(ways[node + 1]) == node + 1:
                return True
            logits_V = logits_TV[node + 1]
            unit = _NEAR * torch.finfo(self.target.dtype).eps
            return sampler.lead(logits_V, ways[node + 1]) > unit * max(float(logits_V.max()), _USUAL)

        verdict = accept_matching(tokens, own.tolist(), parents, reliable)
        slots = (0, *(node + 1 for node in verdict.path))
        self._check_finite(logits_TV.gather(-1, own[:, None])[list(slots)])
        kept = (*(tokens[n] for n in verdict.path), verdict.bonus)
        return Proposal(kept, len(tokens), logits_TV[list(slots)], slots, max(map(len, ways)))

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
        verified, features = self._verified, []
        for b, (row, tokens) in enumerate(zip(verified.rows, kept, strict=True)):
            slots, first = verified.slots[b][: len(tokens)], self._num_unread[row]
            # entries that lie where the text has them: all before the first step aside
            in_place = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
            self.cache.keep(row, first + in_place)
            self._num_unread[row] = len(slots) - in_place
            self.tokens[row].extend(tokens)
            sampler = self.samplers[row]
            assert sampler is not None
            sampler.commit(tokens)
            if verified.features_BTF is not None:
                end = first + len(slots)
                where = slice(first, end) if in_place == len(slots) else [first + slot for slot in slots]
                features.append(verified.features_BTF[b, where])
        began = self._now()
        told = torch.cat(features) if features else None
        self.drafter.observe(self.state, Commit(verified.rows, tuple(map(tuple, kept)), told))
        self.draft_seconds += self._now() - began
        self._verified = _Verified()

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


def _trees(draft: Draft, limits: Sequence[int]) -> tuple[list[list[int]] | None, list[list[int]]]:
    """Every row's parents, None if all are chains, and its tokens: checked, each tree's spine first."""
    drafted = [tokens[:n] for tokens, n in zip(draft.tokens_BN.tolist(), draft.lengths_B, strict=True)]
    if draft.parents_BN is None:
        assert all(n <= limit for n, limit in zip(draft.lengths_B, limits, strict=True)), "more than was asked for"
        return None, drafted
    trees = []
    for b, (tokens, parents, limit) in enumerate(zip(drafted, draft.parents_BN.tolist(), limits, strict=True)):
        tree = parents[: len(tokens)]
        check(tree)
        assert max(depths(tree), default=0) <= limit, "deeper than was asked for"
        drafted[b], tree = spine_first(tokens, tree)
        trees.append(tree)
    # chains in disguise take the shorter way
    return None if all(tree == chain(len(tree)) for tree in trees) else trees, drafted
