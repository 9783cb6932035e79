"""What the commands of __main__.py do; each imports what it needs, and nothing that the machine lacks."""

from __future__ import annotations

import random
import shutil
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from flashdraft.types import FlashdraftError


def prepare(args: Namespace) -> None:
    from .pack import prepare as pack

    parts = pack(args.target, args.train, args.eval, args.to, num_prompts=args.prompts, manifest=args.manifest)
    for part in parts:
        size = sum(file.stat().st_size for file in part.iterdir())
        print(f"{part}  {size / (1 << 20):.1f} MiB")


def receive(args: Namespace) -> None:
    from .unpack import receive as keep

    keep(args.part, args.work)


def run(args: Namespace) -> None:
    from flashdraft.target import Target

    from .run import Run
    from .unpack import read_evaluation, read_prompts

    folder = args.work / "target"
    if not folder.is_dir():
        raise FlashdraftError(f"{args.work} holds no target; carry all parts and `receive` them first.")

    def load() -> Target:
        return Target.load(folder, dtype=args.dtype, device=args.device)

    Run(load, read_prompts(args.work), read_evaluation(args.work), _settings(args), args.work, args.out, args.seconds)()


def smoke(args: Namespace) -> None:
    """All phases with random weights of a real target's widths: finds out in a minute what that machine
    does differently. Nothing needs to be there."""
    from .run import Run
    from .unpack import Prompts

    work = args.work.parent / "smoke"
    shutil.rmtree(work, ignore_errors=True)
    prompts = _random_prompts(4000, 1000)
    listed = Prompts(prompts, [f"p{i}" for i in range(len(prompts))], ["random"] * len(prompts), _FACTS)
    settings = _settings(args, num_tokens=300_000)
    with tempfile.TemporaryDirectory() as spare:
        out = args.out or Path(spare)
        Run(
            lambda: _random_target(args.device, args.dtype),
            listed,
            {"random": _random_prompts(32, 1000)},
            settings,
            work,
            out,
            args.seconds,
        )()
        print((out / "report.md").read_text(encoding="utf-8"))


def join(args: Namespace) -> None:
    from .export import join as put_together

    print(f"the draft is in {put_together(args.out, args.draft)}")


_FACTS: dict[str, Any] = {"target": "random", "template_sha256": None}


def _settings(args: Namespace, **changes: Any) -> Any:
    from .settings import full, toy

    if args.shapes:
        try:
            changes["shapes"] = tuple((int(a), int(b)) for a, b in (shape.split("x") for shape in args.shapes))
        except ValueError:
            raise FlashdraftError(f"--shapes is {' '.join(args.shapes)}; expected LAYERSxBLOCK, such as 3x8.") from None
    return toy(**{k: v for k, v in changes.items() if k != "num_tokens"}) if args.toy else full(**changes)


def _random_prompts(count: int, vocab: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, vocab) for _ in range(rng.randrange(8, 60))] for _ in range(count)]


def _random_target(device: str | None, dtype: str) -> Any:
    import torch
    import transformers

    from flashdraft.target import Target, resolve_dtype, usable_device

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        pad_token_id=2, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    place = usable_device(device)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return Target(model.eval().to(place, resolve_dtype(dtype, place)), name="random")
