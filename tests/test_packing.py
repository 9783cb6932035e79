"""Packed weights: the same bits as torch's own product in a decoding step, and never a stale copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bed import CONFIGS, make_model, random_network
from cli_bed import load_script, save_draft, save_target
from flashdraft import packing
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.packing import PackedLinear, pack, packed_linear
from flashdraft.target import Target

needs_units = pytest.mark.skipif(not packing._has_units(), reason="this processor has no units for bfloat16")


def linear(num_in: int, num_out: int, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(num_in, num_out, bias=bias).to(torch.bfloat16).requires_grad_(False)


def packed(num_in: int = 24, num_out: int = 40, bias: bool = True) -> tuple[nn.Linear, nn.Linear]:
    """One that is packed, and the same not packed."""
    made = linear(num_in, num_out, bias)
    other = copy.deepcopy(made)
    assert pack(made) == 1 and type(made) is PackedLinear
    return made, other


@needs_units
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_in=st.integers(1, 300), num_out=st.integers(1, 300), bias=st.booleans(), seed=st.integers(0, 99),
    rows=st.integers(1, 3), tokens=st.integers(0, 10), strided=st.booleans(),
)  # fmt: skip
def test_the_same_bits(num_in: int, num_out: int, bias: bool, seed: int, rows: int, tokens: int, strided: bool) -> None:
    """Whatever the sizes, for no tokens, and for a view of some positions (to which torch itself adds a bias
    after rounding, and to the same numbers in plain order before)."""
    made = linear(num_in, num_out, bias, seed)
    x = torch.randn(rows, tokens + 2, num_in).to(torch.bfloat16)
    x = x[:, 1 : tokens + 1] if strided else x[:, 2:].contiguous()
    with torch.inference_mode():
        expected = made(x.contiguous())
        if not pack(made):  # some odd sizes do not agree: those stay torch's own, whatever it does
            assert type(made) is nn.Linear
            return
        assert torch.equal(made(x), expected) and torch.equal(made(x.flatten(0, 1)), expected.flatten(0, 1))


@needs_units
def test_a_tokens_numbers_do_not_depend_on_how_many_are_in_the_pass() -> None:
    """What lossless texts in bfloat16 rest on, as without packing."""
    made, other = packed(576, 192, bias=False)
    x = torch.randn(32, 576).to(torch.bfloat16)
    with torch.inference_mode():
        for count in range(1, 33):
            assert torch.equal(made(x[:count]), other(x)[:count]), count


@needs_units
def test_a_changed_weight_is_followed() -> None:
    made, other = packed()
    x = torch.randn(5, 24).to(torch.bfloat16)
    with torch.inference_mode():
        before = made(x)
    with torch.no_grad():
        made.weight[3] += 1
        other.weight[3] += 1
    with torch.inference_mode():
        assert torch.equal(made(x), other(x)) and not torch.equal(made(x), before)
    other.weight = nn.Parameter(torch.randn(40, 24).to(torch.bfloat16), requires_grad=False)
    made.weight.data = other.weight.data
    with torch.inference_mode():
        assert torch.equal(made(x), other(x))
    made.float(), other.float()
    with torch.inference_mode():
        assert torch.equal(made(x.float()), other(x.float()))


@needs_units
def test_no_weight_comes_to_lie_where_the_packed_one_lay() -> None:
    """It would be taken for it."""
    made, _ = packed()
    weight = torch.randn(40, 24).to(torch.bfloat16)
    address = weight.data_ptr()
    made.weight.data = weight
    with torch.inference_mode():
        made(torch.zeros(1, 24, dtype=torch.bfloat16))
    made.weight.data = torch.zeros(1, 1, dtype=torch.bfloat16)
    del weight
    others = [torch.empty(40, 24, dtype=torch.bfloat16) for _ in range(40)]
    assert address not in [other.data_ptr() for other in others]


@needs_units
def test_what_else_is_done_with_a_model() -> None:
    """Its state, copies of it, and gradients are those of a Linear."""
    made, other = packed()
    x = torch.randn(5, 24).to(torch.bfloat16)
    with torch.inference_mode():
        expected = made(x)
    assert made.state_dict().keys() == other.state_dict().keys() and isinstance(made, nn.Linear)
    twin = copy.deepcopy(made)
    with torch.no_grad():
        made.weight.zero_()
    with torch.inference_mode():
        assert torch.equal(twin(x), expected)
    for module in (made, other):
        module.load_state_dict(twin.state_dict())
        module.requires_grad_(True)
        module(x).float().square().sum().backward()
    assert made.weight.grad is not None and torch.equal(made.weight.grad, other.weight.grad)
    read = [part.clone().requires_grad_(True) for part in (x, x)]
    for module, part in zip((made, other), read, strict=True):  # a frozen head, whose input is trained
        module.requires_grad_(False)(part).float().square().sum().backward()
    assert read[0].grad is not None and torch.equal(read[0].grad, read[1].grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_precisions_stay(dtype: torch.dtype) -> None:
    made = linear(8, 8).to(dtype)
    assert pack(made) == 0 and type(made) is nn.Linear


@needs_units
def test_where_it_would_not_fit_or_not_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies may take a third of the memory there is, whatever is free today; a kernel that rounds differently is not used; nor is a
    build of torch without it, or weights whose changes nobody counts."""
    made = linear(32, 16)
    for total, count in ((3 * 32 * 16 * 2 - 1, 0), (3 * 32 * 16 * 2, 1), (None, 1)):
        other = copy.deepcopy(made)
        monkeypatch.setattr(packing, "memory_bytes", lambda total=total: (1, total))
        assert pack(other) == count
    product = packing._product
    monkeypatch.setattr(packing, "_product", lambda x, w, b: product(x, w, b) * (1 if len(x) < 17 else 1.01))
    assert pack(made) == 0

    def missing(*args: object) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(packing, "_product", missing)
    assert pack(made) == 0
    monkeypatch.setattr(packing, "_product", product)
    with torch.inference_mode():
        inside = nn.Linear(32, 16, dtype=torch.bfloat16)
    assert pack(inside) == 0
    monkeypatch.setattr(packing, "_has_units", lambda: False)
    assert pack(made) == 0 and type(made) is nn.Linear


@pytest.fixture
def model() -> Iterator[Target]:
    yield Target(make_model(CONFIGS["qwen2"](), torch.bfloat16), name="qwen2")


@needs_units
def test_a_target_is_packed_and_its_passes_are_the_same(model: Target) -> None:
    """All of its products, the tied head and biases included; training reads the plain weights."""
    kinds = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
    assert model.num_packed == len(kinds) and all(type(m) is PackedLinear for m in kinds)
    for width in (1, 7, 40):
        tokens = torch.randint(3, 90, (2, width), generator=torch.Generator().manual_seed(width))
        found = []
        for kind in (PackedLinear, nn.Linear):
            for module in kinds:
                module.__class__ = kind
            out = model.forward(tokens, model.new_cache(2, 64), [0, 1], layer_ids=(0, 1))
            assert out.features_BTF is not None
            found.append((out.logits_BTV, out.features_BTF))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(model.head_rows()[0], model.model.get_input_embeddings().weight)


@needs_units
def test_drafts_are_packed_when_they_are_loaded(tmp_path: Path) -> None:
    """And not before: a network that is trained changes its weights every step."""
    target = Target.load(save_target(tmp_path / "target"), dtype="bfloat16", device="cpu")
    save_draft(tmp_path / "draft", target, mask_token_id=target.vocab_size - 1)
    network = DFlashDrafter.load(tmp_path / "draft", target).network
    assert all(type(m) is PackedLinear for m in network.modules() if isinstance(m, nn.Linear))
    made = random_network(target, mask_token_id=target.vocab_size - 1)
    drafter = DFlashDrafter(made, target, vocab_ids=torch.arange(3, 50))
    assert not any(type(m) is PackedLinear for m in made.modules()) and type(drafter._head) is PackedLinear


@needs_units
def test_a_weight_of_no_module() -> None:
    weight, bias = torch.randn(7, 12).to(torch.bfloat16), torch.randn(7).to(torch.bfloat16)
    x = torch.randn(3, 12).to(torch.bfloat16)
    for b in (bias, None):
        with torch.inference_mode():
            assert torch.equal(packed_linear(weight, b)(x), F.linear(x, weight, b))


def test_speed_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """scripts/speed.py --products: both kinds are timed where there are two, else it says so."""
    script = load_script("speed")
    if packing._has_units():
        assert min(script.product_seconds((16, 24), 2, 3, 1)) > 0
    monkeypatch.setattr(packing, "_has_units", lambda: False)
    with pytest.raises(SystemExit, match="weights are not packed here"):
        script.product_seconds((16, 24), 2, 3, 1)
