"""The proof that `meshwright train` makes before its first step, and its report in the run's directory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from torch import nn

from meshwright import __version__
from meshwright.data.tokens import TokenSet
from meshwright.errors import PlanError
from meshwright.events import Event
from meshwright.jobs.progress import Say, to_stderr
from meshwright.launch.devices import found_devices
from meshwright.monitor.sinks import JsonlSink
from meshwright.proof import before_run
from meshwright.proof.before_run import Proof
from meshwright.train.session import TrainJob

FILE = "proof.json"
_INSTALLED = {"site-packages", "dist-packages"}


def prove_before(job: TrainJob, token_set: TokenSet, forks: bool, nodes: bool = False, say: Say = to_stderr) -> None:
    """Proves a run's layout on a small clone; reports it in a line, an event and `FILE`.

    One rank needs no proof. A run that is resumed needs none either while `FILE` holds that of the same layout, model
    and code.

    Args:
        job: the run; its directory is there.
        token_set: the prepared text.
        forks: whether this process starts ranks of its own.
        nodes: whether other nodes wait for this one meanwhile.
        say: takes the line.

    Raises:
        PlanError: when the layout doesn't compute what one device computes.
    """
    layout, config = job.plan.layout, job.config
    if layout.world == 1:
        return
    # The other nodes wait for this one no longer than group_s.
    limit_s = min(config.train.prove_s, config.launch.group_s / 2) if nodes else config.train.prove_s
    documents = config.data.separates_documents and len(token_set.train.ends) > 1
    subject = {
        "layout": str(layout),
        "model": job.fingerprint,
        "code": code_hash(job.model.module, job.model.config.name),
        "sequence": config.data.sequence,
        "documents": documents,
        "attention": job.model.config.attention,
        "forks": forks,
    }
    if layout.islands > 1:
        subject["outer"] = job.outer.to_dict()
    path = job.run_dir / FILE
    if has_proof(path, subject, limit_s):
        return
    if forks:
        proof = before_run.prove_ahead(
            job.model,
            layout,
            vocab=token_set.vocab_size,
            tokens=config.data.sequence,
            documents=documents,
            limit_s=limit_s,
            outer=job.outer,
        )
    else:
        reason = "under torchrun this process is a rank and starts none of its own; meshwright verify proves it"
        proof = Proof(outcome="left out", layout=str(layout), why=reason)
    report = proof.to_json() | {"subject": subject, "limit_s": limit_s}
    path.write_text(json.dumps(report, indent=2), encoding="utf-8")
    _report_proof(job.run_dir, proof, say)


def _report_proof(run_dir: Path, proof: Proof, say: Say) -> None:
    """Reports a proof's outcome as an event, and as a line or an error.

    Raises:
        PlanError: when the proof failed.
    """
    sink = JsonlSink(run_dir, metrics=False)
    try:
        event_fields = {
            "layout": proof.layout,
            "proven": proof.proven,
            "outcome": proof.outcome,
            "seconds": proof.seconds,
        }
        sink.event(
            Event(kind="proved" if proof.passed else "not_proved", rank=-1, data=event_fields | {"why": proof.why})
        )
    finally:
        sink.close()
    # The proof runs on the CPU: an operator that only GPUs have may fail there without a fault of the layout.
    if proof.outcome == "wrong" or (proof.failed and _on_cpu()):
        raise PlanError(
            f"layout {proof.layout} failed the proof before training: {proof.proven}: {proof.why} "
            f"({'; '.join(proof.instead)}); meshwright verify shows more; name another --layout, or train all the same "
            "with --train.no-prove"
        )
    say(str(proof))


def code_hash(module: nn.Module, name: str = "") -> str:
    """Returns a hash of the files that define a model, and of meshwright's version.

    These are the files of its classes and, for a model of the user's own, of all that its code has imported from the
    folder that Python found it in: its forward may be written in functions of other files.

    Args:
        module: the model.
        name: of the model, ``module.path:function`` where it is of the user's own.
    """
    names = {type(submodule).__module__ for submodule in module.modules()}
    path, is_own, _ = name.partition(":")
    if is_own:
        names |= {path, *_modules_beside(path)}
    digest = hashlib.sha256(__version__.encode())
    for each in sorted(names):
        digest.update(each.encode())
        file = getattr(sys.modules.get(each), "__file__", None) or ""
        with contextlib.suppress(OSError):  # a class typed at a prompt has no file
            digest.update(Path(file).read_bytes())
    return digest.hexdigest()[:16]


def _modules_beside(path: str) -> list[str]:
    """Returns the modules that were imported from the folder in which Python found a module, but installed ones."""
    file = getattr(sys.modules.get(path), "__file__", None)
    if not file:
        return []
    depth = path.count(".") + (Path(file).name == "__init__.py")
    folder = Path(file).resolve().parents[depth]
    if folder.name in _INSTALLED:
        # An installed package is its own folder, and not all that is installed beside it.
        folder = folder / path.partition(".")[0]
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    sources = {name: Path(file).resolve() for name, file in files.items() if isinstance(file, str)}
    return [
        name
        for name, source in sources.items()
        if source.is_relative_to(folder) and not _INSTALLED & set(source.relative_to(folder).parts)
    ]


def has_proof(path: Path, subject: dict[str, Any], limit_s: float) -> bool:
    """Returns whether the file holds an outcome of the same proof that allows training."""
    try:
        proof = json.loads(path.read_text(encoding="utf-8"))
        if proof["subject"] != subject or proof["outcome"] in ("wrong", "crashed"):
            return False
        return bool(proof["outcome"] != "unfinished" or proof["limit_s"] >= limit_s)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _on_cpu() -> bool:
    return found_devices(None).kind == "cpu"
