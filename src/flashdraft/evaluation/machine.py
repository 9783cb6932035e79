"""The machine that a benchmark runs on: what it is, what others do on it, what memory is taken."""

from __future__ import annotations

import os
import platform
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from ..text import template_digest

if TYPE_CHECKING:
    from ..target import Target


def environment(target: Target | None) -> dict[str, Any]:
    """What a figure depends on besides the settings; of servers' engines they say it themselves."""
    from .. import __version__

    made = {"flashdraft": __version__, "python": platform.python_version(), "cpus": os.cpu_count()}
    if target is None:
        return made | {"asked_from": _cpu_name()}
    import transformers

    cuda = target.device.type == "cuda"
    return made | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(target.device) if cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "chat_template_sha256": template_digest(target.tokenizer) if target.tokenizer is not None else None,
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
    return name


def peak_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


class OtherWork:
    """CPUs that were busy with other processes' work (or taken by the host) since this was made."""

    def __init__(self) -> None:
        self._began, self._own, self._all = time.perf_counter(), time.process_time(), _busy_seconds()

    def load(self) -> float:
        seconds = max(time.perf_counter() - self._began, 1e-6)
        now = _busy_seconds()
        if now is None or self._all is None:  # not on Linux: a load average, which follows slowly
            average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
            return max(0.0, round(average - torch.get_num_threads(), 2))
        return max(0.0, round((now - self._all - (time.process_time() - self._own)) / seconds, 2))


def _busy_seconds() -> float | None:
    """CPU seconds of all processes since the start of the machine; None where nobody counts them."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:  # noqa: PTH123
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
