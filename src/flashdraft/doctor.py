"""What there is on this machine, what is wrong with it, and what to do about that.

Each finding is made on its own: a broken installation is what this is for, so no failure of one may
hide the others.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from .host import memory_bytes
from .terminal import console, count_of, waiting
from .types import FlashdraftError

if TYPE_CHECKING:
    from .target import Target

_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `problem` is None, or one sentence that ends in the remedy."""

    name: str
    value: str
    problem: str | None = None


def examine(
    target: str, draft: str | None = None, *, dtype: str = "auto", device: str | None = None, threads: int | None = None
) -> list[Finding]:
    """All findings, the cheap ones first."""
    findings = [_attempt("python", _python), *_packages()]
    if any(finding.problem for finding in findings if finding.name in ("torch", "transformers")):
        return findings  # nothing below works without them
    with waiting("looking"):
        findings += [
            _attempt("threads", lambda: _threads(threads)),
            _attempt("CPU", _cpu),
            (place := _attempt("device", lambda: _device(device))),
            _attempt("dtype", lambda: _dtype(dtype, None if place.problem else device)),
            _attempt("memory", _memory),
            _attempt("cache folder", _cache_folder),
            _attempt("target files", lambda: _target_files(target)),
        ]
    if any(finding.problem for finding in findings if finding.name in ("device", "dtype", "target files")):
        return findings
    loaded: list[Target] = []
    with waiting(f"loading {target}"):
        findings.append(_attempt("target", lambda: _target(target, dtype, device, loaded)))
        if draft is not None and loaded:
            findings.append(_attempt("draft", lambda: _draft(draft, loaded[0])))
    return findings


def show(findings: list[Finding], *, as_json: bool = False) -> None:
    """Print findings to standard output: a line each, and what is wrong under them."""
    screen = console(sys.stdout)
    wrong = [finding for finding in findings if finding.problem]
    if as_json:
        report = {"ok": not wrong, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report, ensure_ascii=False) + "\n")
        return
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark = Text("wrong", "bold red") if finding.problem else Text("ok", "green")
        name, value = Text(finding.name, "bold"), Text(finding.value, overflow="fold")
        if screen.is_terminal:
            table.add_row(mark, name, value)
        else:  # nothing may cut a line in two that a script looks at
            screen.print(f"{mark.plain:7}{name.plain:14}{value.plain}", soft_wrap=True)
    screen.print(table)
    for finding in wrong:
        screen.print(Text.assemble((f"{finding.name}: ", "bold red"), finding.problem or ""), soft_wrap=True)
    if not wrong:
        screen.print("Nothing is wrong.")


def _attempt(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except FlashdraftError as error:
        return Finding(name, "cannot be used", str(error))
    except Exception as error:
        sentence = " ".join(str(error).split())[:300] or type(error).__name__
        return Finding(name, "cannot be examined", f"{type(error).__name__}: {sentence}")


def _python() -> Finding:
    return Finding("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> list[Finding]:
    """Versions against those the package asks for; torch and transformers are imported."""
    findings = [_attempt(name, lambda name=name: _package(name)) for name in ("torch", "transformers", "safetensors")]  # type: ignore[misc]
    return [*findings, _attempt("gguf", _gguf)]


def _package(name: str) -> Finding:
    import importlib
    from importlib import metadata

    with waiting(f"importing {name}"):
        try:
            module = importlib.import_module(name)
        except (ImportError, OSError) as error:
            sentence = " ".join(str(error).split())[:200]
            return Finding(name, "does not import", f"{sentence}; run: pip install --force-reinstall {name}")
    version = metadata.version(name)
    value = version if name != "torch" else f"{version}, {_torch_build(module)}"
    wanted = _wanted(name)
    if wanted and not _new_enough(version, wanted):
        return Finding(
            name, value, f"flashdraft needs {name} {wanted} or newer; run: pip install --upgrade '{name}>={wanted}'"
        )
    return Finding(name, value)


def _torch_build(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda} build"
    return f"ROCm {torch.version.hip} build" if torch.version.hip else "CPU build"


def _wanted(name: str) -> str | None:
    """The oldest version flashdraft's own requirements allow."""
    from importlib import metadata

    try:
        lines = metadata.requires("flashdraft") or []
    except metadata.PackageNotFoundError:
        return None
    return next((line.removeprefix(f"{name}>=") for line in lines if line.startswith(f"{name}>=")), None)


def _new_enough(version: str, wanted: str) -> bool:
    def key(text: str) -> list[int]:
        return [int("".join(c for c in part if c.isdigit()) or 0) for part in text.split("+")[0].split(".")[:2]]

    return key(version) >= key(wanted)


def _gguf() -> Finding:
    from importlib import metadata

    try:
        return Finding("gguf", metadata.version("gguf"))
    except metadata.PackageNotFoundError:
        return Finding("gguf", "not installed; needed once per GGUF file: pip install 'flashdraft[gguf]'")


def _threads(threads: int | None) -> Finding:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads is not None:
        torch.set_num_threads(threads)
    count = torch.get_num_threads()
    value = f"{count} for {usable} usable CPU{'s' if usable > 1 else ''}"
    if "OMP_NUM_THREADS" in os.environ:
        value += f", OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    if count > usable:
        return Finding("threads", value, f"more threads than CPUs slow each other down; use --threads {usable}")
    return Finding("threads", value)


def _cpu() -> Finding:
    import torch

    from .host import fast_bf16

    bf16 = "in hardware" if fast_bf16(torch.device("cpu")) else "emulated, slow"
    return Finding("CPU", f"{torch.backends.cpu.get_cpu_capability()}, bfloat16 {bf16}")


def _device(device: str | None) -> Finding:
    import torch

    from .target import usable_device

    found = usable_device(device)
    if found.type != "cuda":
        return Finding("device", str(found))
    free, total = torch.cuda.mem_get_info(found)
    return Finding(
        "device", f"{found}, {torch.cuda.get_device_name(found)}, {_size(free)} of {_size(total)} memory free"
    )


def _dtype(dtype: str, device: str | None) -> Finding:
    from .target import resolve_dtype, usable_device

    meant = str(resolve_dtype(dtype, usable_device(device))).removeprefix("torch.")
    return Finding("dtype", f"auto is {meant} here" if dtype == "auto" else meant)


def _memory() -> Finding:
    free, total = memory_bytes()
    if free is None or total is None:
        return Finding("memory", "unknown on this system")
    value = f"{_size(free)} of {_size(total)} available"
    if free < _GIB // 2:
        return Finding("memory", value, "less than 0.5 GiB is available; close other programs")
    return Finding("memory", value)


def _cache_folder() -> Finding:
    from .locate import cache_dir

    folder = cache_dir()
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
    value = f"{_short(folder)}, {_size(held)}"
    place = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Finding("cache folder", value, f"{place} is no folder to write to; name another one in FLASHDRAFT_CACHE")
    return Finding("cache folder", value)


def _target_files(target: str) -> Finding:
    from .locate import locate_target

    folder = locate_target(target)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    value = f"{target} at {_short(folder)}, weights {_size(weights)}"
    free, _ = memory_bytes()
    if free is not None and weights > free:
        return Finding(
            "target files", value, f"the weights do not fit into the {_size(free)} available; take a smaller target"
        )
    return Finding("target files", value)


def _target(name: str, dtype: str, device: str | None, loaded: list[Target]) -> Finding:
    from .target import Target

    target = Target.load(name, dtype=dtype, device=device)
    loaded.append(target)
    template = target.tokenizer is not None and bool(target.tokenizer.chat_template)
    parts = [
        type(target.model).__name__,
        f"{target.num_layers} layers",
        f"hidden {target.hidden_size}",
        f"vocabulary {target.vocab_size}",
        f"context {target.max_context}",
        str(target.dtype).removeprefix("torch."),
        "chat template" if template else "no chat template (use --raw)",
        "exact under roll back (probed)",
        *([f"{count_of(target.num_packed, 'weight')} in the CPU's own order"] if target.num_packed else []),
    ]
    return Finding("target", ", ".join(parts))


def _draft(folder: str, target: Target) -> Finding:
    """A draft of any method, loaded as decoding would load it."""
    from .checkpoint import read_training
    from .drafters import make_drafter
    from .locate import locate_draft
    from .provenance import draft_warnings

    path = locate_draft(folder)
    drafter: Any = make_drafter(target, draft=path)
    network = drafter.model.model if drafter.name == "draft_model" else drafter.network
    parameters = sum(p.numel() for p in network.parameters())
    what, *details = _details(drafter)
    parts = [f"{what} at {folder}", *details, f"{parameters / 1e6:.1f}M parameters", "fits the target"]
    if read_training(path) is None:
        parts.append("does not say how it was trained (no training.json)")
    return Finding("draft", ", ".join(parts), " ".join(draft_warnings(path, target)) or None)


def _details(drafter: Any) -> list[str]:
    """What a drafter of each method is, and what it looks like."""
    if drafter.name == "draft_model":
        model, layers = drafter.model, count_of(drafter.model.num_layers, "layer")
        return [f"draft model {type(model.model).__name__}", layers, f"context {model.max_context}"]
    config = drafter.network.config
    taps = f"taps target layers {', '.join(map(str, drafter.target_layer_ids))}"
    if drafter.name == "medusa":
        tree = f"a tree of {count_of(drafter.max_draft_tokens, 'node')}" if drafter.drafts_trees else "no tree"
        return ["Medusa", count_of(config.num_heads, "head"), tree]
    if drafter.name == "eagle3":
        return ["EAGLE-3", "1 layer", f"{config.draft_vocab_size} of {config.vocab_size} tokens", taps]
    without = {"fused": ", features at the input", "none": ", without features"}.get(config.context, "")
    order = ", left to right" if config.autoregressive else ""
    layers = count_of(config.num_layers, "layer")
    return [
        "DFlash",
        f"{layers}{without}{order}",
        f"block {config.block_size}",
        *([taps] if drafter.target_layer_ids else []),
    ]


def _short(path: Path) -> str:
    with contextlib.suppress(ValueError, RuntimeError):  # not under a home folder, or there is none
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / (1 << 20):.0f} MiB"
