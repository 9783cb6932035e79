"""A headless browser, where the machine has one: Chromium, by its own command line; nothing is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

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
    return subprocess.run([browser, *fixed, *arguments], capture_output=True, timeout=120, check=True)


def screenshot(page: Path, out: Path, width: int, height: int, dark: bool = False) -> Path:
    """A picture of the page's first `height` pixels."""
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    _run([*scheme, f"--window-size={width},{height}", f"--screenshot={out}", page.as_uri()], out.with_suffix(".profile"))
    return out


def dom(page: Path, profile: Path, width: int = 390) -> str:
    """The page as the browser understood it, its scripts run."""
    done = _run([f"--window-size={width},800", "--virtual-time-budget=2000", "--dump-dom", page.as_uri()], profile)
    return done.stdout.decode("utf-8")
