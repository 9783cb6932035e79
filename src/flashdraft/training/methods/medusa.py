"""Training Medusa's heads (arXiv 2401.10774, section 2.2.1: Medusa-1, the target is frozen).

A head's projection starts as the target's LM head and its residual blocks as nothing (section 2.1.1), so at
first every head says what the target says next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...drafters import Drafter
from ...drafters.medusa import MedusaConfig, MedusaDrafter, MedusaNetwork, check_against, read, static_tree, write
from ...target import Target
from ...types import FlashdraftError
from ..blocks import Blocks
from ..config import TrainConfig
from ..data import TokenSequence
from ..features import Features
from ..objectives import SlotHeads
from .base import Method, Start, master_dtype, start_like, take_over


def make(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    if config.draft_vocab:
        raise FlashdraftError(f"draft_vocab is {config.draft_vocab}, but Medusa's heads have the whole vocabulary.")
    heads = config.block_size - 1
    shape = MedusaConfig(
        target.hidden_size, target.vocab_size, heads, config.num_layers, bias=True,
        choices=static_tree(heads, target.vocab_size),
    )  # fmt: skip
    check_against(shape, target, "the draft to train")
    network = MedusaNetwork(shape)
    start = start_like(network.to(master_dtype(target)), config.seed)
    copied = _copy_target(start, target) if config.init == "target" else set()
    if config.init_from is not None:
        copied = take_over(start, read(config.init_from)[1], config.init_from)
    network = network.to(device=target.device, dtype=target.dtype)
    weights = tuple(network.get_parameter(f"lm_heads.{k}.weight") for k in range(heads))
    head = SlotHeads(weights[0], weights=weights)
    method = MedusaMethod(
        target, sequences, network, head, block_size=config.block_size, layer_ids=(target.num_layers,)
    )
    return method, (start, copied)


def _copy_target(start: dict[str, torch.Tensor], target: Target) -> set[str]:
    rows = target.head_rows()[0].to("cpu")
    copied = {name for name in start if name.startswith("lm_heads.")}
    for name in start:
        start[name] = rows.to(start[name].dtype).clone() if name in copied else torch.zeros_like(start[name])
    return copied


class MedusaMethod(Method):
    network: MedusaNetwork

    def states(self, blocks: Blocks, features: Mapping[int, Features]) -> torch.Tensor:
        before = blocks.positions_AB[:, 0].view(-1, blocks.blocks_per_piece) - 1  # it predicted the anchor
        seen = torch.cat([features[i].states_TF[at] for i, at in zip(blocks.sequences, before, strict=True)])
        return self.network.states(seen)

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        write(folder, self.network.config, weights, info)

    def drafter(self, network: nn.Module) -> Drafter:
        assert isinstance(network, MedusaNetwork)
        return MedusaDrafter(network, self.target, use_tree=False)
