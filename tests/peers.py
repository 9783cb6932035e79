"""Other people's DFlash decoders, run on a draft folder of ours, round by round.

The reference is z-lab's package `dflash` 0.1.0; the other is the generator inside transformers.
Both are called as they are; what they propose is watched from outside.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file

from bed import decode
from flashdraft.drafters.dflash import DFlashDrafter
from flashdraft.target import Target
from flashdraft.types import Draft

HAS_REFERENCE = importlib.util.find_spec("dflash") is not None
HAS_NATIVE = hasattr(transformers, "MuseGlimmerAssistantModel")  # from 5.19 on


@dataclass(frozen=True)
class PeerRound:
    """One round: what was drafted, the logits [N, V] it was picked from, tokens committed."""

    draft: tuple[int, ...]
    logits: torch.Tensor
    num_committed: int


@dataclass(frozen=True)
class Trace:
    """One answer: its tokens, the first (the prefill's) included, and its rounds."""

    tokens: tuple[int, ...]
    rounds: tuple[PeerRound, ...]

    def full_rounds(self, block_size: int, num_tokens: int) -> tuple[PeerRound, ...]:
        """The rounds before the answer's end is so near that a block is cut."""
        done, kept = 1, []
        for each in self.rounds:
            if num_tokens - done < block_size:
                break
            kept.append(each)
            done += each.num_committed
        return tuple(kept)


def ours(folder: Path, target: Target, prompt: Sequence[int], num_tokens: int, block_size: int | None = None) -> Trace:
    """Our engine with the draft of `folder`."""
    drafter = DFlashDrafter.load(folder, target, block_size)
    drafts: list[tuple[int, ...]] = []
    logits: list[torch.Tensor] = []
    propose, shape = drafter.propose, drafter.network.shape_logits

    def watch_draft(*args: Any) -> Draft:
        draft = propose(*args)
        drafts.append(tuple(draft.tokens_BN[0, : draft.lengths_B[0]].tolist()))
        if not drafts[-1]:
            logits.append(torch.empty(0, target.vocab_size))
        return draft

    def watch_logits(value: torch.Tensor) -> torch.Tensor:
        shaped: torch.Tensor = shape(value)
        logits.append(shaped[0].clone())
        return shaped

    with (
        mock.patch.object(drafter, "propose", watch_draft),
        mock.patch.object(drafter.network, "shape_logits", watch_logits),
    ):
        result = decode(target, drafter, [prompt], max_tokens=num_tokens, ignore_eos=True)[0]
    counts = [r.num_committed for r in result.stats.rounds]
    return Trace(result.token_ids, _rounds(drafts, logits, counts))


def reference(folder: Path, model: Any, prompt: Sequence[int], num_tokens: int, block_size: int | None = None) -> Trace:
    """z-lab's `dflash_generate`, greedy. The drafts are what it gives the target to verify."""
    from dflash import model as dflash_model

    with their_warnings():
        network = dflash_model.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    drafts: list[tuple[int, ...]] = []
    logits: list[torch.Tensor] = []
    compute = network.compute_logits

    def watch_logits(*args: Any) -> torch.Tensor:
        logits.append(compute(*args))
        return logits[-1]

    passes = itertools.count()

    def watch_block(_model: Any, args: tuple[torch.Tensor, ...], _kwargs: Any) -> None:
        if next(passes) == 0:
            return  # the prefill
        drafts.append(tuple(args[0][0, 1:].tolist()))
        if not drafts[-1]:
            logits.append(torch.empty(1, 0, model.config.vocab_size))

    handle = model.register_forward_pre_hook(watch_block, with_kwargs=True)
    # its statistics ask CUDA for the time
    with (
        handle,
        their_warnings(),
        mock.patch.object(dflash_model, "_cuda_time", time.perf_counter),
        mock.patch.object(network, "compute_logits", watch_logits),
    ):
        out = dflash_model.dflash_generate(
            network, model, torch.tensor([list(prompt)]), num_tokens, None, block_size=block_size, return_stats=True
        )
    tokens = tuple(out.output_ids[0, len(prompt) :].tolist())
    return Trace(tokens, _rounds(drafts, [t[0] for t in logits], out.acceptance_lengths))


def native_network(folder: Path, window: int | None = None) -> Any:
    """Our draft in the one DFlash network transformers has, Muse Glimmer's: same parts, two renamed.

    window: what to write as its window; see test_parity.py for why it is not ours.
    """
    raw = json.loads((folder / "config.json").read_text())
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "block_size",
    )  # fmt: skip
    inner = {name: raw["dflash_config"][name] for name in ("mask_token_id", "target_layer_ids")}
    config = transformers.MuseGlimmerAssistantConfig(
        **{name: raw[name] for name in names}, **inner, sliding_window=window or raw["max_position_embeddings"]
    )
    network = transformers.MuseGlimmerAssistantModel(config)
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict({renamed.get(name, name): tensor for name, tensor in weights.items()}, strict=True)
    return network.eval()


def native(
    folder: Path,
    model: Any,
    prompt: Sequence[int],
    num_tokens: int,
    window: int | None = None,
    assistant: Any = None,
    **settings: Any,
) -> Trace:
    """transformers' `generate` with speculation_type "dflash", greedy.

    assistant: None takes transformers' own network. settings: more of `generate`'s.
    """
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator as Generator

    drafts: list[tuple[int, ...]] = []
    logits: list[torch.Tensor] = []
    lengths: list[int] = []
    get = Generator.get_candidates

    def watch(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        found, scores = get(self, input_ids, **kwargs)
        if not kwargs["is_first_iteration"]:
            lengths.append(input_ids.shape[1])
            drafts.append(tuple(found[0, input_ids.shape[1] :].tolist()))
            logits.append(scores[0] if scores is not None else torch.empty(0, model.config.vocab_size))
        return found, scores

    with their_warnings(), mock.patch.object(Generator, "get_candidates", watch):
        out = model.generate(
            torch.tensor([list(prompt)]), assistant_model=assistant or native_network(folder, window),
            speculation_type="dflash", max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, **settings,
        )  # fmt: skip
    ends = [*lengths[1:], out.shape[1]]
    counts = [end - start for start, end in zip(lengths, ends, strict=True)]
    return Trace(tuple(out[0, len(prompt) :].tolist()), _rounds(drafts, logits, counts))


def _rounds(drafts: list[tuple[int, ...]], logits: list[torch.Tensor], counts: list[int]) -> tuple[PeerRound, ...]:
    return tuple(PeerRound(*each) for each in zip(drafts, logits, counts, strict=True))


@contextlib.contextmanager
def their_warnings() -> Iterator[None]:
    """Deprecations of one transformers version in code written for another are not ours."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
