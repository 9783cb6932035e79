"""Distilling a draft model: the target's own architecture with fewer of its layers.

The layers are spread evenly over the target's, first and last among them; embedding and head stay the
target's and are not trained. Every block has one label, the token behind its anchor: a language model
learns a position at a time, and one pass over a sequence serves all of its blocks. So `tau_estimate` of such
a run is 1 + the share of right tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ... import draft_folder
from ...drafters import Drafter
from ...drafters.draft_model import DraftModelDrafter
from ...loading import quiet_transformers
from ...target import Target
from ...types import FlashdraftError
from ..blocks import Blocks
from ..config import TrainConfig
from ..data import TokenSequence
from ..features import Features
from ..objectives import Head
from .base import Method, Start, master_dtype
from .initialise import output_shape


def make(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    if config.draft_vocab:
        raise FlashdraftError(f"draft_vocab is {config.draft_vocab}, but a draft model has the target's vocabulary.")
    if config.init_from is not None or config.init != "target":
        raise FlashdraftError("a draft model starts from the target's layers (init: target, without init_from).")
    model = shortened(target, config.num_layers)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    start = {n: p.detach().to(master_dtype(target)).clone() for n, p in trained.items()}
    head = Head(*target.head_rows(), *output_shape(target.config))
    method = DraftModelMethod(target, sequences, model, head, block_size=2)
    method.decoded_block_size = config.block_size
    return method, (start, set(start))


def shortened(target: Target, num_layers: int) -> PreTrainedModel:
    """The target's model with some of its layers, in its precision; layers and final norm want gradients."""
    if not 1 <= num_layers < target.num_layers:
        raise FlashdraftError(
            f"num_layers is {num_layers}; expected 1 to {target.num_layers - 1}, fewer than {target.name} has."
        )
    chosen = [round(i * (target.num_layers - 1) / max(num_layers - 1, 1)) for i in range(num_layers)]
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in chosen]
    with quiet_transformers():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=target.dtype)
    weights = _weights(target.model, chosen)
    missing = set(model.state_dict()) - set(weights)
    if missing:
        raise FlashdraftError(
            f"no draft model can be cut from {target.name}: it has no {min(missing)} where its layers are expected."
        )
    model.load_state_dict(weights, strict=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers." in name or name.endswith(".norm.weight"))
    network: PreTrainedModel = model.to(target.device).eval()
    return network


def _weights(model: nn.Module, chosen: Sequence[int]) -> dict[str, torch.Tensor]:
    """The model's weights with the chosen layers counted anew."""
    found = {}
    for name, weight in model.state_dict().items():
        before, mark, rest = name.partition(".layers.")
        index, _, inner = rest.partition(".")
        if not mark:
            found[name] = weight
        else:
            found |= {f"{before}.layers.{i}.{inner}": weight for i, of in enumerate(chosen) if of == int(index)}
    return found


class DraftModelMethod(Method):
    """Attributes: decoded_block_size: anchor + tokens that it drafts when it decodes."""

    network: PreTrainedModel
    decoded_block_size = 5

    def states(self, blocks: Blocks, features: Mapping[int, Features]) -> torch.Tensor:
        # causal, so what a sequence is filled up with is seen by nobody
        read = {i: self._read(self.tokens(i, end)) for i, end in blocks.furthest(1).items()}
        anchors = blocks.positions_AB[:, 0].view(-1, blocks.blocks_per_piece)
        return torch.cat([read[i][at] for i, at in zip(blocks.sequences, anchors, strict=True)])[:, None]

    def _read(self, tokens_T: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.network.base_model(input_ids=tokens_T[None], use_cache=False)[0]
        return states[0]

    def write(self, folder: Path, weights: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        model = copy.deepcopy(self.network)
        for name, weight in weights.items():
            model.get_parameter(name).data.copy_(weight)
        with quiet_transformers():
            model.save_pretrained(folder)
            if self.target.tokenizer is not None:
                self.target.tokenizer.save_pretrained(folder)
        draft_folder.write_json(folder / draft_folder.TRAINING, info)

    def drafter(self, network: nn.Module) -> Drafter:
        assert isinstance(network, PreTrainedModel)
        model = Target(network, self.target.tokenizer, name="the draft model")
        return DraftModelDrafter(model, self.target, self.decoded_block_size)
