"""Proof, at load, that a model can be decoded exactly through our cache, or one sentence why not.

A dozen random tokens go through the model three times: as it is; with attention that attends to
nothing, which shows its windows and whether anything but attention passes between tokens; and in
pieces through our cache, with a wrong draft rolled back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import bridge
from .loading import check_text_decoder
from .model_folder import one_line
from .types import FlashdraftError

if TYPE_CHECKING:
    from .target import Target

NUM_TOKENS = 12
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
# transformers' caches of such layers, and of layers that borrow the keys of another one
_PLAIN_CACHES = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


def check_kind(model: Any, name: str) -> None:
    """Refuse what the configuration already gives away."""
    config = model.config
    kind = getattr(config, "model_type", "") or type(model).__name__
    check_text_decoder(config, name)
    if model.get_output_embeddings() is None or not isinstance(model.get_input_embeddings(), nn.Embedding):
        raise FlashdraftError(f"{name} ({kind}) has no token embedding or no LM head; expected a causal LM.")
    strange = sorted({str(k) for k in getattr(config, "layer_types", None) or ()} - _PLAIN_LAYERS)
    if strange:
        raise FlashdraftError(
            f"{name} ({kind}) has layers of kind {', '.join(strange)}; expected {' and '.join(sorted(_PLAIN_LAYERS))} "
            "only, whose caches can be rolled back exactly: use a target without the others."
        )


@contextlib.contextmanager
def unchanged_if_refused(model: Any, name: str) -> Iterator[None]:
    """Every error inside becomes a FlashdraftError with a name, and leaves the model as it came."""
    attention, training = model.config._attn_implementation, model.training
    try:
        yield
    except Exception as error:  # models raise what they like
        model.set_attn_implementation(attention)
        model.train(training)
        what = f"{name} ({type(model).__name__})"
        if isinstance(error, FlashdraftError):
            raise FlashdraftError(f"{what} cannot be decoded exactly: {error}") from error
        raise FlashdraftError(f"{what} cannot be run as a causal LM: {one_line(error)}.") from error


def probe_tokens(target: Target) -> torch.Tensor:
    """Ids [2, T] of known tokens; the rows share their second half."""
    num_tokens = min(NUM_TOKENS, target.max_context)
    if num_tokens < 4:
        raise FlashdraftError(f"its context holds {target.max_context} tokens; expected at least 4.")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.num_tokens, (2, num_tokens), generator=generator)
    ids[1, num_tokens // 2 :] = ids[0, num_tokens // 2 :]
    return ids.to(target.device)


@torch.inference_mode()
def own_logits(target: Target, ids: torch.Tensor) -> torch.Tensor:
    """What the model says by itself, [T, V], without a cache."""
    target.model.set_attn_implementation("eager")
    logits: torch.Tensor = target.model(input_ids=ids[:1], use_cache=False).logits[0]
    if not bool(logits.isfinite().all()):
        raise FlashdraftError(
            f"its logits are not finite numbers (NaN or infinite) in {str(target.dtype).removeprefix('torch.')}; "
            "its weights are damaged, or it needs another dtype."
        )
    if logits.shape[-1] != target.vocab_size:
        raise FlashdraftError(f"it embeds {target.vocab_size} tokens and gives logits for {logits.shape[-1]}.")
    return logits


@torch.inference_mode()
def read_layers(target: Target, ids: torch.Tensor) -> tuple[nn.ModuleList, tuple[int | None, ...]]:
    """The model's decoder layers and how far each of them sees."""
    model = target.model
    _switch(model, bridge.PROBE)
    with bridge.noting(target.max_context) as notes:
        logits = model(input_ids=ids, use_cache=False).logits
    num_layers = int(model.config.num_hidden_layers)
    silent = [i for i in range(num_layers) if i not in notes.modules]
    if silent:
        raise FlashdraftError(_stateful_sentence(silent, num_layers))
    half = ids.shape[1] // 2
    if not _close(logits[0, half:], logits[1, half:], 1e-4 if _accurate(target) else 0.02):
        raise FlashdraftError(
            "tokens act on later ones outside of attention (a recurrent state or a convolution), "
            "which cannot be rolled back; use a target whose layers only attend."
        )
    windows = tuple(notes.windows[i] for i in range(num_layers))
    _check_own_cache(model, windows, notes.limit)
    return _decoder_layers(model, notes.modules, num_layers), windows


@torch.inference_mode()
def check_roll_back(target: Target, ids: torch.Tensor, expected: torch.Tensor) -> None:
    """Switch to our attention, and prove it: the tokens in pieces, with a wrong draft rolled back,
    give the logits of one pass through the model's own attention."""
    _switch(target.model, bridge.ATTENTION)
    half = ids.shape[1] // 2
    cache = target.new_cache(1, ids.shape[1])
    parts = [target.forward(ids[:1, :half], cache, [0]).logits_BTV[0]]
    cache.keep(0, half)
    target.forward(ids[1:, :half], cache, [0])  # a draft that is refused
    parts.append(target.forward(ids[:1, half:], cache, [0]).logits_BTV[0])
    if not _close(torch.cat(parts), expected.to(target.device), 1e-3 if _accurate(target) else 0.1):
        raise FlashdraftError(
            "after a roll back its logits differ from those of a fresh pass; use a target of another family."
        )


def _switch(model: Any, attention: str) -> None:
    bridge.register()
    model.set_attn_implementation(attention)
    if model.config._attn_implementation != attention:  # transformers only logs that it cannot
        raise FlashdraftError("its attention cannot be replaced, so flashdraft cannot give it a cache.")


def _accurate(target: Target) -> bool:
    return target.dtype in (torch.float32, torch.float64)


def _close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    scale = max(float(expected.double().norm()), 1e-30)
    return float((found.double() - expected.double()).norm()) / scale < tolerance


def _stateful_sentence(silent: Sequence[int], num_layers: int) -> str:
    return (
        f"layers {', '.join(map(str, silent[:8]))}{'...' if len(silent) > 8 else ''} of {num_layers} do not attend by "
        "way of transformers' attention interface: they keep a state that cannot be rolled back (recurrent or linear "
        "attention), or attend in their own way."
    )


def _check_own_cache(model: Any, windows: Sequence[int | None], limit: int) -> None:
    """The cache that `generate` would use evicts what is outside a window: where the masks do not
    say the same, the model's own text depends on the eviction."""
    from transformers import DynamicCache

    layers = DynamicCache(config=model.config).layers
    strange = sorted({type(layer).__name__ for layer in layers} - _PLAIN_CACHES)
    if strange:
        raise FlashdraftError(f"it needs more than keys and values in its cache ({', '.join(strange)}).")
    for i, (layer, window) in enumerate(zip(layers, windows, strict=False)):
        if type(layer).__name__ == "DummyLayer":
            continue
        evicts = layer.sliding_window if type(layer).__name__ == "DynamicSlidingWindowLayer" else limit
        if min(evicts, limit) != (window or limit):
            raise FlashdraftError(
                f"layer {i} sees {window or 'all'} tokens by its mask and {evicts} by its cache; they do not agree."
            )


def _decoder_layers(model: Any, attends: Mapping[int, nn.Module], num_layers: int) -> nn.ModuleList:
    """The list whose i-th module holds the attention that called itself layer i."""
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) or len(module) != num_layers:
            continue
        if all(any(part is attends[i] for part in layer.modules()) for i, layer in enumerate(module)):
            return module
    raise FlashdraftError(f"it has no list of {num_layers} decoder layers that attend one by one.")
