"""Several processes under torchrun: each takes its share of a step's batches, gradients are summed.

The loss's denominator is that of the whole step, so a sum is all there is to it. How the optimizer's
state is shared out among them (`shard`) is in optimizer.py.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ..types import FlashdraftError


class Group:
    """This process's place among `world`; alone if torchrun did not start it.

    Attributes:
        broken: another process was lost.
    """

    def __init__(self) -> None:
        self.broken = False
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if self.world > 1:
            backend = "gloo"
            if torch.cuda.is_available():
                torch.cuda.set_device(self.local_rank)
                # What is said between steps goes by the host: gloo notices a lost process at once,
                # NCCL at its timeout.
                backend = "cpu:gloo,cuda:nccl"
            with self._all_there():
                dist.init_process_group(backend, timeout=dt.timedelta(minutes=30))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def _all_there(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.broken = True
            raise FlashdraftError(
                f"another process of this run ended or was lost, so process {self.rank} ends too; "
                "start the same command again to go on from the last checkpoint."
            ) from error

    def sum(self, tensors: Sequence[torch.Tensor], owners: Sequence[int] | None = None) -> None:
        """Add the tensors up over all processes, in place.

        owners: the process that wants each; what the others then hold is undefined. None: all do.
        """
        if self.world == 1:
            return
        with self._all_there():
            works = [
                dist.all_reduce(tensor, async_op=True)
                if owners is None
                else dist.reduce(tensor, owners[i], async_op=True)
                for i, tensor in enumerate(tensors)
            ]
            _wait(works)

    def spread(self, tensors: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        """Give every process its owner's tensor, in place, whatever its type: as bytes."""
        with self._all_there():
            _wait(
                [
                    dist.broadcast(tensor.view(-1).view(torch.uint8), owner, async_op=True)
                    for tensor, owner in zip(tensors, owners, strict=True)
                ]
            )

    def hand_over(self, tensor: torch.Tensor, owner: int) -> torch.Tensor | None:
        """An owner's tensor as the first process gets it, on the host; nothing for the others, who
        give one of the same shape, type and device to say what to expect."""
        with self._all_there():
            if self.rank == owner != 0:
                dist.send(tensor.contiguous(), 0)
            elif self.leads and owner != 0:
                tensor = torch.empty_like(tensor, memory_format=torch.contiguous_format)
                dist.recv(tensor, owner)
        return tensor.detach().cpu() if self.leads else None

    def agree(self, value: bool) -> bool:
        """Whether any process says so."""
        if self.world == 1:
            return value
        flag = torch.tensor([float(value)])
        self.sum([flag])
        return bool(flag.item() > 0)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized() and not self.broken:
            dist.destroy_process_group()


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def share_out(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """A process for each name, such that all have about the same to hold: the largest first, each to
    who has least."""
    loads = [0] * world
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners
