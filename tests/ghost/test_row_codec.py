"""Tokens in float8 on GPUs: compiled layers round in two kernels and decode in one, without a wait for the device.

The simulated GPU's routers send no token anywhere, so the codec is run by itself.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from meshwright.parallel.row_codec import RowCodec, can_fuse
from meshwright.planner.cost.expert_dispatch import FUSED_ROUND_OPERATIONS, ROUND_OPERATIONS
from tests.ghost.runs import has_ghost
from tests.ghost.test_dropout_kernel import run_alone

pytestmark = [pytest.mark.skipif(not has_ghost(), reason="runs under the simulated GPU: make ghost")]


def test_rounding_and_decoding_are_as_many_kernels_as_are_priced() -> None:
    run_alone("check_launches", __name__)


def check_launches() -> None:
    ghost = ctypes.CDLL(None)
    ghost.ghost_count.restype = ctypes.c_long
    assert can_fuse(torch.device("cuda")) and not can_fuse(torch.device("cpu"))
    for is_fused in (False, True):
        codec, counts = RowCodec(is_fused), []
        # Another number of rows each time, as routers send them: nothing is compiled again.
        for rows in (64, 96, 33):
            tokens = torch.zeros(rows, 256, device="cuda", dtype=torch.bfloat16)
            arrived = torch.empty_like(tokens)
            start = ghost.ghost_count(0), ghost.ghost_count(1)
            encoded = codec.encode(tokens)
            middle = ghost.ghost_count(0)
            codec.decode_into(arrived, encoded)
            counts.append((middle - start[0], ghost.ghost_count(0) - middle, ghost.ghost_count(1) - start[1]))
        rounding, decoding, waits = counts[-1]
        assert rounding + decoding == (FUSED_ROUND_OPERATIONS if is_fused else ROUND_OPERATIONS) and not waits, counts
