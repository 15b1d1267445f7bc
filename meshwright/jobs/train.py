"""The job ``train``: from text and a model's name to a trained model, on one node or on this node of several."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.config import check_config
from meshwright.data.tokens import TokenSet
from meshwright.errors import ConfigError, RankError
from meshwright.jobs.attention_checks import attention_header_row, choose_attention
from meshwright.jobs.conclusion import conclude, follower_result
from meshwright.jobs.early_model import read_early
from meshwright.jobs.epochs import with_counted_steps
from meshwright.jobs.health import DrainPolicy, sampling_health
from meshwright.jobs.layouts import (
    analyse_layout,
    leaner_plan,
    make_plans,
    name_leaner_layout,
    plan_for_fewer_ranks,
    replan_layout,
)
from meshwright.jobs.machines import Machines
from meshwright.jobs.mirrored_run import fetch_checkpoint
from meshwright.jobs.model_reading import ReadModel, read_model
from meshwright.jobs.nodes import NodeOptions, ResolvedNode
from meshwright.jobs.prepare import prepare, text_config
from meshwright.jobs.product_checks import check_products, float8_header_row
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.run_contents import write_contents
from meshwright.jobs.run_directory import (
    PLAN,
    claim_directory,
    planned_outer,
    reporting_full_disk,
    wait_for,
    write_run,
)
from meshwright.jobs.start_checks import check_before_start, check_checkpoints, check_targets, check_torchrun
from meshwright.jobs.train_proof import prove_before
from meshwright.jobs.train_result import TrainResult
from meshwright.jobs.trained_model import check_prompt
from meshwright.jobs.trials import Trial, fastest, run_trials, write_trials
from meshwright.jobs.watch import serving_page
from meshwright.launch.choice import choose_launcher
from meshwright.launch.devices import Devices, found_devices
from meshwright.launch.fork import ForkLauncher
from meshwright.launch.torchrun import TorchrunLauncher
from meshwright.models.analysis.document_masks import check_documents
from meshwright.models.build import BuiltModel
from meshwright.models.measure import measure_shape
from meshwright.monitor.trackers.registry import check_trackers
from meshwright.parallel.head_stages import whole_logits_reason
from meshwright.resilience.agent import Agent, NodeEndpoint
from meshwright.resilience.keeper import await_keeper
from meshwright.resilience.planning import Planning, Replan, ReplanRequest
from meshwright.resilience.run_lock import RunLock
from meshwright.resilience.supervisor import Supervisor
from meshwright.spec.axis import Mechanics
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.hooks import Hook
from meshwright.train.model_analysis import ModelAnalysis
from meshwright.train.outcome import TrainOutcome
from meshwright.train.page_requests import PageRequests
from meshwright.train.run_config import RunConfig
from meshwright.train.session import TrainJob, run_rank
from meshwright.train.shortage import OUT_OF_MEMORY
from meshwright.train.stage_times import check_replan
from meshwright.transport.key import run_key
from meshwright.units import format_bytes, format_count

_WHOLE = "whole"
"""Title of the header's row of matrices that no rank splits."""

Starter = ForkLauncher | TorchrunLauncher | ResolvedNode
"""The launcher of the ranks, or this node's place among several."""


def train(
    config: RunConfig, *, hooks: Sequence[Hook] = (), nodes: NodeOptions | None = None, say: Say = to_stderr
) -> TrainResult | None:
    """Trains a model; the ranks are forked from this process, which must not have run a backward pass.

    A run directory that holds a run of the same config is taken up where it stopped.

    Args:
        config: the run; an empty ``run`` makes a new directory under ``runs/``.
        hooks: called after each step on every rank; see `meshwright.train.hooks`.
        nodes: this node's place, when the same is done on others.
        say: takes a line of progress.

    Returns:
        How the run ended; None on the ranks of torchrun other than the first.

    Raises:
        ConfigError, PlanError, ClusterError: before a rank starts, for what can't be.
        RankError: when ranks failed more often than recovery allows.
    """
    check_config(config, RunConfig, "config")
    config.check_all()
    check_trackers(config.monitor.trackers)
    config.recovery.check_nodes(nodes.nodes if nodes is not None else 1)
    if nodes is not None:
        node_place, config = nodes.resolve(config), claim_directory(config)
        run_dir = Path(config.run)
        with reporting_full_disk(run_dir), RunLock(run_dir, config.launch.owner_s, nodes.node):
            return _train(config, node_place, tuple(hooks), say)
    config, launcher = claim_directory(config), choose_launcher(config.devices, config=config.launch)
    # Under torchrun rank 0 holds the lock for all ranks.
    if not isinstance(launcher, ForkLauncher) and launcher.context.rank:
        return _train(config, launcher, tuple(hooks), say)
    # One command at a time owns a run directory.
    with reporting_full_disk(Path(config.run)), RunLock(Path(config.run), config.launch.owner_s):
        return _train(config, launcher, tuple(hooks), say)


def trials(config: RunConfig, count: int = 3, *, say: Say = to_stderr) -> list[Trial]:
    """Runs the planner's best layouts for ten steps each, on this machine, and returns their times in the plan's order.

    Args:
        config: the run, whose ``layout`` is ``auto``; nothing is written into its directory.
        count: how many layouts at most.
        say: takes a line of progress.

    Raises:
        ConfigError, PlanError: before a rank starts, for what can't be.
    """
    check_config(config, RunConfig, "config")
    if count < 1 or config.layout != "auto":
        raise ConfigError(f"trials: count = {count}, layout = {config.layout}: give at least 1, and layout = auto")
    config.check_all()
    launcher = choose_launcher(config.devices, config=config.launch)
    if not isinstance(launcher, ForkLauncher):
        raise ConfigError("trials start ranks of their own, which under torchrun are there already; call them without")
    config, token_set, model = _text_and_model(config, say)
    offers = make_plans(config, model, _find_machines(config, launcher), count, say)
    with tempfile.TemporaryDirectory() as folder:
        job = _make_job(dataclasses.replace(config, run=folder), model, token_set, offers[0], ())
        return run_trials(job, offers, say)


def _text_and_model(config: RunConfig, say: Say | None) -> tuple[RunConfig, TokenSet, ReadModel]:
    """Prepares the text, counts the steps of epochs and builds the model for the vocabulary.

    Raises:
        ConfigError, DataError: for text, a prompt or masks that they don't support.
    """
    text = text_config(config.model, config.data)
    early_model = read_early(config, text)
    token_set = prepare(text, say=say)
    check_targets(config, token_set, say)
    config = with_counted_steps(config, token_set, say)
    if config.train.sample and config.train.sample_tokens:
        check_prompt(token_set.tokenizer(), config.train.sample)
    vocab, sequence = token_set.vocab_size, config.data.sequence
    model = early_model if early_model and vocab == text.vocab_size else read_model(config, vocab, sequence)
    if config.data.separates_documents and len(token_set.train.ends) > 1:
        check_documents(model.built)
    return config, token_set, model


def _make_job(
    config: RunConfig,
    model: ReadModel,
    token_set: TokenSet,
    offer: tuple[Plan, ModelAnalysis],
    hooks: tuple[Hook, ...],
) -> TrainJob:
    """Returns the job that every rank receives under a plan."""
    plan, analysis = offer
    return TrainJob(
        config=config,
        plan=plan,
        model=model.built,
        analysis=analysis,
        run_dir=Path(config.run),
        data_dir=token_set.path,
        fingerprint=model.fingerprint,
        header=_make_header(config, model, offer, token_set),
        hooks=hooks,
        flops_per_token=float(measure_shape(model.built).train_flops_per_token(config.data.sequence)),
    )


def _train(config: RunConfig, launcher: Starter, hooks: tuple[Hook, ...], say: Say) -> TrainResult | None:
    context = launcher.context if isinstance(launcher, TorchrunLauncher) else None
    leads = launcher.node == 0 if isinstance(launcher, ResolvedNode) else context is None or context.rank == 0
    if context is not None:
        check_torchrun(config, say if leads else None)
    # A layout for another number of ranks is refused before text is prepared.
    if config.layout != "auto":
        Layout.parse(config.layout).check_ranks(launcher.ranks)
    config, token_set, model = _text_and_model(config, say if leads else None)
    run_dir = Path(config.run)
    trial_count = config.trials if not (run_dir / PLAN).exists() else 0
    machines = _find_machines(config, launcher)
    offers = make_plans(config.joining(planned_outer(run_dir)), model, machines, max(1, trial_count), say)
    model = choose_attention(model, *offers[0], config.data, token_set, machines.devices, say if leads else None)
    check_products(offers[0][0].layout, machines.devices)
    check_before_start(config, model, offers[0][0], machines, token_set)
    watched = config.recovery.enabled and context is None
    check_replan(config, offers[0][0].layout, watched, machines.devices.kind)
    job = _make_job(config, model, token_set, offers[0], hooks)
    if trial_count:
        trial_results = run_trials(job, offers, say)
        plan, analysis = offers[fastest(trial_results)]
        plan = dataclasses.replace(plan, reason=f"fastest of {len(trial_results)} that were tried; {plan.reason}")
        job = _make_job(config, model, token_set, (plan, analysis), hooks)
        write_trials(run_dir, trial_results)
    # Config and plan are on disk before the proof, so the other nodes go on meanwhile.
    _prepare_run_directory(job, leads, isinstance(launcher, ResolvedNode), token_set, say)
    requests = PageRequests() if leads and config.monitor.port is not None else None
    job = dataclasses.replace(job, page_requests=requests)
    page_config = config.monitor if leads else dataclasses.replace(config.monitor, port=None)
    node = launcher.node if isinstance(launcher, ResolvedNode) else 0
    drains = config.recovery.on_device_error == "drain"
    policy = DrainPolicy(node, has_gpus=machines.devices.kind == "cuda") if drains else None
    sampling = sampling_health(config.monitor.health_s, run_dir, node, policy)
    with serving_page(page_config, run_dir, requests, say), sampling:
        if leads and config.train.prove:
            prove_before(job, token_set, forks=context is None, nodes=isinstance(launcher, ResolvedNode), say=say)
        if isinstance(launcher, ResolvedNode):
            outcome, leads = _run_node(config, model, job, launcher, machines, say)
        else:
            outcome = _run_ranks(config, model, job, launcher, machines, say)
    if not leads:
        return follower_result(outcome, run_dir) if isinstance(launcher, ResolvedNode) else None
    return conclude(config, run_dir, token_set, job.plan, outcome, machines)


def _prepare_run_directory(job: TrainJob, leads: bool, several_nodes: bool, token_set: TokenSet, say: Say) -> None:
    """Writes config, plan and contents into the run directory, and fetches its checkpoint from the mirror.

    Args:
        job: the run.
        leads: whether this process writes config and plan; another waits for them.
        several_nodes: several nodes, whose directories may be their own.
        token_set: the prepared text.
        say: takes a line of progress.
    """
    if leads:
        await_keeper(job.run_dir, job.config.checkpoint.wait_s, say)
        # A mirror may have what is damaged here; it is asked once the run directory stands.
        if not job.config.checkpoint.mirror:
            check_checkpoints(job.config, job.plan.layout, several_nodes, token_set)
        write_run(job.run_dir, job.config, job.plan)
        if fetch_checkpoint(job.config, job.run_dir, say):
            check_checkpoints(job.config, job.plan.layout, several_nodes, token_set)
    else:
        wait_for(job.run_dir / PLAN, job.config.launch.group_s)
    if leads or several_nodes:
        write_contents(job.run_dir, job.model, token_set)


def _find_machines(config: RunConfig, launcher: Starter) -> Machines:
    """Returns the machines of the ranks; torchrun and ``--nodes`` give the number of nodes."""
    nodes = 1 if isinstance(launcher, ForkLauncher) else launcher.nodes
    return Machines(devices=found_devices(None), ranks=launcher.ranks, nodes=nodes, network=config.launch.network)


def _run_ranks(
    config: RunConfig,
    model: ReadModel,
    job: TrainJob,
    launcher: ForkLauncher | TorchrunLauncher,
    machines: Machines,
    say: Say,
) -> dict[str, object]:
    """Runs the job and returns its outcome; with recovery, failed ranks of this node are started again."""
    if not isinstance(launcher, ForkLauncher) or not config.recovery.enabled:
        launcher.label = job.plan.layout.coordinates
        outcome: TrainOutcome = launcher.run(run_rank, job)[0]
        return outcome.to_json() | {"terminated": isinstance(launcher, ForkLauncher) and launcher.terminated}
    supervisor = Supervisor(job, launcher.devices, _make_planning(config, model, job, launcher.devices, machines, say))
    try:
        outcome = supervisor.run()
    except RankError as error:
        if OUT_OF_MEMORY not in str(error):
            raise
        # An out-of-memory error ends with the nearest layout that needs less.
        raise RankError(f"{error}\n{name_leaner_layout(config, model, machines, job.plan)}") from error
    return outcome.to_json() | {"terminated": supervisor.terminated}


def _run_node(
    config: RunConfig, model: ReadModel, job: TrainJob, nodes: ResolvedNode, machines: Machines, say: Say
) -> tuple[dict[str, Any], bool]:
    """Runs this node's ranks; returns the outcome, and whether this node was the leader at the end."""
    key = run_key(job.run_dir, nodes.key_file)
    endpoint = NodeEndpoint(node=nodes.node, nodes=nodes.nodes, address=nodes.address, port=nodes.port, key=key)
    agent = Agent(job, nodes.devices, endpoint, _make_planning(config, model, job, nodes.devices, machines, say))
    outcome = agent.run()
    return outcome.to_json() | {"terminated": agent.terminated}, agent.leads


def _make_planning(
    config: RunConfig, model: ReadModel, job: TrainJob, devices: Devices, machines: Machines, say: Say
) -> Planning:
    """Returns how a run gets plans and jobs for other numbers of ranks."""
    planned_config = config.joining(job.plan.outer)

    def plan_for_ranks(ranks: int) -> tuple[Plan, ModelAnalysis]:
        return plan_for_fewer_ranks(planned_config, model, machines.for_ranks(ranks), job.plan.layout, say)

    def make_job(plan: Plan, analysis: ModelAnalysis | None) -> TrainJob:
        if analysis is None:
            analysis = analyse_layout(config, model, plan.layout, devices)
        kept_rows = {title: text for title, text in job.header.items() if title != _WHOLE}
        header = kept_rows | _layout_header_rows(model.built, plan, analysis, devices.kind)
        return dataclasses.replace(job, plan=plan, analysis=analysis, header=header)

    def announce_plan(plan: Plan) -> None:
        try:
            write_run(job.run_dir, config, plan)
        except OSError as error:
            # The run goes on without: the same command plans it again.
            say(f"{job.run_dir / PLAN} is still that of the ranks before: {error.strerror}")

    def replan(request: ReplanRequest) -> Replan | None:
        return replan_layout(planned_config, model, machines, request)

    def next_leaner_plan(plan: Plan, reason: str) -> tuple[Plan, ModelAnalysis] | None:
        offer = leaner_plan(planned_config, model, machines, plan)
        if offer is not None:
            say(f"{reason}: the next plan that needs less is {offer[0].layout}, which is started")
        return offer

    return Planning(
        plan_for_ranks=plan_for_ranks,
        make_job=make_job,
        announce_plan=announce_plan,
        leaner_plan=next_leaner_plan,
        replan=replan,
    )


def _make_header(
    config: RunConfig, model: ReadModel, offer: tuple[Plan, ModelAnalysis], token_set: TokenSet
) -> dict[str, str]:
    return {
        "model": f"{config.model.name}, {format_count(model.sizes.total)} parameters, "
        f"{len(model.built.structure.layers)} layers",
        "data": f"{format_count(len(token_set.train.tokens))} tokens, vocabulary {token_set.vocab_size}",
        **_layout_header_rows(model.built, *offer, found_devices(None).kind),
        "run": config.run,
    }


def _layout_header_rows(built: BuiltModel, plan: Plan, analysis: ModelAnalysis, kind: str) -> dict[str, str]:
    """Returns the rows of the header that follow from the plan."""
    memory = ", ".join(f"{category} {format_bytes(size)}" for category, size in plan.prediction.memory.items())
    return {
        "devices": f"{plan.ranks} x {kind}",
        "layout": plan.describe(),
        "state": f"{memory} a rank",
        **unsplit_header_row(plan.layout, analysis),
        **attention_header_row(built, analysis, kind),
        **float8_header_row(built, plan.layout, analysis, kind),
        **logits_header_row(plan.layout, analysis),
    }


def logits_header_row(layout: Layout, analysis: ModelAnalysis) -> dict[str, str]:
    """Returns the row that says why the logits of a whole micro-batch exist at once; none where they needn't."""
    if not layout.loss_chunk.on or analysis.trial is None:
        return {}
    reason = analysis.trial.head.refused or whole_logits_reason(layout)
    return {"logits": f"of a whole micro-batch at once, since {reason}"} if reason else {}


def unsplit_header_row(layout: Layout, analysis: ModelAnalysis) -> dict[str, str]:
    """Returns the row that names matrices which the layout leaves whole on every rank; none without any."""
    degree = layout.degree(Mechanics.MATRICES)
    if degree == 1 or analysis.table is None:
        return {}
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in analysis.table.reasons_whole(degree).items():
        names_by_reason.setdefault(reason, []).append(name)
    if not names_by_reason:
        return {}
    (reason, names), *others = names_by_reason.items()
    more = f"; {len(others)} more reasons for others" if others else ""
    return {_WHOLE: f"{', '.join(names)} on every rank of {layout.format_degree(Mechanics.MATRICES)}: {reason}{more}"}
