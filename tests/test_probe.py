"""The probe is not fooled, changes nothing it refuses, and works in every precision; what a target
knows of itself (ids, context, vocabulary) is right.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from bed import VOCAB, coin, decode, dflash_drafter, make_model, random_prompt
from families import FAMILIES, FULL, SLIDING
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.types import FlashdraftError, Request, SamplingParams
from test_targets import generate

PROMPT = random_prompt(3)


def tiny(model_type: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """The first model of that type in the table."""
    return next(f for f in FAMILIES if f.model_type == model_type).model(dtype, **changes)


def refusal(model: Any, tokenizer: Any = None) -> str:
    with pytest.raises(FlashdraftError) as caught:
        Target(model, tokenizer, name="the model")
    text = str(caught.value)
    assert "the model" in text and "\n" not in text and text.endswith(".") and len(text) < 500
    return text


def words(count: int, **special: str) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of w0, w1..."""
    model = WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special)


def same_as_generate(target: Target, plain: Any, dtype: torch.dtype = torch.float64) -> None:
    answer = generate(plain, [PROMPT])[0]
    drafter = coin(answer, 6, len(PROMPT), 0.6)
    (result,) = decode(target, drafter, [PROMPT], max_tokens=len(answer), ignore_eos=True)
    assert list(result.token_ids) == answer


# What is not attention


class _Shift(nn.Module):
    """A decoder layer that lets a little of the token before through, as a convolution does."""

    def __init__(self, layer: nn.Module, amount: float) -> None:
        super().__init__()
        self.layer, self.amount = layer, amount

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.layer(hidden, *args, **kwargs)
        return out + self.amount * nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_leak_between_tokens_is_found(dtype: torch.dtype) -> None:
    """D5: a state of a few percent, which the tolerance of bfloat16 logits would let pass."""
    model = tiny("llama", dtype)
    model.model.layers[1] = _Shift(model.model.layers[1], 0.05)
    assert "tokens act on later ones outside of attention" in refusal(model)


def test_a_window_that_only_the_mask_knows_is_honoured() -> None:
    """D4: Qwen2 MoE and Phi-3.5 MoE tell their attention nothing of the window, which is longer than
    the probe's text, so that no pass of the probe shows it."""
    for model_type in ("qwen2_moe", "phimoe"):
        model = tiny(model_type)
        plain = copy.deepcopy(model)
        target = Target(model)
        assert 20 in target.windows
        same_as_generate(target, plain)


def test_windows_are_read_at_every_distance() -> None:
    for window in (1, 2, 63, 64, 200):
        assert Target(tiny("mistral", sliding_window=window)).windows == (window,) * 3
    assert Target(tiny("mistral", sliding_window=256)).windows == (None,) * 3  # the whole context
    layers = [SLIDING, FULL, SLIDING]
    assert Target(tiny("gemma3_text", layer_types=layers)).windows == (8, None, 8)


def test_a_cache_that_evicts_more_than_the_mask_hides_is_refused() -> None:
    """D4: a window in the configuration that masks do not have: `generate` would drop keys that its
    own full pass sees."""
    model = tiny("llama")
    model.config.sliding_window = 8
    assert "do not agree" in refusal(model)


def _chunks(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key <= query) & (key // 64 == query // 64)


def _two_sides(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (key - query).abs() < 4


@pytest.mark.parametrize(
    ("rule", "reason"), [(_chunks, "plain window"), (_two_sides, "see later tokens")], ids=["chunks", "two sides"]
)
def test_rules_beyond_the_probes_text_are_refused(monkeypatch: pytest.MonkeyPatch, rule: Any, reason: str) -> None:
    """Chunks of 64 tokens look like full attention to 12 tokens."""
    from transformers import masking_utils
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(masking_utils, "causal_mask_function", rule)
    assert modeling_llama.create_causal_mask is masking_utils.create_causal_mask
    assert reason in refusal(tiny("llama"))


def test_a_mask_that_is_computed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sparse attention adds its choice of keys to the mask, and chooses all of a short text."""
    from transformers.models.llama import modeling_llama

    make = modeling_llama.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda *a, **kw: None if (m := make(*a, **kw)) is None else m + 0
    )
    assert "made in a way" in refusal(tiny("llama"))


def test_attention_features_we_do_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    forward = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", lambda *a, **kw: forward(*a, position_bias=torch.ones(1), **kw)
    )
    assert "position_bias" in refusal(tiny("llama"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_refused_model_is_as_it_was(attention: str) -> None:
    model = tiny("llama", torch.float32)
    model.set_attn_implementation(attention)
    ids = torch.tensor([PROMPT])
    before = model(input_ids=ids).logits
    bad = model.model.layers[1]
    model.model.layers[1] = _Shift(bad, 0.5)
    model.train()
    refusal(model)
    model.model.layers[1] = bad
    assert model.config._attn_implementation == attention
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert torch.equal(model.eval()(input_ids=ids).logits, before)


# Numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_refused(value: float) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.lm_head.weight[7, 3] = value
    assert "not finite numbers" in refusal(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "phi3"])
def test_half_precision_is_proved_too(model_type: str, dtype: torch.dtype) -> None:
    target = Target(tiny(model_type, dtype))
    assert target.dtype == dtype
    assert len(decode(target, None, [PROMPT], max_tokens=4)[0].token_ids) >= 1


def test_the_same_model_can_be_taken_over_twice() -> None:
    model = tiny("mistral")
    plain = copy.deepcopy(model)
    first, second = Target(model), Target(model)
    for target in (second, first):
        same_as_generate(target, plain)


def test_two_targets_take_turns() -> None:
    """Windows and caches belong to a pass, not to a model class."""
    narrow, wide = tiny("mistral"), tiny("mistral", sliding_window=None)
    plains = [copy.deepcopy(model) for model in (narrow, wide)]
    targets = [Target(narrow), Target(wide)]
    engines = [Engine(target) for target in targets]
    streams = [engine.stream(Request(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))) for engine in engines]
    said: list[list[int]] = [[], []]
    for deltas in zip(*streams, strict=True):
        for ids, delta in zip(said, deltas, strict=True):
            ids += [token.id for token in delta.tokens]
    assert said == [generate(plain, [PROMPT], 30)[0] for plain in plains]
    assert said[0] != said[1]


def test_a_taken_over_model_says_so_when_called() -> None:
    target = Target(tiny("llama"))
    with pytest.raises(FlashdraftError, match=r"call Target\.forward"):
        target.model(input_ids=torch.tensor([PROMPT]))


def test_tied_decoy_lists_are_not_taken_for_layers() -> None:
    """T10: another list of as many modules, found before the layers, is none."""
    model = tiny("llama")
    layers = model.model.layers
    del model.model.layers
    model.model.decoys = nn.ModuleList(nn.Linear(32, 32) for _ in layers)
    model.model.layers = layers
    assert Target(model).layers is layers


# What a target knows


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "mistral"])
def test_short_contexts(model_type: str) -> None:
    """A context shorter than the probe's text, with tables of learned positions that are no longer."""
    for context in (4, 5, 11):
        model = tiny(model_type, max_position_embeddings=context)
        plain = copy.deepcopy(model)
        target = Target(model)
        assert target.max_context == context
        (result,) = decode(target, None, [PROMPT[:2]], max_tokens=20, ignore_eos=True)
        assert result.finish_reason == "length"
        assert list(result.token_ids) == generate(plain, [PROMPT[:2]], context - 2)[0]
    # bfloat16 passes are padded to 64 tokens, beyond a learned table
    half = Target(tiny(model_type, torch.bfloat16, max_position_embeddings=11))
    assert len(decode(half, None, [PROMPT[:2]], max_tokens=20, ignore_eos=True)[0].token_ids) == 9
    assert "expected at least 4" in refusal(tiny(model_type, max_position_embeddings=3))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_change_with_the_text_limit_the_context(rope_type: str) -> None:
    """T9, D6: beyond the original context these frequencies depend on the length of the text, and keys
    in the cache keep older ones; up to there a target is exact."""
    if rope_type == "dynamic":
        changes: dict[str, Any] = {
            "max_position_embeddings": 48,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0},
        }
        model = tiny("llama", **changes)
    else:
        rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        model = tiny("phi3", sliding_window=None, original_max_position_embeddings=48, rope_parameters=rope)
    plain = copy.deepcopy(model)
    target = Target(model)
    assert target.max_context == 48
    answer = generate(plain, [PROMPT], 48 - len(PROMPT))[0]
    (result,) = decode(target, coin(answer, 6, len(PROMPT), 0.6), [PROMPT], max_tokens=99, ignore_eos=True)
    assert list(result.token_ids) == answer and result.finish_reason == "length"
    with pytest.raises(FlashdraftError, match="is made for 48"):
        Engine(target, max_context=49)


def test_ids_that_end_an_answer() -> None:
    """From generation_config, config and tokenizer; what is no id of the vocabulary is left out."""
    model = tiny("llama")
    model.generation_config.eos_token_id = [5, 6, VOCAB + 9]
    model.config.eos_token_id = 7
    target = Target(model, words(VOCAB, eos_token="w8", pad_token="w9"))
    assert target.eos_ids == {5, 6, 7, 8}
    assert target.pad_id == 0  # the model's own comes first
    model.config.pad_token_id = -1
    assert Target(model, words(VOCAB, pad_token="w9")).pad_id == 9
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert Target(model).eos_ids == frozenset()


def test_padded_vocabulary_is_never_drafted() -> None:
    """D19: 128 rows, 100 tokens: DFlash proposes none of the 28 that nobody can read."""
    model = make_model(transformers.LlamaConfig(**{**_LLAMA, "vocab_size": 128}), torch.float64)
    target = Target(model, words(100))
    assert (target.vocab_size, target.num_tokens) == (128, 100)
    proposed: list[int] = []
    for seed in range(6):
        drafter = dflash_drafter(target, 8, seed=seed, vocab_size=128, mask_token_id=127)
        propose = drafter.propose

        def noted(*args: Any, propose: Any = propose) -> Any:
            draft = propose(*args)
            proposed.extend(draft.tokens_BN.flatten().tolist())
            return draft

        drafter.propose = noted  # type: ignore[method-assign]
        for params in ({}, {"temperature": 1.5}, {"temperature": 1.5, "acceptance": "rejection"}):
            decode(target, drafter, [PROMPT], max_tokens=20, ignore_eos=True, **params)
    assert len(proposed) > 500 and max(proposed) < 100 and len(set(proposed)) > 20


_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 2, "initializer_range": 0.25,
}  # fmt: skip


def test_padding_rows_are_not_probed() -> None:
    """Rows above the tokenizer's were never trained and may hold anything."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[60:] = float("nan")
    assert Target(model, words(60)).num_tokens == 60


def test_tokenizers_that_do_not_belong_to_the_model_are_refused() -> None:
    assert "has 97 tokens and the model 96" in refusal(tiny("llama"), words(97))
    assert "knows no token" in refusal(tiny("llama"), words(0))
    # an added token beyond the table (Gemma 3 1B has one for images) harms nobody
    tokenizer = words(VOCAB)
    tokenizer.add_tokens(["<image>"])
    assert Target(tiny("llama"), tokenizer).num_tokens == VOCAB


def test_added_tokens_behind_a_gap_count() -> None:
    tokenizer = SimpleNamespace(vocab_size=50, added_tokens_decoder={80: "<tool>"}, eos_token_id=80, pad_token_id=None)
    tokenizer_class = type("Gap", (SimpleNamespace,), {"__len__": lambda self: 51})
    target = Target(tiny("llama"), tokenizer_class(**vars(tokenizer)))
    assert target.num_tokens == 81 and 80 in target.eos_ids


# Kinds


def test_encoder_decoders_and_wrappers_are_refused() -> None:
    t5 = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    assert "encoder-decoder model (t5)" in refusal(transformers.T5ForConditionalGeneration(t5))
    llava = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**_LLAMA, vocab_size=VOCAB),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=8, patch_size=4
        ),
        image_token_index=95,
    )
    assert "several modalities (llava)" in refusal(transformers.LlavaForConditionalGeneration(llava))
    bare = transformers.LlamaModel(transformers.LlamaConfig(**_LLAMA, vocab_size=VOCAB))
    assert "no LM head" in refusal(bare)
