"""All blocks of a pass in one FlexAttention call: the attention of training on CUDA.

Keys are the contexts of the pass's sequences one behind the other, then the blocks:

    [ sequence 3 | sequence 0 | ... | padding ][ block 0 | block 1 | ... | padding ]
      S slots, a power of two                    Q slots, A x B rounded up to a tile

A query sees one run of slots in each part, whatever the window and the direction: from its sequence's
first slot, or the window's, to its anchor; and of its own block. So a mask is four numbers a query. They
are data, not code: one compiled kernel serves every layer and batch of the same S and Q, and which tiles
it has to visit follows from comparing ends of runs, without a function called for each query and slot.

Shape letters as in blocks.py; Q queries, S context slots, K = S + Q keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..drafters.dflash import Attend, DFlashNetwork
from ..types import FlashdraftError

if TYPE_CHECKING:
    from .blocks import Blocks

_TILE = 128  # of queries and of keys; the kernel's own tiles divide it
_LEAST_CONTEXT = 1024
_LEAST_HEAD_DIM = 16  # a Triton product has no narrower operands


def choose_attention(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """`attention` of the configuration as "flex" or "sdpa".

    Raises FlashdraftError if flex is asked for where it cannot train.
    """
    fits = dtype in (torch.bfloat16, torch.float16, torch.float32) and head_dim >= _LEAST_HEAD_DIM
    if wanted == "flex" and device.type == "cpu":
        raise FlashdraftError(
            "attention is 'flex', but FlexAttention has no backward pass on a CPU; set attention to auto or sdpa."
        )
    if wanted == "flex" and not fits:
        raise FlashdraftError(
            f"attention is 'flex', which needs bfloat16, float16 or float32 and heads of at least {_LEAST_HEAD_DIM} "
            f"numbers; the draft has {dtype} and {head_dim}. Set attention to auto or sdpa."
        )
    if wanted == "auto":
        return "flex" if device.type == "cuda" and fits else "sdpa"
    return wanted


def flex_attend(network: DFlashNetwork, blocks: Blocks, states_TF: Mapping[int, torch.Tensor]) -> Attend:
    """What the network calls for the attention of this pass."""
    config = network.config
    num_blocks, size = blocks.positions_AB.shape
    queries = num_blocks * size
    padding = -queries % _TILE
    features_SF, positions_S, starts_A = _pack(blocks, states_TF)
    context = network.project_context(features_SF, positions_S)
    num_slots = len(positions_S)
    masks: dict[tuple[int | None, bool], BlockMask] = {}

    def mask_of(layer: int) -> BlockMask:
        key = (config.windows[layer], config.causal[layer])
        if key not in masks:
            runs = visible_runs(blocks.positions_AB, starts_A, num_slots, *key)
            masks[key] = tile_mask(runs, num_slots + queries + padding)
        return masks[key]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (
            torch.cat([old, F.pad(new.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, padding))])
            for old, new in zip(context[layer], (k, v), strict=True)
        )
        flat = F.pad(q.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, padding))
        out = _call(flat, keys, values, mask_of(layer))
        return out[:queries].reshape(num_blocks, size, *out.shape[1:])

    return attend


def _pack(blocks: Blocks, states_TF: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features [S, F] of every sequence as far as it is seen, their positions [S], and the slot [A]
    where each block's sequence begins."""
    furthest: dict[int, int] = {}
    for sequence, end in zip(blocks.sequences, blocks.reach, strict=True):
        furthest[sequence] = max(furthest.get(sequence, 0), end)
    starts, total = {}, 0
    for sequence, end in furthest.items():
        starts[sequence] = total
        total += end
    # Powers of two: a shape is compiled once, and tiles of padding are never visited.
    padding = max(_LEAST_CONTEXT, 1 << (total - 1).bit_length()) - total
    features = torch.cat([states_TF[sequence][:end] for sequence, end in furthest.items()])
    positions = torch.cat([torch.arange(end) for end in furthest.values()])
    starts_A = torch.tensor([starts[sequence] for sequence in blocks.sequences]).repeat_interleave(
        blocks.blocks_per_piece
    )
    device = features.device
    return F.pad(features, (0, 0, 0, padding)), F.pad(positions, (0, padding)).to(device), starts_A.to(device)


def visible_runs(
    positions_AB: torch.Tensor, starts_A: torch.Tensor, num_slots: int, window: int | None, causal: bool
) -> torch.Tensor:
    """Slots that each query sees, int32 [4, Q]: first and end of a run in the context, and of one in
    the blocks' part. Queries that fill up a tile see themselves: a softmax over nothing is NaN."""
    num_blocks, size = positions_AB.shape
    anchors = positions_AB[:, :1]
    slots = torch.arange(size, device=positions_AB.device)
    first = torch.zeros_like(positions_AB)
    own_first, own_end = torch.zeros_like(slots), torch.full_like(slots, size)
    if window is not None:
        first = torch.minimum((positions_AB - window + 1).clamp(min=0), anchors)
        own_first, own_end = (slots - window + 1).clamp(min=0), (slots + window).clamp(max=size)
    if causal:
        own_end = slots + 1
    starts = starts_A[:, None]
    block = num_slots + size * torch.arange(num_blocks, device=slots.device)[:, None]
    ends = (starts + anchors).expand_as(first)
    runs = torch.stack([starts + first, ends, block + own_first, block + own_end]).flatten(1)
    filling = num_slots + torch.arange(runs.shape[1], runs.shape[1] + -runs.shape[1] % _TILE, device=slots.device)
    nothing = torch.zeros_like(filling)
    return torch.cat([runs, torch.stack([nothing, nothing, filling, filling + 1])], dim=1).int()


def tile_mask(runs_4Q: torch.Tensor, num_keys: int) -> BlockMask:
    """The same as tiles that some query sees, of which some are seen whole, and a rule for the others."""
    tiles = torch.arange(0, num_keys, _TILE, device=runs_4Q.device)
    first, end = runs_4Q[0::2, :, None], runs_4Q[1::2, :, None]
    # no tile has slots of both runs, as the context's part is a whole number of tiles
    touched = ((first < tiles + _TILE) & (end > tiles) & (first < end)).any(0)
    covered = ((first <= tiles) & (end >= tiles + _TILE)).any(0)
    whole = covered.view(-1, _TILE, len(tiles)).all(1)
    partial = touched.view(-1, _TILE, len(tiles)).any(1) & ~whole
    context_first, context_end, own_first, own_end = runs_4Q

    def seen(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        before = (key >= context_first[query]) & (key < context_end[query])
        own = (key >= own_first[query]) & (key < own_end[query])
        return torch.logical_or(before, own)

    mask: BlockMask = BlockMask.from_kv_blocks(*_listed(partial), *_listed(whole), BLOCK_SIZE=_TILE, mask_mod=seen)
    return mask


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles of each row of tiles, and which, those first; with dimensions for batch and heads."""
    which = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], which.int()[None, None]


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    """q [Q, H, d], k and v [K, kv heads, d] -> [Q, H, d]; nothing is copied on the way."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    try:
        out = _kernel("inductor" if q.is_cuda else "eager")(q, k, v, block_mask=mask, enable_gqa=True)
    except torch._dynamo.exc.TorchDynamoException as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise FlashdraftError(
            f"FlexAttention cannot be compiled here ({reason}); set attention to sdpa to train without it."
        ) from error
    states: torch.Tensor = out[0].transpose(0, 1)
    return states


@functools.cache
def _kernel(backend: str) -> Callable[..., torch.Tensor]:
    """Compiled once a process, a program for each pair of shapes. Off CUDA the same program is run
    operator by operator: slow, for tests."""
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False, backend=backend)
    return compiled
