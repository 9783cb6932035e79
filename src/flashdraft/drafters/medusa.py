"""Medusa (arXiv 2401.10774): K heads on the target's last hidden state; head k says the token k places ahead.

The state is what the target's own head reads: after the final norm. Each head is residual blocks
x + silu(W x + b), then a projection to the vocabulary. The state that predicted the anchor is known
when the round begins; head 1 says the token behind the anchor, head k the one k behind. Heads do not
know each other's tokens: a tree of their best guesses (section 2.3.3) buys what that costs.
Typical acceptance is lossy and not implemented.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import draft_folder, tree
from ..config_keys import MOST, Keys, short
from ..draft_config import MOST_BLOCK
from ..packing import pack
from ..sampling import RowSampler
from ..types import Commit, Draft, FlashdraftError
from .drawing import RowDraft, draw, drawn_chain, joined, likeliest, padded

if TYPE_CHECKING:
    from ..target import Target

ARCHITECTURE = "MedusaModel"
_MOST_HEADS = 64


@dataclass(frozen=True)
class MedusaConfig:
    """`choices`: paths of ranks, e.g. (0, 2) is the third guess of head 2 behind the best of head 1;
    empty for a chain of best guesses."""

    hidden_size: int
    vocab_size: int
    num_heads: int = 5
    num_blocks: int = 1
    bias: bool = True
    choices: tuple[tuple[int, ...], ...] = ()


def parse_config(raw: Mapping[str, Any], where: str = "config.json") -> MedusaConfig:
    """A MedusaConfig from config.json, vLLM's keys and `medusa_choices`. One error lists all problems."""
    names = raw.get("architectures")
    if raw.get("model_type") != "medusa" and names != [ARCHITECTURE]:
        raise FlashdraftError(
            f"{where} holds no Medusa heads: model_type is {short(raw.get('model_type'))}, expected 'medusa'."
        )
    keys = Keys(raw)
    config = MedusaConfig(
        hidden_size=keys.integer("hidden_size"),
        vocab_size=keys.integer("vocab_size"),
        num_heads=keys.integer("num_heads", most=_MOST_HEADS, default=5),
        num_blocks=keys.integer("num_hidden_layers", most=_MOST_HEADS, default=1),
        bias=bool(keys.flag("medusa_fc_bias")),
        choices=_choices(keys),
    )
    keys.problems += _problems(config)
    for name, accepted in (("truncated_vocab_size", config.vocab_size), ("original_lm_head", False)):
        if raw.get(name) not in (None, accepted):
            keys.problems.append(f"{name} is {short(raw[name])}, which is not supported")
    if keys.problems:
        raise FlashdraftError(f"{where} holds no Medusa heads that can be used: {'; '.join(keys.problems)}.")
    return config


def _choices(keys: Keys) -> tuple[tuple[int, ...], ...]:
    value = keys.get("medusa_choices")
    if value is None:
        return ()
    if isinstance(value, list) and all(
        isinstance(path, list) and path and all(type(rank) is int and 0 <= rank <= MOST for rank in path)
        for path in value
    ):
        return tuple(map(tuple, value))
    keys.problem("medusa_choices", value, "a list of lists of ranks counted from 0")
    return ()


def _problems(config: MedusaConfig) -> list[str]:
    known, problems = set(config.choices), []
    if len(known) < len(config.choices):
        problems.append("medusa_choices has a path twice")
    for path in config.choices:
        if len(path) > config.num_heads:
            problems.append(f"medusa_choices has the path {list(path)}, deeper than the {config.num_heads} heads")
        elif len(path) > 1 and path[:-1] not in known:
            problems.append(f"medusa_choices has {list(path)} without {list(path[:-1])}")
        if max(path) >= config.vocab_size:
            problems.append(f"medusa_choices has the rank {max(path)} of {config.vocab_size} tokens")
    return problems


def static_tree(num_heads: int, vocab_size: int, nodes: int = 24) -> tuple[tuple[int, ...], ...]:
    """Paths of ranks, grown one after another by the chance that all of a path is right (section 2.3.3).

    The chances are assumed: 0.5 for the first head's best guess, 0.75 of it for every head behind, and
    half of it for every rank below.
    """
    chances = [[0.5 * 0.75**k * 0.5**rank for rank in range(min(nodes, vocab_size))] for k in range(num_heads)]
    return tuple(tree.best_first([[math.log(chance) for chance in head] for head in chances], nodes))


def config_json(config: MedusaConfig, dtype: torch.dtype) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "medusa",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_blocks,
        "medusa_fc_bias": config.bias,
    }
    return raw | ({"medusa_choices": [list(path) for path in config.choices]} if config.choices else {})


def tensor_shapes(config: MedusaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, in vLLM's layout."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(config.num_heads):
        for n in range(config.num_blocks):
            shapes[f"blocks.{k}.layers.{n}.weight"] = (hidden, hidden)
            if config.bias:
                shapes[f"blocks.{k}.layers.{n}.bias"] = (hidden,)
        shapes[f"lm_heads.{k}.weight"] = (config.vocab_size, hidden)
    return shapes


def read(folder: str | Path) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    """Configuration and weights of a draft folder, read strictly."""
    path, raw = draft_folder.read_config(folder)
    config = parse_config(raw, str(path))
    return config, draft_folder.read_tensors(path, tensor_shapes(config))


def write(
    folder: str | Path,
    config: MedusaConfig,
    weights: Mapping[str, torch.Tensor],
    training: Mapping[str, Any] | None = None,
) -> None:
    """Save heads that `read` and vLLM load."""
    tensors = draft_folder.on_cpu(weights)
    draft_folder.check_tensors(tensor_shapes(config), draft_folder.kinds_of(tensors), "the network")
    raw = config_json(config, next(iter(tensors.values())).dtype)
    parse_config(raw, "the draft to be saved")
    draft_folder.write_files(folder, raw, tensors, training)


def check_against(config: MedusaConfig, target: Target, where: str = "the draft") -> None:
    problems = []
    if config.hidden_size != target.hidden_size:
        problems.append(f"hidden size {config.hidden_size}, the target has {target.hidden_size}")
    if config.vocab_size != target.vocab_size:
        problems.append(f"vocabulary {config.vocab_size}, the target has {target.vocab_size}")
    if problems:
        raise FlashdraftError(f"{where} does not fit the target {target.name}: {'; '.join(problems)}.")


class ResidualBlock(nn.Module):
    """x + silu(W x + b) for every layer."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=config.bias) for _ in range(config.num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaNetwork(nn.Module):
    """The heads. `forward` takes any number of states at once: training and decoding call it."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(ResidualBlock(config) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False) for _ in range(config.num_heads)
        )

    def states(self, states: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """What the first heads' projections read (None: all), [..., K, D]."""
        return torch.stack([block(states) for block in list(self.blocks)[:num_heads]], dim=-2)

    def forward(self, states: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits [..., K, V] of states [..., D]; [..., k - 1, :] is about the token k places behind the
        one that the state itself predicts."""
        read = self.states(states, num_heads).unbind(-2)
        return torch.stack([head(part) for head, part in zip(self.lm_heads, read, strict=False)], dim=-2)


class MedusaDrafter:
    """Drafts with Medusa heads: one pass of all heads a round.

    Args:
        network: in the target's dtype, on its device.
        block_size: anchor + tokens of a chain; None takes all heads.
        use_tree: follow the configuration's `choices`; None: if it has any.
        nodes: of a static tree that is made here, instead of the configuration's.
    """

    name = "medusa"
    bytes_per_context_token = 0  # a row's last state is all that is kept

    def __init__(
        self,
        network: MedusaNetwork,
        target: Target,
        block_size: int | None = None,
        use_tree: bool | None = None,
        nodes: int | None = None,
    ) -> None:
        config = network.config
        check_against(config, target)
        most = config.num_heads + 1
        size = block_size if block_size is not None else most
        if not 1 <= size <= most:
            raise FlashdraftError(f"block_size is {size}; expected 1 to {most} for {config.num_heads} Medusa heads.")
        if nodes is not None and not 1 <= nodes <= MOST_BLOCK:
            raise FlashdraftError(f"nodes is {nodes}; expected 1 to {MOST_BLOCK}.")
        choices = config.choices if nodes is None else static_tree(size - 1, config.vocab_size, nodes)
        if use_tree and not (config.choices or nodes):
            raise FlashdraftError(
                "a Medusa tree is asked for, but the configuration has no medusa_choices; say how many nodes one made "
                "here should have (nodes)."
            )
        self.network = network.eval()
        self.depth = size - 1
        self.drafts_trees = bool(choices) and use_tree is not False
        # parents come first: paths by length
        self._choices = sorted((p for p in choices if len(p) <= self.depth), key=lambda p: (len(p), p))
        self._parents = tree.parents_of(self._choices)
        tree.check(self._parents)
        self.max_draft_tokens = len(self._choices) if self.drafts_trees else self.depth
        self.target_layer_ids: tuple[int, ...] = (target.num_layers,) if self.depth else ()
        self._num_tokens, self._device, self._dtype = target.num_tokens, target.device, target.dtype

    @classmethod
    def load(
        cls,
        folder: str | Path,
        target: Target,
        block_size: int | None = None,
        use_tree: bool | None = None,
        nodes: int | None = None,
    ) -> MedusaDrafter:
        """From a draft folder. Raises FlashdraftError if it is damaged or does not fit the target."""
        config, weights = read(folder)
        check_against(config, target, str(folder))
        with torch.device("meta"):
            network = MedusaNetwork(config)
        network.load_state_dict(weights, strict=True, assign=True)
        network.requires_grad_(False).to(device=target.device, dtype=target.dtype)
        pack(network)
        return cls(network, target, block_size, use_tree, nodes)

    def open(self, rows: int, capacity: int) -> torch.Tensor:
        """The state that predicted each row's anchor, [rows, D]."""
        return torch.zeros(rows, self.network.config.hidden_size, dtype=self._dtype, device=self._device)

    def reset(self, state: torch.Tensor, row: int, num_context: int, token: int) -> None:
        pass  # what follows a reset is a prefill, which ends with a new state

    @torch.inference_mode()
    def observe(self, state: torch.Tensor, commit: Commit) -> None:
        if commit.features_CF is None:
            return
        end = 0
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            end += len(tokens)
            if tokens:
                state[row] = commit.features_CF[end - 1]

    @torch.inference_mode()
    def propose(
        self, state: torch.Tensor, rows: Sequence[int], samplers: Sequence[RowSampler], limits: Sequence[int]
    ) -> Draft:
        depths = [min(self.depth, limit) for limit in limits]
        if not max(depths):
            return Draft(padded([[] for _ in rows], self._device), (0,) * len(rows))
        logits_BKV = self.network(state[list(rows)], max(depths))
        # ids above the tokenizer's are padding of the table: no draft
        logits_BKV[..., self._num_tokens :] = -torch.inf
        if self.drafts_trees:
            parts = zip(samplers, logits_BKV, depths, strict=True)
            return joined(
                [self._row_tree(sampler, heads_KV[:depth]) for sampler, heads_KV, depth in parts], self._device
            )
        drawn = [
            draw(sampler, logits_BKV[b, :depth])
            for b, (sampler, depth) in enumerate(zip(samplers, depths, strict=True))
        ]
        tokens_BN = padded([tokens.tolist() for tokens, _ in drawn], self._device)
        return Draft(tokens_BN, tuple(depths), probs_NV=tuple(probs for _, probs in drawn))

    def _row_tree(self, sampler: RowSampler, logits_KV: torch.Tensor) -> RowDraft:
        """The static tree, filled with each head's best tokens; cut at the depth that is wanted."""
        if sampler.rejects:
            return drawn_chain(*draw(sampler, logits_KV[: len(self._choices)]))
        choices = [path for path in self._choices if len(path) <= len(logits_KV)]
        widest = 1 + max((path[-1] for path in choices), default=0)
        best, _ = likeliest(sampler, logits_KV, widest)
        return RowDraft([best[len(path) - 1][path[-1]] for path in choices], self._parents[: len(choices)])
