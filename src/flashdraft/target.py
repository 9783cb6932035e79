"""The target: a Hugging Face causal LM behind our own cache and attention path.

The only module that touches the model. It registers one attention function with transformers and
hands every forward pass an `AttentionPlan` through the model's keyword arguments; the model's own
cache is never used. What the model computes besides attention (norms, rotary embeddings, scaled
embeddings, logit caps) stays the model's code, so any family works whose layers all call that
function. A probe at load proves it for this very model, roll back included, or refuses it.
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

from .attention import AttentionPlan
from .cache import KVCache, round_up
from .types import FlashdraftError, TargetOutput

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Our name in transformers' table of attention functions. It may not contain "flash": names that do
# are taken for kernels to fetch from the hub.
ATTENTION = "draft_cache"

# Keyword arguments of transformers' attention interface that change the result, and our name for
# them. One that is set and not listed here would be ignored silently: refused instead.
_UNDERSTOOD = {"sliding_window", "softcap", "s_aux", "sinks", "is_causal", "dropout", "flashdraft_plan"}
_HARMLESS = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "logits_to_keep", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "head_mask", "cache", "past_key_values", "deterministic",
}  # fmt: skip


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What every attention layer of a target calls; see transformers' AttentionInterface."""
    plan = kwargs.get("flashdraft_plan")
    if plan is None:
        raise FlashdraftError(
            f"{type(module).__name__} does not pass attention arguments on, so flashdraft cannot give it a cache; "
            "use a target of another family (docs/targets.md lists them)."
        )
    strange = [k for k, v in kwargs.items() if k not in _UNDERSTOOD | _HARMLESS and v is not None and v is not False]
    if strange:
        raise FlashdraftError(
            f"{type(module).__name__} uses attention features flashdraft does not know: {', '.join(strange)}."
        )
    layer = module.layer_idx
    plan.seen_layers.add(layer)
    sinks = kwargs.get("s_aux") if kwargs.get("s_aux") is not None else kwargs.get("sinks")
    out = plan.attend(
        layer, query, key, value,
        scale=scaling, window=kwargs.get("sliding_window"), softcap=kwargs.get("softcap"), sinks=sinks,
    )  # fmt: skip
    return out, None


class _TargetPlan(AttentionPlan):
    """An attention plan that notes which layers came by; the probe reads it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen_layers: set[int] = set()


class Target:
    """A causal LM and its tokenizer.

    Attributes:
        vocab_size: V, rows of the embedding (padding rows included).
        num_tokens: ids the tokenizer knows; those above are padding of the vocabulary.
        eos_ids: ids that end an answer. pad_id: or None.
        max_context: the longest sequence the model is made for, prompt and answer together.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "target"
    ) -> None:
        """Take over a loaded model (its attention is switched to ours). Raises FlashdraftError if
        it cannot be decoded exactly under roll back."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        config = model.config.get_text_config()
        self.config = config
        if getattr(config, "is_encoder_decoder", False):
            raise FlashdraftError(f"{name} is an encoder-decoder model; expected a decoder-only causal LM.")
        embeddings = model.get_input_embeddings()
        if not isinstance(embeddings, nn.Embedding):
            raise FlashdraftError(f"{name} has no token embedding table; expected a decoder-only causal LM.")
        self.device: torch.device = embeddings.weight.device
        self.dtype: torch.dtype = embeddings.weight.dtype
        self.vocab_size = int(embeddings.num_embeddings)
        self.hidden_size = int(embeddings.embedding_dim)
        self.num_tokens = min(len(tokenizer), self.vocab_size) if tokenizer is not None else self.vocab_size
        self.max_context = _first_int(config, "max_position_embeddings", "n_positions", "n_ctx") or 1 << 20
        self.eos_ids = _eos_ids(model, tokenizer)
        pad = getattr(config, "pad_token_id", None)
        self.pad_id = pad if pad is not None else getattr(tokenizer, "pad_token_id", None)
        self.layers = _decoder_layers(model, name)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        _probe(self)

    @classmethod
    def load(
        cls, source: str | Path, *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
    ) -> Target:
        """Load from a folder, a GGUF file, a name in the local hub cache, or the alias "smollm2".

        dtype "auto" is bfloat16 where the hardware computes in it, else float32.
        """
        from .locate import locate_target, quiet_transformers

        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        folder = locate_target(source)
        with quiet_transformers():
            model, tokenizer = _load_folder(folder, resolve_dtype(dtype, device), str(source))
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
    ) -> TargetOutput:
        """One pass over new tokens behind each row's committed ones; lengths are not changed.

        Args:
            tokens_BT: int64; row b's tokens sit at positions cache.lengths[rows[b]] onwards.
            valid: per row, real tokens among the T (the rest is padding); None is all.
            keep: which positions' logits to compute: all, one index, or slice(0, 0) for none.
            layer_ids: decoder layers whose outputs to return, joined along the width.
        """
        plan = _TargetPlan(cache, rows, tokens_BT.shape[1], valid)
        # Padding may lie beyond the last position that a learned table has.
        positions = plan.positions(self.device).clamp_(max=self.max_context - 1)
        with self._tapped(layer_ids) as taps:
            logits = self._logits(tokens_BT, positions, plan, keep)
        if len(plan.seen_layers) != self.num_layers:
            raise FlashdraftError(_stateful_sentence(self.name, plan.seen_layers, self.num_layers))
        features = torch.cat([taps[i] for i in layer_ids], dim=-1) if layer_ids else None
        return TargetOutput(logits, features)

    def _logits(
        self, tokens_BT: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, keep: slice | int
    ) -> torch.Tensor:
        index = torch.arange(tokens_BT.shape[1], device=self.device)[keep].reshape(-1)
        some = index.numel() < tokens_BT.shape[1]
        kwargs: dict[str, Any] = {"logits_to_keep": index} if some and self._keeps_logits else {}
        out = self.model(input_ids=tokens_BT, position_ids=positions, use_cache=False, flashdraft_plan=plan, **kwargs)
        logits: torch.Tensor = out.logits
        return logits[:, index] if some and not self._keeps_logits else logits

    @contextlib.contextmanager
    def _tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Outputs of decoder layers, by hooks: `output_hidden_states` would give the last layer
        after the final norm, and all layers whether asked for or not."""
        taps: dict[int, torch.Tensor] = {}

        def hook(index: int) -> Any:
            def keep(_module: nn.Module, _args: object, output: Any) -> None:
                taps[index] = output[0] if isinstance(output, tuple) else output

            return keep

        handles = [self.layers[i].register_forward_hook(hook(i)) for i in layer_ids]
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()


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


def fast_bf16(device: torch.device) -> bool:
    """Whether products in bfloat16 run in hardware there."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in probes)


def _load_folder(folder: Path, dtype: torch.dtype, name: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=True,
            attn_implementation="eager",
        )  # fmt: skip
    except Exception as error:  # transformers raises many kinds; a user needs the sentence, not the kind
        raise FlashdraftError(f"{name} cannot be loaded as a causal LM: {_one_line(error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise FlashdraftError(f"{name} has no usable tokenizer: {_one_line(error)}") from error
    return model, tokenizer


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _first_int(config: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config.get_text_config(), tokenizer):
        value = getattr(holder, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


def _decoder_layers(model: Any, name: str) -> nn.ModuleList:
    wanted = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise FlashdraftError(f"{name} has no list of {wanted} decoder layers; expected a decoder-only causal LM.")


def _stateful_sentence(name: str, seen: set[int], num_layers: int) -> str:
    missing = [i for i in range(num_layers) if i not in seen]
    return (
        f"{name} cannot be decoded speculatively: layers {missing[:8]} of {num_layers} keep a state (recurrent, "
        "linear-attention or shared) that is no plain key/value cache and cannot be rolled back; "
        "use a target whose layers all attend."
    )


def _use_our_attention(model: Any, name: str) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    try:
        model.set_attn_implementation(ATTENTION)
    except Exception as error:
        raise FlashdraftError(
            f"{name} ({type(model).__name__}) does not let its attention be replaced: {_one_line(error)}"
        ) from error


@torch.inference_mode()
def _probe(target: Target) -> None:
    """Switch to our attention, and prove it: 12 tokens in pieces, with a wrong draft rolled back,
    give the logits of one pass through the model's own attention."""
    model, name = target.model, target.name
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (2, 12), generator=generator).to(target.device)
    model.set_attn_implementation("eager")
    expected = model(input_ids=ids[:1], use_cache=False).logits[0]
    _use_our_attention(model, name)

    cache = target.new_cache(1, 16)
    parts = [target.forward(ids[:1, :6], cache, [0]).logits_BTV[0]]
    cache.keep(0, 6)
    target.forward(ids[1:, :4], cache, [0])  # a draft that is refused
    parts.append(target.forward(ids[:1, 6:11], cache, [0]).logits_BTV[0])
    cache.keep(0, 5)
    parts.append(target.forward(ids[:1, 11:], cache, [0]).logits_BTV[0])
    found = torch.cat(parts)

    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.1
    scale = float(expected.float().norm())
    error = float((found.float() - expected.float()).norm()) / max(scale, 1e-30)
    if not error < tolerance:
        raise FlashdraftError(
            f"{name} ({type(model).__name__}) cannot be decoded exactly: after a roll back its logits differ from a "
            f"fresh pass by {error:.1%} (expected under {tolerance:.1%}); use a target of another family."
        )


def padded_width(num_tokens: int, dtype: torch.dtype) -> int:
    """Width of a prefill pass for that many tokens: bfloat16 kernels are compiled per shape, so
    lengths go up in steps of 64 there; others are taken as they are."""
    return round_up(num_tokens) if dtype == torch.bfloat16 else num_tokens
