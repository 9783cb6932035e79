"""What this machine has: memory, and units for bfloat16. Imported where torch may be broken (doctor.py)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def fast_bf16(device: torch.device) -> bool:
    """Whether products in bfloat16 run in hardware there."""
    import torch

    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in probes)


def memory_bytes() -> tuple[int | None, int | None]:
    """(available, total) bytes, a container's limit included where there is one."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        entries = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
        free, total = entries["MemAvailable"], entries["MemTotal"]
    except (OSError, KeyError, ValueError):
        if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
            return None, None
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return None, total
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        stat = dict(
            line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii").splitlines()
        )
        return min(free, max(0, limit - int(stat["anon"]))), min(total, limit)  # file pages are given back
    except (OSError, KeyError, ValueError):  # no such limit
        return free, total
