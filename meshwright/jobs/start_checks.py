"""What a run can't do, refused before its ranks start: by its text, its layout, its ranks and its checkpoints."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.contract import find_backend
from meshwright.checkpoint.files import find_damage
from meshwright.checkpoint.folder import Folder
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.mirror import check_mirror
from meshwright.checkpoint.outcome import CURE
from meshwright.data.loader import Loader
from meshwright.data.packing import PackedRows
from meshwright.data.tokens import TokenSet
from meshwright.errors import CheckpointError, ConfigError, DataError
from meshwright.jobs.layouts import check_fallback_layouts
from meshwright.jobs.machines import Machines
from meshwright.jobs.model_reading import ReadModel
from meshwright.jobs.progress import Say
from meshwright.jobs.run_contents import changed_parts
from meshwright.jobs.site_probe import probe_server
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan
from meshwright.train.faults import check_faults
from meshwright.train.fragments import check_fragments
from meshwright.train.island_checks import check_islands
from meshwright.train.run_config import RunConfig
from meshwright.train.state import WEIGHTS

READ_BYTES = 1 << 29
"""Largest checkpoint whose contents are read before ranks start: half a second; larger ones the ranks read together."""


def check_before_start(
    config: RunConfig, model: ReadModel, plan: Plan, machines: Machines, token_set: TokenSet
) -> None:
    """Refuses what a rank would refuse later: too little text, a layout for fewer ranks, a fault of none.

    Args:
        config: of the run.
        model: on the meta device.
        plan: under which it is to begin.
        machines: on which.
        token_set: the prepared text.

    Raises:
        ConfigError, PlanError: with the rule and the nearest that works.
    """
    config, layout = config.joining(plan.outer), plan.layout
    check_islands(config, layout, resumes=(Path(config.run) / "plan.json").exists())
    if config.outer.meet:
        probe_server(config, model, layout)
    if layout.islands > 1:
        trained = (name for name, weight in model.built.module.named_parameters() if weight.requires_grad)
        check_fragments(trained, config.outer.fragment_count)
    check_fallback_layouts(config, model, layout, machines.devices)
    config.recovery.check_ranks(machines.ranks)
    check_faults(config.recovery.faults, machines.ranks, machines.nodes)
    find_backend(config.checkpoint.backend)
    check_mirror(config.checkpoint.mirror)
    if config.launch.wire == "shm" and machines.devices.kind != "cpu":
        raise ConfigError(
            "launch.wire = shm is between CPU ranks, and these are on GPUs, whose collectives NCCL sends; leave it out"
        )
    rows, data = config.train.batch, config.data
    Loader(
        token_set.train,
        rows=rows,
        sequence=data.sequence,
        seed=config.train.seed,
        row_range=layout.span(0, rows),
        packing=data.resolved_packing,
    )


def check_targets(config: RunConfig, token_set: TokenSet, say: Say | None) -> None:
    """Refuses text of which nothing can be learned or measured, and says what packed rows hold and leave out.

    Args:
        config: of the run.
        token_set: the prepared text.
        say: takes a line; None for none.

    Raises:
        DataError: when a split has no target in its rows.
    """
    data = config.data
    for split in (token_set.train, token_set.validation):
        if len(split.tokens) < 2:
            continue
        if not split.targets():
            raise DataError(
                f"the {split.name} split has no answer to learn or to measure; give more conversations, or "
                "data.validation_share = 0 where it is the held-out part"
            )
        if data.resolved_packing == "stream":
            continue
        packed = PackedRows(split, data.sequence, single=data.resolved_packing == "single")
        if say is not None and split is token_set.train:
            say(_packed_line(packed, config))


def _packed_line(packed: PackedRows, config: RunConfig) -> str:
    """Returns what packed rows hold, how many steps an epoch has, and what is left out."""
    left_out, steps = packed.left_out, -(-packed.count // (config.train.batch * config.outer.sites))
    line = (
        f"rows: {packed.count} of {config.data.sequence} tokens, {packed.filled:.0%} filled with "
        f"{'one document each' if config.data.packing == 'single' else 'whole documents'}; an "
        f"epoch is {steps} steps"
    )
    if left_out.without:
        line += f"; {left_out.without} documents have nothing to learn and are left out"
    if not left_out.targets:
        return line
    return (
        f"{line}; {left_out.cut} documents are longer and cut, {left_out.unlearned} have no target in a row: "
        f"{left_out.targets / left_out.all_targets:.1%} of targets are left out, and a longer data.sequence takes them "
        "in"
    )


def check_torchrun(config: RunConfig, say: Say | None) -> None:
    """Refuses what takes a process beside the ranks, which torchrun doesn't start, and names what stays unused.

    Args:
        config: of the run.
        say: takes the line about settings without effect; None on ranks that say nothing.

    Raises:
        ConfigError: with the setting, and what works.
    """
    if config.monitor.port is not None:
        raise ConfigError(
            f"monitor.port = {config.monitor.port}: torchrun starts ranks alone, and a page needs a process beside "
            f"them; drop it, and type meshwright watch RUN --port {config.monitor.port} beside the run"
        )
    if config.monitor.health_s:
        raise ConfigError(
            f"monitor.health_s = {config.monitor.health_s:g}: torchrun starts ranks alone, and samples need a process "
            "beside them; drop it, or start the run without torchrun"
        )
    if config.trials:
        raise ConfigError("trials start ranks of their own, which under torchrun are there already; drop trials")
    if config.recovery.on_sick == "rewind":
        raise ConfigError(
            "recovery.on_sick = rewind ends the ranks and starts others from an older state, and torchrun starts ranks "
            "alone; write recovery.on_sick = skip or stop, or start the run without torchrun"
        )
    if say is not None and (paths := config.supervised_settings()):
        settings = ", ".join(f"{path} = {config.value(path)}" for path in paths)
        say(
            f"without effect, since torchrun starts ranks alone and nobody starts them again from memory: {settings}; "
            "meshwright's own launcher takes them (--devices, --hostfile, --nodes)"
        )


def check_checkpoints(config: RunConfig, layout: Layout, several_nodes: bool, token_set: TokenSet) -> None:
    """Refuses checkpoints from which ranks of a layout can't resume, by manifests, sizes and, of small ones, checksums.

    Larger ones are read by the ranks, and so are those that may come from elsewhere: a mirror, or other nodes' memory.

    Args:
        config: of the run, whose directory has checkpoints, or none.
        layout: under which it is to go on.
        several_nodes: other nodes may have the state in memory.
        token_set: the prepared text.

    Raises:
        CheckpointError: on one node when there are some and none is whole.
        ConfigError: when the newest whole one has weights of another type than the layout's, or is of another text.
    """
    root = Path(config.run) / "checkpoints"
    reasons = []
    for entry in reversed(Folder(root).entries()):
        try:
            manifest = Manifest.read(entry.path)
            is_read = not several_nodes and not config.checkpoint.mirror and manifest.size_bytes <= READ_BYTES
            damage = (
                find_damage(entry.path / name, record, contents=is_read) for name, record in manifest.files.items()
            )
            if reason := next(filter(None, damage), None):
                raise CheckpointError(reason)
        except CheckpointError as error:
            reasons.append(f"{entry.path.name}: {error}")
            continue
        _check_precision(entry.path, manifest, layout)
        _check_text(entry.path, manifest, token_set, Path(config.run))
        return
    if reasons and not several_nodes:
        raise CheckpointError(f"no checkpoint in {root} is good: {'; '.join(reasons)}; {CURE}")


def _check_precision(path: Path, manifest: Manifest, layout: Layout) -> None:
    """Refuses a layout whose weights have another type than a checkpoint's."""
    saved = {record.dtype for name, record in manifest.tensors.items() if name.partition("/")[0] == WEIGHTS}
    trained = "float64" if layout.precision == "float64" else "float32"
    if saved & {"float64"} != {trained} & {"float64"}:
        kept = "float64" if "float64" in saved else "float32, or bf16 over float32 weights"
        raise ConfigError(
            f"{path} has weights of {' and '.join(sorted(saved))}, and precision={layout.precision} trains weights of "
            f"{trained}, whose steps come to other numbers: a run keeps their type; write precision={kept}, or give "
            "another --run"
        )


def _check_text(path: Path, manifest: Manifest, token_set: TokenSet, run_dir: Path) -> None:
    """Refuses another text than a checkpoint was trained on: its rows, or what their ids mean, would be others."""
    if manifest.origin.data == token_set.fingerprint:
        return
    raise ConfigError(
        f"{path} was trained on the text {manifest.origin.data[:12]}, and data.paths and data.tokenizer give "
        f"{token_set.fingerprint[:12]} now: {changed_parts(run_dir, token_set)} changed since, so that a resumed run "
        f"would read other rows, or ids that mean other text; bring the text back, or train on from the weights: "
        f"meshwright export {run_dir} --to DIR, then model.name = DIR with another --run"
    )
