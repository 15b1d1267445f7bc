"""A configuration of another framework while it becomes a recipe: each of its keys is answered once.

An answer is a setting of ours, or a sentence: why the key is needless here, or what it would do and what works instead.
Who reads a framework's keys takes them out one by one; what nobody takes is answered by the framework's tables, and the
rest is listed as unknown, so that no key is dropped in silence.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from meshwright.errors import ConfigError

AUTO = "auto"
"""Value that another program fills in: Hugging Face's Trainer, for DeepSpeed's configurations."""
UNKNOWN = "no counterpart is known here; look whether it changes the numbers of training"
_OFF = (None, False, "none", "no", "None", "false", "null", "")
"""Values of a key that ask for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """A setting of ours that another framework's file gives."""

    value: object
    """Its value here."""
    origin: str
    """The keys and values that give it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """How a framework's keys are answered where no code reads them."""

    name: str
    """The framework."""
    settings: Mapping[str, str]
    """Its keys whose values are those of a setting of ours, each with the setting's dotted name."""
    needless: Mapping[str, str]
    """Its keys, or globs over them, that need no counterpart, each with the reason."""
    missing: Mapping[str, str]
    """Its keys, or globs over them, that have none, each with what works instead."""
    defaults: Mapping[str, object]
    """Settings of ours with the framework's default where that differs from ours."""
    layout_keys: Mapping[str, str]
    """Keys that code reads, each with what becomes of it; the documentation's table."""


@dataclass(slots=True)
class Migration:
    """A file's keys that wait for an answer, and the answers."""

    foreign: Foreign
    """The framework."""
    values: dict[str, object]
    """Keys with a value that nobody has taken yet, nested ones with dots."""
    devices: int | None = None
    """Ranks, by the file or by the user; None where neither says."""
    settings: dict[str, Carried] = field(default_factory=dict)
    """Dotted settings of ours."""
    layout: dict[str, Carried] = field(default_factory=dict)
    """Keys of the layout."""
    needless: list[str] = field(default_factory=list)
    """Sentences about keys that need no counterpart."""
    missing: list[str] = field(default_factory=list)
    """Sentences about keys that have none."""
    _origins: dict[str, str] = field(default_factory=dict)
    _answered: set[str] = field(default_factory=set)

    def take(self, *names: str) -> object:
        """Takes keys out and returns the first value that is set; None where none is, or another program sets it."""
        taken = None
        for name in names:
            if name not in self.values:
                continue
            value = self.values.pop(name)
            self._origins[name] = f"{name} = {format_value(value)}"
            if value == AUTO:
                if not _answers(name, self.foreign)[0]:
                    self.missing.append(f"{name} = auto: another program fills it in; set it here")
            elif taken is None:
                taken = value
            elif value != taken:
                raise ConfigError(
                    f"{name} = {format_value(value)} contradicts {format_value(taken)}, which another key of the file "
                    f"says ({', '.join(names)}); leave one of them"
                )
        return taken

    def number(self, *names: str) -> float | None:
        """Takes keys out and returns the first number; None where none is set.

        Raises:
            ConfigError: for a value that is no finite number.
        """
        value = self.take(*names)
        if value is None:
            return None
        if isinstance(value, str):  # JSON and YAML write 2e8 so at times
            with contextlib.suppress(ValueError):
                value = float(value)
        # A greater whole number has no float, which isfinite would make of it.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            raise ConfigError(f"{names[0]} = {format_value(value)}: it is to be a number")
        return value

    def count(self, *names: str, least: int = 1) -> int | None:
        """Takes keys out and returns the first whole number; None where none is set.

        Raises:
            ConfigError: for a value that is none, or below ``least``.
        """
        value = self.number(*names)
        if value is None:
            return None
        if value != int(value) or value < least:
            raise ConfigError(f"{names[0]} = {format_value(value)}: it is to be a whole number of at least {least}")
        return int(value)

    def flag(self, *names: str) -> bool:
        """Takes keys out and returns whether the first is on."""
        value = self.take(*names)
        return str(value).lower() in ("true", "yes", "1")

    def word(self, *names: str) -> str:
        """Takes keys out and returns the first text in small letters; empty where none is set."""
        value = self.take(*names)
        return "" if value is None else str(value).lower()

    def origin(self, *names: str) -> str:
        """Returns keys that were taken, with their values, and takes them as answered."""
        self._answered.update(names)
        return ", ".join(self._origins[name] for name in names if name in self._origins)

    def set(self, setting: str, value: object, *names: str, why: str = "") -> None:
        """Gives a setting of ours a value, with the keys that it comes from.

        Raises:
            ConfigError: for a value that no setting has.
        """
        plain = value if isinstance(value, list) else [value]
        if not all(isinstance(item, (bool, int, float, str)) for item in plain):
            raise ConfigError(f"{self.origin(*names)}: {setting} takes a number or a word")
        self.settings[setting] = Carried(value=value, origin=self.origin(*names) or why)

    def lay(self, key: str, value: object, *names: str, why: str = "") -> None:
        """Gives a key of the layout a value, with the keys that it comes from."""
        self.layout[key] = Carried(value=value, origin=self.origin(*names) or why)

    def lay_degree(self, axis: str, degree: int | None, *names: str) -> int:
        """Gives an axis a degree, and returns it; 1 leaves the axis out, and says so."""
        if degree is None or degree == 1:
            self.drop("off", *names)
            return 1
        self.lay(axis, degree, *names)
        return degree

    def tell_state_over_cp(self) -> None:
        """Says that the ranks of cp share the state there, which here they do beside those of shard alone."""
        self.missing.append(
            "state over cp: its ranks share the state there, and here each of them has it whole; they share it beside "
            "shard, as in shard=2,cp=4,zero=3"
        )

    def drop(self, why: str, *names: str) -> None:
        """Answers keys that were taken: they are needless here."""
        self._answered.update(names)
        self.needless += [f"{self._origins[name]}: {why}" for name in names if self._is_said(name)]

    def _is_said(self, name: str) -> bool:
        """Returns whether a key that was taken has a value of its own, or needs none."""
        origin = self._origins.get(name, "")
        return bool(origin) and not any(sentence.startswith(f"{origin}:") for sentence in self.missing)

    def leave(self, why: str, *names: str) -> None:
        """Answers keys that were taken: they have no counterpart."""
        self._answered.update(names)
        self.missing += [f"{self._origins[name]}: {why}" for name in names if name in self._origins]

    def lay_data_axes(self, zero: int, ranks: int, shard: int, *names: str) -> None:
        """Spreads data parallel ranks over copies and shards; experts, laid before, divide shards alone.

        Args:
            zero: ZeRO level there.
            ranks: that read rows of their own.
            shard: of these, ranks that share the state; 0 for all.
            names: keys that say so.

        Raises:
            ConfigError: when runs of ``shard`` ranks don't divide the ranks.
        """
        shard = shard or ranks
        if ranks % shard:
            raise ConfigError(
                f"{self.origin(*names)}: {ranks} data ranks don't divide into groups of {shard} that share the state; "
                f"nearest that works: {math.gcd(ranks, shard)}"
            )
        if not zero and ranks > 1 and "ep" in self.layout:
            zero, shard = 1, ranks
            self.needless.append("copies: ep divides ranks that share state, so zero=1 shards what AdamW keeps")
        if zero and shard == 1:
            self.drop("ZeRO shards over data ranks, and here one has the whole state", *names)
            zero = 0
        copies = ranks if not zero else ranks // shard
        if copies > 1:
            self.lay("replicate", copies, *names, why=f"{ranks} data parallel ranks")
        if zero:
            self.lay("shard", shard, *names, why=f"{ranks} data parallel ranks")
            self.lay("zero", zero, *names, why=f"{ranks} data parallel ranks")

    def finish(self) -> None:
        """Answers what nobody took: by the tables of the framework, else as unknown."""
        foreign = self.foreign
        for name, setting in foreign.settings.items():
            if name in self.values and (value := self.take(name)) is not None:
                self.set(setting, _number_if_one(value), name)
        off_sections = tuple(
            name.removesuffix(key)
            for name, value in self.values.items()
            for key in ("enabled", "enable")
            if name.endswith(f".{key}") and value in (False, "false")
        )
        for name in list(self.values):
            is_auto = self.values[name] == AUTO
            value = self.take(name)
            needless, missing = _answers(name, foreign)
            if needless:
                self.drop(needless, name)
            elif value in ({}, []):
                self.drop("empty", name)
            elif is_auto:
                continue  # said when it was taken
            elif missing and (value in _OFF or name.startswith(off_sections)):
                self.drop("off", name)
            else:
                self.leave(missing or UNKNOWN, name)
        self.drop("no effect beside the other keys", *(name for name in self._origins if name not in self._answered))
        for setting, value in foreign.defaults.items():
            if setting not in self.settings:
                self.set(setting, value, why=f"default of {foreign.name}")
        self._keep_warmup()

    def _keep_warmup(self) -> None:
        """Keeps a warm-up that outlasts the steps, as that of a short run on a long run's schedule."""
        names = ("train.steps", "schedule.warmup")
        steps, warmup = (self.settings[name].value if name in self.settings else None for name in names)
        shape = self.settings.get("schedule.shape")
        if not (isinstance(steps, int) and isinstance(warmup, int)) or warmup < steps:
            return
        if shape is not None and shape.value == "constant":
            return
        written = shape.value if shape else "the schedule"
        why = f"a warm-up of {warmup} steps outlasts {steps} steps, so that {written} never begins"
        self.settings["schedule.shape"] = Carried(value="constant", origin=why)
        self.needless.append(f"schedule.shape: {why}")

    def require_devices(self, path: str) -> int:
        """Returns the number of ranks.

        Raises:
            ConfigError: neither the file nor the user says.
        """
        if self.devices is None:
            raise ConfigError(f"{path} doesn't say how many devices it is for; give --devices N")
        return self.devices


def _number_if_one(value: object) -> object:
    """Returns 2e-5 for "2e-5", as JSON and YAML write it at times, and 2000 for 2000.0; else the value."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _answers(name: str, foreign: Foreign) -> tuple[str, str]:
    """Returns the sentences of a framework's tables about a key, needless and missing; empty where one has none.

    A name that a table has outranks the globs of both; a section that is named without keys is answered as they are.
    """
    exact = foreign.needless.get(name, ""), foreign.missing.get(name, "")
    if any(exact):
        return exact
    needless, missing = (
        next((why for glob, why in table.items() if fnmatchcase(name, glob) or glob == f"{name}.*"), "")
        for table in (foreign.needless, foreign.missing)
    )
    return needless, missing


def format_value(value: object) -> str:
    """Returns a foreign value in one short line, in which nothing can end a comment."""
    text = str(value).lower() if isinstance(value, bool) else "none" if value is None else str(value)
    text = printable(text)
    return text if len(text) <= 60 else text[:57] + "..."


def printable(text: str) -> str:
    """Returns text without what ends a line or steers a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)


def divided(whole: int, part: int, what: str) -> int:
    """Returns a quotient.

    Args:
        whole: number to divide.
        part: number of parts.
        what: the two in words, for the message.

    Raises:
        ConfigError: it doesn't divide.
    """
    if part < 1 or whole % part:
        raise ConfigError(f"{what}: {whole} doesn't divide by {part}, and it has to")
    return whole // part


def flatten(values: Mapping[str, object], prefix: str = "", depth: int = 0) -> dict[str, object]:
    """Returns nested mappings as one, keys joined by dots.

    Raises:
        ConfigError: for more levels than any of these files has, or a key that is there twice.
    """
    if depth > 6:
        raise ConfigError(f"{prefix[:60]}: nested more than 6 deep, which no configuration of these frameworks is")
    flat: dict[str, object] = {}
    for key, value in values.items():
        name = printable(f"{prefix}{key}")[:120]
        inner = flatten(value, f"{name}.", depth + 1) if isinstance(value, Mapping) and value else {name: value}
        if both := flat.keys() & inner.keys():
            raise ConfigError(f"{min(both)} stands in it twice; leave one of them")
        flat |= inner
    return flat
