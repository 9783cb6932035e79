"""Where a Hugging Face model calls us: its attention, and once, in the probe, its masks.

Two attention functions are registered with transformers. A model switched to `ATTENTION` runs every
layer over our cache, by the plan of the pass it is in. A model switched to `PROBE` attends to
nothing: the pass only notes who asked for what, and what the model's own mask lets a token see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .attention import AttentionPlan
from .types import FlashdraftError

# Our names in transformers' tables. They may not contain "flash": names that do are taken for
# kernels to fetch from the hub.
ATTENTION = "draft_cache"
PROBE = "draft_probe"

# Keyword arguments of transformers' attention interface that change the result and are honoured
# (a window is, by way of the mask), and those that change nothing here. Others would be ignored
# silently: refused instead.
_UNDERSTOOD = {"sliding_window", "softcap", "s_aux", "sinks"}
_HARMLESS = {
    "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "head_mask", "cache", "past_key_values", "deterministic",
}  # fmt: skip

# Longest context a mask is looked at for. Windows wider than this are taken for none.
_FARTHEST = 1 << 20


@dataclass(frozen=True)
class _Pass:
    plan: AttentionPlan
    windows: Sequence[int | None]


@dataclass
class Notes:
    """What a probing pass saw.

    Attributes:
        limit: longest context the model is made for.
        modules: layer index -> the attention module that called with it.
        windows: layer index -> tokens its mask lets a token see, itself included; None is all.
    """

    limit: int
    modules: dict[int, nn.Module] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    _masks: list[tuple[torch.Tensor, int | None]] = field(default_factory=list)

    def hand_out(self, mask: torch.Tensor, window: int | None) -> None:
        self._masks.append((mask, window))

    def window_of(self, mask: torch.Tensor | None, num_queries: int, num_keys: int) -> int | None:
        """The window a handed out mask stands for. A view of it will do; a mask computed from it or
        from anything else says something that we do not know: FlashdraftError."""
        if mask is not None and mask.shape[-2:] == (num_queries, num_keys):
            for known, window in self._masks:
                if mask.untyped_storage().data_ptr() == known.untyped_storage().data_ptr():
                    return window
        raise FlashdraftError("its attention mask is made in a way flashdraft does not know.")


_pass: ContextVar[_Pass | None] = ContextVar("flashdraft_pass", default=None)
_notes: ContextVar[Notes | None] = ContextVar("flashdraft_notes", default=None)


def register() -> None:
    """Put our functions into transformers' tables; again does no harm."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attend)
    AttentionInterface.register(PROBE, _note_attention)
    # No mask is registered for ATTENTION: the model then makes none, and the plan has its own.
    AttentionMaskInterface.register(PROBE, _note_mask)


@contextlib.contextmanager
def running(plan: AttentionPlan, windows: Sequence[int | None]) -> Iterator[None]:
    """Attention layers called inside follow `plan`, each with its window.

    A context variable and not a keyword argument of the model's forward: many families do not hand
    such arguments down to their attention.
    """
    token = _pass.set(_Pass(plan, windows))
    try:
        yield
    finally:
        _pass.reset(token)


@contextlib.contextmanager
def noting(limit: int) -> Iterator[Notes]:
    """Attention layers called inside are noted."""
    notes = Notes(min(limit, _FARTHEST))
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention layer of a target calls; see transformers' AttentionInterface."""
    current = _pass.get()
    if current is None:
        raise FlashdraftError("this model belongs to a flashdraft Target; call Target.forward, not the model itself.")
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = current.plan.attend(
        layer, query, key, value,
        scale=scaling, window=current.windows[layer], softcap=softcap, sinks=s_aux if s_aux is not None else sinks,
    )  # fmt: skip
    return out.contiguous(), None  # some families take views of it, as the eager result allows


def _note_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Nothing attends to anything: what still passes between tokens, passes outside of attention."""
    notes, kind = _notes.get(), type(module).__name__
    assert notes is not None, "the probe's attention is for probing passes"
    strange = [k for k, v in kwargs.items() if k not in _UNDERSTOOD | _HARMLESS and v is not None and v is not False]
    if strange:
        raise FlashdraftError(f"{kind} uses attention features flashdraft does not know: {', '.join(strange)}.")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise FlashdraftError(f"{kind} does not say which layer it is, so it cannot be given a cache.")
    if layer in notes.modules:
        raise FlashdraftError(f"layer {layer} ({kind}) attends more than once in a pass; expected one cache per layer.")
    if key.shape[2] != query.shape[2] or is_causal is False:
        raise FlashdraftError(f"{kind} attends to more than the tokens of the text; expected causal self-attention.")
    batch, heads, tokens, _ = query.shape
    notes.windows[layer] = notes.window_of(attention_mask, tokens, key.shape[2])
    notes.modules[layer] = module
    return value.new_zeros(batch, tokens, heads, value.shape[-1]), None


def _note_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_unused: Any,
) -> torch.Tensor:
    """A mask of zeros that stands for the window the model's mask rule comes to."""
    notes = _notes.get()
    assert notes is not None, "the probe's masks are for probing passes"
    mask = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    notes.hand_out(mask, _window_of(mask_function, notes.limit, device))
    return mask


def _window_of(rule: Callable[..., torch.Tensor], limit: int, device: torch.device | str) -> int | None:
    """Tokens that rule(batch, head, query, key) lets a query see, or None for all before it.

    Raises FlashdraftError for every other rule: bidirectional, in chunks, by content.
    """

    def row(query: int) -> torch.Tensor:
        keys = torch.arange(query + 2, device=device)
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return rule(zero, zero, zero + query, keys).expand(len(keys))

    last = row(limit - 1)
    if last[-1]:
        raise FlashdraftError("its layers see later tokens (bidirectional attention); expected a causal LM.")
    window = int(last.sum())
    for query in {0, 1, window - 1, window, window + 1, limit // 2, limit - 1}:
        if 0 <= query < limit:
            keys = torch.arange(query + 2, device=device)
            if not torch.equal(row(query), (keys <= query) & (keys > query - window)):
                raise FlashdraftError(
                    "its layers do not see a plain window of the tokens before (attention in chunks, or by a rule "
                    "of its own); expected full or sliding-window attention."
                )
    return None if window == limit else window
