"""The base of configs: frozen dataclasses built from TOML, Python or flags, which refuse unknown keys and wrong types.

Every config is ``@dataclass(frozen=True, kw_only=True, slots=True)`` and derives from `Config`. Each field has a
docstring under it; cross-field rules are in one ``check()``. Configs are never mutated: derived values are properties.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from meshwright.errors import ConfigError, nearest


class IdleSetting(NamedTuple):
    """A setting that can't have an effect, since another one rules it out."""

    path: str
    """Its dotted path."""
    message: str
    """The rule, and the nearest that works."""


class Config:
    """Base of every config: construction from nested mappings with checked keys and types, and back."""

    __slots__ = ()

    def check(self) -> None:
        """Raises `ConfigError` when fields contradict each other. A config with cross-field rules overrides it."""

    def idle_settings(self) -> tuple[IdleSetting, ...]:
        """Returns the settings that differ from their default and can't have an effect; `check` refuses them."""
        return ()

    def value(self, path: str) -> Any:
        """Returns the value of a setting by its dotted path."""
        value: Any = self
        for name in path.split("."):
            value = getattr(value, name)
        return value

    def with_value(self, path: str, value: Any) -> Self:
        """Returns the config with another value of one setting, by its dotted path."""
        name, _, below = path.partition(".")
        changed = {name: getattr(self, name).with_value(below, value) if below else value}
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]

    def check_all(self, where: str = "") -> None:
        """Refuses numbers that aren't finite, and runs `check`, on this config and on every config below it.

        Args:
            where: dotted path of this config inside the whole, for messages.
        """
        hints = _type_hints(type(self))  # type: ignore[arg-type]  # classes are hashable
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, path = getattr(self, field.name), f"{where}.{field.name}" if where else field.name
            if isinstance(value, Config):
                value.check_all(path)
            elif isinstance(hint := hints[field.name], type) and issubclass(hint, Config):
                check_config(value, hint, path)
            else:
                _check_finite(value, path)
        self.check()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "", base: Self | None = None) -> Self:
        """Builds the config from nested mappings, over the defaults or over ``base``.

        Args:
            values: nested mapping; its keys are the field names.
            where: dotted path of this config inside the whole, for messages.
            base: config whose values stand where ``values`` is silent.

        Raises:
            ConfigError: for an unknown key (naming the nearest) or a value of the wrong type.
        """
        hints = _type_hints(cls)  # type: ignore[arg-type]  # classes are hashable
        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        fields = {name: getattr(base, name) for name in names} if base is not None else {}
        for key, value in values.items():
            path = f"{where}.{key}" if where else key
            if key not in names:
                raise ConfigError(f"unknown key '{path}'{nearest(key, names)}")
            fields[key] = _coerce(hints[key], value, path, fields.get(key))
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Returns nested plain values for `from_dict`; fields that are None are left out."""
        return {
            field.name: _plain(getattr(self, field.name))
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if getattr(self, field.name) is not None
        }


def check_config(value: object, kind: type[Config], name: str) -> None:
    """Refuses what isn't a config where one is asked for, as the path of a recipe.

    Args:
        value: what a caller gave.
        kind: of the config.
        name: of the argument or the field.

    Raises:
        ConfigError: says how one is made.
    """
    if not isinstance(value, kind):
        raise ConfigError(
            f"{name} = {value!r} is a {type(value).__name__}; it must be {kind.__name__}: write {kind.__name__}(...), "
            f"or {kind.__name__}.from_dict(tomllib.load(file)) of a TOML file"
        )


@functools.cache
def _type_hints(config_class: type[Config]) -> Mapping[str, Any]:
    """Returns the type hint of each field, resolved once a class."""
    # `from __future__ import annotations` makes the hints strings, and compiling them costs a millisecond a config.
    return typing.get_type_hints(config_class)


def _check_finite(value: Any, path: str) -> None:
    """Refuses NaN and infinities, for which the comparisons of a `check` are meaningless."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path} = {value}: it must be a finite number")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_finite(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            _check_finite(item, f"{path}[{index}]")


def _plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


def _coerce(hint: Any, value: Any, path: str, base: Any) -> Any:
    """Checks a value against its type hint; int is converted to float and list to tuple, nothing else."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _coerce(args[0], value, path, base)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        # The first member of a union that accepts the value wins.
        for arm in (arm for arm in args if arm is not type(None)):
            try:
                return _coerce(arm, value, path, base)
            except ConfigError:
                continue
    elif origin is typing.Literal:
        if value in args:
            return value
        raise ConfigError(f"{path} = {value!r} is not one of {', '.join(map(repr, args))}")
    elif origin is tuple and isinstance(value, (list, tuple)):
        arms = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(arms) == len(value):
            return tuple(_coerce(arm, item, f"{path}[{i}]", None) for i, (arm, item) in enumerate(zip(arms, value)))
    elif origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if isinstance(value, Mapping):
            return {str(key): _coerce(args[1], item, f"{path}.{key}", None) for key, item in value.items()}
    elif isinstance(hint, type):
        if issubclass(hint, Config) and isinstance(value, Mapping):
            return hint.from_dict(value, path, base)
        # TOML writes 1 where a float is meant.
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:
                raise ConfigError(f"{path} is a number too large for a float; give a smaller one") from None
        if hint is Path and isinstance(value, str):
            return Path(value)
        if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
            return value
    elif hint is Any:
        return value
    name = getattr(hint, "__name__", None) or str(hint)
    raise ConfigError(f"{path} = {value!r} is a {type(value).__name__}; it must be {name}")


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        ConfigError: when it isn't there or isn't TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(
            f"no such recipe: {path}; give the path of a TOML file, or let meshwright new --to {path} write one"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
