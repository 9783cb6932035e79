"""Training EAGLE-3 (arXiv 2503.01840, section 3.2: training-time test).

A block is unrolled as it is drafted: its first pair has the target's feature, every later one the
network's own state of the pair before, and the tokens are the right ones. Keys and values of the pairs
before a block depend on the target's features alone, so all blocks of a sequence share them.

The paper starts from random weights. `init: target` copies the target's last layer into the half that
reads the state, and its LM head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...cache import round_up
from ...drafters import Drafter
from ...drafters.eagle3 import Eagle3Drafter, Eagle3Network
from ...drafters.eagle3_folder import Eagle3Config, check_against, default_layer_ids, read, write
from ...target import Target
from ..blocks import Blocks, attend_piece, block_masks
from ..config import TrainConfig
from ..data import TokenSequence
from ..features import Features
from ..objectives import Head
from .base import Method, Start, master_dtype, start_like, take_over
from .initialise import draft_vocab, rope_of


def make(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    vocab_ids = draft_vocab(sequences, config.draft_vocab, target) if config.draft_vocab else None
    shape = _shape(config, target, len(vocab_ids) if vocab_ids is not None else target.vocab_size)
    layer_ids = check_against(shape, target, "the draft to train")
    network = Eagle3Network(shape)
    start = start_like(network.to(master_dtype(target)), config.seed)
    copied = _copy_target(start, target, vocab_ids) if config.init == "target" else set()
    if config.init_from is not None:
        copied = take_over(start, read(config.init_from)[1], config.init_from)
    network = network.to(device=target.device, dtype=target.dtype)
    assert network.lm_head is not None
    method = Eagle3Method(
        target, sequences, network, Head(network.lm_head.weight), block_size=config.block_size, layer_ids=layer_ids,
        vocab_ids=vocab_ids,
    )  # fmt: skip
    return method, (start, copied)


def _shape(config: TrainConfig, target: Target, draft_vocab_size: int) -> Eagle3Config:
    text = target.config
    heads = int(text.num_attention_heads)
    return Eagle3Config(
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size or int(text.intermediate_size),
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or target.hidden_size // heads),
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        max_context=target.max_context,
        target_layer_ids=config.target_layer_ids or default_layer_ids(target.num_layers),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        rope=rope_of(text),
    )


def _copy_target(start: dict[str, torch.Tensor], target: Target, vocab_ids: torch.Tensor | None) -> set[str]:
    """The names that are copies. Of the attention's inputs the embedding's half starts at zero."""
    theirs = dict(target.layers[-1].named_parameters())
    final = getattr(target.model.base_model, "norm", None)
    found = {
        "lm_head.weight": target.head_rows(vocab_ids)[0],
        "norm.weight": getattr(final, "weight", None),
        "midlayer.hidden_norm.weight": theirs.get("input_layernorm.weight"),
        "midlayer.post_attention_layernorm.weight": theirs.get("post_attention_layernorm.weight"),
        **{name: theirs.get(name.removeprefix("midlayer.")) for name in start if "_proj." in name},
    }
    copied = set()
    for name, weight in found.items():
        own = start[name]
        if weight is not None and weight.shape == own.shape:
            own.copy_(weight.to("cpu"))
            copied.add(name)
        elif weight is not None and weight.ndim == 2 and own.shape == (weight.shape[0], 2 * weight.shape[1]):
            own.zero_()[:, weight.shape[1] :] = weight.to("cpu")
    width = start["fc.weight"].shape[0]
    start["fc.weight"].zero_()[:, -width:] = torch.eye(width)  # the deepest tap comes last
    return copied


class Eagle3Method(Method):
    network: Eagle3Network

    def states(self, blocks: Blocks, features: Mapping[int, Features]) -> torch.Tensor:
        """Shapes as in blocks.py; the pair of position j is token j + 1 with the feature of j."""
        fused = {i: self.network.fuse(features[i].states_TF[:end]) for i, end in blocks.furthest().items()}
        unroll = _Unroll(self, blocks, fused)
        tokens = torch.cat([blocks.tokens_AB[:, :1], blocks.labels_AL.clamp(min=0)], dim=1)
        before = blocks.positions_AB[:, 0].view(-1, blocks.blocks_per_piece) - 1
        hidden = torch.cat([fused[i][at] for i, at in zip(blocks.sequences, before, strict=True)])[:, None]
        states = []
        for slot in range(blocks.labels_AL.shape[1]):
            positions = blocks.positions_AB[:, slot, None] - 1
            hidden = self.network(self.target.embed(tokens[:, slot, None]), hidden, positions, unroll.attend)
            states.append(hidden)
        out: torch.Tensor = self.network.norm(torch.cat(states, dim=1))
        return out

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        write(folder, self.network.config, weights, self.vocab_ids, info)

    def drafter(self, network: nn.Module) -> Drafter:
        assert isinstance(network, Eagle3Network)
        return Eagle3Drafter(network, self.target, self.vocab_ids, self.block_size)


class _Unroll:
    """Attention of all blocks over the pairs before them and their own so far."""

    def __init__(self, method: Eagle3Method, blocks: Blocks, fused: Mapping[int, torch.Tensor]) -> None:
        self._blocks = blocks
        self._context = {}
        for i, end in blocks.furthest().items():
            embeds = method.target.embed(method.tokens(i, end + 1)[1:])
            self._context[i] = method.network.project_context(embeds, fused[i], torch.arange(end, device=embeds.device))
        size = blocks.blocks_per_piece
        self._masks = [
            # before its own first pair, which is that of the anchor
            block_masks(blocks.positions_AB[p * size : (p + 1) * size] - 1, round_up(end), None, True, fused[i].dtype)[0]
            for p, (i, end) in enumerate(zip(blocks.sequences, blocks.reach, strict=True))
        ]  # fmt: skip
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self._keys.append(k)
        self._values.append(v)
        keys, values = torch.cat(self._keys, dim=2), torch.cat(self._values, dim=2)
        own = q.new_zeros(1, len(self._keys))
        outs = []
        for piece, (i, end) in enumerate(zip(self._blocks.sequences, self._blocks.reach, strict=True)):
            size = self._blocks.blocks_per_piece
            part, seen = slice(piece * size, (piece + 1) * size), slice(0, round_up(end))
            context_k, context_v = (t[seen] for t in self._context[i])
            outs.append(attend_piece(q[part], context_k, context_v, keys[part], values[part], self._masks[piece], own))
        return torch.cat(outs)
