"""From a model folder to a model and its tokenizer, strictly: every weight comes from the files, every
tensor in them is used, and no code from the folder is run. Memory is bounded by the files' size.
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .model_folder import ModelFolder, check_folder, one_line
from .types import FlashdraftError

# Tables that some exporters store and models compute by themselves.
_RECOMPUTED = (".inv_freq", ".masked_bias", ".attn.bias")
# Weights a model may have for each number in the files: tied tables count once in the files, and a
# quantised number holds up to 16 weights.
_SLACK, _SLACK_QUANTISED = 2, 20


def load_folder(path: Path, dtype: torch.dtype, name: str) -> tuple[Any, Any]:
    """(model, tokenizer) of a folder, on the CPU. Raises FlashdraftError with one sentence."""
    folder = check_folder(path)
    with quiet_transformers():
        config = read_config(folder, name)
        check_size(config, folder.num_weights, name, "quantization_config" in folder.config)
        return _model(folder, config, dtype, name), _tokenizer(path, name)


def read_config(folder: ModelFolder, name: str) -> Any:
    """The configuration of a decoder-only causal LM that transformers itself knows; no code is run."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, classes = folder.config.get("model_type"), folder.config.get("architectures") or []
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) if isinstance(kind, str) else None
    if folder.config.get("auto_map") and not (isinstance(classes, list) and own in classes):
        raise FlashdraftError(
            f"{name} asks for code of its own (auto_map in config.json), which flashdraft never runs; "
            "use a model of an architecture that transformers has itself."
        )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING_NAMES:
        raise FlashdraftError(
            f"config.json of {name} gives the model_type {kind!r}, which the installed transformers does not know; "
            "use another model, or a newer transformers."
        )
    if own is None:
        raise FlashdraftError(f"{name} is a {kind} model; expected a decoder-only causal LM for text.")
    try:
        config = AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers raises many kinds; a user needs the sentence, not the kind
        raise FlashdraftError(f"config.json of {name} is no {kind} configuration: {one_line(error)}.") from error
    check_text_decoder(config, name)
    return config


def check_text_decoder(config: Any, name: str) -> None:
    """Refuse encoder-decoders, and models that wrap a language model with others."""
    kind = getattr(config, "model_type", "") or type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise FlashdraftError(f"{name} is an encoder-decoder model ({kind}); expected a decoder-only causal LM.")
    try:
        single = config.get_text_config() is config
    except ValueError:  # several language models inside
        single = False
    if not single:
        raise FlashdraftError(
            f"{name} is a model of several modalities ({kind}); expected a causal LM for text alone, "
            "such as the language model inside it."
        )


def check_size(config: Any, num_weights: int, name: str, quantised: bool = False) -> None:
    """Refuse a configuration that describes far more than its weights are: what is missing would be
    allocated and filled at random."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:
        raise FlashdraftError(f"no model can be built from config.json of {name}: {one_line(error)}.") from error
    wanted = sum(p.numel() for p in model.parameters())
    tables = sum(b.numel() for b in model.buffers())
    limit = num_weights * (_SLACK_QUANTISED if quantised else _SLACK) + (1 << 16)
    if wanted > limit or tables > limit + (1 << 26):
        raise FlashdraftError(
            f"config.json of {name} describes {max(wanted, tables):,} numbers, its weights are {num_weights:,}; "
            "they do not belong together."
        )


def _model(folder: ModelFolder, config: Any, dtype: torch.dtype, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder.path, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False,
            local_files_only=True, attn_implementation="eager", output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the info, where it says which
        )  # fmt: skip
    except Exception as error:
        raise FlashdraftError(f"{name} cannot be loaded as a causal LM: {one_line(error)}.") from error
    check_complete(info, name)
    _check_quantisation(folder, model, name)
    return model


def _check_quantisation(folder: ModelFolder, model: Any, name: str) -> None:
    """Refuse packed weights that nobody unpacked: their integers would be taken for the weights."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    method = folder.config.get("quantization_config")
    if method:
        kind = method.get("quant_method") if isinstance(method, dict) else method
        raise FlashdraftError(f"{name} is quantised by {kind!r}, which the installed transformers cannot read.")
    packed = sorted(folder.integers & {key for key, _ in model.named_parameters()})
    if packed:
        raise FlashdraftError(f"{name} is stored in integers and does not say how to read them: {_some(packed)} so.")


def check_complete(info: dict[str, Any], name: str) -> None:
    """Refuse what transformers only warns about: weights it filled at random, tensors it left out."""
    problems = []
    for key, meaning in (("missing_keys", "missing"), ("mismatched_keys", "of the wrong shape")):
        found = sorted(str(item[0] if isinstance(item, tuple) else item) for item in info.get(key) or ())
        if found:
            problems.append(f"{_some(found)} {meaning}")
    unused = sorted(key for key in info.get("unexpected_keys") or () if not key.endswith(_RECOMPUTED))
    if unused:
        problems.append(f"{_some(unused)} no part of it")
    problems += [one_line(ValueError(message)) for message in info.get("error_msgs") or ()][:1]
    if problems:
        raise FlashdraftError(f"the weights of {name} do not fit its config.json: {'; '.join(problems)}.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more are" if len(names) > 3 else " is" if len(names) == 1 else " are"
    return ", ".join(names[:3]) + more


def _tokenizer(path: Path, name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise FlashdraftError(f"{name} has no usable tokenizer: {one_line(error)}.") from error


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No garbage collection: importing torch and transformers makes a million objects that stay, and
    looking through them again and again takes a sixth of a load."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and advice, which are not about the user's input."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its GGUF reader has a bar of its own
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
