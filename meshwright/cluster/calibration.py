# long: a calibration is its tables and what is read off each of them
"""Calibration: measured tables of a machine, which replace the catalogue's figures of its kind.

Every table is rows of plain values, so that a calibration is a JSON file that people can read and programs can extend.
``busy`` rows were measured with all ranks under the same load, all others with one rank alone.
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
from typing import Self

import numpy as np

from meshwright.array_types import Values
from meshwright.cluster.device import canonical_dtype
from meshwright.cluster.tables import Key, RateTable, TimeTable, grouped
from meshwright.errors import ClusterError, nearest
from meshwright.json_types import JsonObject
from meshwright.records import parse_json

VERSION = 1
FORMS = ("nt", "nn", "tn")
"""Products of a linear layer: ``nt`` forward (x W'), ``nn`` input gradient (y W), ``tn`` weight gradient (y' x)."""

Rows = tuple[Key, ...]


def machine_key(machine: JsonObject) -> str:
    """Hashes a machine's facts to its content key: 16 hex digits."""
    # Sorted keys: the same facts in any order have one key.
    text = json.dumps({str(key): machine[key] for key in sorted(machine)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured tables of one machine with a number of ranks; all are optional."""

    machine: JsonObject
    """Facts that identify the machine: device, cores, memory, software, ranks, nodes."""
    ranks: int
    """Number of ranks of the measurement."""
    nodes: int = 1
    """Number of their nodes."""
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
    """(kind, ranks, nodes, before, bytes, seconds): groups of ``ranks`` over ``nodes`` with a rank stride of
    ``before``, all groups at once; bytes of the full tensor."""
    overlap: float | None = None
    """Share of an all-reduce that hides under matrix products, 0 to 1; None where it wasn't measured."""
    pace_s: float = 0.0
    """Seconds of a fixed probe (`calibrate.pace`), the fastest of the measurement; 0 where it wasn't timed."""
    pace_spread: float = 0.0
    """Median over fastest time of the probe, minus 1: the load of other programs on the machine."""
    host: Rows = ()
    """(item, seconds) of the runtime's host time beside operators and collectives (`planner.cost.host`)."""
    taken_s: float = field(default=0.0, compare=False)
    """Duration of the measurement."""

    def __post_init__(self) -> None:
        """Converts every table to tuples."""
        for name in _TABLES:
            object.__setattr__(self, name, tuple(tuple(row) for row in getattr(self, name)))

    # -------------------------------------------------------- queries of the cost model

    def _measured_dtype(self, dtype: str) -> str:
        """Returns the data type whose times are those of ``dtype``.

        That is its own but for the one of fp16 and bf16 that wasn't measured on a GPU: the same units compute both at
        the same rate. Source: NVIDIA's data sheets from A100 on.
        """
        name = canonical_dtype(dtype)
        twin = {"fp16": "bf16", "bf16": "fp16"}.get(name)
        if twin and self.machine.get("kind") == "cuda" and not any(key[0] == name for key in self._matmuls):
            return twin
        return name

    def has_matmul(self, dtype: str) -> bool:
        """Returns whether matrix products of this data type were measured."""
        return any(key[0] == self._measured_dtype(dtype) for key in self._matmuls)

    def matmul_s(self, m: Values, n: Values, k: Values, dtype: str, form: str = "nt", busy: bool = True) -> Values:
        """Returns seconds of the product (m, k) x (k, n); sizes are numbers, or float arrays that broadcast.

        Args:
            m: rows of the result, usually tokens.
            n: columns of the result.
            k: contracted dim.
            dtype: data type.
            form: one of `FORMS`; ``tn`` has the tokens in k.
            busy: under the load of all ranks.

        Raises:
            ClusterError: when nothing was measured for the data type.
        """
        table = self._find_table(self._matmuls, (self._measured_dtype(dtype), form, busy), "matrix products")
        # 2 m n k FLOP; no product is faster than its launch.
        flops = 2.0 * np.asarray(m, dtype=float) * n * k
        return _scalar_or_array(np.maximum(flops / table.rate(m, n, k), self.launch_s))

    def has_attention(self, dtype: str) -> bool:
        """Returns whether attention in this data type was measured."""
        return any(key[0] == self._measured_dtype(dtype) for key in self._attentions)

    def attention_s(
        self, rows: Values, sequence: Values, size: Values, dtype: str, backward: bool = False, busy: bool = True
    ) -> Values:
        """Returns seconds of causal attention, forward or backward; sizes are numbers, or arrays that broadcast.

        Args:
            rows: sequences x heads.
            sequence: tokens, S.
            size: of a head, E.
            dtype: data type.
            backward: the gradient, without the forward.
            busy: under the load of all ranks.
        """
        table = self._find_table(self._attentions, (self._measured_dtype(dtype), busy, backward), "attention")
        # rows S^2 E: proportional to the FLOP of causal attention, and cancels against the table's unit.
        pair_products = np.asarray(rows, dtype=float) * np.asarray(sequence, dtype=float) ** 2 * size
        return _scalar_or_array(np.maximum(pair_products / table.rate(rows, sequence, size), self.launch_s))

    def has_operation(self, name: str, dtype: str = "float32") -> bool:
        """Returns whether an operation was measured in this data type."""
        return any(key[:2] == (name, self._measured_dtype(dtype)) for key in self._operations)

    def operation_s(self, name: str, elements: Values, dtype: str = "float32", busy: bool = True) -> Values:
        """Returns seconds of an operation (``add``, ``gelu``, ``gelu_backward`` ...) by number of elements."""
        table = self._find_table(self._operations, (name, self._measured_dtype(dtype), busy), "operations")
        return _scalar_or_array(np.maximum(np.asarray(elements, dtype=float) / table.rate(elements), self.launch_s))

    def bandwidth_bytes_per_s(self, size: Values, dtype: str = "float32", busy: bool = True) -> Values:
        """Returns bytes per second read and written when a tensor of ``size`` bytes is copied."""
        # A copy reads and writes each element: two transfers of its bytes.
        elements = np.maximum(np.asarray(size, dtype=float) / _ITEM_BYTES[canonical_dtype(dtype)], 1.0)
        return 2.0 * elements * _ITEM_BYTES[canonical_dtype(dtype)] / self.operation_s("copy", elements, dtype, busy)

    def optimizer_s(self, elements: Values) -> Values:
        """Returns seconds of one optimizer update by number of weights."""
        if not self.optimizer:
            raise ClusterError("the calibration has no optimizer; run meshwright calibrate")
        # Elements per second; beyond the largest measured size the last rate holds.
        rates = RateTable("optimizer", {(int(count),): count / seconds for count, seconds in self.optimizer})
        return _scalar_or_array(np.asarray(elements, dtype=float) / rates.rate(elements))

    def host_s(self, item: str) -> float:
        """Returns host seconds of one ``operator_forward``, ``action``, ``step`` ...; 0 if not measured."""
        return self._host.get(item, 0.0)

    @cached_property
    def _host(self) -> dict[str, float]:
        return {str(item): float(seconds) for item, seconds in self.host}

    @property
    def crowd(self) -> float:
        """Ranks per core, of which a quota may leave parts; 1 where each rank has one or more, and on GPUs."""
        return max(1.0, self.ranks / self._cores) if self._cores else 1.0

    @property
    def is_throttled(self) -> bool:
        """Whether a quota leaves each node less than a core."""
        return 0.0 < self._cores < self.nodes

    @property
    def alone_speedup(self) -> float:
        """Speed of a rank while all others of its node wait, over that beside them; 1 on GPUs.

        A node's ranks share its cores, or the quota of them, as one pool, of which a rank takes a core at most.
        """
        return min(self.crowd, self.ranks / self.nodes)

    @property
    def _cores(self) -> float:
        """Cores' worth of processor time of all nodes; 0 on GPUs."""
        # Machine facts count one node's cores.
        return float(self.machine.get("cores", 0)) * self.nodes if self.machine.get("kind") == "cpu" else 0.0

    def covers(self, kind: str, ranks: int, nodes: int = 1) -> bool:
        """Returns whether a collective was measured over groups of ``ranks`` on ``nodes``."""
        return any(key[:3] == (kind, ranks, nodes) for key in self._collectives)

    def collective_s(self, kind: str, size: Values, ranks: int, nodes: int = 1, rank_stride: int = 1) -> Values:
        """Returns seconds of a collective under the load of all groups at once.

        Args:
            kind: a name of `traffic.COLLECTIVES`.
            size: bytes of the full tensor; a number or a float array.
            ranks: of the group.
            nodes: of the group.
            rank_stride: difference of two members' ranks; the nearest measured one is used.

        Raises:
            ClusterError: when `covers` is false.
        """
        if ranks <= 1:
            return _scalar_or_array(np.zeros(np.shape(size)))
        placements = [key for key in self._collectives if key[:3] == (kind, ranks, nodes)]
        if not placements:
            measured = sorted({f"{key[0]} over {key[1]} ranks on {key[2]} nodes" for key in self._collectives})
            raise ClusterError(
                f"the calibration has no {kind} over {ranks} ranks on {nodes} nodes, only "
                f"{', '.join(measured) or 'none'}"
            )
        # Strides are compared by their ratio, as 2 against 4 differs like 8 against 16.
        nearest_placement = min(placements, key=lambda key: abs(np.log(key[3] / rank_stride)))
        return _scalar_or_array(self._collectives[nearest_placement].seconds(size))

    def best_matmul(self, dtype: str) -> float:
        """Returns the highest rate of forward products under full load, in FLOP/s; 0 where none was measured."""
        rates = [
            table.best
            for (kind, form, busy), table in self._matmuls.items()
            if (kind, form, busy) == (dtype, "nt", True)
        ]
        return max(rates, default=0.0)

    def times(self, kind: str, ranks: int, nodes: int, rank_stride: int) -> list[tuple[float, float]]:
        """Returns (bytes, seconds) of a collective over one placement, ascending by size."""
        return sorted(tuple(row[4:]) for row in self.collectives if row[:4] == (kind, ranks, nodes, rank_stride))

    # -------------------------------------------------------- files

    @property
    def key(self) -> str:
        """Content key of the machine; the name of its file."""
        return machine_key(self.machine)

    def to_json(self) -> dict[str, object]:
        """Returns plain values for `from_json`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tables = {name: [list(row) for row in values[name]] for name in _TABLES}
        return {"version": VERSION, "key": self.key} | values | {"machine": dict(self.machine)} | tables

    @classmethod
    def from_json(cls, values: JsonObject) -> Self:
        """Builds the calibration from `to_json`'s values.

        Raises:
            ClusterError: for another version, or invalid tables.
        """
        if not isinstance(values, Mapping):
            raise ClusterError("the calibration is no table; measure again")
        fields = {key: value for key, value in values.items() if key not in ("version", "key")}
        field_names = [field.name for field in dataclasses.fields(cls)]
        if values.get("version") != VERSION:
            raise ClusterError(
                f"the calibration is of version {values.get('version')}, this meshwright reads {VERSION}: measure again"
            )
        for key in fields:
            if key not in field_names:
                raise ClusterError(f"calibration: unknown key '{key}'{nearest(key, field_names)}")
        try:
            calibration = cls(**fields)
            calibration.check()
        except (TypeError, ValueError, KeyError) as error:
            raise ClusterError(f"the calibration can't be read ({error}); measure again") from None
        return calibration

    def check(self) -> None:
        """Builds every table, so that a damaged one is refused when it is read, not at a later query.

        Raises:
            ClusterError: for an invalid table.
        """
        for table in (self._matmuls, self._attentions, self._operations, self._collectives):
            # Reading the cached property builds the table, which checks it.
            assert isinstance(table, dict)

    def save(self, folder: Path) -> Path:
        """Writes ``KEY.json`` into a folder, which is created if missing, and returns its path."""
        path = folder / f"{self.key}.json"
        self.write(path)
        return path

    def write(self, path: Path) -> None:
        """Writes the calibration to a file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Nodes that share a folder may write the same file at once: the temporary name has host and pid.
        temporary = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
        temporary.write_text(_render_json(self.to_json()), encoding="utf-8")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a calibration.

        Raises:
            ClusterError: when it is missing or can't be read.
        """
        try:
            return cls.from_json(parse_json(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ClusterError(f"the calibration {path} can't be read: {error.strerror}") from None
        except ValueError as error:
            raise ClusterError(f"the calibration {path} is not JSON: {error}") from None

    @classmethod
    def find(cls, folder: Path, machine: JsonObject) -> Self | None:
        """Loads a folder's calibration of a machine; None without one."""
        path = folder / f"{machine_key(machine)}.json"
        return cls.load(path) if path.is_file() else None

    def merged(self, newer: Calibration) -> Calibration:
        """Returns this calibration with the rows of ``newer`` added, which replace rows of the same sizes."""
        changed = {}
        for name, key_columns in _TABLES.items():
            # Later rows of a dict win: those of the newer calibration.
            rows = {row[:key_columns]: row for row in (*getattr(self, name), *getattr(newer, name))}
            changed[name] = tuple(rows.values())
        return dataclasses.replace(self, **changed)  # type: ignore[arg-type]

    # -------------------------------------------------------- tables

    def _find_table(self, tables: Mapping[Key, RateTable], key: Key, table_name: str) -> RateTable:
        """Finds a table by its key; where only the other load was measured, that one's."""
        if key in tables:
            return tables[key]
        # The same key with the other value of ``busy``.
        fallback_key = tuple(
            not entry if isinstance(entry, bool) and index == _BUSY_COLUMN[table_name] else entry
            for index, entry in enumerate(key)
        )
        if fallback_key in tables:
            return tables[fallback_key]
        measured = sorted({f"{table_key[0]}" for table_key in tables})
        raise ClusterError(
            f"the calibration has no {table_name} for {key[0]}; measured: {', '.join(measured) or 'none'}"
        )

    @cached_property
    def _matmuls(self) -> dict[Key, RateTable]:
        return {
            key: RateTable(
                "matrix products", {(m, n, k): 2.0 * m * n * k / seconds for m, n, k, seconds in rows if seconds}
            )
            for key, rows in grouped(self.matmul, 3).items()
        }

    @cached_property
    def _attentions(self) -> dict[Key, RateTable]:
        """Tables by (dtype, busy, backward) over (rows, sequence, head size)."""
        rate_tables = {}
        for key, table_rows in grouped(self.attention, 2).items():
            for backward in (False, True):
                rates: dict[tuple[int, ...], float] = {
                    (rows_count, sequence, head_size): rows_count
                    * sequence
                    * sequence
                    * head_size
                    / (backward_s if backward else forward_s)
                    for rows_count, sequence, head_size, forward_s, backward_s in table_rows
                }
                # Forward and backward are tables of their own, of one grid.
                rate_tables[(*key, backward)] = RateTable("attention", rates)
        return rate_tables

    @cached_property
    def _operations(self) -> dict[Key, RateTable]:
        return {
            key: RateTable("operations", {(count,): count / seconds for count, seconds in rows})
            for key, rows in grouped(self.operations, 3).items()
        }

    @cached_property
    def _collectives(self) -> dict[Key, TimeTable]:
        return {
            key: TimeTable("collectives", ((size, seconds) for size, seconds in rows))
            for key, rows in grouped(self.collectives, 4).items()
        }


_TABLES = {"matmul": 6, "attention": 5, "operations": 4, "optimizer": 1, "collectives": 5, "host": 1}
"""Tables, and the number of leading columns that identify a row."""
_BUSY_COLUMN = {"matrix products": 2, "attention": 1, "operations": 2}
"""Index of ``busy`` in a table's key."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5, "int8": 1}
"""Bytes of an element."""


def _scalar_or_array(values: Values) -> Values:
    """Converts a 0-d array to a float."""
    array = np.asarray(values)
    return float(array) if array.ndim == 0 else array


def _render_json(values: JsonObject) -> str:
    """Renders JSON with one table row a line."""
    lines = []
    for key, value in values.items():
        # Tables are long: one row a line keeps the file readable, and its diffs short.
        if isinstance(value, Sequence) and not isinstance(value, str) and value:
            rows = ",\n    ".join(json.dumps(row) for row in value)
            lines.append(f"  {json.dumps(key)}: [\n    {rows}\n  ]")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
