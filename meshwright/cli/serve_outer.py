"""``meshwright serve-outer``: the outer server of sites, islands that are runs of their own."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cli.arguments import print_result, read_config, take_value
from meshwright.errors import ConfigError
from meshwright.jobs.serve_outer import serve_outer
from meshwright.train.run_config import RunConfig

USAGE = """usage: meshwright serve-outer [RECIPE] --listen HOST:PORT --run DIR [options]

Makes versions of the outer weights from the rounds of sites: runs of their own, on any machines and under any layouts,
which dial in with meshwright train RECIPE --outer.meet HOST:PORT --outer.site I --outer.key-file KEY (docs/islands.md).
The first site hands over the first weights. Ctrl-C or SIGTERM saves; the same command goes on.

  --listen HOST:PORT    address of this machine that sites reach; shards take the N ports after it
  --run DIR             the server's own directory: key, versions, metrics.jsonl, events.jsonl
  --shards N            processes that share weights and momentum (1)
  --save-every K        versions between two saved ones (10)

Of the recipe the section outer counts, as every site has it too:

  --outer.mode M        sync, async or bounded (sync)
  --outer.sites N       number of sites that share the rows (1)
  --outer.quorum Q      sync: sites after whose rounds late ones are waited for at most grace_s (all sites)
  --outer.grace-s S     that wait, and the silence after which a site is forgotten (30)
  --outer.staleness S   bounded: rounds by which a site may be ahead of the slowest (2)
  --outer.momentum-every N       async, bounded: rounds between updates of the momentum (outer.sites)
  --outer.lr R, --outer.momentum B, --outer.no-nesterov, --outer diloco|local_sgd: the outer step
  --outer.key-file F    the key, where another than DIR/key is wanted
"""


def run(argv: Sequence[str]) -> int:
    """Serves until it is asked to end; exit status 0 when the last version is on disk."""
    args = list(argv)
    if not args or "-h" in args or "--help" in args:
        print_result(USAGE.rstrip())
        return 0
    listen = take_value(args, "--listen")
    shards, save_every = take_value(args, "--shards") or "1", take_value(args, "--save-every") or "10"
    if listen is None:
        raise ConfigError("serve-outer needs --listen HOST:PORT, the address that sites dial")
    if not shards.isdigit() or not save_every.isdigit():
        raise ConfigError(f"--shards {shards} --save-every {save_every}: give whole numbers")
    serve_outer(read_config(RunConfig, args, "serve-outer"), listen, shards=int(shards), save_every=int(save_every))
    return 0
