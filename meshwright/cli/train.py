"""``meshwright train``: from text and a model's name to a trained model."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli import train_proof, trials
from meshwright.cli.arguments import answer, read_config, say, take_flag, take_value
from meshwright.cli.hosts import run_on_hosts, show_commands
from meshwright.cli.inputs import (
    CONFIG,
    PLAN,
    Machines,
    ReadModel,
    ledger_here,
    prepared,
    read_model,
    run_config,
    text_config,
)
from meshwright.cli.layouts import check_fallbacks, facts_of, leaner, make_plans, plan_for_less
from meshwright.cli.mirrored_run import fetch
from meshwright.cli.nodes import Nodes, NodeWords, take_nodes
from meshwright.cli.resumption import differences
from meshwright.cli.run_contents import write_contents
from meshwright.errors import ConfigError, RankError
from meshwright.launch.choice import choose_launcher
from meshwright.launch.devices import Devices, found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.preload import prepare_environment
from meshwright.planner.run_history import record
from meshwright.resilience.keeper import await_keeper
from meshwright.resilience.run_lock import FOLDER as OWNER
from meshwright.resilience.run_lock import RunLock
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.hooks import Hook
from meshwright.train.run_config import RunConfig
from meshwright.units import format_bytes, format_count

if TYPE_CHECKING:
    from meshwright.data.tokens import TokenSet
    from meshwright.launch.torchrun import TorchrunLauncher
    from meshwright.train.model_analysis import ModelAnalysis
    from meshwright.train.session import TrainJob

PREEMPTED = 143
"""Exit status of a run that SIGTERM ended, its last state on disk. Source: POSIX shells, 128 + SIGTERM."""


def run(argv: Sequence[str]) -> int:
    """Trains; exit status 0 when the run reached its last step, 1 when it was interrupted, 143 by SIGTERM."""
    words = list(argv)
    as_json = take_flag(words, "--json")
    hostfile, dry = take_value(words, "--hostfile"), take_flag(words, "--dry-run")
    place = take_nodes(words)
    config = read_config(RunConfig, words, "train")
    if hostfile is not None or dry:
        config = _owned(config)
        return show_commands(words, config, hostfile) if dry else run_on_hosts(words, config, str(hostfile))
    result = train(config, nodes=place)
    if as_json and "run" in result:
        answer(json.dumps(result, indent=2))
    if not result or result["finished"]:
        return 0
    return PREEMPTED if result["terminated"] else 1


def _owned(config: RunConfig) -> RunConfig:
    """Names a new run's directory, or takes up an old one's, which must be of the same config."""
    if not config.run:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        name = config.model.name.rstrip("/").replace("/", "-").replace(":", "-").lstrip(".-")
        return dataclasses.replace(config, run=str(Path("runs") / f"{name}-{stamp}"))
    folder = Path(config.run)
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ConfigError(f"run = {folder}: {place} is a file, and a run is a directory; give another --run")
    if (folder / CONFIG).exists():
        differing = differences(run_config(folder), config)
        if differing:
            raise ConfigError(
                f"run directory {folder} belongs to another config: {'; '.join(differing)}; give another --run, or the "
                "settings that it was made with"
            )
    elif folder.exists() and any(path.name != OWNER for path in folder.iterdir()):
        raise ConfigError(f"run directory {folder} holds files but no {CONFIG}; give another --run")
    return config


def train(config: RunConfig, hooks: Sequence[Hook] = (), nodes: NodeWords | None = None) -> dict[str, Any]:
    """Trains as the command does; for use from Python, in a process that has run no tensor operation yet.

    Args:
        config: the run; an empty ``run`` makes a new directory under ``runs/``.
        hooks: called after each step on every rank; see `meshwright.train.hooks`.
        nodes: this node's place, when the same is done on others.

    Returns:
        How it ended: ``finished``, step, loss, validation loss, bits per byte, sample, run, report. Empty on the ranks
        of torchrun other than the first; ``finished`` and ``terminated`` on nodes that don't lead at the end.
    """
    config.check_all()
    config.recovery.check_nodes(nodes.nodes if nodes is not None else 1)
    prepare_environment()
    if nodes is not None:
        place, config = nodes.place(config), _owned(config)
        with RunLock(Path(config.run), config.launch.owner_s, nodes.node):
            return _train(config, place, tuple(hooks))
    config, launcher = _owned(config), choose_launcher(config.devices, config=config.launch)
    if not isinstance(launcher, ForkLauncher) and launcher.context.rank:
        return _train(config, launcher, tuple(hooks))
    with RunLock(Path(config.run), config.launch.owner_s):
        return _train(config, launcher, tuple(hooks))


def _train(
    config: RunConfig, launcher: ForkLauncher | TorchrunLauncher | Nodes, hooks: tuple[Hook, ...]
) -> dict[str, Any]:
    from meshwright.cli.trained_model import check_prompt
    from meshwright.launch.torchrun import TorchrunLauncher
    from meshwright.models.measure import measure_shape
    from meshwright.models.probe import check_documents
    from meshwright.train.session import TrainJob

    context = launcher.context if isinstance(launcher, TorchrunLauncher) else None
    first = launcher.node == 0 if isinstance(launcher, Nodes) else context is None or context.rank == 0
    if config.layout != "auto":
        Layout.parse(config.layout).check_ranks(launcher.ranks)
    if config.model.kind == "type":
        read_model(config, None, None)  # a wrong name or size is known before text is prepared
    token_set = prepared(text_config(config.model, config.data), quiet=not first)
    if config.train.sample and config.train.sample_tokens:
        check_prompt(token_set.tokenizer(), config.train.sample)
    model = read_model(config, token_set.vocab_size, config.data.sequence)
    if config.data.mask_documents and len(token_set.train.ends) > 1:
        check_documents(model.built)
    if config.trials and context is not None:
        raise ConfigError("trials start ranks of their own, which under torchrun are there already; drop trials")
    run_dir = Path(config.run)
    tried = config.trials if not (run_dir / PLAN).exists() else 0
    offers = make_plans(config, model, machines := _machines(config, launcher), max(1, tried))
    plan, facts = offers[0]
    _check_ahead(config, model, plan.layout, machines.devices, token_set)
    header = _header(config, model, plan, token_set)
    job = TrainJob(
        config=config,
        plan=plan,
        model=model.built,
        analysis=facts,
        run_dir=run_dir,
        data_dir=token_set.path,
        fingerprint=model.fingerprint,
        header=header,
        hooks=hooks,
        flops_per_token=float(measure_shape(model.built).train_flops_per_token(config.data.sequence)),
    )
    if tried:
        at, rows = trials.fastest(job, offers)
        plan, facts = offers[at]
        plan = dataclasses.replace(plan, reason=f"fastest of {len(rows)} that were tried; {plan.reason}")
        header = _header(config, model, plan, token_set)
        job = dataclasses.replace(job, plan=plan, analysis=facts, header=header)
        trials.written(run_dir, rows)
    _begin(job, first, isinstance(launcher, Nodes), token_set)
    if first and config.train.prove:
        train_proof.before(job, token_set, forks=context is None, nodes=isinstance(launcher, Nodes))
    if isinstance(launcher, Nodes):
        result, first = _nodes_result(config, model, job, launcher, machines)
    else:
        result = _ranks_result(config, model, job, launcher, machines)
    if not first:
        return {name: result[name] for name in ("finished", "terminated")} if isinstance(launcher, Nodes) else {}
    return _conclude(config, run_dir, token_set, plan, result, machines)


def _begin(job: TrainJob, first: bool, nodes: bool, token_set: TokenSet) -> None:
    """Writes what the run directory holds from the start, and brings its checkpoint back from elsewhere.

    Args:
        job: the run.
        first: whether this process writes config and plan; another waits for them.
        nodes: several nodes, whose directories may be their own.
        token_set: the prepared text.
    """
    if first:
        await_keeper(job.run_dir, job.config.checkpoint.wait_s, say)
        _write_run(job.run_dir, job.config, job.plan)
        fetch(job.config, job.run_dir)
    else:
        _wait_for(job.run_dir / PLAN, job.config.launch.group_s)
    if first or nodes:
        write_contents(job.run_dir, job.model, token_set)


def _machines(config: RunConfig, launcher: ForkLauncher | TorchrunLauncher | Nodes) -> Machines:
    """Returns what the ranks stand on; torchrun and the words of nodes say on how many nodes."""
    nodes = 1 if isinstance(launcher, ForkLauncher) else launcher.nodes
    return Machines(devices=found_devices(None), ranks=launcher.ranks, nodes=nodes, network=config.launch.network)


def _ranks_result(
    config: RunConfig,
    model: ReadModel,
    job: TrainJob,
    launcher: ForkLauncher | TorchrunLauncher,
    machines: Machines,
) -> dict[str, Any]:
    """Runs the job; ranks that this process forks are started again when they fail."""
    from meshwright.resilience.supervisor import Supervisor
    from meshwright.train.session import run_rank
    from meshwright.train.shortage import OUT_OF_MEMORY

    if not isinstance(launcher, ForkLauncher) or not config.recovery.enabled:
        launcher.label = job.plan.layout.place
        result = launcher.run(run_rank, job)[0]
        return result | {"terminated": isinstance(launcher, ForkLauncher) and launcher.terminated}
    devices = launcher.devices

    def plans(ranks: int) -> tuple[Plan, ModelAnalysis]:
        return plan_for_less(config, model, machines.fewer(ranks), job.plan.layout)

    def announce(changed: TrainJob) -> TrainJob:
        try:
            _write_run(job.run_dir, config, changed.plan)
        except OSError as error:
            # The run goes on without: the same command plans it again.
            say(f"{job.run_dir / PLAN} is still that of the ranks before: {error.strerror}")
        return dataclasses.replace(changed, header=job.header | _layout_rows(changed.plan, devices.kind))

    supervisor = Supervisor(job, devices, plans, announce)
    try:
        result = supervisor.run()
    except RankError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        raise RankError(f"{error}\n{leaner(config, model, machines, job.plan)}") from error
    return result | {"terminated": supervisor.terminated}


def _nodes_result(
    config: RunConfig, model: ReadModel, job: TrainJob, nodes: Nodes, machines: Machines
) -> tuple[dict[str, Any], bool]:
    """Runs this node's share of the job; returns how it ended, and whether this node led then."""
    from meshwright.resilience.agent import Agent, Seat
    from meshwright.transport.key import run_key

    def plans(ranks: int) -> tuple[Plan, ModelAnalysis]:
        return plan_for_less(config, model, machines.fewer(ranks), job.plan.layout)

    def remake(plan: Plan) -> TrainJob:
        facts, rows = facts_of(config, model, plan.layout, nodes.devices), _layout_rows(plan, nodes.devices.kind)
        return dataclasses.replace(job, plan=plan, analysis=facts, header=job.header | rows)

    key = run_key(job.run_dir, nodes.key_file)
    seat = Seat(node=nodes.node, nodes=nodes.nodes, address=nodes.address, port=nodes.port, key=key)
    agent = Agent(job, nodes.devices, seat, plans, remake, lambda plan: _write_run(job.run_dir, config, plan))
    result = agent.run()
    return result | {"terminated": agent.terminated}, agent.leads


def _check_ahead(config: RunConfig, model: ReadModel, layout: Layout, devices: Devices, token_set: TokenSet) -> None:
    """Refuses before a rank starts what would be refused later: too little text, a layout for fewer ranks."""
    from meshwright.checkpoint.contract import find_backend
    from meshwright.checkpoint.mirror import check_mirror
    from meshwright.data.loader import Loader

    check_fallbacks(config, model, layout, devices)
    find_backend(config.checkpoint.backend)
    check_mirror(config.checkpoint.mirror)
    rows, sequence = config.train.batch, config.data.sequence
    Loader(token_set.train, rows=rows, sequence=sequence, seed=config.train.seed, row_range=layout.span(0, rows))


def _write_run(run_dir: Path, config: RunConfig, plan: Plan) -> None:
    import tomli_w

    run_dir.mkdir(parents=True, exist_ok=True)
    for name, text in ((CONFIG, tomli_w.dumps(config.to_dict())), (PLAN, plan.dumps())):
        # Renamed into place: a kill in between must not leave a run that no longer knows its config.
        beside = run_dir / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(run_dir / name)


def _wait_for(path: Path, limit_s: float) -> None:
    """Waits until rank 0 has written a file."""
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise ConfigError(f"{path} didn't appear within {limit_s:g} s; the nodes must share the run directory")
        time.sleep(0.05)


def _header(config: RunConfig, model: ReadModel, plan: Plan, token_set: TokenSet) -> dict[str, str]:
    return {
        "model": f"{config.model.name}, {format_count(model.sizes.total)} parameters, "
        f"{len(model.built.structure.layers)} layers",
        "data": f"{format_count(len(token_set.train.tokens))} tokens, vocabulary {token_set.vocab_size}",
        **_layout_rows(plan, found_devices(None).kind),
        "run": config.run,
    }


def _layout_rows(plan: Plan, kind: str) -> dict[str, str]:
    """Returns the rows of the header that follow from the plan."""
    memory = ", ".join(f"{part} {format_bytes(size)}" for part, size in plan.prediction.memory.items())
    return {
        "devices": f"{plan.ranks} x {kind}",
        "layout": f"{plan.layout} ({plan.reason})",
        "state": f"{memory} a rank",
    }


def _conclude(
    config: RunConfig, run_dir: Path, token_set: TokenSet, plan: Plan, result: dict[str, Any], machines: Machines
) -> dict[str, Any]:
    """Adds sample and baselines to a finished run, rewrites its report, and shows how it ended."""
    from meshwright.cli.result import show_result
    from meshwright.data.tokens import compression_baselines
    from meshwright.events import Event
    from meshwright.monitor.report import write_report
    from meshwright.monitor.sinks import JsonlSink

    summary: dict[str, Any] = dict(result) | {"run": str(run_dir)}
    sink = JsonlSink(run_dir, metrics=False)
    try:
        if result["finished"]:
            if config.train.sample_tokens:
                prompt, text = _sample(config, run_dir, token_set)
                summary |= {"prompt": prompt, "sample": text}
                told = {"step": result["step"], "prompt": prompt, "text": text}
                sink.event(Event(kind="sampled", rank=-1, data=told))
            if token_set.validation.text_bytes:
                summary |= {f"{name}_bits_per_byte": bits for name, bits in compression_baselines(token_set).items()}
            numbers = {key: value for key, value in summary.items() if isinstance(value, (int, float))}
            sink.event(Event(kind="run_finished", rank=-1, data=numbers))
    finally:
        sink.close()
    if config.monitor.report:
        summary["report"] = str(write_report(run_dir, config.monitor.drift_bound))
    summary["state"], summary["time"] = _state(run_dir), _time(run_dir)
    if result["finished"] and summary["time"]:
        _remember(plan, summary["time"], machines.fewer(plan.ranks))
    show_result(summary)
    return summary


def _state(run_dir: Path) -> dict[str, dict[str, int]]:
    """Returns bytes of model state of rank 0 by part, planned and measured, and the ZeRO paper's total."""
    from meshwright.monitor.rundir import read_run

    read = read_run(run_dir)
    planned = read.plan.get("prediction", {})
    # A run may have had other layouts before this one.
    rows = (step.get("memory", {}) for step in reversed(read.steps) if step.get("layout") == read.layout)
    measured: Mapping[str, int] = next((row for row in rows if "parameters" in row), {})
    parts = {
        part: {"planned": int(size), "measured": int(measured[part])}
        for part, size in planned.get("memory", {}).items()
        if part in measured
    }
    if not parts:
        return {}
    total = {key: sum(row[key] for row in parts.values()) for key in ("planned", "measured")}
    return parts | {"total": total | {"zero_paper": int(planned["formula"]["zero_paper_bytes"])}}


def _time(run_dir: Path) -> dict[str, float]:
    """Returns the median seconds of a step, planned and measured; empty where one of them isn't known."""
    from meshwright.monitor.drift import measure
    from meshwright.monitor.rundir import read_run

    read = read_run(run_dir)
    planned = (read.plan.get("prediction") or {}).get("step_s")
    measured = measure([step for step in read.steps if step.get("layout") == read.layout])["step_s"]
    return {"planned": planned, "measured": measured} if planned and measured else {}


def _remember(plan: Plan, time_s: Mapping[str, float], machines: Machines) -> None:
    """Adds the run to what this machine has taught; a cache that can't be written is no reason to fail a run."""
    path, machine = ledger_here(machines)
    row = {"layout": str(plan.layout), "priced_s": time_s["planned"] / plan.prediction.learned}
    with contextlib.suppress(OSError):
        record(path, machine, row | {"measured_s": time_s["measured"]})


def _sample(config: RunConfig, run_dir: Path, token_set: TokenSet) -> tuple[str, str]:
    from meshwright.cli.trained_model import open_run

    trained = open_run(run_dir, trust=True)  # its config is what this command was given
    prompt = config.train.sample or token_set.held_out_text(256).decode("utf-8", errors="ignore")[:64]
    return prompt, trained.complete(prompt, max_tokens=config.train.sample_tokens)
