"""What a method is to the trainer: a network, the states of its blocks, the head behind them, files.

Every method drafts the tokens behind an anchor, so all train on the same blocks (blocks.py), with the
same loss (objectives.py), optimizer and checkpoints. A new one is a file here and a line in the table
of `make_method`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...drafters import Drafter
from ...target import Target
from ...types import FlashdraftError
from ..blocks import Blocks
from ..data import TokenSequence
from ..features import Features
from ..objectives import Head


class Method(ABC):
    """One method of drafting while it is trained.

    Attributes:
        network: in the compute precision, on the target's device; what wants a gradient is trained.
        head: from states to logits over the draft vocabulary.
        block_size: anchor + labels of a block.
        layer_ids: tapped layers of the target; empty for none.
        vocab_ids: the draft vocabulary, or None for all ids.
        attention: "flex" or "sdpa" (flex.py).
    """

    def __init__(
        self, target: Target, sequences: Sequence[TokenSequence], network: nn.Module, head: Head,
        *, block_size: int, layer_ids: Sequence[int] = (), mask_token_id: int = 0,
        vocab_ids: torch.Tensor | None = None, attention: str = "sdpa",
    ) -> None:  # fmt: skip
        self.target, self.sequences, self.network, self.head = target, sequences, network, head
        self.block_size, self.layer_ids, self.mask_token_id = block_size, tuple(layer_ids), mask_token_id
        self.vocab_ids, self.attention = vocab_ids, attention

    def prepare(self, blocks: Blocks, step: int) -> Blocks:
        """What the blocks of a step look like before they are used; a function of seed and step."""
        return blocks

    @abstractmethod
    def states(self, blocks: Blocks, features: Mapping[int, Features]) -> torch.Tensor:
        """States [A, L, D] that the head reads: slot k is about the token k places behind the anchor."""

    @abstractmethod
    def write(self, folder: Path, weights: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        """A draft folder that `--draft` reads, from the network's trained weights."""

    @abstractmethod
    def drafter(self, network: nn.Module) -> Drafter:
        """What decodes with a copy of the network."""

    def tokens(self, sequence: int, end: int) -> torch.Tensor:
        """Ids [end] of a sequence, filled up with its last one, on the target's device."""
        ids = torch.tensor(self.sequences[sequence].token_ids[:end])
        filled = torch.cat([ids, ids[-1:].expand(end - len(ids))])
        return filled.to(self.target.device)


# a network's weights in full precision, where training begins, and those of them that were the target's
Start = tuple[dict[str, torch.Tensor], set[str]]


def master_dtype(target: Target) -> torch.dtype:
    return torch.float64 if target.dtype == torch.float64 else torch.float32


def start_like(network: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """The first weights of a draft of any method: norms are 1, biases 0, matrices normal; those that end a
    residual branch are small. A seed's numbers are drawn in fp32, in the order of the network's names, and
    runs depend on them."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in network.named_parameters():
        if parameter.ndim == 1:
            found[name] = torch.zeros_like(parameter) if name.endswith("bias") else torch.ones_like(parameter)
        else:
            scale = 0.01 if "down" in name or "o_proj" in name else 0.02
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            found[name] = (values * scale).to(parameter.dtype)
    return found


def take_over(own: dict[str, torch.Tensor], saved: Mapping[str, torch.Tensor], folder: str | Path) -> set[str]:
    """Start from the weights of another draft of the same shape. Raises FlashdraftError."""
    if {k: tuple(v.shape) for k, v in own.items()} != {k: tuple(v.shape) for k, v in saved.items()}:
        raise FlashdraftError(f"{folder} has weights of other shapes than this configuration; they have to be equal.")
    for name, weight in saved.items():
        own[name] = weight.to(own[name].dtype)
    return set(own)
