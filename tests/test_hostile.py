"""Files that are broken or made to do harm: one sentence of ours or a draft that loads, nothing runs, nothing
is waited for, and memory stays bounded. tests/test_locate.py and tests/test_checkpoint.py have more, case by case.
"""

from __future__ import annotations

import builtins
import copy
import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from bed import random_network, tiny_target
from cli_bed import save_target
from flashdraft import checkpoint
from flashdraft.drafters import make_drafter
from flashdraft.drafters.dflash import DFlashNetwork
from flashdraft.engines.layouts import engine_config
from flashdraft.target import Target
from flashdraft.types import FlashdraftError

TARGET = tiny_target("llama", "float32")
CPU_SECONDS, WAIT_SECONDS = 2.0, 600.0
MOST_KILOBYTES = 300_000


class Stuck(BaseException):
    """Not an Exception, so that nothing on the way takes it for an error of the file."""


@pytest.fixture(autouse=True)
def watched() -> Iterator[None]:
    """Ends what computes for longer than an input may take, or waits for a pipe that nobody writes to."""

    def stop(number: int, frame: types.FrameType | None) -> None:
        raise Stuck(signal.Signals(number).name)

    before = {each: signal.signal(each, stop) for each in (signal.SIGPROF, signal.SIGALRM)}
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    for each, handler in before.items():
        signal.signal(each, handler)


def memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- 2,000 mutated drafts


def folders() -> dict[str, tuple[dict[str, Any], bytes]]:
    """(config.json, model.safetensors) of a draft in each layout that is read."""
    ids = torch.arange(0, 96, 2)
    found = {}
    for layout in ("zlab", "vllm", "speculators"):
        network = random_network(TARGET, windows=(5, None), causal=(True, False))
        tensors = network.state_dict()
        rows = None
        if layout != "zlab":
            rows = len(ids)
            members = torch.zeros(96, dtype=torch.bool)
            members[ids] = True
            tensors |= {"lm_head.weight": TARGET.head_rows(ids)[0], "d2t": ids - torch.arange(len(ids)), "t2d": members}
        found[layout] = engine_config(layout, network.config, torch.float32, None, rows), _bytes(tensors)
    return found


def _bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})


VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, 2**64, 10**30, 0.0, -0.5, 1e308, float("nan"), float("inf"), "", "x",
    "full_attention", "../../x", [], [1], [[1]], [None] * 3, {}, {"a": 1}, {"rope_type": "yarn", "factor": 1e-9},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside a JSON value."""
    found = [path] if path else []
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += places(part, (*path, key))
    return found


def mutated_config(raw: dict[str, Any], rng: random.Random) -> bytes:
    changed = copy.deepcopy(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        *path, last = rng.choice(places(changed))
        holder = changed
        for key in path:
            holder = holder[key]
        if rng.random() < 0.2 and isinstance(holder, dict):
            del holder[last]
        else:
            holder[last] = copy.deepcopy(rng.choice(VALUES))
        if not changed:
            break
    text = json.dumps(changed)
    if rng.random() < 0.15:  # and as text
        spot = rng.randrange(len(text))
        text = text[:spot] + rng.choice(['"', "{", "}", "[", "]", ",", "9" * 5000, "\x00", ""]) + text[spot + 1 :]
    if rng.random() < 0.05:
        text = text[:-1] + ', "hidden_size": 32, "hidden_size": 64}'
    return text.encode()


def mutated_weights(data: bytes, rng: random.Random) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    kind = rng.randrange(6)
    if kind == 0:  # cut, or more than there should be
        cut = rng.randrange(len(data))
        return data[:cut] if rng.random() < 0.7 else data + data[:cut]
    if kind == 1:  # bytes of the header
        changed = bytearray(data)
        for _ in range(rng.choice((1, 2, 8))):
            changed[rng.randrange(8 + length)] = rng.choice((0, 0x22, 0x30, 0x39, 0x5D, 0x7D, 0x80, 0xFF))
        return bytes(changed)
    if kind == 2:  # its length
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 2**31, 2**60, 2**64 - 1))) + data[8:]
    header = json.loads(data[8 : 8 + length])
    name = rng.choice([key for key in header if key != "__metadata__"])
    if kind == 3:  # what it says of a tensor
        key = rng.choice(("dtype", "shape", "data_offsets"))
        other = {
            "dtype": ["F16", "F64", "I8", "BOOL", "F8_E4M3", "X", None, 3],
            "shape": [[], [0], [1], [2**40, 2**40], [-1], [2**63], "x", [1.5], header[name]["shape"][::-1]],
            "data_offsets": [[0, 0], [5, 1], [0, 2**62], [-4, 4], [0], None, [2**64, 2**64]],
        }
        header[name][key] = rng.choice(other[key])
    elif kind == 4:  # its name
        header[rng.choice(("x", "", "layers.999999999.mlp.up_proj.weight", "../x", "ids", name + ".weight"))] = header[
            name
        ]
        del header[name]
    else:  # gone, or there twice
        if rng.random() < 0.5:
            del header[name]
        else:
            text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
            return struct.pack("<Q", len(text)) + text.encode() + data[8 + length :]
    text = json.dumps(header)
    return struct.pack("<Q", len(text)) + text.encode() + data[8 + length :]


def use(folder: Path) -> None:
    """Everything that is read of a draft, but the target's side."""
    config, weights = checkpoint.read(folder)
    checkpoint.read_vocab(folder, config)
    checkpoint.read_training(folder)
    checkpoint.check_tables(folder, config, TARGET)
    checkpoint.check_against(config, TARGET)
    with torch.device("meta"):
        network = DFlashNetwork(config)
    network.load_state_dict(weights, strict=True, assign=True)


@pytest.mark.parametrize("layout", ["zlab", "vllm", "speculators"])
def test_mutated_drafts_are_one_sentence_or_load(layout: str, tmp_path: Path) -> None:
    """2,001 of them, by seed: our own error or a draft, within two seconds of the processor and bounded memory."""
    raw, data = folders()[layout]
    rng = random.Random(layout)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text(json.dumps(raw))
    weights.write_bytes(data)
    use(tmp_path)  # the one they are made from is good
    start, loaded = memory(), 0
    for number in range(667):
        in_config = rng.random() < 0.6
        config.write_bytes(mutated_config(raw, rng) if in_config else json.dumps(raw).encode())
        weights.unlink()  # a new file: the old one may still be mapped
        weights.write_bytes(data if in_config else mutated_weights(data, rng))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        try:
            use(tmp_path)
            loaded += 1
        except FlashdraftError as error:
            said = str(error)
            assert "\n" not in said and len(said) < 4000, (number, said)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    assert 20 < loaded < 400
    assert memory() - start < MOST_KILOBYTES


# --- folders that mean harm


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.system, (f"touch '{self.mark}'",))


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def code(folder: Path, mark: Path, name: str = "modeling_x.py") -> None:
    (folder / name).write_text(f"open({str(mark)!r}, 'w').close()\nclass X: pass\nclass ConfigX: pass\n")


def own_code(folder: Path, mark: Path) -> None:
    code(folder, mark)
    code(folder, mark, "__init__.py")
    edit(folder, auto_map={"AutoModel": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}, architectures=["X"])


def code_beside(folder: Path, mark: Path) -> None:
    for name in ("modeling_x.py", "__init__.py", "setup.py", "conftest.py", "dflash.py", "generate.py", "config.py"):
        code(folder, mark, name)
    (folder / "custom_generate").mkdir()
    code(folder / "custom_generate", mark, "generate.py")
    edit(folder, auto_map={"AutoModel": "modeling_x.X", "": "config.ConfigX"})


def pickled(name: str, instead: str | None = None) -> Callable[[Path, Path], None]:
    def change(folder: Path, mark: Path) -> None:
        if instead is not None:
            (folder / instead).unlink()
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))

    return change


def pickles_beside(folder: Path, mark: Path) -> None:
    for name in ("pytorch_model.bin", "adapter_model.bin", "mask_embedding.pt", "optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))


def index(to: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, mark: Path) -> None:
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, to)}))

    return change


def link(name: str, to: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, mark: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return change


def pipe(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, mark: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def directory(name: str) -> Callable[[Path, Path], None]:
    def change(folder: Path, mark: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return change


def sparse(name: str) -> Callable[[Path, Path], None]:
    """40 GB that take no room on the disk."""

    def change(folder: Path, mark: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, 40 << 30)

    return change


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    def changed(folder: Path, mark: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", data[:8])[0]
        found = json.loads(data[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return changed


def claim_tensor(found: dict[str, Any]) -> None:
    found["x"] = {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}


def claim_shape(found: dict[str, Any]) -> None:
    next(part for name, part in found.items() if name != "__metadata__")["shape"] = [1 << 31, 1 << 31]


def header_length(folder: Path, mark: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + data[8:])


def huge_sizes(folder: Path, mark: Path) -> None:
    edit(folder, hidden_size=2**31 - 2, num_hidden_layers=10**9, vocab_size=2**31 - 1, layer_types=None)


def text(value: str) -> Callable[[Path, Path], None]:
    return lambda folder, mark: (folder / "config.json").write_text(value) and None  # type: ignore[func-returns-value]


def twice(folder: Path, mark: Path) -> None:
    file = folder / "config.json"
    file.write_text(file.read_text().rstrip()[:-1] + ', "hidden_size": 1000000}')


# what it is -> (how a good folder becomes it, whether a draft and a target still load)
HOSTILE: dict[str, tuple[Callable[[Path, Path], Any], tuple[bool, bool]]] = {
    "code of its own": (own_code, (False, False)),
    "code beside a known architecture": (code_beside, (True, True)),
    "a pickle only": (pickled("pytorch_model.bin", "model.safetensors"), (False, False)),
    "a pickle named safetensors": (pickled("model.safetensors"), (False, False)),
    "a pickle named config.json": (pickled("config.json"), (False, False)),
    "pickles beside": (pickles_beside, (True, True)),
    "an index that climbs": (index("../../etc/passwd.safetensors"), (False, False)),
    "an index from the root": (index("/etc/passwd"), (False, False)),
    "weights that are a link to another file": (link("model.safetensors", "/etc/passwd"), (False, False)),
    "weights that are a device": (link("model.safetensors", "/dev/zero"), (False, False)),
    "a configuration that is a device": (link("config.json", "/dev/zero"), (False, False)),
    "a configuration that is a loop": (link("config.json", "config.json"), (False, False)),
    "weights that are a pipe": (pipe("model.safetensors"), (False, False)),
    "a configuration that is a pipe": (pipe("config.json"), (False, False)),
    "weights that are a folder": (directory("model.safetensors"), (False, False)),
    "a configuration of 40 GB": (sparse("config.json"), (False, False)),
    "weights of 40 GB of nothing": (sparse("model.safetensors"), (False, False)),
    "a header of 2^60 bytes": (header_length, (False, False)),
    "a tensor of 2^62 bytes": (header(claim_tensor), (False, False)),
    "a shape of 2^62 numbers": (header(claim_shape), (False, False)),
    "sizes of 2^31": (huge_sizes, (False, False)),
    "JSON without end": (text("[" * 300_000), (False, False)),
    "objects without end": (text('{"a":' * 300_000), (False, False)),
    "not a number": (lambda folder, mark: edit(folder, rms_norm_eps=float("nan")), (False, False)),
    "infinite": (lambda folder, mark: edit(folder, hidden_size=float("inf")), (False, False)),
    "a key twice": (twice, (False, False)),
    # what only one of the two has
    "a vocabulary that is a pipe": (pipe("draft_vocab.safetensors"), (False, False)),
    "a vocabulary of 40 GB": (sparse("draft_vocab.json"), (False, False)),
    "a tokenizer that is a pipe": (pipe("tokenizer.json"), (True, False)),
    "a tokenizer that is a device": (link("tokenizer_config.json", "/dev/zero"), (True, False)),
    "a tokenizer of 40 GB": (sparse("tokenizer.json"), (True, False)),
    "settings that are a pipe": (pipe("generation_config.json"), (True, False)),
    "a template that is a pipe": (pipe("chat_template.jinja"), (True, False)),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A draft and a target that fit each other."""
    base = tmp_path_factory.mktemp("good")
    model = save_target(base / "target")
    target = Target.load(model, dtype="float32")
    network = random_network(target, vocab_size=target.vocab_size, mask_token_id=target.vocab_size - 1)
    checkpoint.write(base / "draft", network.config, network.state_dict(), {"step": 1})
    return {"draft": base / "draft", "target": model}


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_folders(
    what: str, role: str, good: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given as draft and as target: nothing runs, nobody is asked, one sentence or the plain model."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was about to run")

    for owner, name in ((builtins, "input"), (torch, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(owner, name, never)
    change, loads = HOSTILE[what]
    folder = Path(shutil.copytree(good[role], tmp_path / "folder"))
    mark = tmp_path / "ran"
    change(folder, mark)
    start = memory()
    signal.alarm(int(WAIT_SECONDS))
    try:
        if role == "draft":
            make_drafter(_target(good["target"]), None, folder)
        else:
            Target.load(folder, dtype="float32", device="cpu")
        loaded = True
    except FlashdraftError as error:
        loaded = False
        assert "\n" not in str(error) and str(error).rstrip()[-1] in ".!?)" and len(str(error)) < 1500, error
    finally:
        signal.alarm(0)
    assert loaded == loads[role == "target"]
    assert not mark.exists() and memory() - start < MOST_KILOBYTES


_LOADED: dict[Path, Target] = {}


def _target(folder: Path) -> Target:
    if folder not in _LOADED:
        _LOADED[folder] = Target.load(folder, dtype="float32")
    return _LOADED[folder]


def test_the_bomb_is_one(tmp_path: Path) -> None:
    """And the watch would notice."""
    (tmp_path / "x").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    pickle.loads((tmp_path / "x").read_bytes())
    assert (tmp_path / "ran").exists()
    signal.setitimer(signal.ITIMER_PROF, 0.05)
    with pytest.raises(Stuck, match="SIGPROF"):
        while True:
            pass
