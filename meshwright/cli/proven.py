"""The proof that `meshwright train` makes before its first step, and what it leaves in the run's directory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from meshwright.cli.words import say
from meshwright.errors import PlanError

if TYPE_CHECKING:
    from meshwright.data.tokens import TokenSet
    from meshwright.train.session import Job

FILE = "proof.json"


def before(job: Job, token_set: TokenSet, forks: bool) -> None:
    """Proves a run's layout on a small clone; says it in a line, an event and `FILE`. One rank needs no proof.

    Args:
        job: the run; its directory is there.
        token_set: the prepared text.
        forks: whether this process starts ranks of its own.

    Raises:
        PlanError: when the layout doesn't compute what one device computes.
    """
    from meshwright.events import Event
    from meshwright.monitor.sinks import JsonlSink
    from meshwright.proof.ahead import Proof, prove_ahead

    layout, config = job.plan.layout, job.config
    if layout.world == 1:
        return
    if forks:
        proof = prove_ahead(
            job.model,
            layout,
            vocab=token_set.vocab_size,
            tokens=config.data.sequence,
            documents=config.data.mask_documents and len(token_set.train.ends) > 1,
            limit_s=config.train.prove_s,
        )
    else:
        why = "under torchrun this process is a rank and starts none of its own; meshwright verify proves it"
        proof = Proof(outcome="left out", layout=str(layout), why=why)
    (job.run_dir / FILE).write_text(json.dumps(proof.to_json(), indent=2), encoding="utf-8")
    sink = JsonlSink(job.run_dir, metrics=False)
    try:
        told = {"layout": proof.layout, "proven": proof.proven, "outcome": proof.outcome, "seconds": proof.seconds}
        sink.event(Event(kind="proved" if proof.passed else "not_proved", rank=-1, data=told | {"why": proof.why}))
    finally:
        sink.close()
    # What a CPU can't run, as a kernel that only a GPU has, is no fault of a layout of GPUs.
    if proof.outcome == "wrong" or (proof.failed and _on_cpu()):
        raise PlanError(
            f"layout {proof.layout} failed the proof before training: {proof.proven}: {proof.why} "
            f"({'; '.join(proof.instead)}); meshwright verify shows more; name another --layout, or train all the same "
            "with --train.no-prove"
        )
    say(str(proof))


def _on_cpu() -> bool:
    from meshwright.launch.devices import found_devices

    return found_devices(None).kind == "cpu"
