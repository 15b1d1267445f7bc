"""What holds for every test: no network, one torch thread, no warning of a tokenizer that sees a fork."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="meshwright-cache-")
"""No calibration and no earlier runs of this machine have a say in a test, and none is left behind by one."""
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
