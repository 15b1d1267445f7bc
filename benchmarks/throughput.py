"""How fast a step is, at 2 or 4 ranks on the CPU: meshwright against scripts by hand and against other frameworks.

Contenders run one after the other, each in new processes, in rounds whose order rotates; ratios are taken within a
round and their median is reported, with the least and the most. Every contender trains the same 20M model in float32 on
the same token file, with fused AdamW, clipping and a logged loss: a GPT-2 along the data axes, a llama along ``tp``,
``pp`` and ``cp``. On the llama all start from the same weights and read the same rows; their losses must agree, or the
exit status is 1, as it is when a layout of meshwright's takes more memory than its script.

    python benchmarks/throughput.py [--model llama] [--ranks 4] [--only meshwright,ddp] [--rounds 3] [--steps 8]
        [--setting medium] [--json OUT]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders import CONTENDERS, Contender, select
from processes import ForeignLoad, RankWatch, become_subreaper, run_limited, wait_until_quiet
from reference import STEPS, model_words, write_reference

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"
SETTINGS = {
    "gpt2": {"small": (4, 128), "medium": (4, 256)},
    "llama": {"small": (8, 128), "medium": (8, 256)},
}
"""Rows of the global batch and tokens a row, by model; 8 micro-batches want 8 rows."""
WARM_UP = 3
LIMIT_S = 180.0
VOCABULARY = {"gpt2": 24000, "llama": 8000}
DATA = ("--limit-bytes", "12000000", "--validation-share", "0")
GPT2 = (
    "--model", "gpt2", "--model.layers", "6", "--model.width", "384", "--model.heads", "6", "--model.vocab", "24000",
    "--model.context", "256",
)  # fmt: skip
CACHE = ROOT / "build" / "throughput"
MIB = 2**20
DISTURBED_CORES = 0.2
"""Cores kept busy by other programs from which a run counts as disturbed."""
ALIKE = 1e-3
"""Relative difference between losses of one step that rounding may make in the first steps of the llama."""
ALIKE_STEPS = 5


@dataclass
class Sample:
    """One run of one contender."""

    step_s: list[float]
    """Timed steps, from the end of the step before to the end of this one."""
    first_step_s: float
    """From the start of the first process to the end of the first step."""
    peak_bytes: list[int]
    """Most resident memory, by rank, but for snapshots."""
    loss: list[float]
    cpu_s: float
    """CPU seconds of all ranks a timed step: what contention for the cores disturbs least."""
    parameter_bytes: int
    """Parameters that rank 0 holds between steps."""
    snapshot_bytes: int = 0
    """Copies of the state for recovery that the rank had mapped beside that; scripts have none."""
    parts: dict[str, float] = field(default_factory=dict)
    """meshwright's own account: median seconds by part."""
    foreign: float = 0.0
    """Cores that other programs kept busy meanwhile."""
    round: int = 0
    """Which round it ran in: ratios pair samples of one round."""


def main() -> int:
    """Measures and prints tables."""
    options = _options()
    become_subreaper()
    chosen = select(options.only, options.model, options.ranks, PEERS.exists())
    tokens = prepare(options.model)
    results: dict[str, Any] = {}
    wrong: list[str] = []
    began = time.monotonic()
    for setting in options.setting or list(SETTINGS[options.model]):
        samples = measure(chosen, SETTINGS[options.model][setting], tokens, options)
        results[setting] = {name: [dataclasses.asdict(one) for one in many] for name, many in samples.items()}
        print(table(f"{options.model} {setting}", SETTINGS[options.model][setting], chosen, samples), flush=True)
        wrong += unlike(samples) if options.model == "llama" else []
        wrong += larger(chosen, samples)
        if options.json:
            options.json.write_text(json.dumps({"options": vars(options) | {"json": ""}, "runs": results}, indent=1))
    print(f"{time.monotonic() - began:.0f} s in all; load {os.getloadavg()[0]:.1f} at the end")
    for line in wrong:
        print(line)
    return int(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names or beginnings of names, separated by commas")
    parser.add_argument("--model", choices=tuple(SETTINGS), default="gpt2")
    parser.add_argument("--ranks", type=int, choices=sorted({one.ranks for one in CONTENDERS}), default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help=f"timed steps; {WARM_UP} more go before them")
    parser.add_argument("--setting", action="append", choices=("small", "medium"), help="may come twice; both if not")
    parser.add_argument("--patience", type=int, default=1, help="how often a disturbed run is tried again")
    parser.add_argument("--json", type=Path, help="file for all samples")
    options = parser.parse_args()
    if WARM_UP + options.steps > STEPS:
        parser.error(f"--steps {options.steps}: at most {STEPS - WARM_UP}")
    return options


def prepare(model: str) -> Path:
    """Prepares the text once, with a model's vocabulary, and returns the prepared directory."""
    words = ["--vocab-size", str(VOCABULARY[model]), *DATA]
    command = [sys.executable, "-m", "meshwright", "prepare", *words, "--cache", str(CACHE), "--json"]
    output = run_limited(command, {}, LIMIT_S, ROOT)
    return Path(json.loads(output)["path"])


def measure(
    chosen: Sequence[Contender], setting: tuple[int, int], data: Path, options: argparse.Namespace
) -> dict[str, list[Sample]]:
    """Runs every contender once a round; each round begins elsewhere in their order."""
    rounds = options.rounds
    samples: dict[str, list[Sample]] = {one.name: [] for one in chosen}
    for number in range(rounds):
        place = number * len(chosen) // max(1, rounds)
        for one in [*chosen[place:], *chosen[:place]]:
            try:
                sample = _least_disturbed(one, setting, data, options)
                samples[one.name].append(dataclasses.replace(sample, round=number))
                _say(one, number, sample)
            except RuntimeError as error:
                print(f"{one.name}: {error}", file=sys.stderr, flush=True)
    return samples


def _say(one: Contender, number: int, sample: Sample) -> None:
    """Tells people how it goes, so that what was measured is known even when the rest is cut off."""
    print(
        f"round {number + 1}: {one.name} {statistics.median(sample.step_s) * 1e3:.0f} ms, {sample.cpu_s:.2f} CPU s, "
        f"{max(sample.peak_bytes) / MIB:.0f} MiB, first step {sample.first_step_s:.1f} s, "
        f"foreign {sample.foreign:.2f} cores",
        file=sys.stderr,
        flush=True,
    )


def _least_disturbed(one: Contender, setting: tuple[int, int], data: Path, options: argparse.Namespace) -> Sample:
    """Runs a contender again while other programs disturb it; of all its runs the least disturbed one counts."""
    tried: list[Sample] = []
    while len(tried) <= options.patience and not (tried and tried[-1].foreign < DISTURBED_CORES):
        wait_until_quiet()
        meter = ForeignLoad()
        sample = run_contender(one, setting, data, options.steps)
        tried.append(dataclasses.replace(sample, foreign=meter.read()))
    return min(tried, key=lambda sample: sample.foreign)


def run_contender(one: Contender, setting: tuple[int, int], data: Path, steps: int) -> Sample:
    """Trains for the warm-up and the timed steps in new processes."""
    rows, sequence = setting
    if not one.script:
        return _run_meshwright(one, rows, sequence, WARM_UP + steps)
    python = str(PEERS if one.peer else sys.executable)
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(one.ranks)]
    command += [str(HERE / one.script), "--tokens", str(data / "train.bin"), "--rows", str(rows)]
    command += ["--sequence", str(sequence), "--steps", str(WARM_UP + steps), "--mode", one.mode]
    command += ["--micro", str(one.micro)]
    if one.model == "llama":
        command += ["--reference", str(write_reference(CACHE, data, rows, sequence))]
    command += ["--started", repr(time.time())]
    environment = {"PYTHONPATH": str(HERE / "scripts"), "OMP_NUM_THREADS": "1", **dict(one.environment)}
    output = run_limited(command, environment, LIMIT_S, ROOT, until="RESULT ")
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    found["step_s"] = found["step_s"][WARM_UP:]
    found["cpu_s"] = statistics.median(found["cpu_s"][WARM_UP:])
    return Sample(**found)


def _run_meshwright(one: Contender, rows: int, sequence: int, steps: int) -> Sample:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        recipe = {
            "devices": one.ranks, "layout": one.mode, "data.cache": CACHE, "data.sequence": sequence,
            "data.vocab-size": VOCABULARY[one.model],
            "train.steps": steps, "train.batch": rows, "train.sample-tokens": 0, "schedule.warmup": 1,
            "evaluation.every": 0, "checkpoint.every": 0, "run": run,
        }  # fmt: skip
        words = [word for key, value in recipe.items() for word in (f"--{key}", str(value))]
        words += [word.replace("--", "--data.") for word in DATA]
        words += GPT2 if one.model == "gpt2" else model_words()
        command = [sys.executable, "-m", "meshwright", "train", *words, "--data.no-mask-documents", "--train.no-prove"]
        started = time.time()
        watch = RankWatch(run, (WARM_UP, steps))
        watch.start()
        try:
            run_limited([*command, "--monitor.no-report", *one.extra], {}, LIMIT_S, ROOT)
        finally:
            cpu_s = watch.end()
        return dataclasses.replace(_read_run(run, started), cpu_s=cpu_s, peak_bytes=list(watch.peak_bytes.values()))


def _read_run(run: Path, started: float) -> Sample:
    """Reads a run directory; what passes between steps (records, hooks) is spread evenly over the steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = {event["kind"]: event for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())}
    begun, saved = events["run_started"]["time"], events["checkpoint_saved"]
    between = max(0.0, saved["time"] - saved["seconds"] - begun - sum(line["step_s"] for line in lines)) / len(lines)
    timed = lines[WARM_UP:]
    parts = {name: statistics.median(line["parts"].get(name, 0.0) for line in timed) for name in timed[0]["parts"]}
    return Sample(
        step_s=[line["step_s"] + between for line in timed],
        first_step_s=begun + lines[0]["step_s"] - started,
        peak_bytes=[],
        # How soon the first snapshot is taken goes by the planned step time, so a short run may have none.
        snapshot_bytes=lines[-1]["memory"].get("snapshots", 0),
        loss=[line["loss"] for line in lines],
        cpu_s=0.0,
        parameter_bytes=lines[-1]["memory"].get("parameters", 0),
        parts=parts | {"between": between},
    )


def unlike(samples: dict[str, list[Sample]]) -> list[str]:
    """Returns a line for each contender whose first losses aren't those of the first one, as they must be."""
    many = {name: found[0].loss[:ALIKE_STEPS] for name, found in samples.items() if found}
    lines = []
    for name, losses in list(many.items())[1:]:
        first, expected = next(iter(many.items()))
        worst = max(abs(one - other) / other for one, other in zip(losses, expected))
        if worst > ALIKE:
            lines.append(f"{name} trains something else than {first}: losses {losses} against {expected}")
    return lines


def table(title: str, setting: tuple[int, int], chosen: Sequence[Contender], samples: dict[str, list[Sample]]) -> str:
    """Formats medians, and ratios of speed (above 1 is faster than the script) and of memory (below 1 is less).

    A peak counts no snapshots: scripts have none. They stand in a column of their own, in MiB.
    """
    rows, sequence = setting
    lines = [
        f"{title}: {rows} rows x {sequence} tokens a step, {chosen[0].ranks} ranks",
        f"{'contender':<26}{'step ms':>9}{'tokens/s':>10}{'of ddp (least-most)':>22}{'of its own script':>22}"
        f"{'CPU s':>8}{'of ddp':>8}{'peak MiB':>10}{'of script':>11}"
        f"{'snapshots':>11}{'first step s':>14}{'foreign cores':>15}",
    ]
    ddp_cpu_s = statistics.median([sample.cpu_s for sample in samples.get("ddp", [])] or [0.0])
    for one in chosen:
        many = samples[one.name]
        if not many:
            lines.append(f"{one.name:<26}{'failed':>9}")
            continue
        step_s = statistics.median(step for sample in many for step in sample.step_s)
        peak, others = peak_bytes(many), samples.get(one.rival, [])
        cpu_s = statistics.median(sample.cpu_s for sample in many)
        first = statistics.median(sample.first_step_s for sample in many)
        snapshots = max(sample.snapshot_bytes for sample in many)
        rival = "" if one.rival == "ddp" else spread(many, others)
        of_script = f"{peak / peak_bytes(others):.2f}" if others and one.rival != one.name else ""
        lines.append(
            f"{one.name:<26}{step_s * 1e3:>9.0f}{rows * sequence / step_s:>10.0f}"
            f"{spread(many, samples.get('ddp', [])):>22}{rival:>22}"
            f"{cpu_s:>8.2f}{ddp_cpu_s / max(cpu_s, 1e-9):>8.2f}{peak / MIB:>10.0f}{of_script:>11}"
            f"{snapshots / MIB:>11.0f}{first:>14.1f}{max(sample.foreign for sample in many):>15.2f}"
        )
    return "\n".join(lines) + "\n"


def peak_bytes(many: Sequence[Sample]) -> float:
    """Returns the most resident memory of any rank, the median over runs."""
    return statistics.median(max(sample.peak_bytes) for sample in many)


def larger(chosen: Sequence[Contender], samples: dict[str, list[Sample]]) -> list[str]:
    """Returns a line for each layout of meshwright's that takes more memory than the script it is measured against."""
    lines = []
    for one in chosen:
        ours, script = samples[one.name], samples.get(one.rival)
        if not one.script and ours and script and peak_bytes(ours) > peak_bytes(script):
            lines.append(
                f"{one.name} takes {peak_bytes(ours) / MIB:.0f} MiB, {one.rival} {peak_bytes(script) / MIB:.0f} MiB"
            )
    return lines


def spread(many: Sequence[Sample], rivals: Sequence[Sample]) -> str:
    """Returns the median over rounds of the ratio of step times, with the least and the most."""
    of_round = {rival.round: statistics.median(rival.step_s) for rival in rivals}
    ratios = [of_round[sample.round] / statistics.median(sample.step_s) for sample in many if sample.round in of_round]
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
