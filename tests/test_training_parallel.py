"""Two processes under torchrun's rules: the numbers of one, also in shards, and no waiting for the dead."""

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
from flashdraft.training.config import as_json, make_config
from flashdraft.training.parallel import Group, share_out
from flashdraft.training.progress import Progress, read_metrics
from flashdraft.training.run import build_trainer
from flashdraft.training.trainer import Trainer
from flashdraft.types import FlashdraftError
from test_training_trainer import answers, tiny_config

CHANGES: dict[str, Any] = {
    "num_layers": 1, "block_size": 4, "accumulate": 3, "blocks_per_batch": 16, "anchors_per_piece": 8,
    "max_steps": 4, "log_steps": 1, "kl_weight": 0.5,
}  # fmt: skip
MUON: dict[str, Any] = {"optimizer": "muon", "weight_decay": 0.1, "ema": 0.9}
CONSTANT: dict[str, Any] = {"schedule": "wsd", "decay_share": 0.0, "ema": 0.9}  # rates for any number of steps
# What two processes do one after the other: a folder, and what is changed. A folder's second goes on.
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("whole", {}),
    ("shards", {"shard": True}),
    ("whole muon", MUON),
    ("shards muon", {**MUON, "shard": True}),
    ("constant", CONSTANT),
    ("to shards", {**CONSTANT, "max_steps": 2}),
    ("to shards", {**CONSTANT, "shard": True}),
    ("from shards", {**CONSTANT, "shard": True, "max_steps": 2}),
    ("from shards", CONSTANT),
    ("for one", {**CONSTANT, "shard": True, "max_steps": 2}),
]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def go(values: dict[str, Any], group: Group | None, dies_at: int | None = None) -> Trainer:
    """A run from its last checkpoint to its end."""
    trainer = build_trainer(make_config(values), group, tiny_target("llama", "float32"))
    trainer._validate = lambda _: (validated(trainer), {})
    steps = trainer.train_step

    def dying() -> Any:
        if trainer.step == dies_at:
            os._exit(9)
        return steps()

    trainer.train_step = dying  # type: ignore[method-assign]
    trainer.resume()
    with Progress(None, 1, 0) as progress:
        trainer.run(progress)
    return trainer


def validated(trainer: Trainer) -> float:
    """Instead of a tau, a number that depends on all weights that a validation would use."""
    return sum(float(weight.double().abs().sum()) for _, weight in sorted(trainer.masters.best_weights.items()))


def process(rank: int, port: int, folder: Path, runs: list[dict[str, Any]], dies_at: int | None) -> None:
    """One of two; ends with 0, or with 7 and a file that says why."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    group = Group()
    try:
        for values in runs:
            trainer = go(values, group, dies_at if rank == 1 else None)
            group.agree(False)  # nobody goes on before the first has saved
            owned = sum(w.numel() for w in trainer.masters.weights.values())
            (Path(values["run"]).parent / f"owned{rank}").write_text(str(owned))
    except FlashdraftError as error:
        (folder / f"error{rank}").write_text(str(error))
        os._exit(7)
    group.close()


def two(folder: Path, runs: list[dict[str, Any]], dies_at: int | None = None) -> list[int | None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["flashdraft.training.run", "transformers.models.llama.modeling_llama", "bed"])
    port = free_port()
    processes = [context.Process(target=process, args=(rank, port, folder, runs, dies_at)) for rank in range(2)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(240)
    return [p.exitcode for p in processes]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return answers(4, tokens=24)


def settings(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return as_json(tiny_config(folder, rows, **{**CHANGES, **changes}))


@pytest.fixture(scope="module")
def done(rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RUNS by two processes, which share run folders."""
    folder = tmp_path_factory.mktemp("two")
    assert two(folder, [settings(folder / name, rows, **changes) for name, changes in RUNS]) == [0, 0]
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "run" / "latest" / "state.safetensors")


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert {name: tensor.shape for name, tensor in one.items()} == {name: t.shape for name, t in other.items()}
    for name, tensor in one.items():
        if not name.startswith(("exp_avg", "momentum")):
            assert torch.allclose(tensor, other[name], rtol=0, atol=2e-4), name


@pytest.mark.parametrize("name", ["whole", "shards", "shards muon"])
def test_two_processes_give_the_numbers_of_one(
    done: Path, rows: list[dict[str, Any]], name: str, tmp_path: Path
) -> None:
    """Batches of a step are shared out, three among two; the loss has one denominator. So it is if each
    process owns a half of the optimizer's state."""
    values = settings(tmp_path / "alone", rows, **{**dict(RUNS)[name], "shard": False})
    go(values, None)
    one, both = (read_metrics(folder / "run" / "metrics.jsonl") for folder in (tmp_path / "alone", done / name))
    assert [m.keys() for m in one] == [m.keys() for m in both]
    for key, accuracy in (("loss", 1e-5), ("grad_norm", 1e-3), ("validation_tau", 1e-4), ("tau_estimate", 1e-9)):
        numbers = [[m[key] for m in metrics if key in m] for metrics in (one, both)]
        assert numbers[0] == pytest.approx(numbers[1], rel=accuracy) and numbers[0], key
    assert_close(state(tmp_path / "alone"), state(done / name))
    drafts = [load_file(f / "run" / "latest" / "model.safetensors") for f in (tmp_path / "alone", done / name)]
    assert_close(*drafts)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("shards", "whole"),
        ("shards muon", "whole muon"),
        ("to shards", "constant"),
        ("from shards", "constant"),
    ],
)
def test_shards_change_no_bit(done: Path, name: str, like: str) -> None:
    """Neither all the way nor from half of it, with a checkpoint that the other kind has saved."""
    one, other = state(done / name), state(done / like)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())
    drafts = [load_file(done / n / "run" / "latest" / "model.safetensors") for n in (name, like)]
    assert all(torch.equal(tensor, drafts[1][key]) for key, tensor in drafts[0].items())


def test_a_checkpoint_of_shards_is_read_by_one_process(done: Path, rows: list[dict[str, Any]]) -> None:
    """It goes on as if they had never been apart, to rounding."""
    assert (done / "for one" / "run" / "latest").resolve().name == "step-00000002"
    go(settings(done / "for one", rows, **CONSTANT), None)
    assert (done / "for one" / "run" / "latest").resolve().name == "step-00000004"
    assert_close(state(done / "for one"), state(done / "constant"))


def test_who_owns_what(done: Path) -> None:
    sizes = {name: tensor.numel() for name, tensor in state(done / "whole").items() if name.startswith("weights.")}
    whole = sum(sizes.values())
    owned = {name: [int((done / name / f"owned{rank}").read_text()) for rank in (0, 1)] for name, _ in RUNS}
    assert owned["whole"] == [whole, whole]
    for name in ("shards", "shards muon", "to shards"):
        assert sum(owned[name]) == whole and max(owned[name]) < 0.6 * whole
    sizes = {"fc": 90, "a": 40, "b": 40, "c": 30, "d": 20, "e": 1}
    assert share_out(sizes, 2) == {"fc": 0, "a": 1, "b": 1, "c": 1, "d": 0, "e": 0}
    assert set(share_out(sizes, 8).values()) == set(range(6))  # two have nothing


def test_a_killed_process_ends_the_other(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert two(tmp_path, [settings(tmp_path / "dies", rows, shard=True)], dies_at=2) == [7, 9]
    said = (tmp_path / "error0").read_text()
    assert "another process of this run ended" in said and "start the same command again" in said
