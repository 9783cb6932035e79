"""The methods of drafting that can be trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...target import Target
from ..config import TrainConfig
from ..data import TokenSequence
from .base import Method, Start


def _dflash(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    from .dflash import make

    return make(config, target, sequences)


def _medusa(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    from .medusa import make

    return make(config, target, sequences)


def _eagle3(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    from .eagle3 import make

    return make(config, target, sequences)


def _draft_model(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    from .draft_model import make

    return make(config, target, sequences)


METHODS: dict[str, Callable[[TrainConfig, Target, Sequence[TokenSequence]], tuple[Method, Start]]] = {
    "dflash": _dflash,
    "medusa": _medusa,
    "eagle3": _eagle3,
    "draft_model": _draft_model,
}


def make_method(config: TrainConfig, target: Target, sequences: Sequence[TokenSequence]) -> tuple[Method, Start]:
    """The method of a configuration, and where its weights start. Raises FlashdraftError."""
    return METHODS[config.method](config, target, sequences)


__all__ = ["METHODS", "Method", "Start", "make_method"]
