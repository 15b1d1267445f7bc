#!/bin/sh
# Everything that only a real GPU can tell, in ten minutes on one of them: `sh tests/gpu/first.sh --out FOLDER`.
# Parts run under limits of their own and leave a JSON line a result in FOLDER/results.jsonl, also when one fails.
# Without a network: put the wheels of what lacks (tyro, tomli-w, zstandard, torchao and what they need) into .whl/ first.
set -e
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
if [ -d .whl ]; then
  # A folder of its own: nobody else has put code there.
  site=$(mktemp -d)
  "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" .whl/*.whl
  PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
fi
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
# Read when torch is imported, which parts do before meshwright could set it.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
exec "$PYTHON" -m tests.gpu.first "$@"
