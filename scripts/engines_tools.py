"""What the parts of engines.py share: environments of their own, commands, waiting for a server."""

from __future__ import annotations

import email
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
TORCH = "torch==2.13.0"


class Skipped(Exception):
    """A part that cannot run here, and why."""


def call(command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run a command; what it prints goes to the part's log. Raises CalledProcessError."""
    print("$", shlex.join(map(str, command)), flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **(env or {})}, check=True)


def environment(folder: Path, *installs: Sequence[str]) -> Path:
    """The Python of a virtual environment in `folder`, made once. installs: pip's arguments, a call each."""
    python, done = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join(" ".join(each) for each in installs)
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return python
    call([sys.executable, "-m", "venv", "--clear", folder])
    for each in installs:
        call([python, "-m", "pip", "install", "--quiet", *each])
    done.write_text(wanted, encoding="utf-8")
    return python


def requirements(folder: Path, package: str, without: Collection[str]) -> list[str]:
    """What a wheel asks for, extras and some packages left out: `package` is then installed --no-deps."""
    call([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package])
    name = package.split("==")[0].replace("-", "_")
    wheel = max(folder.glob(f"{name}-*.whl"), key=lambda file: file.stat().st_mtime)
    with zipfile.ZipFile(wheel) as archive:
        path = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        listed = email.message_from_bytes(archive.read(path)).get_all("Requires-Dist") or []
    return [each for each in listed if "extra ==" not in each and named(each) not in without]


def named(requirement: str) -> str:
    """ "Torch-Vision >= 1; marker" -> "torch-vision"."""
    found = re.match(r"[\w.-]+", requirement)
    return found.group().lower().replace("_", "-") if found else requirement


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
    return port


@contextmanager
def serving(
    command: Sequence[str | Path], url: str, *, env: Mapping[str, str] | None = None, seconds: float = 600
) -> Iterator[None]:
    """A server until the block ends, once `url` answers. Raises RuntimeError if it ends or never does."""
    print("$", shlex.join(map(str, command)), "&", flush=True)
    server = subprocess.Popen([str(part) for part in command], env={**os.environ, **(env or {})})
    try:
        last = time.monotonic() + seconds
        while not _answers(url):
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode} before it answered")
            if time.monotonic() > last:
                raise RuntimeError(f"the server did not answer within {seconds:.0f} s")
            time.sleep(1)
        yield
    finally:
        server.terminate()
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return int(reply.status) == 200
    except (urllib.error.URLError, OSError):
        return False
