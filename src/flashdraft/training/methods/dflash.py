"""Training DFlash (arXiv 2602.06036), and DFlash without its parts.

"injected" is the paper's: the context is projected features. In the others ("fused", "none",
drafters/dflash_ablations.py) the context's tokens run through the network, once for all blocks of a
sequence. An autoregressive draft is trained on blocks of which a random number of first slots is
filled in, as it finds them when it decodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ... import checkpoint
from ...drafters import Drafter
from ...drafters.dflash import DFlashDrafter, DFlashNetwork
from ...drafters.dflash_ablations import OwnContextDrafter
from ...sampling import counter_key
from ...target import Target
from ..blocks import Blocks, Context, block_states, causal_mask, piece_attend
from ..config import TrainConfig
from ..data import TokenSequence
from ..features import Features
from ..flex import choose_attention
from ..objectives import Head
from .base import Method, Start
from .initialise import draft_config, draft_vocab, new_network

_REVEAL = 20  # stream of counter_key


def make(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    shape = draft_config(config, target, sequences)
    vocab_ids = draft_vocab(sequences, config.draft_vocab, target) if config.draft_vocab else None
    weights, copied = new_network(config, shape, target, sequences)
    network = DFlashNetwork(shape).to(device=target.device, dtype=target.dtype)
    head = Head(*target.head_rows(vocab_ids), shape.output_multiplier, shape.softcap)
    kind = DFlashMethod if shape.context == "injected" else OwnContextMethod
    attention = choose_attention(config.attention, target.device, target.dtype, shape.head_dim)
    method = kind(
        target, sequences, network, head, block_size=shape.block_size, layer_ids=shape.target_layer_ids,
        mask_token_id=shape.mask_token_id, vocab_ids=vocab_ids, attention=attention,
    )  # fmt: skip
    method.seed = config.seed
    return method, (dict(weights.named_parameters()), copied)


class DFlashMethod(Method):
    network: DFlashNetwork
    seed = 0

    def prepare(self, blocks: Blocks, step: int) -> Blocks:
        if not self.network.config.autoregressive:
            return blocks
        num_blocks, num_labels = blocks.labels_AL.shape
        filled = torch.tensor([counter_key(self.seed + step, i, _REVEAL) % num_labels for i in range(num_blocks)])
        return reveal(blocks, filled)

    def states(self, blocks: Blocks, features: Mapping[int, Features]) -> torch.Tensor:
        taps = {i: found.states_TF for i, found in features.items()}
        return block_states(self.network, self.target.embed, blocks, taps, self.attention)

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        checkpoint.write(folder, self.network.config, weights, info, self.vocab_ids)

    def drafter(self, network: nn.Module) -> Drafter:
        assert isinstance(network, DFlashNetwork)
        kind = DFlashDrafter if network.config.context == "injected" else OwnContextDrafter
        return kind(network, self.target, vocab_ids=self.vocab_ids)


def reveal(blocks: Blocks, filled_A: torch.Tensor) -> Blocks:
    """Blocks whose first slots behind the anchor hold their tokens, which are no labels any more."""
    labels = blocks.labels_AL
    given = (torch.arange(labels.shape[1]) < filled_A[:, None]) & (labels >= 0)
    tokens = blocks.tokens_AB.clone()
    tokens[:, 1:] = torch.where(given, labels, tokens[:, 1:])
    return dataclasses.replace(blocks, tokens_AB=tokens, labels_AL=torch.where(given, -1, labels))


class OwnContextMethod(DFlashMethod):
    """The context runs through the network, causally."""

    def states(self, blocks: Blocks, features: Mapping[int, Features]) -> torch.Tensor:
        config, size = self.network.config, blocks.blocks_per_piece
        fused = {}
        if config.context == "fused":
            fused = {i: self._shifted(features[i].states_TF[:end]) for i, end in blocks.furthest().items()}
        context = {i: self._read(i, end, fused.get(i)) for i, end in blocks.furthest().items()}
        embeds = self.target.embed(blocks.tokens_AB) * config.embedding_scale
        if fused:  # what predicted the anchor is known, what would predict the slots is not
            anchors = blocks.positions_AB[:, 0].view(-1, size)
            known = torch.cat([fused[i][at] for i, at in zip(blocks.sequences, anchors, strict=True)])
            embeds = torch.cat([embeds[:, :1] + known[:, None], embeds[:, 1:]], dim=1)
        states: torch.Tensor = self.network(embeds, blocks.positions_AB, piece_attend(config, blocks, context))
        return states[:, 1:]

    def _shifted(self, states_TF: torch.Tensor) -> torch.Tensor:
        """Fused features [T + 1, D] at the places of the tokens that they predicted."""
        return F.pad(self.network.fuse(states_TF), (0, 0, 1, 0))

    def _read(self, sequence: int, end: int, fused: torch.Tensor | None) -> Context:
        config = self.network.config
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        positions = torch.arange(end, device=self.target.device)[None]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            found.append((k[0].transpose(0, 1), v[0].transpose(0, 1)))
            window = config.windows[layer]
            mask = None if window is None else causal_mask(end, window, q)
            seen = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
            return seen.transpose(1, 2)

        embeds = self.target.embed(self.tokens(sequence, end))[None] * config.embedding_scale
        if fused is not None:
            embeds = embeds + fused[:end]
        self.network(embeds, positions, attend)
        return found
