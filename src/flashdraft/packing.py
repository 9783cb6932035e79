"""Weights in the order in which a CPU's matrix units read them.

AMX and AVX512-BF16 multiply pairs of rows. torch keeps a Linear's weight in plain rows and re-arranges it in every
product, which for the few tokens of a decoding step takes longer than the product. Here each weight is re-arranged
once, at load, with oneDNN's own function, and given to the kernels that torch's compiler uses. For the few tokens of a
decoding step they add up in the same order: results are equal to the bit, which is tried out for every shape before it
is used. Wider passes may be added up in another order, as torch's own are from one width to another.

The plain weights stay where they are, for whoever reads them; those of a safetensors file in the same precision are
pages of that file, which the system may drop. Training a network changes its weights every step: only targets and
finished drafts are packed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .host import fast_bf16, memory_bytes

_TRIED = (1, 6, 13, 17, 32)  # tokens of the products that have to agree
_EXPECTED = 16  # tokens of a pass that the order is asked for; it is one for all numbers of them


class PackedWeight:
    """A weight's copy in that order, and which weight it is of. Not copied along with a model: made again."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.key = _key(weight)
        self._plain = weight.detach()  # while it lives, no other weight comes to lie at its address
        self.tensor: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _EXPECTED)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return (type(None), ())


class PackedLinear(nn.Linear):
    """A Linear whose products read the packed copy. `weight` is as it was, and may be changed: the copy follows, but
    for what is written into `weight.data`, which torch does not count."""

    _packed: PackedWeight | None = None

    @classmethod
    def take(cls, module: nn.Linear) -> None:
        """Make a Linear one of these. Its copy is made now, and not in somebody's first request."""
        module.__class__ = cls
        module.__dict__["_packed"] = PackedWeight(module.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if input.dtype != torch.bfloat16 or torch.is_grad_enabled() or not _usable(weight):
            return F.linear(input, weight, self.bias)
        if self._packed is None or self._packed.key != _key(weight):
            self._packed = PackedWeight(weight)
        return _product(input, self._packed.tensor, self.bias)


def pack(model: nn.Module) -> int:
    """Pack the Linears of a model that computes in bfloat16 on a CPU with such units, if the copies take at most a
    third of the machine's memory; elsewhere nothing changes. Returns how many were packed.

    Of all memory and not of what is free, so that a run that goes on tomorrow computes the same.
    """
    found = [module for module in model.modules() if type(module) is nn.Linear and _usable(module.weight)]
    _, total = memory_bytes()
    if total is not None and 3 * sum(module.weight.nbytes for module in found) > total:
        return 0
    agreed: dict[tuple[int, int, bool], bool] = {}
    count = 0
    for module in found:
        shape = (module.out_features, module.in_features, module.bias is not None)
        if shape not in agreed:
            agreed[shape] = _agrees(module)
        if agreed[shape]:
            PackedLinear.take(module)
            count += 1
    return count


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Module:
    """x -> x W^T + b for a weight that belongs to no module."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    pack(linear)
    return linear


def _usable(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not weight.is_inference() and _has_units()


def _key(weight: torch.Tensor) -> tuple[int, int]:
    """Changes when the numbers may have."""
    return weight.data_ptr(), weight._version


@functools.cache
def _has_units() -> bool:
    """Whether torch has the kernels, and the processor the units: without them nothing is re-arranged."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    has_kernels = available and all(hasattr(torch.ops.mkldnn, name) for name in names)
    return has_kernels and fast_bf16(torch.device("cpu"))


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


@torch.no_grad()
def _agrees(linear: nn.Linear) -> bool:
    """Whether both kernels give the same bits."""
    try:
        packed = PackedWeight(linear.weight).tensor
        generator = torch.Generator().manual_seed(0)
        for num_tokens in _TRIED:
            x = torch.randn(num_tokens, linear.in_features, generator=generator).to(torch.bfloat16)
            if not torch.equal(_product(x, packed, linear.bias), F.linear(x, linear.weight, linear.bias)):
                return False
    except RuntimeError:  # a build of torch that names the kernels and does not have them
        return False
    return True
