"""Look-ups in a config.json that collect what is wrong instead of stopping at the first problem.

Rotary embeddings are here too: drafts of all methods spell them the same two ways.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

# Upper bound that no draft comes near: a broken file must not make us allocate what it claims.
MOST = 2**31 - 1

# rope_type -> keys it needs and keys it may have (beside rope_type and rope_theta)
_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
    "yarn": (
        {"factor"},
        {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
         "truncate"},
    ),
}  # fmt: skip
# For text all axes of a multimodal rope count the same, which makes it the plain one.
_ROPE_IGNORED = {"type", "rope_type", "rope_theta", "mrope_section", "mrope_interleaved"}


class Keys:
    """Typed look-ups in a config that collect problems instead of raising. null is absent."""

    def __init__(self, raw: Mapping[str, Any], section: str | None = None, inner_names: Collection[str] = ()) -> None:
        """`section` is an object inside in which `inner_names` are looked for first."""
        inner = raw.get(section) if section is not None else None
        self.problems: list[str] = []
        if inner is not None and not isinstance(inner, dict):
            self.problems.append(f"{section} is {short(inner)}, expected an object")
            inner = None
        self.inner: Mapping[str, Any] = inner or {}
        self.top = raw
        self._inner_names = frozenset(inner_names)

    def get(self, name: str) -> Any:
        value = self.inner.get(name) if name in self._inner_names else None
        return self.top.get(name) if value is None else value

    def problem(self, name: str, value: Any, expected: str) -> None:
        self.problems.append(f"{name} is {short(value)}, expected {expected}")

    def integer(self, name: str, least: int = 1, most: int = MOST, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        limit = f" and at most {most}" if most < MOST or (isinstance(value, int) and value > most) else ""
        self.problem(name, value, f"an integer of at least {least}{limit}")
        return least

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        value = default if value is None else value
        if is_number(value) and value > 0:
            return float(value)
        self.problem(name, value, "a number above 0")
        return default

    def flag(self, name: str) -> bool | None:
        value = self.top.get(name)
        if value is not None and not isinstance(value, bool):
            self.problem(name, value, "true or false")
            return None
        return value


def is_number(value: Any) -> bool:
    """A finite int or float; compared, because a long integer cannot be made a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_rope(keys: Keys) -> dict[str, Any]:
    """Rotary parameters, from either spelling; said twice, they have to agree."""
    new, old = (_rope_map(keys, name) for name in ("rope_parameters", "rope_scaling"))
    if new and old and any(new.get(k) != old.get(k) for k in {*new, *old} - {"rope_theta"}):
        keys.problems.append("rope_parameters and rope_scaling say different things; keep one of them")
    rope = {**new, **old}
    thetas = [t for t in (new.get("rope_theta"), old.get("rope_theta"), keys.top.get("rope_theta")) if t is not None]
    rope["rope_theta"] = thetas[0] if thetas else 10000.0
    if any(theta != thetas[0] for theta in thetas):
        keys.problems.append(f"rope_theta is given as {' and as '.join(map(short, thetas))}; keep one of them")
    kind = rope.setdefault("rope_type", "default")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        keys.problem("rope_type", kind, " or ".join(map(repr, _ROPE_KEYS)))
        return {"rope_type": "default", "rope_theta": 10000.0}
    original = keys.top.get("original_max_position_embeddings")
    if original is not None and kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = original
    _check_rope(keys, rope)
    return rope


def _rope_map(keys: Keys, name: str) -> dict[str, Any]:
    value = keys.top.get(name)
    if value is None or value == {}:
        return {}
    if not isinstance(value, dict):
        keys.problem(name, value, "an object")
        return {}
    if any(isinstance(part, dict) for part in value.values()):
        keys.problems.append(f"{name} differs by layer type, which is not supported")
        return {}
    if value.get("partial_rotary_factor") not in (None, 1):
        keys.problems.append("partial_rotary_factor asks for rotary embeddings on a part of the head, not supported")
    kind = value.get("rope_type", value.get("type", "default"))
    known = {key: part for key, part in value.items() if key not in _ROPE_IGNORED and part is not None}
    known.pop("partial_rotary_factor", None)
    theta = {"rope_theta": value["rope_theta"]} if value.get("rope_theta") is not None else {}
    return {"rope_type": kind, **known, **theta}


def _check_rope(keys: Keys, rope: Mapping[str, Any]) -> None:
    kind = rope["rope_type"]
    needed, optional = _ROPE_KEYS[kind]
    keys.problems += [f"rope type {kind!r} needs {name}" for name in sorted(needed - rope.keys())]
    strange = rope.keys() - needed - optional - {"rope_type", "rope_theta"}
    keys.problems += [f"rope type {kind!r} has no {name}" for name in sorted(strange)]
    for name, value in rope.items():
        if name == "truncate":
            ok, expected = isinstance(value, bool), "true or false"
        elif name == "rope_theta":
            ok, expected = is_number(value) and value > 1, "a number above 1"
        else:
            ok, expected = is_number(value) and value > 0, "a number above 0"
        if not ok and name not in ("rope_type", *strange):
            keys.problem(name, value, expected)
    low, high = rope.get("low_freq_factor", 0), rope.get("high_freq_factor", math.inf)
    if kind == "llama3" and is_number(low) and is_number(high) and not low < high:
        keys.problems.append(f"low_freq_factor {low} is not below high_freq_factor {high}")
    fast, slow = rope.get("beta_fast", 32), rope.get("beta_slow", 1)
    if kind == "yarn" and is_number(fast) and is_number(slow) and not slow <= fast:
        keys.problems.append(f"beta_slow {slow} is above beta_fast {fast}")
