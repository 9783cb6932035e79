"""A tiny target, a draft trained for it in seconds, and what flashdraft decodes with them: what engines are
compared with. Used by engines.py.

    python scripts/engines_pair.py FOLDER

FOLDER gets target/ (a Llama with a toy tokenizer of 128 words), draft/, data.json (prompts, answers and
counts, see `Bundle`) and states/ (layers' outputs, for other people's trainers). Heads are 32
wide: engines' kernels know no smaller ones. Everything is in float32 and on the CPU.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from bed import _block_loss, decode, make_model, random_network  # the tests' own tiny models and training
from flashdraft import DFlashDrafter, Target, checkpoint

VOCAB, BLOCK, HEAD_DIM = 128, 8, 32
MASK = 3  # a word of its own that no text holds
LAYER_IDS = (1, 2)
NUM_PROMPTS, MAX_TOKENS = 8, 48
LENGTH = MAX_TOKENS + 2 * BLOCK  # tokens decoded, so that no block before an answer's end is cut


@dataclass(frozen=True)
class Bundle:
    """Prompts, greedy answers of `max_tokens` tokens, and what each round accepted on the way there.

    `accepted[i]`: drafted tokens kept in each round of prompt i until its answer is long enough, the last
    round whole: engines count it so. `law`: of prompt 0, the probability of every text of three tokens
    ("5 17 9") when each is one of the two likeliest.
    """

    block_size: int
    max_tokens: int
    prompts: list[list[int]]
    answers: list[list[int]]
    accepted: list[list[int]]
    law: dict[str, float]

    def per_position(self) -> list[int]:
        return by_position(self.accepted, self.block_size)

    @property
    def num_drafts(self) -> int:
        return sum(map(len, self.accepted))


def by_position(accepted: Sequence[Sequence[int]], block_size: int) -> list[int]:
    """Rounds that kept at least 1, 2, ... drafted tokens."""
    return [sum(n >= i for row in accepted for n in row) for i in range(1, block_size)]


def read_bundle(folder: Path) -> Bundle:
    return Bundle(**json.loads((folder / "data.json").read_text(encoding="utf-8")))


def make_bundle(folder: Path) -> Bundle:
    """The bundle of a folder, made if it is not there."""
    if (folder / "data.json").exists():
        return read_bundle(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = make_model(target_config(), torch.float32)
    model.save_pretrained(folder / "target")
    toy_tokenizer().save_pretrained(folder / "target")
    # the attention of a target is switched to ours: another copy is the one saved
    target = Target(make_model(target_config(), torch.float32), name="pair")
    prompts = toy_prompts()
    samples = [sample(target, prompt) for prompt in prompts]
    network = train(target, samples)
    checkpoint.write(folder / "draft", network.config, network.state_dict(), {"target": str(folder / "target")})
    save_states(folder / "states", samples)
    bundle = decoded(target, folder / "draft", prompts)
    # last: a run that was killed before starts anew
    (folder / "data.json").write_text(json.dumps(asdict(bundle)) + "\n", encoding="utf-8")
    return bundle


def target_config() -> Any:
    return transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=HEAD_DIM, max_position_embeddings=512, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip


def toy_tokenizer() -> Any:
    """Words "w4" to "w127", one token each."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<mask>": MASK} | {f"w{i}": i for i in range(4, VOCAB)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=words, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def toy_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(4, VOCAB) for _ in range(5 + 2 * i)] for i in range(NUM_PROMPTS)]


Sample = tuple[torch.Tensor, torch.Tensor, int]


def sample(target: Target, prompt: list[int]) -> Sample:
    """Tokens of prompt and answer, the outputs of LAYER_IDS and of the last layer [T, F], prompt's length."""
    answer = decode(target, None, [prompt], max_tokens=MAX_TOKENS, ignore_eos=True)[0].token_ids
    tokens = torch.tensor([[*prompt, *answer]])
    out = target.forward(
        tokens, target.new_cache(1, tokens.shape[1]), [0], layer_ids=(*LAYER_IDS, target.num_layers - 1)
    )
    assert out.features_BTF is not None
    return tokens[0].clone(), out.features_BTF[0].clone(), len(prompt)


def train(target: Target, samples: Sequence[Sample], steps: int = 160) -> Any:
    """Overfitted to the answers: right often, not always."""
    network = random_network(
        target, std=0.1, head_dim=HEAD_DIM, num_heads=2, num_kv_heads=1, intermediate_size=64,
        target_layer_ids=LAYER_IDS, mask_token_id=MASK, block_size=BLOCK, max_context=512,
    ).requires_grad_(True)  # fmt: skip
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-3, weight_decay=0.0)
    width = len(LAYER_IDS) * target.hidden_size
    for step in range(steps):
        tokens, states, num_prompt = samples[step % len(samples)]
        loss = _block_loss(network, target, tokens, states[:, :width], num_prompt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network


def save_states(folder: Path, samples: Sequence[Sample]) -> None:
    """What trainers of other people read from files: tokens and hidden states, as safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    for i, (tokens, states, num_prompt) in enumerate(samples):
        mask = (torch.arange(len(tokens)) >= num_prompt).long()
        save_file({"input_ids": tokens, "loss_mask": mask, "states": states}, folder / f"{i}.safetensors")


def decoded(target: Target, draft: Path, prompts: list[list[int]]) -> Bundle:
    """What flashdraft does with a draft folder."""
    drafter = DFlashDrafter.load(draft, target)
    results = decode(target, drafter, prompts, max_tokens=LENGTH, ignore_eos=True)
    accepted = [whole_rounds([r.num_committed for r in result.stats.rounds]) for result in results]
    answers = [list(result.token_ids[:MAX_TOKENS]) for result in results]
    return Bundle(drafter.block_size, MAX_TOKENS, prompts, answers, accepted, law_of_three(target, prompts[0]))


def law_of_three(target: Target, prompt: list[int]) -> dict[str, float]:
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, prob in law.items():
            tokens = torch.tensor([[*prompt, *text]])
            logits = target.forward(tokens, target.new_cache(1, tokens.shape[1]), [0], keep=-1).logits_BTV
            best = logits[0, -1].topk(2)
            for p, token in zip(best.values.softmax(-1).tolist(), best.indices.tolist(), strict=True):
                longer[(*text, token)] = prob * p
        law = longer
    return {" ".join(map(str, text)): prob for text, prob in law.items()}


def reference_accepted(draft: Path, target: Path, bundle: Bundle) -> list[list[int]] | None:
    """What z-lab's own code accepts with a draft in its layout, as `Bundle.accepted`; None if the package
    dflash is not installed here."""
    import peers

    if not peers.HAS_REFERENCE:
        return None
    model = transformers.AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return [
        whole_rounds([r.num_committed for r in peers.reference(draft, model, prompt, LENGTH).rounds])
        for prompt in bundle.prompts
    ]


def whole_rounds(committed: Sequence[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    """Drafted tokens kept in each round until `max_tokens` are there, from the counts of a longer answer."""
    done, row = 1, []
    for count in committed:
        if done >= max_tokens:
            break
        row.append(count - 1)
        done += count
    return row


def chi_square(counts: dict[str, int], law: dict[str, float]) -> float:
    """Of samples against a law; infinite if a text came that cannot."""
    total = sum(counts.values())
    if counts.keys() - law.keys():
        return float("inf")
    return sum((counts.get(text, 0) - total * p) ** 2 / (total * p) for text, p in law.items())


if __name__ == "__main__":
    made = make_bundle(Path(sys.argv[1]))
    print(f"{made.num_drafts} drafts, accepted by position {made.per_position()}")
