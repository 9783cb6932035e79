"""The test bed: tiny random targets, and drafters whose draft is known beforehand.

Targets are cached per (family, dtype) in a process. Scripted drafters speak the real protocol.
"""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
import torch
import transformers

from flashdraft.cache import KVCache
from flashdraft.checkpoint import DraftConfig
from flashdraft.drafters.dflash import DFlashDrafter, DFlashNetwork
from flashdraft.engine import Engine
from flashdraft.target import Target
from flashdraft.types import Commit, Draft, Request, Result, SamplingParams, TargetOutput

VOCAB = 96
DTYPES = {"float64": torch.float64, "float32": torch.float32}

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Wide weights make sharp, varied distributions; the default 0.02 gives a nearly uniform model
    # that repeats itself, and lets mistakes go unseen.
    "initializer_range": 0.25,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **kw: transformers.LlamaConfig(**{**_COMMON, **kw}),
    "qwen3": lambda **kw: transformers.Qwen3Config(**{**_COMMON, "head_dim": 16, **kw}),
    # biases on q, k, v and tied embeddings
    "qwen2": lambda **kw: transformers.Qwen2Config(**{**_COMMON, "tie_word_embeddings": True, **kw}),
}


def make_model(config: Any, dtype: torch.dtype, seed: int = 0) -> Any:
    """A random causal LM of a transformers config, biases and norms included."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * (0.3 if "bias" in name else 0.1))
    model.generation_config.eos_token_id = config.eos_token_id
    return model.eval().to(dtype)  # the same weights in every precision


@functools.cache
def tiny_target(family: str = "llama", dtype: str = "float64") -> Target:
    return Target(make_model(CONFIGS[family](), DTYPES[dtype]), name=f"tiny {family}")


def draft_config(target: Target, **changes: Any) -> DraftConfig:
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": target.vocab_size,
        "target_layer_ids": (0, 1),
        "num_target_layers": target.num_layers,
        "block_size": 8,
        "mask_token_id": VOCAB - 1,
        "windows": (None, None),
        "causal": (False, False),
        "max_context": 256,
        **changes,
    }
    return DraftConfig(**values)


def random_network(target: Target, seed: int = 0, std: float = 0.2, **changes: Any) -> DFlashNetwork:
    """A DFlash network with wide random weights, so that every part of it moves the draft."""
    torch.manual_seed(seed)
    network = DFlashNetwork(draft_config(target, **changes))
    with torch.no_grad():
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=std)
    return network.to(target.dtype)


def dflash_drafter(target: Target, block_size: int | None = None, seed: int = 0, **changes: Any) -> DFlashDrafter:
    return DFlashDrafter(random_network(target, seed, **changes), target, block_size)


@functools.cache
def trained_network(family: str, dtype: str = "float64", steps: int = 120) -> DFlashNetwork:
    """A network taught the target's greedy answers to PROMPTS, in fp32: right often, not always.

    Every answer position is an anchor once a step; a block sees the features before its anchor.
    """
    target = tiny_target(family, "float32")
    network = random_network(target, std=0.1).requires_grad_(True)
    samples = [_training_sample(target, prompt) for prompt in PROMPTS]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(steps):
        tokens, features, num_prompt = samples[step % len(samples)]
        loss = _block_loss(network, target, tokens, features, num_prompt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.to(DTYPES[dtype])


def _training_sample(target: Target, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
    answer = decode(target, None, [prompt], max_tokens=40, ignore_eos=True)[0].token_ids
    tokens = torch.tensor([[*prompt, *answer]])
    cache = target.new_cache(1, tokens.shape[1])
    out = target.forward(tokens, cache, [0], layer_ids=(0, 1))
    assert out.features_BTF is not None
    return tokens[0].clone(), out.features_BTF[0].clone(), len(prompt)


def _block_loss(
    network: DFlashNetwork, target: Target, tokens: torch.Tensor, features: torch.Tensor, num_prompt: int
) -> torch.Tensor:
    config, size = network.config, network.config.block_size
    anchors = torch.arange(num_prompt, len(tokens) - size + 1)
    slots = anchors[:, None] + torch.arange(size)
    blocks = torch.full_like(slots, config.mask_token_id)
    blocks[:, 0] = tokens[anchors]
    context = network.project_context(features, torch.arange(len(tokens)))
    seen = (torch.arange(len(tokens)) < anchors[:, None])[:, None, None, :].expand(-1, -1, size, -1)
    mask = torch.cat([seen, torch.ones(len(anchors), 1, size, size, dtype=torch.bool)], dim=-1)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        before = [t.transpose(0, 1)[None].expand(len(anchors), -1, -1, -1) for t in context[layer]]
        keys, values = (torch.cat([old, new], dim=2) for old, new in zip(before, (k, v), strict=True))
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
        return out.transpose(1, 2)

    hidden = network(target.embed(blocks), slots, attend)
    logits = network.shape_logits(target.head(hidden[:, 1:]))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[slots[:, 1:]].flatten())


class ScriptedDrafter:
    """Proposes what `script(generated)` returns: generated = the answer's tokens so far.

    Args:
        num_prompt: tokens of the prompt, the same for all rows.
    """

    name = "scripted"
    target_layer_ids: tuple[int, ...] = ()
    drafts_trees = False

    def __init__(self, script: Callable[[list[int]], list[int]], block_size: int, num_prompt: int) -> None:
        self.script, self.block_size, self.num_prompt = script, block_size, num_prompt
        self.max_draft_tokens = block_size - 1

    def open(self, rows: int, capacity: int) -> list[list[int]]:
        return [[] for _ in range(rows)]

    def reset(self, state: list[list[int]], row: int, num_context: int, token: int) -> None:
        state[row] = [*state[row][:num_context], token]

    def observe(self, state: list[list[int]], commit: Commit) -> None:
        for row, tokens in zip(commit.rows, commit.tokens, strict=True):
            state[row].extend(tokens)

    def propose(self, state: list[list[int]], rows: Sequence[int], samplers: Any, limits: Sequence[int]) -> Draft:
        drafts = [
            self.script(state[row][self.num_prompt :])[: min(limit, self.max_draft_tokens)]
            for row, limit in zip(rows, limits, strict=True)
        ]
        width = max(map(len, drafts))
        tokens = torch.tensor([d + [0] * (width - len(d)) for d in drafts], dtype=torch.int64).view(len(drafts), width)
        return Draft(tokens, tuple(map(len, drafts)), probs_NV=(None,) * len(drafts))


def echo(answer: Sequence[int], block_size: int, num_prompt: int) -> ScriptedDrafter:
    """Always right, for one request whose answer is known."""
    return ScriptedDrafter(lambda done: list(answer[len(done) :]), block_size, num_prompt)


def wrong(answer: Sequence[int], block_size: int, num_prompt: int, vocab: int = VOCAB) -> ScriptedDrafter:
    """Never right."""
    return ScriptedDrafter(lambda done: [(t + 1) % vocab for t in answer[len(done) :]], block_size, num_prompt)


def coin(
    answer: Sequence[int], block_size: int, num_prompt: int, right: float, seed: int = 0, vocab: int = VOCAB
) -> ScriptedDrafter:
    """Each token right with probability `right`: random accept patterns."""
    rng = random.Random(seed)

    def script(done: list[int]) -> list[int]:
        return [t if rng.random() < right else (t + 1) % vocab for t in answer[len(done) :]]

    return ScriptedDrafter(script, block_size, num_prompt)


class PuppetTarget:
    """A target whose logits are a given function of the tokens so far: says what no random model
    can be made to say. It keeps the tokens themselves in the cache, so a stale slot shows.

    Args:
        law: logits [V] after a prefix; called once per prefix.
    """

    hidden_size = 8
    num_layers = 1
    pad_id = None
    device = torch.device("cpu")

    def __init__(
        self,
        law: Callable[[tuple[int, ...]], Sequence[float] | torch.Tensor],
        vocab_size: int,
        *,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        max_context: int = 4096,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.law = functools.cache(law)
        self.vocab_size = self.num_tokens = vocab_size
        self.tokenizer, self.eos_ids, self.max_context, self.dtype = tokenizer, frozenset(eos_ids), max_context, dtype
        self.name = "puppet"

    def new_cache(self, rows: int, context: int, slack: int = 64) -> KVCache:
        return KVCache(rows, context + slack)

    def forward(
        self,
        tokens_BT: torch.Tensor,
        cache: KVCache,
        rows: Sequence[int],
        *,
        valid: Sequence[int] | None = None,
        keep: slice | int = slice(None),
        layer_ids: Sequence[int] = (),
        parents: Sequence[Sequence[int]] | None = None,
    ) -> TargetOutput:
        starts = [cache.lengths[row] for row in rows]
        states = tokens_BT[:, None, :, None].double()
        cache.write(0, rows, starts, states, states)
        slots = torch.arange(tokens_BT.shape[1])[keep].reshape(-1).tolist()
        logits = torch.zeros(len(rows), len(slots), self.vocab_size, dtype=self.dtype)
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            written = cache.layer(0)[0][row, 0, :, 0].long().tolist()
            for t, slot in enumerate(slots):
                if valid is None or slot < valid[b]:
                    path = (
                        written[start : start + slot + 1]
                        if parents is None
                        else self._path(written[start:], parents[b], slot)
                    )
                    logits[b, t] = torch.as_tensor(self.law((*written[:start], *path)), dtype=self.dtype)
        return TargetOutput(logits, None)

    @staticmethod
    def _path(block: list[int], parents: Sequence[int], slot: int) -> list[int]:
        """The tokens a tree's slot follows, from the anchor down to its own."""
        path = [block[slot]]
        while slot:
            slot = parents[slot - 1] + 1
            path.insert(0, block[slot])
        return path


def saying(answer: Sequence[int], num_prompt: int, vocab: int) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """A law for PuppetTarget: after the prompt, `answer`, and then its last token for ever. Off the
    script it says something else."""

    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        done = prefix[num_prompt:]
        on_script = list(done[: len(answer)]) == list(answer[: len(done)])
        token = answer[min(len(done), len(answer) - 1)] if on_script else (prefix[-1] + 1) % vocab
        return torch.nn.functional.one_hot(torch.tensor(token), vocab).double() * 9

    return law


def with_eos(target: Target, *eos_ids: int) -> Target:
    """The same target, with other tokens that end an answer."""
    other = copy.copy(target)
    other.eos_ids = frozenset(eos_ids)
    return other


def _byte_letters() -> list[str]:
    """GPT-2's letter for every byte: printable ones stand for themselves."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(rest)) for b in range(256)]


BYTES = 3  # id of byte 0 in byte_tokenizer: ids 0, 1, 2 are special


@functools.cache
def byte_tokenizer(*pieces: bytes) -> Any:
    """Byte-level BPE: <pad>, <s>, </s>, the 256 bytes, then `pieces` as tokens of their own."""
    letters = _byte_letters()
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {letter: BYTES + b for b, letter in enumerate(letters)}
    for piece in pieces:
        vocab["".join(letters[b] for b in piece)] = len(vocab)
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def byte_ids(text: str | bytes) -> list[int]:
    data = text.encode() if isinstance(text, str) else text
    return [BYTES + b for b in data]


def plain_scores(
    logits: Sequence[float], prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, stop_ids: set[int]
) -> list[float]:
    """Processed scores of one slot, written again with plain loops and no tensor."""
    scores = [float(x) for x in logits]
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *answer}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(answer):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(answer).count(token)
    if len(answer) < params.min_tokens:
        scores = [-math.inf if token in stop_ids else x for token, x in enumerate(scores)]
    if params.temperature == 0:
        return scores
    scores = [x / params.temperature for x in scores]
    if 0 < params.top_k < len(scores):
        least = sorted(scores, reverse=True)[params.top_k - 1]
        scores = [x if x >= least else -math.inf for x in scores]
    mass = 0.0
    for prob in sorted(plain_softmax(scores), reverse=True) if params.top_p < 1 else []:
        mass += prob
        if mass >= params.top_p:
            scores = [x if p >= prob else -math.inf for x, p in zip(scores, plain_softmax(scores), strict=True)]
            break
    probs = plain_softmax(scores)
    return [x if p >= params.min_p * max(probs) else -math.inf for x, p in zip(scores, probs, strict=True)]


def plain_softmax(scores: Sequence[float]) -> list[float]:
    powers = [math.exp(x - max(scores)) for x in scores]
    return [x / sum(powers) for x in powers]


def random_prompt(seed: int, length: int = 12, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab - 1) for _ in range(length)]


def repetitive_prompt(seed: int, length: int = 24) -> list[int]:
    """Prompts in which n-grams come back, so that prompt lookup has something to propose."""
    part = random_prompt(seed, 5)
    return (part * length)[:length]


PROMPTS = [random_prompt(i, 5 + 3 * i) for i in range(3)] + [repetitive_prompt(i, 15 + 4 * i) for i in range(3)]


def decode(
    target: Target, drafter: Any, prompts: Sequence[Sequence[int]], max_rows: int = 1, **params: Any
) -> list[Result]:
    """Results of prompts with the same parameters, `max_rows` at a time; seeds differ by prompt."""
    seed = params.pop("seed", 0)
    engine = Engine(target, drafter, max_rows=max_rows)
    return engine.run([Request(p, SamplingParams(seed=seed + i, **params)) for i, p in enumerate(prompts)])
