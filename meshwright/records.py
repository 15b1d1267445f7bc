"""JSON serialisation of values between processes: plain ones, and checked records of a closed list of classes.

A record is a frozen dataclass or a NamedTuple. Its class is sent by name, and only classes that both ends listed are
instantiated, so that received data can't name arbitrary code. A field that isn't of its declared type is refused.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_TAG = "!"
"""Key that marks a JSON object as an encoded record or container."""


class RecordError(ValueError):
    """Received data isn't a valid value."""


class RecordCodec:
    """Encodes values as JSON and decodes them.

    Args:
        records: the permitted dataclasses and NamedTuples.
        customs: for other classes, a pair of functions: one to a plain value, one back from it.
    """

    def __init__(
        self,
        records: Iterable[type] = (),
        customs: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] | None = None,
    ) -> None:
        self._records = {record.__name__: record for record in records}
        self._hints = {name: typing.get_type_hints(record) for name, record in self._records.items()}
        self._customs = {Path: (str, Path)} | dict(customs or {})
        self._custom_names = {kind.__name__: pair for kind, pair in self._customs.items()}

    def dumps(self, value: Any) -> bytes:
        """Returns a value as JSON.

        Raises:
            RecordError: when it holds an object of a class that isn't listed.
        """
        return json.dumps(self._encode(value), separators=(",", ":")).encode()

    def loads(self, data: bytes | bytearray | memoryview) -> Any:
        """Returns the value of `dumps`'s bytes.

        Raises:
            RecordError: for anything else.
        """
        try:
            return self._decode(parse_json(bytes(data)))
        except RecordError:
            raise
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RecordError(f"not a value of this program: {type(error).__name__}: {error}") from None

    def loads_as(self, kind: type[T], data: bytes | bytearray | memoryview) -> T:
        """Returns the value of `dumps`'s bytes, which must be of a class.

        Raises:
            RecordError: for anything else.
        """
        value = self.loads(data)
        if not isinstance(value, kind):
            raise RecordError(f"a {type(value).__name__} came where a {getattr(kind, '__name__', kind)} was due")
        return value

    def _encode(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        kind = type(value)
        # By identity: another class of the same name isn't permitted.
        if self._records.get(kind.__name__) is kind:
            fields = value if isinstance(value, tuple) else _fields_of(value)
            return {_TAG: kind.__name__, "fields": [self._encode(item) for item in fields]}
        if kind is list:
            return [self._encode(item) for item in value]
        if kind in (set, frozenset) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
            name = "tuple" if isinstance(value, tuple) else kind.__name__
            return {_TAG: name, "items": [self._encode(item) for item in value]}
        if isinstance(value, Mapping):
            # A plain dict stays a JSON object; other keys, or the tag as a key, need the encoded form.
            if all(type(key) is str for key in value) and _TAG not in value:
                return {key: self._encode(item) for key, item in value.items()}
            return {_TAG: "dict", "items": [[self._encode(key), self._encode(item)] for key, item in value.items()]}
        for custom_class, (dump, _) in self._customs.items():
            if isinstance(value, custom_class):
                return {_TAG: custom_class.__name__, "custom": dump(value)}
        raise RecordError(f"{kind.__module__}.{kind.__qualname__} isn't among what passes between these processes")

    def _decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _TAG not in value:
            return {key: self._decode(item) for key, item in value.items()}
        name = value[_TAG]
        # Exactly the tag and one field: anything else was not written by `dumps`.
        if name in self._records and len(value) == 2:
            return self._decode_record(name, [self._decode(item) for item in value["fields"]])
        if name in self._custom_names and len(value) == 2:
            return self._custom_names[name][1](value["custom"])
        if name == "dict":
            return {self._decode(key): self._decode(item) for key, item in value["items"]}
        containers: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
        if name in containers:
            return containers[name](self._decode(item) for item in value["items"])
        raise RecordError(f"'{str(name)[:80]}' isn't among what passes between these processes")

    def _decode_record(self, name: str, values: Sequence[Any]) -> Any:
        kind, hints = self._records[name], self._hints[name]
        names = kind._fields if issubclass(kind, tuple) else [item.name for item in _declared(kind)]  # type: ignore[attr-defined]
        if len(names) != len(values):
            raise RecordError(f"{name} has {len(names)} fields, and {len(values)} came")
        for field, value in zip(names, values):
            # Before the class is instantiated, so that its own code sees only valid types.
            if not matches(hints[field], value):
                raise RecordError(
                    f"{name}.{field} is a {type(value).__name__} unlike {_describe_mismatch(hints[field], value)}"
                )
        return kind(*values) if issubclass(kind, tuple) else kind(**dict(zip(names, values)))


def _describe_mismatch(hint: Any, value: Any) -> str:
    """Returns the name of a type that a value doesn't fit; for a TypedDict with the missing, unknown or wrong keys."""
    if not typing.is_typeddict(hint) or not isinstance(value, dict):
        return str(getattr(hint, "__name__", hint))
    hints = typing.get_type_hints(hint, include_extras=True)
    wrong = [key for key in hints.keys() | value.keys() if key not in hints or not matches(hints[key], value.get(key))]
    return f"{hint.__name__}: {', '.join(sorted(map(str, wrong))[:8])}"


def _declared(kind: type) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(kind) if item.init]  # type: ignore[arg-type]


def _fields_of(value: Any) -> list[Any]:
    return [getattr(value, item.name) for item in _declared(type(value))]


def parse_json(text: str | bytes | bytearray) -> Any:
    """Returns the value of JSON from a file or another process.

    Raises:
        ValueError: for anything else, and for values nested beyond the parser's recursion limit.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values are nested too deep") from None


def matches(hint: Any, value: Any) -> bool:
    """Returns whether a value fits a type hint: unions, containers with their items, TypedDicts key by key."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (typing.Required, typing.NotRequired):
        return matches(args[0], value)
    if origin in (typing.Union, types.UnionType):
        return any(matches(arm, value) for arm in args)
    if origin is typing.Literal:
        return value in args
    if typing.is_typeddict(hint):
        return _matches_keys(hint, value)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        arms = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        return len(arms) == len(value) and all(matches(arm, item) for arm, item in zip(arms, value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        is_mapping = isinstance(value, Mapping)
        return is_mapping and all(matches(args[0], key) and matches(args[1], item) for key, item in value.items())
    if isinstance(origin, type):
        kind = isinstance(value, origin) and not isinstance(value, str)
        return kind and (not args or all(matches(args[0], item) for item in value))
    if hint is float:
        # JSON doesn't distinguish 1 from 1.0.
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(hint, type):
        # bool is a subclass of int, but True is no count.
        return isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool)
    return False


def _matches_keys(hint: Any, value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    hints = typing.get_type_hints(hint, include_extras=True)
    # Not __required_keys__, which doesn't evaluate annotations that are strings.
    required = {key for key, item in hints.items() if typing.get_origin(item) is not typing.NotRequired}
    keys_fit = required <= value.keys() <= hints.keys()
    return keys_fit and all(matches(hints[key], item) for key, item in value.items())
