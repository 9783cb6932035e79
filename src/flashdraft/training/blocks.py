"""Many blocks of several sequences in one pass of the draft network.

The blocks of a piece share their sequence's context: its keys and values are projected once and
never copied per anchor. A block's query sees the context before its anchor and its own block, in
one softmax; blocks do not see each other. Network and projections are those of decoding.

Shape letters here: A blocks of a pass, N blocks of a piece, B slots of a block, L = B - 1 labels,
S context, H heads, G query heads of a key/value head, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..cache import round_up
from ..draft_config import DraftConfig
from ..drafters.dflash import Attend, DFlashNetwork
from .data import TokenSequence
from .flex import flex_attend
from .plan import Piece


@dataclass(frozen=True)
class Blocks:
    """A batch of pieces as tensors.

    tokens_AB: [anchor, MASK, ...]. positions_AB. labels_AL: what slots 1.. should predict, -1 for
    none. sequences: of each piece. N = A / pieces; blocks that fill up a piece have no label.
    reach: of each piece, the context slots that its furthest block sees.
    """

    tokens_AB: torch.Tensor
    positions_AB: torch.Tensor
    labels_AL: torch.Tensor
    sequences: tuple[int, ...]
    blocks_per_piece: int
    reach: tuple[int, ...]

    def furthest(self, beyond: int = 0) -> dict[int, int]:
        """Of each sequence, the context slots that any of its pieces sees, and so many more, in whole buckets."""
        found: dict[int, int] = {}
        for sequence, end in zip(self.sequences, self.reach, strict=True):
            found[sequence] = max(found.get(sequence, 0), round_up(end + beyond))
        return found

    def to(self, device: torch.device) -> Blocks:
        tensors = {name: getattr(self, name).to(device) for name in ("tokens_AB", "positions_AB", "labels_AL")}
        return replace(self, **tensors)


def make_blocks(
    pieces: Sequence[Piece],
    sequences: Sequence[TokenSequence],
    block_size: int,
    mask_token_id: int,
    blocks_per_piece: int,
    device: torch.device | str = "cpu",
    num_pieces: int | None = None,
) -> Blocks:
    """num_pieces: fill the batch up to so many, with pieces that have no label, for shapes that stay."""
    filling = [Piece(pieces[-1].sequence, pieces[-1].anchors, (0,) * len(pieces[-1].anchors))]
    pieces = [*pieces, *filling * ((num_pieces or 0) - len(pieces))]
    slots = torch.arange(block_size)
    tokens, positions, labels = [], [], []
    for piece in pieces:
        padding = blocks_per_piece - len(piece.anchors)
        ids = torch.tensor(sequences[piece.sequence].token_ids)
        anchors = torch.tensor([*piece.anchors, *piece.anchors[-1:] * padding])
        ends = torch.tensor([*piece.ends, *[0] * padding])
        at = anchors[:, None] + slots
        label = torch.where(at < ends[:, None], ids[at.clamp(max=len(ids) - 1)], -1)
        block = torch.full_like(at, mask_token_id)
        block[:, 0] = ids[anchors]
        tokens.append(block)
        positions.append(at)
        labels.append(label[:, 1:])
    return Blocks(
        torch.cat(tokens).to(device),
        torch.cat(positions).to(device),
        torch.cat(labels).to(device),
        tuple(piece.sequence for piece in pieces),
        blocks_per_piece,
        tuple(max(piece.anchors) for piece in pieces),
    )


def block_states(
    network: DFlashNetwork,
    embed: Callable[[torch.Tensor], torch.Tensor],
    blocks: Blocks,
    states_TF: Mapping[int, torch.Tensor],
    attention: str = "sdpa",
) -> torch.Tensor:
    """Final states [A, L, D] of the masked slots. states_TF: features of the batch's sequences.

    attention: "sdpa" is a call per piece, "flex" one for all of them (flex.py).
    """
    if attention == "flex":
        attend = flex_attend(network, blocks, states_TF)
    else:
        attend = piece_attend(network.config, blocks, _project(network, blocks.furthest(), states_TF))
    embeds = embed(blocks.tokens_AB) * network.config.embedding_scale
    states: torch.Tensor = network(embeds, blocks.positions_AB, attend)
    return states[:, 1:]


# of a sequence, per layer: the context's keys and values [S, kv heads, d]
Context = Sequence[tuple[torch.Tensor, torch.Tensor]]


def piece_attend(config: DraftConfig, blocks: Blocks, context: Mapping[int, Context]) -> Attend:
    """What the network calls for the attention of this pass. context: of every sequence, as far as it is seen."""
    size, reach = blocks.blocks_per_piece, blocks.reach
    masks: dict[tuple[int, int | None, bool], tuple[torch.Tensor, torch.Tensor]] = {}

    def masks_of(piece: int, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        key = (piece, config.windows[layer], config.causal[layer])
        if key not in masks:
            at = blocks.positions_AB[piece * size : (piece + 1) * size]
            masks[key] = block_masks(at, round_up(reach[piece]), key[1], key[2], dtype)
        return masks[key]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs = []
        for piece, sequence in enumerate(blocks.sequences):
            part = slice(piece * size, (piece + 1) * size)
            seen = slice(0, round_up(reach[piece]))
            keys, values = context[sequence][layer]
            masks = masks_of(piece, layer, q.dtype)
            outs.append(attend_piece(q[part], keys[seen], values[seen], k[part], v[part], *masks))
        return torch.cat(outs)

    return attend


def _project(
    network: DFlashNetwork, furthest: Mapping[int, int], states_TF: Mapping[int, torch.Tensor]
) -> dict[int, Context]:
    projected: dict[int, Context] = {}
    for sequence, end in furthest.items():
        states = states_TF[sequence][:end]
        projected[sequence] = network.project_context(states, torch.arange(end, device=states.device))
    return projected


def block_masks(
    positions_NB: torch.Tensor, num_slots: int, window: int | None, causal: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Additive masks over the context [N, 1 or B, S] and over a block [B, B]."""
    slots = torch.arange(num_slots, device=positions_NB.device)
    seen = slots < positions_NB[:, :1, None]
    within = torch.arange(positions_NB.shape[1], device=positions_NB.device)
    away = within[:, None] - within
    own = away >= 0 if causal else torch.ones_like(away, dtype=torch.bool)
    if window is not None:
        seen = seen & (positions_NB[:, :, None] - slots < window)
        own = own & (away.abs() < window)
    return additive(seen, dtype), additive(own, dtype)


def causal_mask(num_slots: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Additive mask [S, S] of a context that reads itself through a window."""
    slots = torch.arange(num_slots, device=like.device)
    away = slots[:, None] - slots
    return additive((away >= 0) & (away < window), like.dtype)


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def attend_piece(
    q: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    block_k: torch.Tensor,
    block_v: torch.Tensor,
    context_mask: torch.Tensor,
    block_mask: torch.Tensor,
) -> torch.Tensor:
    """Attention of N blocks over their shared context and, each, its own block.

    Args:
        q: [N, H, B, d]. block_k, block_v: [N, kv heads, C, d], C = B where a block sees itself whole.
        context_k, context_v: [S, kv heads, d], one copy for all blocks.
        context_mask: additive [N, 1 or B, S]. block_mask: additive [B, C].

    Returns [N, B, H, d].
    """
    n, heads, size, dim = q.shape
    kv_heads = block_k.shape[1]
    group = heads // kv_heads
    q = (q * dim**-0.5).view(n, kv_heads, group, size, dim)
    shared = q.transpose(0, 1).reshape(kv_heads, n * group * size, dim)
    before = shared @ context_k.permute(1, 2, 0)
    before = before.view(kv_heads, n, group, size, -1) + context_mask[:, None]
    own = q.flatten(2, 3) @ block_k.transpose(-1, -2)
    own = own.view(n, kv_heads, group, size, -1).transpose(0, 1) + block_mask
    probs = torch.cat([before, own], dim=-1).softmax(-1)
    slots = context_k.shape[0]
    seen = probs[..., :slots].reshape(kv_heads, n * group * size, slots) @ context_v.transpose(0, 1)
    seen = seen.view(kv_heads, n, group * size, dim).transpose(0, 1)
    local = probs[..., slots:].transpose(0, 1).reshape(n, kv_heads, group * size, -1) @ block_v
    return (seen + local).reshape(n, heads, size, dim).transpose(1, 2)
