"""Cross-validation: constants fitted from their priors to some models, sizes or files, judged on the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.published.fitting import SPREAD, Knobs, errors, fit, known_engines, measured
from benchmarks.published.models import whole
from benchmarks.published.naive import Naive
from benchmarks.published.predict import predict, with_engines
from benchmarks.published.rows import Case
from benchmarks.published.stats import fits, regret
from meshwright.planner.cost.framework_profile import GIB

PRIORS: dict[str, float] = {
    "picojoules": 1.3,
    "ramp": 65.0,
    "quantum": 0.5,
    "flash_forward": 0.5,
    "flash_backward": 0.4,
    "batched": 0.4,
    "pass_width": 40.0,
    "pass_ffn": 10.0,
    "score_passes": 11.0,
    "loss_passes:0": 25.0,
    "cast_bytes": 4.0,
    "route_bytes": 12.0,
    "accumulate_bytes": 10.0,
    "attention": 0.8,
    "matmul": 0.9,
    "host_layer_s": 1e-3,
    "host_step_s": 0.01,
    "tp_start_s": 2e-5,
    "host_microbatch_s": 1e-3,
    "action_s": 3e-4,
    "dp_overlap": 0.6,
    "interference": 0.3,
    "scatter_share": 0.8,
    "tp_overlap": 0.5,
    "ep_overlap": 0.3,
    "logits": 10.0,
    "gathered": 6.0,
    "late_layers": 22.0,
    "fresh_gradient": 4.0,
    "allocator": 1.1,
    "allocator_bytes": 0.25 * GIB,
    "context_bytes": 1.0 * GIB,
    "torchtitan-eager/saved/logits": 12.0,
    "torchtitan/saved/logits": 12.0,
    "torchtitan-2025/saved/logits": 4.0,
}
"""Where every constant starts: from specifications and from what such code moves. By its whole name where code differs,
`KINDS` among them. Which of them were counted anew, and how, was decided with errors of rows in sight that a fit had
left out, so what such rows say of the priors is a bit kinder than code of which nobody has seen a row. An eager loss
over float32 has their log-softmax, its gradient and its input's at once (3 x 4 bytes), as torchtitan lets go of the
logits before backward ("del pred"); a compiled one logits and their gradient in 16 bits."""
KINDS: tuple[tuple[str, dict[str, float]], ...] = (
    ("nanotron fsdp-composer fsdp-composer-hopper torchtitan-eager", {"pass_width": 90.0, "pass_ffn": 12.0}),
    (
        "torchtitan torchtitan-async-tp torchtitan-rowwise torchtitan-async-tp-rowwise",
        {"pass_width": 38.0, "pass_ffn": 5.0},
    ),
    (
        "megatron-2020 megatron-2022 megatron-deepspeed megatron-deepspeed-bigscience sailor",
        {"pass_width": 30.0, "pass_ffn": 4.0},
    ),
    ("megatron-deepspeed sailor", {"host_layer_s": 5.5e-4}),
    ("nemo nemo-overlap bridge bridge-graphs", {"pass_width": 25.0}),
    ("bridge bridge-graphs megatron-te", {"attention": 1.15}),
    ("nemo-overlap bridge bridge-graphs", {"tp_overlap": 0.8}),
    ("nemo", {"tp_overlap": 0.0}),
    ("sailor", {"score_passes": 33.0, "loss_passes:0": 40.0}),
    ("fsdp-composer-hopper", {"attention": 0.38}),
    ("torchtitan-rowwise torchtitan-async-tp-rowwise", {"cast_bytes": 10.0}),
)
"""Priors by what a framework's code is known to do.

Each figure is a count or a measurement, but that a kind was made at all, and of which engines, was decided where
errors of left-out rows were large: see `PRIORS`.

- Code that runs operation by operation moves 90 bytes an element of D and 12 of F, what torch.compile made of it 38 and
  5: counted off the operators of a GPT-2 and a Llama layer (`meshwright_profile.PASS_WIDTH`, `FUSED_WIDTH`; eager, the
  mean of 116 and 60).
- Megatron's kernels fused by hand: two norms (4 each), two sums with bias, dropout and residual (7 with the mask), the
  bias of q, k and v (6), attention's output put in order (2 to 4); bias and GELU 4. Transformer Engine's: two norms
  (4), two residual sums (6), rotations of q and k (5). Source: Megatron-LM, fused_bias_dropout.py, fused_bias_gelu.py.
- A layer of Megatron makes 24 launches, where an eager Llama's 45 are taken to cost a host the 1 ms that is the prior.
- Transformer Engine's attention is cuDNN's, which on one H100 reached 0.59 and 0.46 of the peak where others' prior is
  0.4 and 0.32 (`meshwright_profile.HOPPER_ATTENTION`). What was written for Ampere reaches Ampere's rate on Hopper's
  units and clocks, 1.5 x 312 of 989 TFLOP/s of it.
- Ring exchanges of Transformer Engine's user buffers expose a first piece of four to eight; NeMo of v3.0 had none.
- In float32 Megatron's fused softmax refuses, and eager scores are written (4), scaled (8), masked (9, the mask's byte
  among them), normalised (8) and read (4); its loss makes logits contiguous (8), finds the largest (4), subtracts it
  (8), takes exponentials (8), sums (4) and divides (8). Source: Megatron-LM, fused_softmax.py and cross_entropy.py.
- Scales of rows are found and applied along both sides of an operand: twice a pass that reads 2 bytes and one that
  reads 2 and writes 1.
"""
PRIORS |= {
    f"{engine}/runtime/{key}": value for names, kind in KINDS for engine in names.split() for key, value in kind.items()
}
SPREADS: dict[str, float] = {
    "picojoules": 0.3,
    "matmul": 0.1,
    "allocator": 0.05,
    "scatter_share": 0.2,
    "flash_forward": 0.25,
    "flash_backward": 0.25,
    "attention": 0.25,
    "batched": 0.3,
    "logits": 0.3,
    "host_layer_s": 1.0,
    "host_step_s": 1.0,
    "host_microbatch_s": 1.0,
    "action_s": 1.0,
    "tp_start_s": 1.0,
}
"""How sure a prior is: standard deviation of the constant's logarithm, `fitting.SPREAD` where it isn't named. Shares of
a measured peak are known to a tenth, kernels' shares to a quarter, what code moves to a factor of 1.6, seconds of a
host to a factor of 3."""
LEAST_MOST: dict[str, tuple[float, float]] = {
    "quantum": (0.0, 1.0),
    "flash_forward": (0.2, 0.75),
    "flash_backward": (0.15, 0.7),
    "batched": (0.2, 0.8),
    "attention": (0.3, 2.0),
    "matmul": (0.5, 1.05),
    "dp_overlap": (0.05, 1.0),
    "interference": (0.0, 1.0),
    "scatter_share": (0.3, 1.0),
    "tp_overlap": (0.0, 1.0),
    "ep_overlap": (0.05, 1.0),
    "allocator": (1.0, 1.3),
    "accumulate_bytes": (4.0, 24.0),
}
"""Bounds by what a constant is."""
MOST_ROWS = 140
"""Rows that a fold is fitted to; more are drawn from."""


def _named(prefix: str, names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}/{name}" for name in names.split())


PRODUCTS = _named("products", "picojoules ramp")
RATES = {
    "hopper": PRODUCTS + _named("rates/hopper", "quantum flash_forward flash_backward"),
    "ampere": PRODUCTS + _named("rates/ampere", "quantum flash_forward batched"),
    "blackwell": PRODUCTS + _named("rates/blackwell", "flash_forward"),
}
"""Of a generation, those of products among them that all share."""
NANOTRON = _named(
    "nanotron/runtime",
    "pass_width pass_ffn loss_passes:0 accumulate_bytes host_layer_s host_step_s dp_overlap scatter_share",
)
DEEPSPEED = _named("megatron-deepspeed/runtime", "host_layer_s score_passes pass_width host_step_s loss_passes:0")
COMPOSER = _named("fsdp-composer/runtime", "attention pass_width interference") + _named(
    "fsdp-composer-hopper/runtime", "attention pass_width interference"
)
MEGATRON = _named("megatron-2020/runtime", "pass_width score_passes") + _named("megatron-2022/runtime", "pass_width")
NANOTRON_MEMORY = (*_named("nanotron/saved", "late_layers gathered logits"), "nanotron/allocator")
BEFORE_MEMORY = (*_named("nanotron-before/saved", "late_layers gathered logits"), "nanotron-before/allocator")


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One division of rows."""

    name: str
    knobs: tuple[str, ...]
    train: Callable[[Case], bool]
    test: Callable[[Case], bool]
    what: str = "time"
    unseen: tuple[str, ...] = ()
    """Constants that stay at their priors: those of a framework of which no row is fitted."""


def _of(*files: str, **columns: str) -> Callable[[Case], bool]:
    """Rows of files in whose columns a word stands."""

    def chosen(case: Case) -> bool:
        return case.file.startswith(files) and all(word in case.row.get(key, "") for key, word in columns.items())

    return chosen


def _gpus(low: int, high: int, *files: str) -> Callable[[Case], bool]:
    return lambda case: case.file.startswith(files) and low <= whole(case.row, "gpus") <= high


def _width(low: int, high: int, *files: str) -> Callable[[Case], bool]:
    return lambda case: case.file.startswith(files) and low <= whole(case.row, "hidden") <= high


HF, VTRAIN, MPT, MLPERF = "hf_", "vtrain", "mpt_", "mlperf"
SIZES = ("125m", "760m", "3b", "13b", "70b")
"""Every other size of MPT."""
OLD = ("megatron_sc21", "korthikanti", "megatron_readme")
FOLDS: tuple[Fold, ...] = (
    Fold(
        name="sweep, small model to large",
        knobs=RATES["hopper"] + NANOTRON,
        train=_width(0, 2048, HF),
        test=_width(2049, 99999, HF),
    ),
    Fold(
        name="sweep, large model to small",
        knobs=RATES["hopper"] + NANOTRON,
        train=_width(2049, 99999, HF),
        test=_width(0, 2048, HF),
    ),
    Fold(
        name="sweep, up to 2 nodes to more",
        knobs=RATES["hopper"] + NANOTRON,
        train=_gpus(1, 16, HF),
        test=_gpus(17, 99999, HF),
    ),
    Fold(
        name="sweep, memory, small to large",
        knobs=NANOTRON_MEMORY + BEFORE_MEMORY,
        train=_width(0, 2048, HF),
        test=_width(2049, 99999, HF),
        what="memory",
    ),
    Fold(
        name="sweep, memory, large to small",
        knobs=NANOTRON_MEMORY + BEFORE_MEMORY,
        train=_width(2049, 99999, HF),
        test=_width(0, 2048, HF),
        what="memory",
    ),
    Fold(
        name="vtrain, width 1024 to wider",
        knobs=RATES["ampere"] + DEEPSPEED,
        train=_width(0, 1024, VTRAIN),
        test=_width(1025, 99999, VTRAIN),
    ),
    Fold(
        name="vtrain, width 2048 to others",
        knobs=RATES["ampere"] + DEEPSPEED,
        train=_width(2048, 2048, VTRAIN),
        test=lambda case: case.file.startswith(VTRAIN) and whole(case.row, "hidden") != 2048,
    ),
    Fold(
        name="vtrain, every other model",
        knobs=RATES["ampere"] + DEEPSPEED,
        train=lambda case: case.file.startswith(VTRAIN) and case.row["layers"] in ("12", "20"),
        test=lambda case: case.file.startswith(VTRAIN) and case.row["layers"] not in ("12", "20"),
    ),
    Fold(
        name="MPT, every other size",
        knobs=RATES["ampere"] + RATES["hopper"] + COMPOSER,
        train=lambda case: case.file.startswith(MPT) and case.row["model"][4:] in SIZES,
        test=lambda case: case.file.startswith(MPT) and case.row["model"][4:] not in SIZES,
    ),
    Fold(
        name="MPT on A100, up to 3B and with vTrain's rows, to larger",
        knobs=RATES["ampere"] + DEEPSPEED + COMPOSER[:3],
        train=lambda case: (
            case.file.startswith(VTRAIN) or (_width(0, 2560, MPT)(case) and _of(MPT, gpu_type="a100")(case))
        ),
        test=lambda case: _width(2561, 99999, MPT)(case) and _of(MPT, gpu_type="a100")(case),
    ),
    Fold(
        name="MPT on H100, up to 3B and with the sweep's rows, to larger",
        knobs=RATES["hopper"] + NANOTRON + COMPOSER[3:],
        train=lambda case: case.file.startswith(HF) or (_width(0, 2560, MPT)(case) and _of(MPT, gpu_type="h100")(case)),
        test=lambda case: _width(2561, 99999, MPT)(case) and _of(MPT, gpu_type="h100")(case),
    ),
    Fold(
        name="MPT, up to 3B to larger",
        knobs=RATES["ampere"] + RATES["hopper"] + COMPOSER,
        train=_width(0, 2560, MPT),
        test=_width(2561, 99999, MPT),
    ),
    Fold(
        name="MPT on A100 to MPT on H100, whose rates come from the sweep",
        knobs=RATES["hopper"] + NANOTRON + RATES["ampere"] + COMPOSER,
        train=lambda case: case.file.startswith(HF) or (case.file.startswith(MPT) and "a100" in case.row["gpu_type"]),
        test=_of(MPT, gpu_type="h100"),
    ),
    Fold(
        name="vtrain, MPT and 2020's table to SC21 and 2022",
        knobs=RATES["ampere"] + DEEPSPEED + COMPOSER + MEGATRON[:2],
        train=_of(VTRAIN, MPT, "megatron_readme"),
        test=_of(*OLD[:2]),
    ),
    Fold(
        name="MLPerf v3 to v4, rates with MPT",
        knobs=RATES["hopper"] + COMPOSER + _named("nemo/runtime", "pass_width tp_overlap"),
        train=lambda case: case.file.startswith(MPT) or (case.file.startswith(MLPERF) and case.row["date"] < "v4"),
        test=lambda case: case.file.startswith(MLPERF) and case.row["date"] >= "v4" and "H100" in case.row["gpu_type"],
    ),
    Fold(
        name="bridge and SimuMax, 70B and Qwen to the others",
        knobs=RATES["blackwell"] + _named("bridge/runtime", "pass_width route_bytes tp_overlap ep_overlap"),
        train=lambda case: case.file.startswith(("megatron_bridge", "simumax")) and _seventy(case),
        test=lambda case: case.file.startswith(("megatron_bridge", "simumax")) and not _seventy(case),
    ),
    Fold(
        name="SimuMax, memory, 70B to the others",
        knobs=_named("megatron-te/saved", "logits fresh_gradient"),
        train=_of("simumax", model="70b"),
        test=lambda case: case.file.startswith("simumax") and "70b" not in case.row["model"],
        what="memory",
    ),
)
"""Every division that is judged; those that leave out a file are added below."""


BIGSCIENCE = _named("megatron-deepspeed-bigscience/runtime", "matmul score_passes pass_width tp_start_s")
NEMO = tuple(f"{name}/runtime/{key}" for name in ("nemo", "nemo-overlap") for key in ("pass_width", "tp_overlap"))
BRIDGE = tuple(
    f"{name}/runtime/{key}"
    for name in ("bridge", "bridge-graphs")
    for key in ("attention", "pass_width", "route_bytes", "cast_bytes", "tp_overlap", "ep_overlap")
)
PLAIN = _named("megatron-te/runtime", "attention accumulate_bytes")
TITAN = tuple(
    f"{name}/runtime/{key}"
    for name in (
        *("torchtitan-eager", "torchtitan", "torchtitan-async-tp"),
        *("torchtitan-rowwise", "torchtitan-async-tp-rowwise"),
    )
    for key in ("attention", "pass_width", "pass_ffn", "cast_bytes", "tp_overlap")
    if key != "tp_overlap" or "async" in name
)
FILES = (
    ("BLOOM", ("bigscience",), (VTRAIN, MPT, *OLD), RATES["ampere"] + DEEPSPEED, BIGSCIENCE),
    ("vTrain", (VTRAIN,), (MPT, "bigscience", *OLD), RATES["ampere"] + COMPOSER, DEEPSPEED),
    ("MPT", (MPT,), (VTRAIN, HF), RATES["ampere"] + RATES["hopper"] + NANOTRON + DEEPSPEED, COMPOSER),
    ("the sweep", (HF,), (MPT, "torchtitan", MLPERF), RATES["hopper"] + COMPOSER, NANOTRON),
    ("torchtitan", ("torchtitan",), (HF, MPT), RATES["hopper"] + NANOTRON + COMPOSER, TITAN),
    ("MLPerf", (MLPERF,), (HF, MPT), RATES["hopper"] + NANOTRON + COMPOSER, NEMO),
    ("SimuMax", ("simumax",), ("megatron_bridge",), RATES["blackwell"] + BRIDGE[:6], PLAIN),
    ("Bridge", ("megatron_bridge",), ("simumax",), RATES["blackwell"], BRIDGE),
)  # fmt: skip
"""Files left out: (name, judged on, fitted to, constants that are fitted, constants of its framework)."""


def left_out(name: str, judged: tuple[str, ...], fitted: tuple[str, ...], *knobs: tuple[str, ...]) -> Fold:
    """Returns the division that leaves out files, fitted to others; ``knobs`` are those fitted and the unseen."""
    return Fold(name=f"{name} left out", knobs=knobs[0], train=_of(*fitted), test=_of(*judged), unseen=knobs[1])


FOLDS += tuple(left_out(*item) for item in FILES)


def _seventy(case: Case) -> bool:
    return any(word in case.row["model"].lower() for word in ("70b", "qwen"))


def prior(name: str) -> float:
    """Returns where a constant starts."""
    return PRIORS[name if name in PRIORS else name.rpartition("/")[2]]


def spread(name: str) -> float:
    """Returns how sure that is; see `SPREADS`."""
    return SPREADS.get(name.rpartition("/")[2], SPREAD)


def run(cases: Sequence[Case], folds: Sequence[Fold] = FOLDS, rounds: int = 10) -> Iterator[Mapping[str, Any]]:
    """Yields each fold's errors, regret and fits on rows that it wasn't fitted to; constants are as before afterwards.

    The naive predictor's rates are those of the rows that a fold is fitted to, all of them.
    """
    for fold in folds:
        known = [case for case in cases if measured(case, fold.what)]
        train, test = [case for case in known if fold.train(case)], [case for case in known if fold.test(case)]
        if not train or not test:
            continue
        chosen = drawn(train)
        with at_priors((*fold.knobs, *fold.unseen)):
            start = np.exp(errors(test, fold.what)) - 1
            found = fit_from_priors(fold, chosen, rounds)
            size = np.exp(errors(test, fold.what)) - 1
            judged = predict(with_engines([case for case in cases if fold.test(case)], known_engines()))
        naive = Naive(train)
        plain = [abs(naive.seconds(case) / case.time_s - 1) for case in test if case.time_s]
        yield {
            "fold": fold.name,
            "what": fold.what,
            "fitted_rows": len(chosen),
            "rows": len(size),
            "signed_median": float(np.median(size)),
            "median": float(np.median(np.abs(size))),
            "p90": float(np.percentile(np.abs(size), 90)),
            "unfitted_median": float(np.median(np.abs(start))),
            "naive_median": float(np.median(plain)) if fold.what == "time" else None,
            "regret": regret(judged, lambda item: item.step_s) if fold.what == "time" else None,
            "fits": fits(judged) if fold.what == "memory" else None,
            "constants": found,
        }


@contextmanager
def at_priors(names: Sequence[str]) -> Iterator[None]:
    """Puts constants at their priors; they are as before afterwards."""
    knobs = Knobs(names)
    before = knobs.read()
    knobs.write([prior(name) for name in names])
    try:
        yield
    finally:
        knobs.write(before)


def fit_from_priors(fold: Fold, rows: Sequence[Case], rounds: int, leaps: bool = True) -> dict[str, float]:
    """Fits a division's constants from where they are, each held by how sure it is, and returns them.

    Where a framework is left out, each of the others has a level of its own: the one that is judged has another.
    """
    names = tuple(dict.fromkeys(fold.knobs))
    limits = {name: LEAST_MOST[key] for name in names if (key := name.rpartition("/")[2]) in LEAST_MOST}
    spreads = {name: spread(name) for name in names}
    return fit(rows, names, fold.what, limits, rounds, spreads, leaps=leaps, levels=bool(fold.unseen))


def drawn(cases: Sequence[Case], most: int = MOST_ROWS) -> list[Case]:
    """Returns at most ``most`` of the cases, as equally many of each file as there are."""
    files: dict[str, list[Case]] = {}
    for case in cases:
        files.setdefault(case.file, []).append(case)
    chance = random.Random(0)
    found: list[Case] = []
    smallest_first = sorted(files.values(), key=len)
    for number, rows in enumerate(smallest_first):
        room = (most - len(found)) // (len(smallest_first) - number)
        found += chance.sample(rows, min(len(rows), room))
    return found
