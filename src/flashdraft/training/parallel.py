"""Several processes under torchrun: each takes its share of a step's batches, gradients are summed.

The loss's denominator is that of the whole step, so a sum is all there is to it.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..types import FlashdraftError


class Group:
    """This process's place among `world`; alone if torchrun did not start it."""

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if self.world > 1:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=dt.timedelta(minutes=30))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add the tensors up over all processes, in place."""
        if self.world == 1:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        try:
            dist.all_reduce(flat)
        except RuntimeError as error:
            raise FlashdraftError(
                f"another process of this run ended or was lost, so process {self.rank} ends too; "
                "start the same command again to go on from the last checkpoint."
            ) from error
        first = 0
        for t in tensors:
            t.copy_(flat[first : first + t.numel()].view_as(t))
            first += t.numel()

    def agree(self, value: bool) -> bool:
        """Whether any process says so."""
        if self.world == 1:
            return value
        flag = torch.tensor([float(value)], device="cuda" if torch.cuda.is_available() else "cpu")
        self.sum([flag])
        return bool(flag.item() > 0)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
