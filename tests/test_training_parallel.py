"""Two processes under torchrun's rules: the numbers of one, and no waiting for the dead."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bed import tiny_target
from flashdraft.training.parallel import Group
from flashdraft.training.progress import Progress, read_metrics
from flashdraft.training.run import build_trainer
from flashdraft.types import FlashdraftError
from test_training_trainer import answers, tiny_config

CHANGES: dict[str, Any] = {
    "num_layers": 1, "block_size": 4, "accumulate": 3, "blocks_per_batch": 16, "anchors_per_piece": 8,
    "max_steps": 4, "log_steps": 1, "kl_weight": 0.5,
}  # fmt: skip


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def process(rank: int, port: int, folder: Path, rows: list[dict[str, Any]], dies_at: int | None) -> None:
    """One of two; ends with 0, or with 7 and a file that says why."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    group = Group()
    trainer = build_trainer(tiny_config(folder, rows, **CHANGES), group, tiny_target("llama", "float32"))
    if rank == 1 and dies_at is not None:
        steps = trainer.train_step

        def dying() -> Any:
            if trainer.step == dies_at:
                os._exit(9)
            return steps()

        trainer.train_step = dying  # type: ignore[method-assign]
    try:
        with Progress(None, 1, 0) as progress:
            trainer.run(progress)
    except FlashdraftError as error:
        (folder / f"error{rank}").write_text(str(error))
        os._exit(7)
    group.close()


def two(folder: Path, rows: list[dict[str, Any]], dies_at: int | None = None) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashdraft.training.run", "transformers.models.llama.modeling_llama", "bed"])
    port = free_port()
    folders = [folder / "lead", folder / "other"]
    processes = []
    for rank in range(2):
        folders[rank].mkdir()
        processes.append(context.Process(target=process, args=(rank, port, folders[rank], rows, dies_at)))
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    return [p.exitcode for p in processes]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return answers(4, tokens=24)


def test_two_processes_give_the_numbers_of_one(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    """Batches of a step are shared out, three among two; the loss has one denominator."""
    (tmp_path / "alone").mkdir()
    trainer = build_trainer(tiny_config(tmp_path / "alone", rows, **CHANGES), target=tiny_target("llama", "float32"))
    with Progress(None, 1, 0) as progress:
        trainer.run(progress)
    assert two(tmp_path, rows) == [0, 0]
    one, both = (read_metrics(tmp_path / name / "run" / "metrics.jsonl") for name in ("alone", "lead"))
    assert [m["loss"] for m in both] == pytest.approx([m["loss"] for m in one], rel=1e-5)
    assert [m["slot_accuracy"] for m in both] == [m["slot_accuracy"] for m in one]
    assert not (tmp_path / "other" / "run" / "metrics.jsonl").exists()  # the leader writes
    states = [load_file(tmp_path / name / "run" / "latest" / "state.safetensors") for name in ("alone", "lead")]
    for name, tensor in states[0].items():
        if name.startswith("weights."):
            assert torch.allclose(tensor, states[1][name], rtol=0, atol=2e-4), name


def test_a_killed_process_ends_the_other(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert two(tmp_path, rows, dies_at=2) == [7, 9]
    said = (tmp_path / "lead" / "error0").read_text()
    assert "another process of this run ended" in said and "start the same command again" in said
