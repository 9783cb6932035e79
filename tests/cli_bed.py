"""The command line's test bed: a tiny target with a real tokenizer, and what a command printed."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from bed import CONFIGS, make_model, random_network
from flashdraft import checkpoint
from flashdraft.drafters import eagle3_folder, medusa
from flashdraft.drafters.eagle3 import Eagle3Network
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.text import encode_chat
from flashdraft.types import Origin, Request, Result, SamplingParams, Token
from rivals import eagle_config, shaken

CHOICES = ((0,), (1,), (0, 0), (0, 1), (1, 0))

CORPUS = [
    "The harbour lies between two green hills, and the boats leave before sunrise.",
    "Every evening the boats come back to the harbour with silver fish.",
    "user says hello and the assistant says hello to the user again and again",
]
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
PROMPT = "The boats leave the harbour"


def trained_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A byte-level BPE, so that any text of the random model has ids and the other way round."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    return tokenizer


def save_target(folder: Path, template: str | None = TEMPLATE, seed: int = 0, **changes: Any) -> Path:
    tokenizer = trained_tokenizer(template)
    config = CONFIGS["llama"](**{"vocab_size": len(tokenizer), "max_position_embeddings": 512, **changes})
    make_model(config, torch.float32, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_draft(folder: Path, target: Target, **changes: Any) -> None:
    """A draft with random weights, made for the target or, by `changes`, not quite."""
    network = random_network(target, **changes)
    checkpoint.write(folder, network.config, network.state_dict())


def save_rivals(folder: Path, target: Target) -> dict[str, Path]:
    """A draft of each other method for a target, with random weights: method -> folder."""
    heads = medusa.MedusaNetwork(medusa.MedusaConfig(target.hidden_size, target.vocab_size, 3, choices=CHOICES))
    ids = torch.arange(3, target.num_tokens, 2)
    eagle = Eagle3Network(eagle_config(target, vocab_size=target.vocab_size, draft_vocab_size=len(ids)))
    for seed, network in enumerate((heads, eagle)):
        shaken(network, seed, 0.15)
    medusa.write(folder / "medusa", heads.config, heads.state_dict())
    eagle3_folder.write(folder / "eagle3", eagle.config, eagle.state_dict(), ids)
    save_target(folder / "draft_model", seed=1, num_hidden_layers=1)
    return {name: folder / name for name in ("medusa", "eagle3", "draft_model")}


class Outcome:
    """What a command printed and how it ended."""

    def __init__(self, result: Any) -> None:
        self.code: int = result.exit_code
        self.out: str = result.stdout
        self.err: str = result.stderr
        self.exception = result.exception


Call = Callable[..., Outcome]


def spawn(*args: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[bytes]:
    """Python in a process of its own, its standard input empty."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *args]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, env=env, timeout=300, check=False
    )


def engine_answer(target: Target, text: str = PROMPT, **params: Any) -> Result:
    prompt = encode_chat(target.tokenizer, [{"role": "user", "content": text}])
    return Engine(target).run([Request(prompt, SamplingParams(**params))])[0]


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


class Screen(io.StringIO):
    """A terminal, as far as anyone asks."""

    def isatty(self) -> bool:
        return True


def tokens(*pairs: tuple[str, Origin]) -> list[Token]:
    return [Token(i, text, origin) for i, (text, origin) in enumerate(pairs)]


def load_script(name: str) -> Any:
    """A file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
