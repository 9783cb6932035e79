"""The command as docs/training.md has it: torchrun starts two `flashdraft train`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from bed import random_prompt
from cli_bed import save_target
from flashdraft import cli
from flashdraft.training.progress import read_metrics

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flashdraft"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    save_target(folder / "target")
    rows = [{"id": i, "token_ids": random_prompt(i, 50, 300), "num_prompt_tokens": 8} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "target": str(folder / "target"), "data": [str(folder / "rows.jsonl")], "dtype": "float32", "num_layers": 1,
        "block_size": 4, "target_layer_ids": [0, 1], "mask_token_id": 319, "anchors_per_piece": 8, "threads": 1,
        "blocks_per_batch": 16, "accumulate": 3, "log_steps": 1, "ema": 0.9, "lr": 1e-2, "warmup_steps": 1,
    }  # fmt: skip
    for name, changes in {"one": {"max_steps": 4}, "two": {"max_steps": 4, "shard": True}, "dies": {}}.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"run": str(folder / name), **values, **changes}))
    return folder


def torchrun(*args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.Popen(
        [*TORCHRUN, *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def test_two_processes_give_the_loss_of_one(folder: Path) -> None:
    """In shards; and only one of them talks and writes."""
    with torchrun("train", str(folder / "two.yaml")) as command:
        out, err = command.communicate(timeout=240)
    assert command.returncode == 0, err
    assert "2 process(es)" in out and out.count("starting: 4 sequences") == 1 and out.count("finished:") == 1
    alone = CliRunner().invoke(cli.app, ["train", str(folder / "one.yaml")])
    assert alone.exit_code == 0, alone.stderr
    one, two = (read_metrics(folder / name / "metrics.jsonl") for name in ("one", "two"))
    assert [m["step"] for m in two] == [1, 2, 3, 4] == [m["step"] for m in one]
    for key in ("loss", "grad_norm", "tau_estimate"):
        assert [m[key] for m in two] == pytest.approx([m[key] for m in one], rel=1e-4), key
    assert one[0]["loss"] != pytest.approx(one[-1]["loss"], rel=1e-2)  # it did train
    drafts = [load_file(folder / name / "latest" / "model.safetensors") for name in ("one", "two")]
    assert all(torch.allclose(tensor, drafts[1][name], rtol=0, atol=2e-3) for name, tensor in drafts[0].items())


def worker(command: subprocess.Popen[Any], rank: int) -> int:
    """The process of a rank, as the kernel knows it."""
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    ranks = {child: Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    (found,) = [int(child) for child, environment in ranks.items() if f"RANK={rank}".encode() in environment]
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the processes in /proc")
def test_a_killed_process_ends_the_other(folder: Path) -> None:
    """It says so, and how to go on, instead of waiting for a peer that will never answer."""
    changes = ["--set", "max_steps=1000000", "--set", "checkpoint_steps=1"]
    with torchrun("train", str(folder / "dies.yaml"), *changes) as command:
        try:
            deadline = time.monotonic() + 240
            while not (folder / "dies" / "latest").exists():
                assert command.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            os.kill(worker(command, 1), signal.SIGKILL)
            _, err = command.communicate(timeout=120)
        finally:
            command.terminate()
    assert command.returncode != 0
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "another process of this run ended or was lost, so process 0 ends too" in said[0]
    assert "start the same command again to go on from the last checkpoint" in said[0]
    assert (folder / "dies" / "latest" / "state.safetensors").is_file()
