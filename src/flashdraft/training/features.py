"""What the target says about a sequence: tapped states, and its likeliest next tokens.

Computed online, its length rounded up so that kernel shapes repeat: one sequence at a time on a CPU,
on a GPU all that a batch lacks in a few passes. The features of the sequences in use are held in
memory; a folder may keep them for the next epoch, and so does a GPU with room.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..cache import round_up
from ..target import Target
from .config import TrainConfig
from .data import TokenSequence

# Tokens of a pass over several sequences, padding included: their logits take some gigabytes.
_TOKENS_PER_PASS = 16384


@dataclass(frozen=True)
class Features:
    """states_TF: tapped states, T a multiple of 64 (rows behind the sequence are finite, unused).

    ids_TK, probs_TK: the K likeliest ids for the token AT position t, given those before it, as
    indices into the draft vocabulary, and their probabilities; None if no objective compares them.
    """

    states_TF: torch.Tensor
    ids_TK: torch.Tensor | None = None
    probs_TK: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        tensors = (self.states_TF, self.ids_TK, self.probs_TK)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


class FeatureSource:
    """Features of sequences by index.

    Args:
        vocab_ids: the draft vocabulary, or None for all of it.
    """

    def __init__(
        self,
        target: Target,
        sequences: Sequence[TokenSequence],
        layer_ids: Sequence[int],
        config: TrainConfig,
        vocab_ids: torch.Tensor | None = None,
    ) -> None:
        self._target, self._sequences, self._layer_ids = target, sequences, tuple(layer_ids)
        self._vocab_ids = vocab_ids
        self._num_tokens = config.distribution_tokens if config.needs_distribution else 0
        self._cache = target.new_cache(1, max(len(s.token_ids) for s in sequences), slack=64)
        # all sequences of a shuffled group, and those of the group that begins in the same batch
        self._recent: OrderedDict[int, Features] = OrderedDict()
        self._max_recent = config.mix + config.blocks_per_batch // config.anchors_per_piece
        self._bytes, self._max_bytes = 0, _room(target.device)
        self._store = None
        if config.feature_cache is not None:
            self._store = _Store(Path(config.feature_cache).expanduser(), config.feature_cache_gb, self._settings())

    def get(self, index: int) -> Features:
        return self.of([index])[index]

    def of(self, indices: Iterable[int]) -> dict[int, Features]:
        """Of several sequences, in their order."""
        wanted = list(dict.fromkeys(indices))
        found: dict[int, Features] = {}
        missing = []
        for index in wanted:
            if index in self._recent:
                self._recent.move_to_end(index)
                found[index] = self._recent[index]
            else:
                stored = self._store.load(self._sequences[index].token_ids) if self._store else None
                if stored is not None:
                    found[index] = self._hold(index, stored)
                else:
                    missing.append(index)
        for group in self._passes(missing):
            for index, features in zip(group, self._compute(group), strict=True):
                found[index] = self._hold(index, features)
                if self._store:
                    self._store.save(self._sequences[index].token_ids, features)
        return {index: found[index] for index in wanted}

    def _hold(self, index: int, features: Features) -> Features:
        self._recent[index] = features
        self._bytes += features.num_bytes
        while len(self._recent) > self._max_recent and self._bytes > self._max_bytes:
            self._bytes -= self._recent.popitem(last=False)[1].num_bytes
        return features

    def _passes(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Which sequences share a pass of the target: none on a CPU, where a pass of one fills the
        machine; else such of about the same length, up to a number of tokens."""
        if self._target.device.type == "cpu":
            yield from ([index] for index in indices)
            return
        group: list[int] = []
        for index in sorted(indices, key=self._width):
            if group and (len(group) + 1) * self._width(index) > _TOKENS_PER_PASS:
                yield group
                group = []
            group.append(index)
        if group:
            yield group

    def _width(self, index: int) -> int:
        return round_up(len(self._sequences[index].token_ids))

    def _settings(self) -> str:
        vocab = "" if self._vocab_ids is None else hashlib.sha256(self._vocab_ids.cpu().numpy().tobytes()).hexdigest()
        return json.dumps([self._target.name, str(self._target.dtype), self._layer_ids, self._num_tokens, vocab])

    def _compute(self, group: Sequence[int]) -> list[Features]:
        if not self._layer_ids and not self._num_tokens:  # nothing is asked of the target
            return [Features(torch.empty(self._width(index), 0, device=self._target.device)) for index in group]
        lengths = [len(self._sequences[index].token_ids) for index in group]
        width = round_up(max(lengths))
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        for row, (index, length) in enumerate(zip(group, lengths, strict=True)):
            ids[row, :length] = torch.tensor(self._sequences[index].token_ids)
        cache = self._cache if len(group) == 1 else self._target.new_cache(len(group), width)
        first = min(map(self._first_needed, group)) if self._num_tokens else width
        out = self._target.forward(
            ids.to(self._target.device), cache, range(len(group)), valid=lengths,
            keep=slice(first, None) if self._num_tokens else slice(0, 0), layer_ids=self._layer_ids,
        )  # fmt: skip
        tapped = out.features_BTF if self._layer_ids else ids.new_empty(*ids.shape, 0).to(self._target.device)
        assert tapped is not None
        found = []
        for row, (index, length) in enumerate(zip(group, lengths, strict=True)):
            # cloned, because autograd may not keep tensors of inference mode
            states = tapped[row, : self._width(index)].clone()
            if self._num_tokens:
                own = self._first_needed(index)
                found.append(Features(states, *self._likeliest(out.logits_BTV[row, own - first :], own, length)))
            else:
                found.append(Features(states))
        return found

    def _first_needed(self, index: int) -> int:
        """First position whose logits are used, in whole buckets."""
        starts = [start for start, _ in self._sequences[index].loss_spans]
        return max(min(starts, default=0) - 1, 0) // 64 * 64

    def _likeliest(self, logits_RV: torch.Tensor, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits_RV = logits_RV[: length - first]
        wide = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
        total = wide.logsumexp(-1, keepdim=True)
        if self._vocab_ids is not None:
            wide = wide[:, self._vocab_ids.to(wide.device)]
        top = wide.topk(min(self._num_tokens, wide.shape[-1]), dim=-1)
        probs = (top.values - total).exp()
        # row r speaks about the token after position first + r
        ids_TK = torch.zeros(length + 1, top.indices.shape[1], dtype=torch.int32, device=probs.device)
        probs_TK = torch.zeros(length + 1, top.indices.shape[1], dtype=probs.dtype, device=probs.device)
        ids_TK[first + 1 :] = top.indices
        probs_TK[first + 1 :] = probs
        return ids_TK, probs_TK


def _room(device: torch.device) -> int:
    """Bytes that features of other sequences than those in use may take: on a GPU 40 % of what is free."""
    if device.type != "cuda":
        return 0
    return int(0.4 * torch.cuda.mem_get_info(device)[0])


class _Store:
    """Features on disk, a file per sequence, until a size is reached. A damaged file is ignored."""

    def __init__(self, folder: Path, max_gb: float, settings: str) -> None:
        tag = hashlib.sha256(settings.encode()).hexdigest()[:16]
        self._folder = folder / tag
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "settings.json").write_text(settings + "\n")
        self._left = int(max_gb * 1e9) - sum(f.stat().st_size for f in self._folder.glob("*.safetensors"))

    def _file(self, tokens: Sequence[int]) -> Path:
        return self._folder / (hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:32] + ".safetensors")

    def load(self, tokens: Sequence[int]) -> Features | None:
        file = self._file(tokens)
        if not file.is_file():
            return None
        try:
            with safe_open(file, framework="pt") as stored:
                return Features(**{key: stored.get_tensor(key) for key in stored.keys()})  # noqa: SIM118
        except (SafetensorError, OSError, TypeError):
            return None

    def save(self, tokens: Sequence[int], features: Features) -> None:
        tensors = {k: v for k, v in vars(features).items() if v is not None}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        if size > self._left:
            return
        self._left -= size
        file = self._file(tokens)
        part = file.with_suffix(f".{os.getpid()}.part")  # other processes may write the same
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, part)
        part.replace(file)
