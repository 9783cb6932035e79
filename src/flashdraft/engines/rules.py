"""What each engine would refuse, or worse: load and quietly draft badly with. Facts from reading and running vLLM
0.32, SGLang 0.5.23, llama.cpp 11434 and speculators 0.9 (../docs/serving.md); newer versions may do better.

A draft can never spoil a text, only the number of accepted tokens, which nobody notices by looking. So
what an engine ignores is refused here, unless it costs nothing that is not said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .. import checkpoint
from ..draft_config import DraftConfig
from ..types import FlashdraftError
from . import llama_cpp
from .target_facts import MASK_TOKEN, TargetFacts

ENGINES = ("vllm", "sglang", "llama.cpp", "speculators", "zlab")

# Classes of targets, without ForCausalLM and the like, in small letters.
_VLLM = {
    "llama", "internlm3", "telechat3", "iquestcoder", "qwen2", "qwen3", "qwen3moe", "qwen3next", "qwen3_5", "qwen3_5moe",
    "qwen3vl", "qwen2_5_vl", "mistral", "ministral3", "mistral3", "pixtral", "phi3", "granite", "gemma4", "gptoss",
    "deepseekv2", "deepseekv3", "deepseekv32", "deepseekv4", "glm5next", "glmmoedsa", "kimik25", "kimik3", "minimaxm2",
    "minimaxm3", "minicpm", "minicpm3", "mimo", "mimov2", "nemotronh", "laguna", "llama4", "ernie4_5", "plamo3",
    "apertus", "afmoe",
}  # fmt: skip
_NOT_VLLM = {
    "gemma", "gemma2", "gemma3", "gemma3n", "mixtral", "qwen2moe", "cohere", "cohere2", "falcon", "glm4", "olmo", "olmo2",
    "olmo3", "olmoe", "phimoe", "stablelm", "exaone4", "lfm2", "granitemoe", "mamba", "jamba", "gpt2", "gptj", "opt",
}  # fmt: skip
_SGLANG = {
    "llama", "mistral", "ministral3", "phi3", "llama4", "qwen3", "qwen3moe", "qwen3next", "qwen3_5", "qwen3_5moe", "qwen3vl",
    "gemma4", "gptoss", "deepseekv2", "deepseekv3", "deepseekv32", "glm4moelite", "glm5next", "kimik25", "kimik3",
    "laguna", "lfm2", "mimov2", "minimaxm3", "nanbeige", "nemotronh", "inkling", "internlm3",
}  # fmt: skip
_READ_ROWS = ("vllm", "speculators", "llama.cpp")
_NOT_SGLANG = {"qwen2", "qwen2moe", "gemma2", "gemma3", "mixtral", "granite", "olmo2"}


@dataclass(frozen=True)
class Case:
    """A draft on its way to an engine. `target` None: nobody said which it is for, or it is not here."""

    engine: str
    config: DraftConfig
    dtype: torch.dtype
    vocab_size: int | None = None  # tokens of a reduced vocabulary
    own_rows: bool = False  # whether the head's rows for them are written too
    target: TargetFacts | None = None

    @property
    def slides(self) -> bool:
        return any(window is not None for window in self.config.windows)

    @property
    def mixed(self) -> bool:
        return self.slides and None in self.config.windows


def examine(case: Case) -> list[str]:
    """Sentences a user should know. Raises one FlashdraftError that lists all that must not be exported."""
    if case.target is not None:
        checkpoint.check_against(case.config, case.target.as_target())
    rules = _LLAMA_CPP if case.engine == "llama.cpp" else _REFUSED
    problems = [problem for rule in rules for problem in rule(case)]
    if problems:
        raise FlashdraftError(f"the draft cannot go to {case.engine}: {'; '.join(problems)}.")
    return [note for rule in _NOTED for note in rule(case)]


def _network(case: Case) -> Iterator[str]:
    config = case.config
    if config.is_ablation:
        yield f"it is DFlash without one of its parts (context {config.context!r}), which flashdraft alone runs"
    if config.from_anchor and case.engine != "speculators":
        yield "its anchor slot predicts a token too (DeepSpec), and all slots would be read one place off"
    if config.block_size < 2:
        yield f"its block of {config.block_size} drafts nothing"
    if case.dtype == torch.float64 and case.engine != "zlab":
        yield "its weights are float64, which serving engines do not take; save it in float32 or bfloat16"


def _layers(case: Case) -> Iterator[str]:
    config = case.config
    if config.num_target_layers and max(config.target_layer_ids, default=0) >= config.num_target_layers - 1:
        yield (
            f"it taps layer {max(config.target_layer_ids)} of {config.num_target_layers}, whose state engines read "
            "before or after the final norm, each its way"
        )
    if list(config.target_layer_ids) != sorted(set(config.target_layer_ids)):
        yield f"target_layer_ids {list(config.target_layer_ids)} do not rise strictly"


def _scales(case: Case) -> Iterator[str]:
    config, engine = case.config, case.engine
    if config.embedding_scale != 1 and engine != "zlab":
        yield f"input_embedding_scale {config.embedding_scale:g} is ignored there"
    if engine in ("zlab", "sglang"):
        return
    if config.output_multiplier != 1:
        yield f"output_multiplier {config.output_multiplier:g} is ignored there"
    if config.softcap is not None:
        yield f"final_logit_softcapping {config.softcap:g} is ignored there"


def _windows(case: Case) -> Iterator[str]:
    config = case.config
    full = {c for c, w in zip(config.causal, config.windows, strict=True) if w is None}
    sliding = {c for c, w in zip(config.causal, config.windows, strict=True) if w is not None}
    if case.engine == "speculators" and True in full:
        yield "its full layers are causal, and there they never are"
    if case.engine == "speculators" and len(sliding) > 1:
        yield "some sliding layers are causal and others not, which its configuration cannot say"


def _vocabulary(case: Case) -> Iterator[str]:
    if case.own_rows and case.engine not in _READ_ROWS:
        yield "only vLLM, speculators and llama.cpp read rows of the head for a part of the vocabulary"
    if case.own_rows and case.target is None:
        yield "the head's rows are the target's, so name it with --target"
    if case.own_rows and case.vocab_size is None:
        yield "it drafts from the whole vocabulary, so there are no rows to write"


def _mask_token(case: Case) -> Iterator[str]:
    known = case.target.mask_token_id if case.target is not None else None
    if case.engine == "sglang" and known not in (None, case.config.mask_token_id):
        yield f"the tokenizer has {MASK_TOKEN} at {known}, and SGLang wants no other mask token than that"


def _family(case: Case) -> str:
    name = case.target.architecture if case.target is not None else ""
    return re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel)$", "", name).lower()


def _unserved(case: Case) -> Iterator[str]:
    if case.engine == "sglang" and _family(case) in _NOT_SGLANG:
        yield f"SGLang runs DFlash for other targets than {_family(case)}"


def _served(case: Case) -> Iterator[str]:
    family = _family(case)
    if case.engine in ("vllm", "speculators") and family in _NOT_VLLM:
        yield (
            f"vLLM's own {family} class does not give the layers' states away; its Transformers backend does "
            "(--model-impl transformers), which was tried with Llama only."
        )
    listed = {"vllm": _VLLM | _NOT_VLLM, "speculators": _VLLM | _NOT_VLLM, "sglang": _SGLANG | _NOT_SGLANG}
    if family and case.engine in listed and family not in listed[case.engine]:
        yield f"whether {case.engine} runs DFlash for {family} targets is not known here."


def _whole_vocabulary(case: Case) -> Iterator[str]:
    if case.vocab_size is not None and not case.own_rows:
        more = "; --own-rows writes them" if case.engine in _READ_ROWS else ""
        yield (
            f"the draft was trained on {case.vocab_size:,} of {case.config.vocab_size:,} tokens, which {case.engine} does "
            f"not know of: it drafts from the target's whole head, which has the same rows and others beside them{more}."
        )


def _sliding(case: Case) -> Iterator[str]:
    causal = set(case.config.causal)
    if case.engine == "vllm" and case.mixed:
        yield "sliding and full layers together run on a GPU only (model runner V2); vLLM on a CPU refuses them."
    if case.engine == "speculators" and case.mixed and len(causal) > 1:
        yield "vLLM up to 0.32 runs all layers of such a speculators folder causally; export --to vllm for it."
    if case.engine == "speculators" and case.slides:
        yield "speculators trains with windows that start at the block's anchor; engines let them slide with each token."
    if case.engine not in ("zlab", "llama.cpp") and case.slides and False in causal and not case.mixed:
        yield f"windows that look both ways were not compared with {case.engine}'s."


def _rope(case: Case) -> Iterator[str]:
    told = sorted({"attention_factor", "mscale", "mscale_all_dim"} & set(case.config.rope))
    if told and case.engine not in ("zlab", "llama.cpp"):
        yield f"of the rotary embedding, {', '.join(told)} {'is' if len(told) == 1 else 'are'} not followed by all versions."


def _anchor(case: Case) -> Iterator[str]:
    if case.config.from_anchor:
        yield "its anchor slot predicts a token too (sample_from_anchor), which vLLM refuses in a DFlash draft."


def _unknown(case: Case) -> Iterator[str]:
    if case.target is None:
        yield "no target was looked at, so nothing is known of how the draft fits; name it with --target."


def _gguf(case: Case) -> Iterator[str]:
    yield from llama_cpp.refusals(case.config)


Rule = Callable[[Case], Iterator[str]]
_REFUSED: tuple[Rule, ...] = (_network, _layers, _scales, _windows, _vocabulary, _mask_token, _unserved)
_LLAMA_CPP: tuple[Rule, ...] = (_gguf, _layers, _vocabulary)
_NOTED: tuple[Rule, ...] = (_unknown, _served, _whole_vocabulary, _sliding, _rope, _anchor)
