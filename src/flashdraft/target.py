"""The target: a Hugging Face causal LM behind our own cache and attention path.

The only module that runs the model. Every pass goes through our attention and cache (bridge.py);
the model's own cache is never used. What the model computes besides attention (norms, rotary
embeddings, scaled embeddings, logit caps) stays the model's code. A probe at load proves for this
very model, roll back included, that this is exact, or refuses it (probe.py).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from . import bridge, probe
from .attention import AttentionPlan
from .cache import KVCache, round_up
from .host import fast_bf16
from .loading import load_folder, without_collection
from .locate import locate_target
from .model_folder import one_line
from .packing import pack
from .types import FlashdraftError, TargetOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Target:
    """A causal LM and its tokenizer.

    Attributes:
        vocab_size: V, rows of the embedding (padding rows included).
        num_tokens: ids the tokenizer knows; those above are padding of the vocabulary.
        eos_ids: ids that end an answer. pad_id: or None.
        max_context: the longest sequence the model is made for, prompt and answer together.
        windows: per decoder layer, how many tokens a token sees, itself included; None is all.
        num_packed: Linears whose weights were put into the processor's order (packing.py).
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "target"
    ) -> None:
        """Take over a loaded model (its attention is switched to ours). Raises FlashdraftError if
        it cannot be decoded exactly under roll back, and leaves the model as it was."""
        probe.check_kind(model, name)
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config
        weight: torch.Tensor = model.get_input_embeddings().weight
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.vocab_size, self.hidden_size = int(weight.shape[0]), int(weight.shape[1])
        self.num_tokens = _num_tokens(tokenizer, self.vocab_size, name)
        self.max_context = _max_context(model.config)
        self.eos_ids = _eos_ids(model, tokenizer, self.vocab_size)
        self.pad_id = _pad_id(model, tokenizer, self.vocab_size)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        with probe.unchanged_if_refused(model, name):
            model.eval()
            ids = probe.probe_tokens(self)
            expected = probe.own_logits(self, ids)
            self.layers, self.windows = probe.read_layers(self, ids)
            probe.check_roll_back(self, ids, expected)
        model.requires_grad_(False)
        self.num_packed = pack(model)
        if model.get_output_embeddings() is not None:
            model.get_output_embeddings().register_forward_pre_hook(_as_whole)

    @classmethod
    def load(
        cls, source: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
    ) -> Target:
        """Load from a folder, a GGUF file, a name in the local hub cache, or the alias "smollm2".

        dtype "auto" is bfloat16 where the hardware computes in it, else float32.
        """
        device = usable_device(device)
        wanted = resolve_dtype(dtype, device)
        # What is wrong in the lines above is said before this, which may take long.
        with without_collection():
            model, tokenizer = load_folder(locate_target(source), wanted, str(source))
            return cls(model.to(device), tokenizer, name=str(source))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def new_cache(self, rows: int, context: int, slack: int = 64) -> KVCache:
        """A cache for sequences of `context` tokens; `slack` slots more take padding of a pass."""
        return KVCache(rows, context + slack)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Raw embedding rows of token ids, without any scaling the model adds."""
        return F.embedding(tokens, self.model.get_input_embeddings().weight)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states by the bare LM head, without caps or scales the model adds."""
        out: torch.Tensor = self.model.get_output_embeddings()(hidden)
        return out

    def head_rows(self, ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The LM head's weight [N, D] and bias [N] or None, for some token ids only."""
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        if ids is None:
            return weight, bias
        ids = ids.to(weight.device)
        return weight[ids].contiguous(), bias[ids].contiguous() if bias is not None else None

    @torch.inference_mode()
    def forward(
        self,
        tokens_BT: torch.Tensor,
        cache: KVCache,
        rows: Sequence[int],
        *,
        valid: Sequence[int] | None = None,
        keep: slice | int = slice(None),
        layer_ids: Sequence[int] = (),
        parents: Sequence[Sequence[int]] | None = None,
    ) -> TargetOutput:
        """One pass over new tokens behind each row's committed ones; lengths are not changed.

        Args:
            tokens_BT: int64; row b's tokens sit at positions cache.lengths[rows[b]] onwards.
            valid: per row, real tokens among the T (the rest is padding); None is all.
            keep: which positions' logits to compute: all, one index, or slice(0, 0) for none.
            layer_ids: decoder layers whose outputs to return, joined along the width; the number of
                layers stands for what the head reads, the state after the final norm.
            parents: per row, the tree of its tokens behind the first (tree.py); None: chains.
        """
        plan = AttentionPlan(cache, rows, tokens_BT.shape[1], valid, parents)
        # Padding may lie beyond the last position that a learned table has.
        positions = plan.positions(self.device).clamp_(max=self.max_context - 1)
        with self._tapped(layer_ids) as taps, bridge.running(plan, self.windows):
            logits = self._logits(tokens_BT, positions, keep)
        # The layers of a model that is spread over devices sit elsewhere than its embedding.
        features = torch.cat([taps[i].to(self.device) for i in layer_ids], dim=-1) if layer_ids else None
        return TargetOutput(logits.to(self.device), features)

    def _logits(self, tokens_BT: torch.Tensor, positions: torch.Tensor, keep: slice | int) -> torch.Tensor:
        wanted = keep if isinstance(keep, slice) else slice(keep, keep + 1 or None)
        some = len(range(tokens_BT.shape[1])[wanted]) < tokens_BT.shape[1]
        # A slice, where models expect a number or a tensor: it fits a hidden state on any device.
        kwargs: dict[str, Any] = {"logits_to_keep": wanted} if some and self._keeps_logits else {}
        out = self.model(input_ids=tokens_BT, position_ids=positions, use_cache=False, **kwargs)
        logits: torch.Tensor = out.logits
        return logits[:, wanted] if some and not self._keeps_logits else logits

    @contextlib.contextmanager
    def _tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Outputs of decoder layers, by hooks: `output_hidden_states` would give the last layer
        after the final norm, and all layers whether asked for or not."""
        taps: dict[int, torch.Tensor] = {}

        def hook(index: int) -> Any:
            def keep(_module: nn.Module, _args: object, output: Any) -> None:
                taps[index] = output if isinstance(output, torch.Tensor) else output[0]
                if taps[index].ndim != 3:
                    raise FlashdraftError(
                        f"decoder layers of {self.name} put out states of shape {list(taps[index].shape)}; a drafter "
                        "that reads them expects [rows, tokens, width]: use one that taps no layers, such as ngram."
                    )

            return keep

        handles = [self.layers[i].register_forward_hook(hook(i)) for i in layer_ids if i < self.num_layers]
        if self.num_layers in layer_ids:
            handles.append(self._decoder().register_forward_hook(hook(self.num_layers)))
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    def _decoder(self) -> nn.Module:
        """The model without its head, whose output is what the head reads."""
        decoder: nn.Module = self.model.base_model
        if decoder is self.model:
            raise FlashdraftError(
                f"{self.name} has no decoder apart from its head; use a drafter that does not read it."
            )
        return decoder


def _as_whole(_head: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    """What the head reads, with plain strides. Of a view of some positions torch multiplies row by
    row on a CPU, with a copy of the head's weights for each: three times the price of a token."""
    states = args[0]
    if states.ndim != 3 or states.stride(0) == states.shape[1] * states.stride(1):
        return None
    return (states.clone(memory_format=torch.contiguous_format), *args[1:])


def usable_device(device: str | torch.device | None = None) -> torch.device:
    """The device of a name, tried out; None is a GPU if there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise FlashdraftError(f"device is {device!r}; expected cpu, or cuda, cuda:1... with a GPU.") from error
    try:
        if torch.empty(0, device=found).is_meta:
            raise RuntimeError("meta tensors hold no values")
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = one_line(error).split(". ")[0].rstrip(".")
        raise FlashdraftError(f"device {device!r} cannot be used ({reason}); take cpu, or cuda with a GPU.") from error
    return found


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """A torch dtype from its name; "auto" is bfloat16 where it is fast, else float32."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if fast_bf16(device) else torch.float32
    known = {
        "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16,
        "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    }  # fmt: skip
    if dtype not in known:
        raise FlashdraftError(f"dtype is {dtype!r}; expected auto, float32, bfloat16, float16 or float64.")
    return known[dtype]


def _num_tokens(tokenizer: Any, vocab_size: int, name: str) -> int:
    if tokenizer is None:
        return vocab_size
    if len(tokenizer) == 0:
        raise FlashdraftError(f"the tokenizer of {name} knows no token; expected one made for the model.")
    base = int(tokenizer.vocab_size)
    if base > vocab_size:
        raise FlashdraftError(
            f"the tokenizer of {name} has {base} tokens and the model {vocab_size}; expected the model's own tokenizer."
        )
    # Added tokens may lie behind a gap, or (as an image token of some text models) beyond the table.
    added = max(tokenizer.added_tokens_decoder, default=-1) + 1
    return min(max(len(tokenizer), added), vocab_size)


def _max_context(config: Any) -> int:
    found = 1 << 20
    for attribute in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        value = getattr(config, attribute, None)
        if isinstance(value, int) and value > 0:
            found = value
            break
    # Frequencies of these kinds change with the length of the text once it exceeds the original
    # context: keys in the cache would no longer fit. Up to there they are fixed.
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") or found
            found = min(found, int(original))
    return found


def _eos_ids(model: Any, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(holder, "eos_token_id", None)
        values: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        found.update(v for v in values if _is_id(v, vocab_size))
    return frozenset(found)


def _pad_id(model: Any, tokenizer: Any, vocab_size: int) -> int | None:
    for holder in (model.config, tokenizer):
        value: Any = getattr(holder, "pad_token_id", None)
        if _is_id(value, vocab_size):
            return int(value)
    return None


def _is_id(value: Any, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def padded_width(num_tokens: int, dtype: torch.dtype) -> int:
    """Width of a prefill pass for that many tokens: bfloat16 kernels are compiled per shape, so
    lengths go up in steps of 64 there; others are taken as they are."""
    return round_up(num_tokens) if dtype == torch.bfloat16 else num_tokens
