"""What a run tells: metrics.jsonl, a line or a live panel on the terminal, a plot at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live


class MetricsFile:
    """metrics.jsonl of a run; a resumed run takes back the lines of steps it repeats."""

    def __init__(self, run: Path, first_step: int) -> None:
        self.path = run / "metrics.jsonl"
        run.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(self.path) if line["step"] <= first_step]
        part = self.path.with_suffix(".part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        part.replace(self.path)

    def add(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a cut one at the end (a crash) is left out."""
    lines = []
    if path.is_file():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
    return lines


class Progress:
    """On a terminal a live panel, elsewhere a line whenever metrics come.

    Args:
        num_steps: of the whole run; `expect` says more about it later. first_step: where this process
            begins, so that the time left comes from the steps it has made itself.
    """

    def __init__(self, console: Console | None, num_steps: int | None, first_step: int) -> None:
        self._console, self._first = console, first_step
        self._num_steps = num_steps
        self._seconds_left: float | None = None
        self._began = time.monotonic()
        self._live: Live | None = None
        self._metrics: Mapping[str, Any] | None = None
        self._decoded: list[float] = []
        self._note = ""

    def __enter__(self) -> Progress:
        if self._console is not None and self._console.is_terminal:
            from rich.live import Live

            # drawn anew at every refresh, so that it follows the terminal's width and the clock
            self._live = Live(console=self._console, refresh_per_second=4, transient=True, get_renderable=self._panel)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def expect(self, num_steps: int | None, seconds_left: float | None) -> None:
        """What is known of the run's end: its steps, or (while the clock decides) its time."""
        self._num_steps = num_steps
        self._seconds_left = seconds_left

    def say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)  # commands can be copied

    def note(self, text: str) -> None:
        """A word in the live panel until the end; may be called from a signal handler."""
        self._note = text

    def show(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = metrics
        if self._live is not None:
            self._live.refresh()
        elif self._console is not None:
            self.say(self._line(metrics))

    def decoded(self, step: int, tau: float, domains: Mapping[str, float]) -> None:
        """A validation's acceptance lengths: all of them, and of each prompt file."""
        self._decoded.append(tau)
        parts = ", ".join(f"{name} {value:.3f}" for name, value in domains.items())
        self.say(f"step {step}: decoded acceptance length {tau:.3f} ({parts})")

    def _left(self, step: int) -> str:
        done = step - self._first
        if self._num_steps is not None and done > 0:
            seconds = (time.monotonic() - self._began) / done * (self._num_steps - step)
        elif self._seconds_left is not None:
            seconds = self._seconds_left
        else:
            return "?"
        hours, rest = divmod(int(seconds), 3600)
        return f"{hours}h{rest // 60:02d}m" if hours else f"{rest // 60}m{rest % 60:02d}s"

    def _line(self, m: Mapping[str, Any]) -> str:
        slots = " ".join(f"{100 * a:.0f}" for a in m["slot_accuracy"])
        steps = f"{m['step']}/{self._num_steps}" if self._num_steps is not None else f"{m['step']}"
        return (
            f"step {steps}  loss {m['loss']:.4f}  tau~{m['tau_estimate']:.3f}  slots {slots} %  "
            f"{m['anchors_per_second']:.0f} anchors/s  {m['tokens_per_second']:.0f} tok/s  left {self._left(m['step'])}"
        )

    def _panel(self) -> RenderableType:
        from rich.console import Group
        from rich.panel import Panel
        from rich.text import Text

        assert self._console is not None
        width = min(76, self._console.width)
        m, note = self._metrics, self._note
        if m is None:
            return Text(note or "the first steps are on their way")
        inner = width - 4  # border and padding
        filled, empty = ("#", ".") if self._console.options.ascii_only else ("█", "·")
        bars = max(1, inner - len("slot 15  100.0 %"))
        rows = [
            _joined(inner, f"loss {m['loss']:.4f}", f"acceptance length ~{m['tau_estimate']:.3f}", f"rate {m['lr']:.2e}"),
            *(
                f"slot {k:>2} {_bar(a, bars, filled, empty)} {100 * a:5.1f} %"
                for k, a in enumerate(m["slot_accuracy"], 1)
            ),
            _joined(
                inner, f"{m['anchors_per_second']:.0f} anchors/s", f"{m['tokens_per_second']:.0f} tokens/s",
                f"left {self._left(m['step'])}",
            ),
        ]  # fmt: skip
        if self._decoded:
            rows.append("decoded: " + " ".join(f"{tau:.2f}" for tau in self._decoded[-(inner - 9) // 5 :]))
        if note:
            rows.append(note)
        title = f"step {m['step']}" + (f" of {self._num_steps}" if self._num_steps is not None else "")
        lines = (Text(line, no_wrap=True, overflow="ellipsis") for line in "\n".join(rows).split("\n"))
        return Panel(Group(*lines), title=title, width=width)


def _joined(width: int, *parts: str) -> str:
    """The parts in one line, or one below the other where that is too wide."""
    line = "   ".join(parts)
    return line if len(line) <= width else "\n".join(parts)


def _bar(share: float, width: int, filled: str, empty: str) -> str:
    full = round(share * width)
    return filled * full + empty * (width - full)


def write_plot(run: Path) -> Path | None:
    """curves.svg: loss and acceptance lengths over the steps; None without enough points."""
    metrics = read_metrics(run / "metrics.jsonl")
    loss = [(m["step"], m["loss"]) for m in metrics if "loss" in m]
    estimate = [(m["step"], m["tau_estimate"]) for m in metrics if "tau_estimate" in m]
    tau = [(m["step"], m["validation_tau"]) for m in metrics if "validation_tau" in m]
    if len(loss) < 2:
        return None
    parts = [
        _chart(0, "loss", {"loss": loss}),
        _chart(260, "acceptance length", {"estimate": estimate, "decoded": tau}),
    ]
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 520" font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    path = run / "curves.svg"
    path.write_text(svg, encoding="utf-8")
    return path


def _chart(top: int, title: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    points = [p for line in series.values() for p in line]
    last = max(x for x, _ in points) or 1
    low, high = min(y for _, y in points), max(y for _, y in points)
    span = (high - low) or 1.0

    def place(x: float, y: float) -> str:
        return f"{60 + 560 * x / last:.1f},{top + 220 - 180 * (y - low) / span:.1f}"

    parts = [
        f'<text x="60" y="{top + 24}">{title}</text>',
        f'<text x="8" y="{top + 44}">{high:.3g}</text><text x="8" y="{top + 224}">{low:.3g}</text>',
        f'<text x="580" y="{top + 240}">{last:.0f}</text>',
        f'<path d="M60 {top + 30}V{top + 225}H625" fill="none" stroke="#888"/>',
    ]
    for i, (name, line) in enumerate(series.items()):
        color = ("#1f6feb", "#d1242f")[i % 2]
        if line:
            path = " ".join(place(x, y) for x, y in line)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(f'<text x="{300 + 110 * i}" y="{top + 24}" fill="{color}">{name}</text>')
    return "".join(parts)
