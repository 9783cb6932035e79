"""A draft as `assistant_model` of transformers' own `generate`, for people who stay in it.

    assistant = DFlashAssistant.load("smollm2", model)
    model.generate(ids, assistant_model=assistant, speculation_type="dflash")

transformers gives the embedded block and the new context features, keeps the draft's keys and values, and
applies the target's head; the network is ours, so windows and causality are as everywhere in flashdraft.
What transformers does not ask the draft about (the head, and with it a reduced vocabulary or a soft cap)
costs accepted tokens at most, and is warned about; ../docs/serving.md has the table.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from .. import bridge, checkpoint
from ..draft_config import MOST_BLOCK, DraftConfig
from ..drafters.dflash import DFlashNetwork
from ..loading import check_text_decoder
from ..locate import locate_draft
from ..types import FlashdraftError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..target import Target

_CALL = 'generate(..., assistant_model=assistant, speculation_type="dflash")'


class DFlashAssistant(nn.Module):
    """What transformers' DFlash generator asks of an assistant: `config`, `device`, a forward pass.

    Attributes:
        config: a transformers configuration with `target_layer_ids`, `block_size` and `mask_token_id`. All
            layers are full ones to its cache: windows are masks.
    """

    def __init__(self, network: DFlashNetwork, block_size: int | None = None, input_scale: float = 1.0) -> None:
        """input_scale: what to multiply the embeddings by that the target's own module gives."""
        super().__init__()
        _check_transformers()
        _check_draft(network.config, block_size)
        self.network = network.eval().requires_grad_(False)
        self.input_scale = input_scale
        self.config = _cache_config(network.config, block_size)

    @classmethod
    def load(cls, draft: str | Path, model: PreTrainedModel, block_size: int | None = None) -> DFlashAssistant:
        """The draft of a folder or alias, for a model that transformers loaded, in its dtype and on its device.

        Raises FlashdraftError if the installed transformers has no DFlash, or the draft does not fit.
        Warns if it will accept fewer tokens there than in flashdraft.
        """
        _check_transformers()
        folder = locate_draft(draft)
        config = checkpoint.read(folder)[0]
        _check_draft(config, block_size)
        host = _host(model)
        checkpoint.check_against(config, cast("Target", host), str(folder))
        checkpoint.check_tables(folder, config, cast("Target", host))
        for sentence in _losses(config, folder, host):
            warnings.warn(sentence, stacklevel=2)
        return cls(DFlashNetwork.load(folder, host.dtype, host.device), block_size, _input_scale(model, config))

    @property
    def device(self) -> torch.device:
        return self.network.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.norm.weight.dtype

    @property
    def generation_config(self) -> Any:
        """Not there: only the other kinds of assisted generation ask an assistant for one."""
        raise FlashdraftError(f"generate takes the draft for a language model; call it as {_CALL}.")

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> Any:
        """Final states of a block, as `last_hidden_state` [1, T, D].

        Args:
            noise_embeds: [1, T, D], the target's embeddings of [anchor, MASK, ...].
            context_hidden_states: [1, C, F], features of the tokens that became context since the last call.
            position_ids: [1, C + T]. attention_mask: [1, S + C + T] over the whole sequence, 0 for padding.
            cache: transformers' DFlashCache, whose older name is past_key_values; it holds S tokens.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPast

        if len(noise_embeds) != 1:
            raise FlashdraftError(
                f"{len(noise_embeds)} prompts at a time; transformers drafts for one, call it for each."
            )
        kept = cache if cache is not None else past_key_values
        size, config = noise_embeds.shape[1], self.network.config
        # a draft that predicts from the anchor needs no last slot, but transformers will remove one for it
        spare = 1 if config.from_anchor else 0
        used = size - spare
        context = self.network.project_context(context_hidden_states[0].to(self.dtype), position_ids[0, :-size])

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            new = [
                torch.cat([old.transpose(0, 1)[None], F.pad(own, (0, 0, 0, spare))], dim=2)
                for old, own in zip(context[layer], (k, v), strict=True)
            ]
            keys, values = (t[:, :, : t.shape[2] - spare] for t in kept.update(*new, layer))
            mask = _mask(used, keys.shape[2], config.windows[layer], config.causal[layer], attention_mask, q.device)
            seen = F.scaled_dot_product_attention(
                q, keys, values, mask, enable_gqa=config.num_heads != config.num_kv_heads
            )
            return seen.transpose(1, 2)

        embeds = noise_embeds[:, :used].to(self.dtype)
        if self.input_scale != 1:
            embeds = embeds * self.input_scale
        hidden = self.network(embeds, position_ids[:, -size:][:, :used], attend)
        if config.output_multiplier != 1:
            hidden = hidden * config.output_multiplier  # the head is linear
        # it takes the states behind the first
        return BaseModelOutputWithPast(last_hidden_state=F.pad(hidden, (0, 0, spare, 0)))


def _mask(
    size: int,
    num_slots: int,
    window: int | None,
    causal: bool,
    attention_mask: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Which of S slots the last T see, bool [1, 1, T, S]; None is all. As attention.py has it: a window of w
    is less than w away, in either direction."""
    padded = attention_mask is not None and not bool(attention_mask.all())
    if window is None and not causal and not padded:
        return None
    slot = torch.arange(num_slots, device=device)
    query = slot[num_slots - size :, None]
    seen = torch.ones(size, num_slots, dtype=torch.bool, device=device)
    if causal:
        seen &= slot <= query
    if window is not None:
        seen &= (query - slot).abs() < window
    if padded:
        assert attention_mask is not None
        seen &= attention_mask[0, :num_slots].bool()
    return seen[None, None]


@dataclass(frozen=True)
class _Host:
    """What the checks of a draft ask of a target; the model itself is left as it is."""

    model: Any
    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    eos_ids: frozenset[int]
    pad_id: int | None
    dtype: torch.dtype
    device: torch.device

    def head_rows(self, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight if ids is None else weight[ids.to(weight.device)], None


def _host(model: Any) -> _Host:
    """Raises FlashdraftError for what is no causal LM of transformers' own."""
    if not hasattr(model, "generate") or model.get_output_embeddings() is None:
        raise FlashdraftError(
            f"a draft fits a model that transformers loaded (AutoModelForCausalLM), not a {type(model).__name__}."
        )
    name = type(model).__name__
    check_text_decoder(model.config, name)
    if model.config._attn_implementation == bridge.ATTENTION:
        raise FlashdraftError(
            f"this {name} belongs to a flashdraft Target, which runs it with its own cache; "
            "decode with flashdraft's Engine, or load the model again with transformers."
        )
    weight: torch.Tensor = model.get_input_embeddings().weight
    settings = (getattr(model, "generation_config", None), model.config)
    return _Host(
        model=model, name=name, hidden_size=weight.shape[1], vocab_size=weight.shape[0],
        num_layers=model.config.num_hidden_layers,
        eos_ids=frozenset(i for each in settings for i in _ids(getattr(each, "eos_token_id", None))),
        pad_id=next(iter(_ids(getattr(model.config, "pad_token_id", None))), None),
        dtype=weight.dtype, device=model.get_output_embeddings().weight.device,
    )  # fmt: skip


def _ids(value: Any) -> Iterable[int]:
    return [i for i in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(i, int)]


def _check_transformers() -> None:
    import transformers
    from transformers.generation import candidate_generator

    if not hasattr(candidate_generator, "DFlashTokenCandidateGenerator"):
        raise FlashdraftError(
            f"transformers {transformers.__version__} has no DFlash in generate; expected 5.19 or later "
            "(pip install -U transformers), or decode with flashdraft's Engine."
        )


def _check_draft(config: DraftConfig, block_size: int | None) -> None:
    if config.is_ablation:
        raise FlashdraftError(
            f"the draft is DFlash without one of its parts (context {config.context!r}); transformers drafts with "
            "DFlash alone, decode with flashdraft's Engine."
        )
    size = config.block_size if block_size is None else block_size
    if not 2 <= size <= MOST_BLOCK:
        raise FlashdraftError(f"block_size is {size}; expected 2 (anchor and one drafted token) to {MOST_BLOCK}.")
    # transformers reads the last layer after the final norm; without a target this is all there is to tell it
    if config.num_target_layers and max(config.target_layer_ids) >= config.num_target_layers - 1:
        raise FlashdraftError(
            f"the draft taps layer {max(config.target_layer_ids)} of {config.num_target_layers}, which transformers "
            "gives after the final norm; expected earlier layers."
        )


def _losses(config: DraftConfig, folder: Path, host: _Host) -> list[str]:
    """What lowers the number of accepted tokens there, a sentence each. The text stays the target's."""
    found = []
    if checkpoint.read_vocab(folder, config) is not None:
        found.append(
            "the draft was trained on a part of the vocabulary; transformers drafts from all of it, "
            "expect fewer accepted tokens."
        )
    if config.softcap is not None:
        found.append(
            "the draft caps its logits; transformers samples drafts without the cap, "
            "expect fewer accepted tokens at temperatures above 0."
        )
    training = checkpoint.read_training(folder)
    hashes = checkpoint.draft_warning(training, folder), checkpoint.target_warning(training, cast("Target", host))
    return [*found, *(sentence for sentence in hashes if sentence)]


def _cache_config(config: DraftConfig, block_size: int | None) -> Any:
    from transformers import PreTrainedConfig

    return PreTrainedConfig(
        num_hidden_layers=config.num_layers,
        layer_types=["full_attention"] * config.num_layers,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        target_layer_ids=list(config.target_layer_ids),
        block_size=config.block_size if block_size is None else block_size,
        mask_token_id=config.mask_token_id,
    )


@torch.no_grad()
def _input_scale(model: Any, config: DraftConfig) -> float:
    """The draft's own scale over that of the target's embedding module (Gemma's gives scaled rows)."""
    module = model.get_input_embeddings()
    if getattr(module, "embed_norm", None) is not None:
        return config.embedding_scale  # transformers leaves this norm out for a draft
    ids = torch.arange(min(16, module.weight.shape[0]), device=module.weight.device)
    given, rows = module(ids).double(), module.weight[ids].double()
    scale = float((given * rows).sum() / rows.square().sum())
    if not torch.allclose(given, rows * scale, rtol=0.02, atol=1e-6):
        raise FlashdraftError(
            f"the embedding of {type(model).__name__} is more than a table with a scale, which a draft cannot undo; "
            "decode with flashdraft's Engine."
        )
    ratio = config.embedding_scale / scale
    return 1.0 if abs(ratio - 1) < 0.01 else ratio  # the module keeps its scale rounded
