"""The methods of drafting that can be trained: a module of the same name each, imported when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from ...target import Target
from ..config import TrainConfig
from ..data import TokenSequence
from .base import Method, Start

METHODS = ("dflash", "medusa", "eagle3", "draft_model")


def make_method(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    """The method of a configuration, and where its weights start. Raises FlashdraftError."""
    assert config.method in METHODS  # config.py refuses all others
    made: tuple[Method, Start] = import_module(f".{config.method}", __name__).make(config, target, sequences)
    return made


__all__ = ["METHODS", "Method", "Start", "make_method"]
