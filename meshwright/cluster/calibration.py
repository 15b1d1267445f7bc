"""What was measured on a machine, in place of what the catalogue says of its kind.

Every table is rows of plain values, so that a calibration is a JSON file that people can read and programs can add to.
``busy`` rows were measured while all ranks did the same, the others with one rank at work.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from meshwright.cluster.device import canonical_dtype
from meshwright.cluster.tables import RateTable, TimeTable, grouped
from meshwright.errors import ClusterError, nearest
from meshwright.records import parse_json

VERSION = 1
FORMS = ("nt", "nn", "tn")
"""Products of a linear layer: ``nt`` forward (x W'), ``nn`` the input's gradient (y W), ``tn`` the weight's (y' x)."""

Rows = tuple[tuple[Any, ...], ...]


def machine_key(machine: Mapping[str, Any]) -> str:
    """Returns the content key of a machine's facts: 16 hex digits."""
    text = json.dumps({str(key): machine[key] for key in sorted(machine)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured tables of one machine with a number of ranks; all are optional."""

    machine: Mapping[str, Any]
    """Facts that make the machine what it is: device, cores, memory, software, ranks, nodes."""
    ranks: int
    """Ranks at work when it was measured."""
    nodes: int = 1
    """Nodes that they ran on."""
    launch_s: float = 0.0
    """Host time of one small operation."""
    matmul: Rows = ()
    """(dtype, form, busy, m, n, k, seconds) of (m, k) x (k, n)."""
    attention: Rows = ()
    """(dtype, busy, rows, sequence, head size, forward seconds, backward seconds); rows are sequences x heads."""
    operations: Rows = ()
    """(operation, dtype, busy, elements, seconds)."""
    optimizer: Rows = ()
    """(elements, seconds) of one fused update with all ranks at work."""
    collectives: Rows = ()
    """(kind, ranks, nodes, before, bytes, seconds): groups of ``ranks`` over ``nodes``, whose members stand ``before``
    ranks apart, all groups at once; bytes of the whole tensor."""
    overlap: float | None = None
    """Share of an all-reduce that hides under matrix products, 0 to 1; None where it wasn't measured."""
    pace_s: float = 0.0
    """Seconds of a fixed bit of work (`calibrate.pace`), the fastest while measuring; 0 where it wasn't timed."""
    pace_spread: float = 0.0
    """How much longer than that it took in the median, relative: how much else the machine was doing."""
    host: Rows = ()
    """(what, seconds) that the runtime takes beside operators and collectives (`planner.cost.host`)."""
    taken_s: float = field(default=0.0, compare=False)
    """How long measuring took."""

    def __post_init__(self) -> None:
        """Makes every table of tuples, whatever it came as."""
        for name in _TABLES:
            object.__setattr__(self, name, tuple(tuple(row) for row in getattr(self, name)))

    # -------------------------------------------------------- asked by the cost model

    def has_matmul(self, dtype: str) -> bool:
        """Whether products of this data type were measured."""
        return any(key[0] == canonical_dtype(dtype) for key in self._matmuls)

    def matmul_s(self, m: Any, n: Any, k: Any, dtype: str, form: str = "nt", busy: bool = True) -> Any:
        """Returns seconds of (m, k) x (k, n); sizes may be arrays.

        Args:
            m: rows, usually tokens.
            n: columns of the result.
            k: length of the sums.
            dtype: data type.
            form: one of `FORMS`; ``tn`` has the tokens in k.
            busy: while all ranks compute.

        Raises:
            ClusterError: when nothing was measured for the data type.
        """
        table = self._pick(self._matmuls, (canonical_dtype(dtype), form, busy), "matrix products")
        work = 2.0 * np.asarray(m, dtype=float) * n * k
        return _plain(np.maximum(work / table.rate(m, n, k), self.launch_s))

    def has_attention(self, dtype: str) -> bool:
        """Whether attention in this data type was measured."""
        return any(key[0] == canonical_dtype(dtype) for key in self._attentions)

    def attention_s(
        self, rows: Any, sequence: Any, size: Any, dtype: str, backward: bool = False, busy: bool = True
    ) -> Any:
        """Returns seconds of causal attention, forward or backward.

        Args:
            rows: sequences x heads.
            sequence: tokens, S.
            size: of a head, E.
            dtype: data type.
            backward: the gradient, without the forward.
            busy: while all ranks compute.
        """
        table = self._pick(self._attentions, (canonical_dtype(dtype), busy, backward), "attention")
        work = np.asarray(rows, dtype=float) * np.asarray(sequence, dtype=float) ** 2 * size
        return _plain(np.maximum(work / table.rate(rows, sequence, size), self.launch_s))

    def has_operation(self, name: str, dtype: str = "float32") -> bool:
        """Whether an operation was measured in this data type."""
        return any(key[:2] == (name, canonical_dtype(dtype)) for key in self._operations)

    def operation_s(self, name: str, elements: Any, dtype: str = "float32", busy: bool = True) -> Any:
        """Returns seconds of an operation on so many elements: ``add``, ``copy``, ``gelu``, ``gelu_backward`` ..."""
        table = self._pick(self._operations, (name, canonical_dtype(dtype), busy), "operations")
        return _plain(np.maximum(np.asarray(elements, dtype=float) / table.rate(elements), self.launch_s))

    def bandwidth_bytes_per_s(self, size: Any, dtype: str = "float32", busy: bool = True) -> Any:
        """Returns bytes per second read and written when a tensor of ``size`` bytes is copied."""
        elements = np.maximum(np.asarray(size, dtype=float) / _ITEM[canonical_dtype(dtype)], 1.0)
        return 2.0 * elements * _ITEM[canonical_dtype(dtype)] / self.operation_s("copy", elements, dtype, busy)

    def optimizer_s(self, elements: Any) -> Any:
        """Returns seconds of one update of so many weights."""
        if not self.optimizer:
            raise ClusterError("the calibration has no optimizer; run meshwright calibrate")
        rates = RateTable("optimizer", {(int(count),): count / seconds for count, seconds in self.optimizer})
        return _plain(np.asarray(elements, dtype=float) / rates.rate(elements))

    def host_s(self, what: str) -> float:
        """Returns host seconds of one operator, action, unit, step ...; 0 where they weren't measured."""
        return self._host.get(what, 0.0)

    @cached_property
    def _host(self) -> dict[str, float]:
        return {str(what): float(seconds) for what, seconds in self.host}

    @property
    def crowd(self) -> float:
        """Ranks that share a core; 1 where each has one or more, and on GPUs."""
        cores = int(self.machine.get("cores", 0)) * self.nodes
        return max(1.0, self.ranks / cores) if cores and self.machine.get("kind") == "cpu" else 1.0

    def covers(self, kind: str, ranks: int, nodes: int = 1) -> bool:
        """Whether an operation was measured over groups of so many ranks on so many nodes."""
        return any(key[:3] == (kind, ranks, nodes) for key in self._collectives)

    def collective_s(self, kind: str, size: Any, ranks: int, nodes: int = 1, before: int = 1) -> Any:
        """Returns seconds of a collective under the load of all groups at once.

        Args:
            kind: a name of `traffic.COLLECTIVES`.
            size: bytes of the whole tensor; a number or an array.
            ranks: of the group.
            nodes: that they stand on.
            before: ranks between two members; of those measured the nearest is taken.

        Raises:
            ClusterError: when `covers` says no.
        """
        if ranks <= 1:
            return _plain(np.zeros(np.shape(size)))
        places = [key for key in self._collectives if key[:3] == (kind, ranks, nodes)]
        if not places:
            known = sorted({f"{key[0]} over {key[1]} ranks on {key[2]} nodes" for key in self._collectives})
            raise ClusterError(
                f"the calibration has no {kind} over {ranks} ranks on {nodes} nodes, only {', '.join(known) or 'none'}"
            )
        place = min(places, key=lambda key: abs(np.log(key[3] / before)))
        return _plain(self._collectives[place].seconds(size))

    def best_matmul(self, dtype: str) -> float:
        """Returns the highest rate of forward products with all ranks at work, in FLOP/s; 0 where none was measured."""
        rates = [
            table.best
            for (kind, form, busy), table in self._matmuls.items()
            if (kind, form, busy) == (dtype, "nt", True)
        ]
        return max(rates, default=0.0)

    def times(self, kind: str, ranks: int, nodes: int, before: int) -> list[tuple[float, float]]:
        """Returns (bytes, seconds) of a collective over one placement, by size."""
        return sorted(tuple(row[4:]) for row in self.collectives if row[:4] == (kind, ranks, nodes, before))

    # -------------------------------------------------------- kept

    @property
    def key(self) -> str:
        """Content key of the machine; the name of its file."""
        return machine_key(self.machine)

    def to_json(self) -> dict[str, Any]:
        """Returns plain values that `from_json` takes back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tables = {name: [list(row) for row in values[name]] for name in _TABLES}
        return {"version": VERSION, "key": self.key} | values | {"machine": dict(self.machine)} | tables

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Builds the calibration from `to_json`'s values.

        Raises:
            ClusterError: for another version, or tables that can't be.
        """
        if not isinstance(values, Mapping):
            raise ClusterError("the calibration is no table; measure again")
        kept = {key: value for key, value in values.items() if key not in ("version", "key")}
        known = [field.name for field in dataclasses.fields(cls)]
        if values.get("version") != VERSION:
            raise ClusterError(
                f"the calibration is of version {values.get('version')}, this meshwright reads {VERSION}: measure again"
            )
        for key in kept:
            if key not in known:
                raise ClusterError(f"calibration: unknown key '{key}'{nearest(key, known)}")
        try:
            made = cls(**kept)
            made.check()
        except (TypeError, ValueError, KeyError) as error:
            raise ClusterError(f"the calibration can't be read ({error}); measure again") from None
        return made

    def check(self) -> None:
        """Builds every table, so that a damaged one is refused when read and not when asked.

        Raises:
            ClusterError: for a table that can't be.
        """
        for table in (self._matmuls, self._attentions, self._operations, self._collectives):
            assert isinstance(table, dict)

    def save(self, folder: Path) -> Path:
        """Writes ``KEY.json`` into a folder, which is made if need be, and returns its path."""
        path = folder / f"{self.key}.json"
        self.write(path)
        return path

    def write(self, path: Path) -> None:
        """Writes the calibration to a file, beside first and then renamed over it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Nodes that share a folder may write the same at once.
        beside = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
        beside.write_text(_dumps(self.to_json()), encoding="utf-8")
        beside.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a calibration.

        Raises:
            ClusterError: when it isn't there or can't be read.
        """
        try:
            return cls.from_json(parse_json(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ClusterError(f"the calibration {path} can't be read: {error.strerror}") from None
        except ValueError as error:
            raise ClusterError(f"the calibration {path} is not JSON: {error}") from None

    @classmethod
    def find(cls, folder: Path, machine: Mapping[str, Any]) -> Self | None:
        """Returns the calibration that a folder has of a machine, None when it has none."""
        path = folder / f"{machine_key(machine)}.json"
        return cls.load(path) if path.is_file() else None

    def merged(self, other: Calibration) -> Calibration:
        """Returns this calibration with the rows of ``other`` in place of its own at the same sizes."""
        changed = {}
        for name, keys in _TABLES.items():
            rows = {row[:keys]: row for row in (*getattr(self, name), *getattr(other, name))}
            changed[name] = tuple(rows.values())
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]

    # -------------------------------------------------------- tables

    def _pick(self, tables: Mapping[tuple[Any, ...], RateTable], key: tuple[Any, ...], what: str) -> RateTable:
        """Returns a table; where one load alone was measured, that one's."""
        if key in tables:
            return tables[key]
        other = tuple(not part if isinstance(part, bool) and at == _BUSY[what] else part for at, part in enumerate(key))
        if other in tables:
            return tables[other]
        known = sorted({f"{found[0]}" for found in tables})
        raise ClusterError(f"the calibration has no {what} for {key[0]}; measured: {', '.join(known) or 'none'}")

    @cached_property
    def _matmuls(self) -> dict[tuple[Any, ...], RateTable]:
        return {
            key: RateTable(
                "matrix products", {(m, n, k): 2.0 * m * n * k / seconds for m, n, k, seconds in rows if seconds}
            )
            for key, rows in grouped(self.matmul, 3).items()
        }

    @cached_property
    def _attentions(self) -> dict[tuple[Any, ...], RateTable]:
        found = {}
        for key, rows in grouped(self.attention, 2).items():
            for backward in (False, True):
                rates: dict[tuple[int, ...], float] = {
                    (n, s, e): n * s * s * e / (back if backward else ahead) for n, s, e, ahead, back in rows
                }
                found[(*key, backward)] = RateTable("attention", rates)
        return found

    @cached_property
    def _operations(self) -> dict[tuple[Any, ...], RateTable]:
        return {
            key: RateTable("operations", {(count,): count / seconds for count, seconds in rows})
            for key, rows in grouped(self.operations, 3).items()
        }

    @cached_property
    def _collectives(self) -> dict[tuple[Any, ...], TimeTable]:
        return {
            key: TimeTable("collectives", ((size, seconds) for size, seconds in rows))
            for key, rows in grouped(self.collectives, 4).items()
        }


_TABLES = {"matmul": 6, "attention": 5, "operations": 4, "optimizer": 1, "collectives": 5, "host": 1}
"""Each table, and how many entries of a row say what was measured."""
_BUSY = {"matrix products": 2, "attention": 1, "operations": 2}
"""Where a table's key says whether all ranks were at work."""
_ITEM = {"float64": 8, "float32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5, "int8": 1}
"""Bytes of an element."""


def _plain(values: Any) -> Any:
    """Returns a float for a scalar."""
    found = np.asarray(values)
    return float(found) if found.ndim == 0 else found


def _dumps(values: Mapping[str, Any]) -> str:
    """Returns JSON with one row of a table a line."""
    lines = []
    for key, value in values.items():
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            rows = ",\n    ".join(json.dumps(row) for row in value)
            lines.append(f"  {json.dumps(key)}: [\n    {rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
