"""Help of the verbs that look at a run, or act on one, from outside."""

from __future__ import annotations

from meshwright.cli.help_page import JSON, HelpPage
from meshwright.jobs.watch import DEFAULT_PORT
from meshwright.monitor.config import HOST
from meshwright.train.run_config import RunConfig

_DONE = "0 done, 1 failed, 2 refused."
RUN_PAGES = {
    "status": HelpPage(
        usage="status RUN [--json]",
        purpose="Says where the run of a directory stands: its state, its step, who trains, what the scheduler says.",
        options=(JSON,),
        settings=(),
        examples=("meshwright status runs/first",),
        status="0 whatever the state is, 2 where there is no run.",
    ),
    "logs": HelpPage(
        usage="logs RUN [-f]",
        purpose="Prints what a run's job printed, on all of its nodes; of a run in a terminal its steps and events.",
        options=(("-f, --follow", "go on until the run has ended"),),
        settings=(),
        examples=("meshwright logs runs/first -f",),
        status="0, or 2 where there is no run.",
    ),
    "cancel": HelpPage(
        usage="cancel RUN [--now] [--wait S]",
        purpose="Ends the run of a directory with a checkpoint, as Ctrl-C does; a job that waits leaves the queue.",
        options=(
            ("--now", "end it at once, without a checkpoint"),
            ("--wait S", "seconds to wait for its end (600)"),
        ),
        settings=(),
        examples=("meshwright cancel runs/first",),
        status="0 nobody trains there any more, 1 it goes on or can't be reached, 2 refused.",
    ),
    "drain": HelpPage(
        usage="drain RUN [--node N] [--device D] [--undo]",
        purpose=(
            "Takes a node, or one of its devices, out of a run: after a step that all ranks agree on they go on\n"
            "without it, and no step is computed twice (docs/recovery.md). Alone it lists what is drained."
        ),
        options=(
            ("--node N", "number of the node (0)"),
            ("--device D", "number of one of its devices; all of the node's without"),
            ("--undo", "let it come back"),
            ("--why TEXT", "reason, for the run's events"),
            ("--wait S", "seconds to wait for the run's answer (300)"),
            JSON,
        ),
        settings=(),
        examples=("meshwright drain runs/first --node 1", "meshwright drain runs/first --node 1 --undo"),
        status="0 the run did it, or will at its start, 1 it refused or didn't answer, 2 refused here.",
    ),
    "watch": HelpPage(
        usage="watch RUN [--port N] [--host ADDRESS]",
        purpose=(
            "Serves the page of a run directory, which may be under way or have ended, until Ctrl-C.\n"
            "A run's own page, with buttons, is train --monitor.port N."
        ),
        options=(
            ("--port N", f"port ({DEFAULT_PORT}); any free one for 0"),
            ("--host ADDRESS", f"address to bind to ({HOST})"),
        ),
        settings=(),
        examples=("meshwright watch runs/first",),
        status="0 after Ctrl-C, 2 refused.",
    ),
    "trace": HelpPage(
        usage="trace RUN [--to FILE]",
        purpose=(
            "Writes the recorded steps of a run as a trace of all ranks (phases, waits for collectives, events) in\n"
            "Chrome's JSON format; open it at https://ui.perfetto.dev or chrome://tracing. A run records one step in\n"
            "N under --monitor.timeline N, and one in 50 under --monitor.port."
        ),
        options=(("--to FILE", "the file to write (RUN/trace.json)"),),
        settings=(),
        examples=("meshwright trace runs/first --to first.json",),
        status=_DONE,
    ),
    "serve-outer": HelpPage(
        usage="serve-outer [RECIPE] --listen HOST:PORT --run DIR [options]",
        purpose=(
            "Makes versions of the outer weights from rounds of sites: runs of their own, on any machines, under any\n"
            "layouts, which dial in (docs/islands.md). The first hands over the weights. Ctrl-C or SIGTERM saves."
        ),
        options=(
            ("--listen HOST:PORT", "address of this machine that sites reach; shards take the N ports after it"),
            ("--run DIR", "the server's own directory: key, versions, metrics.jsonl, events.jsonl"),
            ("--shards N", "processes that share weights and momentum (1)"),
            ("--save-every K", "versions between two saved ones (10)"),
        ),
        settings=(
            ("--outer.mode M", "sync, async or bounded (sync); of a recipe the section outer counts, as sites have it"),
            ("--outer.sites N", "number of sites that share the rows (1)"),
            ("--outer.quorum Q", "sync: sites after whose rounds late ones are waited for at most grace_s (all sites)"),
            ("--outer.grace-s S", "that wait, and the silence after which a site is forgotten (30)"),
            ("--outer.staleness S", "bounded: rounds by which a site may be ahead of the slowest (2)"),
            ("--outer.momentum-every N", "async, bounded: rounds between updates of the momentum (outer.sites)"),
            ("--outer.lr R", "--outer.momentum B, --outer.no-nesterov, --outer diloco|local_sgd: the outer step"),
            ("--outer.key-file F", "the key, where another than DIR/key is wanted"),
        ),
        examples=(
            "meshwright serve-outer recipe.toml --listen 10.0.0.1:7700 --run runs/server",
            "meshwright train recipe.toml --outer.meet 10.0.0.1:7700 --outer.site 0 --outer.key-file KEY",
        ),
        status="0 the last version is on disk, 1 failed, 2 refused.",
        configs=(RunConfig,),
    ),
}
"""The page of each of them."""
