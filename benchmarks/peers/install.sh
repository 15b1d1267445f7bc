#!/bin/sh
# Makes .venv-peers beside the package: the frameworks that throughput.py compares with, on the same torch.
# Run: sh benchmarks/peers/install.sh [python]     (some minutes; about 2 GB)
set -eu
cd "$(dirname "$0")/../.."
python=${1:-python3.11}
test -x .venv-peers/bin/python || "$python" -m venv .venv-peers
pip=".venv-peers/bin/python -m pip install -q --disable-pip-version-check --no-input"
$pip setuptools wheel numpy torch==2.13.0
torch=$(.venv-peers/bin/python -c 'import torch; print(torch.__version__)')
echo "torch==$torch" >.venv-peers/constraints.txt
$pip -c .venv-peers/constraints.txt transformers==5.23.0 accelerate lightning
# DeepSpeed builds no kernels at install: DS_BUILD_OPS=0; those that it needs it compiles when first used.
DS_BUILD_OPS=0 $pip -c .venv-peers/constraints.txt --no-build-isolation deepspeed
.venv-peers/bin/python -m pip list 2>/dev/null | grep -iE '^(torch|transformers|accelerate|lightning|deepspeed|numpy) '
