"""A headless browser, where the machine has one: Chromium, by its own command line; nothing is installed."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
REASON = "no headless browser here (chromium or google-chrome on the PATH); Debian's package is called chromium"


def find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


def _run(arguments: list[str], profile: Path) -> subprocess.CompletedProcess[bytes]:
    browser = find()
    assert browser is not None
    fixed = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
        "--disable-dev-shm-usage", f"--user-data-dir={profile}",
    ]  # fmt: skip
    for patience in (60, 120):  # on a busy machine it sometimes hangs at its start
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run([browser, *fixed, *arguments], capture_output=True, timeout=patience, check=True)
        shutil.rmtree(profile, ignore_errors=True)
    pytest.skip(f"{browser} does not answer on this machine")


def _narrow(page: Path, folder: Path, width: int, height: int) -> Path:
    """The page in a frame: a window is never narrower than 500 pixels, a phone is. What is measured
    in it goes into the title."""
    outer = folder / f"frame{width}.html"
    outer.write_text(
        f"<!doctype html><body style='margin:0'><iframe id='f' src='{page.as_uri()}' style='border:0;display:block' "
        f"width='{width}' height='{height}'></iframe><script>onload=()=>{{const d=document.getElementById('f')"
        ".contentDocument;document.title=[d.documentElement.scrollWidth,d.body.scrollHeight,"
        "d.querySelectorAll('script,img').length].join(' ')}</script>"
    )
    return outer


def _scheme(dark: bool) -> str:
    return f"--blink-settings=preferredColorScheme={0 if dark else 1}"


def screenshot(page: Path, out: Path, width: int, height: int, dark: bool = False) -> Path:
    """A picture of the page's first `height` pixels."""
    page = _narrow(page, out.parent, width, height) if width < 500 else page
    size = f"--window-size={max(width, 500)},{height}"
    _run([_scheme(dark), size, f"--screenshot={out}", page.as_uri()], out.with_suffix(".profile"))
    return out


def measured(page: Path, folder: Path, width: int) -> tuple[int, int, int]:
    """In a frame of `width` pixels: how wide and high the page gets (wider, and it scrolls sideways), and how
    many scripts and pictures the browser found in it."""
    arguments = ["--allow-file-access-from-files", "--virtual-time-budget=3000", "--dump-dom"]
    done = _run([*arguments, _narrow(page, folder, width, 800).as_uri()], folder / "width.profile")
    found = re.search(r"<title>(\d+) (\d+) (\d+)</title>", done.stdout.decode("utf-8"))
    assert found is not None, "the browser did not measure the page"
    return int(found[1]), int(found[2]), int(found[3])
