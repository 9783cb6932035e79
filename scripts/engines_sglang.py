"""SGLang's own reading of our exports: a part of engines.py.

Its CPU path refuses DFlash, and the package is made for CUDA, so nothing is decoded: its configuration
parser is taken out of the wheel and run alone, with the rest of the package stubbed.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engines_pair import make_bundle
from engines_tools import call

from flashdraft import checkpoint
from flashdraft.draft_config import DraftConfig, parse_config
from flashdraft.engines.transfer import export_draft

SGLANG = "sglang==0.5.23"
PARSER = "sglang/srt/speculative/dflash_utils.py"
WINDOW = 16


def run(folder: Path) -> dict[str, Any]:
    make_bundle(folder.parent / "pair")
    pair = folder.parent / "pair"
    exported = export_draft(pair / "draft", "sglang", folder / "draft", str(pair / "target")).folder
    raw = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    config = parse_config(raw)
    sliding = dataclasses.replace(config, windows=(WINDOW,) * config.num_layers, causal=(True,) * config.num_layers)
    parser = sglang_parser(folder)
    for own, written in ((config, raw), (sliding, checkpoint.config_json(sliding, torch.float32))):
        compare(parser, own, written)
    return {"configurations read alike": 2, "decoding": "not on a CPU"}


def compare(parser: Any, config: DraftConfig, raw: dict[str, Any]) -> None:
    """Raises AssertionError where SGLang reads a configuration otherwise than we do."""
    found = parser.parse_dflash_draft_config(draft_hf_config=raw)
    expected = {
        "num_hidden_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.softcap,
    }
    theirs = {name: getattr(found, name) for name in expected}
    assert theirs == expected, f"SGLang reads {theirs}, we {expected}"
    window = parser.get_dflash_attention_sliding_window_size(raw)  # counts the tokens to the left
    ours = max((w - 1 for w in config.windows if w is not None), default=None)
    assert window == ours, f"SGLang's window is {window}, ours {ours}"


def sglang_parser(folder: Path) -> Any:
    """The module with its parser, alone."""
    call([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, SGLANG])
    with zipfile.ZipFile(max(folder.glob("sglang-*.whl"), key=lambda file: file.stat().st_mtime)) as wheel:
        file = Path(wheel.extract(PARSER, folder / "unpacked"))
    spec = importlib.util.spec_from_file_location("sglang_dflash_utils", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with mock.patch.object(sys, "meta_path", [_Stubs(), *sys.meta_path]):
        spec.loader.exec_module(module)
    return module


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module of the package sglang, as one that has every name."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.split(".")[0] != "sglang":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
