"""A frozen dataclass of settings from a YAML file and `--set key=value`.

Every value is checked against its field's type, and a key that does not exist is an error which
names the closest one that does.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .types import FlashdraftError

T = TypeVar("T")

_NAMES = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def read_yaml(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The lines of a YAML file, and `key=value` strings, which win."""
    import yaml

    try:
        raw = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise FlashdraftError(f"{path} cannot be read: {error.strerror}; expected a YAML file.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FlashdraftError(f"{path} is no valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise FlashdraftError(f"{path} holds a {type(raw).__name__}; expected lines of `key: value`.")
    return raw | read_overrides(overrides)


def read_overrides(overrides: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """`key=value` strings as given to an option of the command line; values are YAML."""
    import yaml

    found = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise FlashdraftError(f"{option} {override!r} has no '='; expected {option} key=value.")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise FlashdraftError(f"{option} {override!r} is no valid YAML: {' '.join(str(error).split())}") from None
    return found


def make_settings(kind: type[T], raw: Mapping[str, Any], where: str = "the configuration") -> T:
    """An instance of a dataclass; its own checks run too. Raises FlashdraftError."""
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in raw.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)
            raise FlashdraftError(f"{where} has a key {key!r} that does not exist; the closest one is {near[0]!r}.")
        values[key] = convert(value, hints[key], key)
    required = [f.name for f in dataclasses.fields(kind) if _has_no_default(f)]  # type: ignore[arg-type]
    missing = [name for name in required if name not in values]
    if missing:
        raise FlashdraftError(f"{where} lacks {', '.join(missing)}.")
    return kind(**values)


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def convert(value: Any, hint: Any, key: str) -> Any:
    """A YAML value as the field's type. YAML reads 1e-3 as text; a number was meant."""
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not types.NoneType)
    if typing.get_origin(hint) is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(convert(item, typing.get_args(hint)[0], key) for item in items)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    elif hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    elif hint is str and isinstance(value, (str, Path)):
        return str(value)
    elif hint is dict or typing.get_origin(hint) is dict:
        if isinstance(value, Mapping):
            return dict(value)
        raise FlashdraftError(f"{key} is {value!r}; expected lines of `name: value`.")
    raise FlashdraftError(f"{key} is {value!r}; expected {_NAMES[hint]}.")
