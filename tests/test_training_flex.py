"""FlexAttention's side of training: tiles, programs that are compiled once, when it is chosen.

That its numbers are right is in test_training_blocks.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.testing import CompileCounterWithBackend

from bed import random_network, tiny_target
from flashdraft.target import Target
from flashdraft.training import flex
from flashdraft.training.blocks import Blocks, block_states, make_blocks
from flashdraft.training.flex import choose_attention, tile_mask, visible_runs
from flashdraft.training.methods import dflash
from flashdraft.training.plan import Piece
from flashdraft.types import FlashdraftError
from test_training_blocks import MASK, features_of, flex_that_trains_on_a_cpu, piece, sequence
from test_training_trainer import answers, tiny_trainer

# dynamo looks at every input, network states among them
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def flex_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with flex_that_trains_on_a_cpu(monkeypatch):
        yield


@pytest.mark.parametrize(("window", "causal"), [(None, False), (600, True), (4, False)])
def test_tiles_are_those_that_torch_finds(window: int | None, causal: bool) -> None:
    """A tile too few would lose keys in the compiled kernel, which looks at no other; operator by
    operator nobody would notice. torch asks the rule for every query and key."""
    generator = torch.Generator().manual_seed(0)
    anchors = torch.randint(1, 700, (50, 1), generator=generator).sort(dim=0).values
    starts = torch.where(torch.arange(50) < 20, 0, 700)
    runs = visible_runs(anchors + torch.arange(8), starts, 1536, window, causal)
    assert runs.shape == (4, 512)
    mask = tile_mask(runs, 2048)
    expected = torch_flex.create_block_mask(mask.mask_mod, None, None, 512, 2048, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    assert bool(mask.full_kv_num_blocks.any()) is (window != 4)
    for count, which in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for row, number in enumerate(getattr(mask, count)[0, 0].tolist()):
            ours, theirs = (getattr(m, which)[0, 0, row, :number].tolist() for m in (mask, expected))
            assert ours == theirs


def test_a_tile_of_which_one_slot_is_seen() -> None:
    """Runs that end just behind a tile's edge, and begin just before it."""
    runs = torch.zeros(4, 256, dtype=torch.int32)
    runs[2], runs[3] = torch.arange(384, 640), torch.arange(385, 641)
    runs[1, :128], runs[0, 128:], runs[1, 128:] = 129, 127, 256
    mask = tile_mask(runs, 640)
    assert mask.kv_indices[0, 0, 0, :2].tolist() == [1, 3] and mask.full_kv_indices[0, 0, 0, 0] == 0
    assert mask.kv_indices[0, 0, 1, :2].tolist() == [0, 4] and mask.full_kv_indices[0, 0, 1, 0] == 1
    assert mask.kv_num_blocks.tolist() == [[[2, 2]]] and mask.full_kv_num_blocks.tolist() == [[[1, 1]]]


def batch(target: Target, size: int, seed: int, length: int = 60) -> tuple[Blocks, dict[int, torch.Tensor]]:
    samples = [sequence(seed=seed), sequence(seed=seed + 1, length=length, prompt=20)]
    pieces = [piece(0, [9 + seed % 5, 17, 28], 30), piece(1, [20, 33, length - 2 - seed % 7], length)]
    blocks = make_blocks(pieces, samples, size, MASK, 4, num_pieces=3)
    return blocks, {i: features_of(target, samples[i].token_ids, (0, 1)) for i in (0, 1)}


def test_a_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all batches, layers, windows and directions; another one where contexts need the next bucket."""
    counter = CompileCounterWithBackend("eager")
    kernel = flex._kernel
    monkeypatch.setattr(flex, "_kernel", functools.cache(lambda backend: kernel.__wrapped__(counter)))
    target = tiny_target()
    for changes in ({}, {"windows": (5, None), "causal": (True, False)}):
        network = random_network(target, **changes).requires_grad_(True)
        for seed in (3, 8):
            blocks, features = batch(target, 8, seed)
            assert block_states(network, target.embed, blocks, features, "flex").requires_grad
    assert counter.frame_count == 1
    monkeypatch.setattr(flex, "_LEAST_CONTEXT", 64)  # 28 + 58 context slots: 128 of them
    block_states(network, target.embed, *batch(target, 8, 3), "flex")
    assert counter.frame_count == 2


def test_a_batch_is_filled_up_by_blocks_without_labels() -> None:
    sample = sequence()
    blocks = make_blocks([Piece(0, (9, 15), (30, 30)), Piece(0, (11,), (30,))], [sample], 8, MASK, 2, num_pieces=4)
    assert blocks.tokens_AB.shape == (8, 8)
    assert blocks.sequences == (0,) * 4 and blocks.reach == (15, 11, 11, 11)
    assert (blocks.labels_AL[:3, 0] >= 0).all() and (blocks.labels_AL[3:] == -1).all()


def test_training_is_the_same_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, the second with half a batch: the same losses, gradients' norms and weights."""
    rows, found = answers(2), []
    for attention in ("sdpa", "flex"):
        monkeypatch.setattr(dflash, "choose_attention", lambda *args, attention=attention: attention)
        (tmp_path / attention).mkdir()
        run = tiny_trainer(tmp_path / attention, rows, dtype="float64", num_layers=1, window=12, blocks_per_batch=64)
        assert run.plan.steps_per_epoch == 2 and len(run.plan.batches(1)[0]) == 2
        reports = [run.train_step() for _ in range(2)]
        found.append((reports, run.masters.weights))
    (first, one), (second, other) = found
    assert [r.loss for r in first] == pytest.approx([r.loss for r in second], rel=1e-9)
    assert [r.grad_norm for r in first] == pytest.approx([r.grad_norm for r in second], rel=1e-7)
    assert [r.num_blocks for r in first] == [r.num_blocks for r in second]
    for name, weight in one.items():
        assert torch.allclose(weight, other[name], rtol=0, atol=1e-6), name


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "head_dim", "chosen"),
    [
        ("auto", CPU, torch.bfloat16, 64, "sdpa"),
        ("auto", CUDA, torch.bfloat16, 64, "flex"),
        ("auto", CUDA, torch.float32, 80, "flex"),
        ("auto", CUDA, torch.float64, 64, "sdpa"),
        ("auto", CUDA, torch.bfloat16, 8, "sdpa"),
        ("sdpa", CUDA, torch.bfloat16, 64, "sdpa"),
        ("flex", CUDA, torch.bfloat16, 64, "flex"),
    ],
)
def test_what_is_chosen(wanted: str, device: torch.device, dtype: torch.dtype, head_dim: int, chosen: str) -> None:
    assert choose_attention(wanted, device, dtype, head_dim) == chosen


def test_what_cannot_be_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlashdraftError, match="no backward pass on a CPU; set attention to auto or sdpa"):
        tiny_trainer(tmp_path, answers(1), attention="flex")
    with pytest.raises(FlashdraftError, match=r"the draft has torch.float64 and 64\. Set attention to"):
        choose_attention("flex", CUDA, torch.float64, 64)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise torch._dynamo.exc.TorchDynamoException("no compiler")

    monkeypatch.setattr(flex, "_kernel", lambda backend: fails)
    target = tiny_target()
    with pytest.raises(FlashdraftError, match=r"cannot be compiled here \(no compiler\); set attention to sdpa"):
        block_states(random_network(target), target.embed, *batch(target, 8, 3), "flex")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 12])
def test_the_compiled_kernel_on_cuda(tmp_path: Path, window: int | None) -> None:
    """What training on a GPU runs, against products on the CPU in float64: states and all gradients."""
    wide = tiny_target()
    changes = {"head_dim": 16, "windows": (window, window), "causal": (window is not None,) * 2}
    network = random_network(wide, **changes).requires_grad_(True)
    blocks, features = batch(wide, 8, 3, length=200)
    found = []
    for device, dtype, attention in (("cpu", torch.float64, "sdpa"), ("cuda", torch.float32, "flex")):
        moved = network.to(device=device, dtype=dtype)
        there = Blocks(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(blocks).items()})
        context = {i: f.to(device=device, dtype=dtype) for i, f in features.items()}

        def embed(tokens: torch.Tensor, device: str = device, dtype: torch.dtype = dtype) -> torch.Tensor:
            return wide.embed(tokens.cpu()).to(device=device, dtype=dtype)

        states = block_states(moved, embed, there, context, attention)
        gradients = torch.autograd.grad(states.square().sum(), list(moved.parameters()))
        found.append([t.detach().cpu().double() for t in (states, *gradients)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-2 * one.norm()  # products in TF32 where the device has them
