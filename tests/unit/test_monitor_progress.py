from __future__ import annotations

import os
import struct
import time

import pytest

from meshwright.errors import RankError
from meshwright.monitor.progress import (
    PHASES,
    ProgressWriter,
    RankStamp,
    read_progress,
    reset_progress,
    waiting_sentences,
)


def test_what_a_rank_stamps_is_what_a_reader_sees(tmp_path):
    path = tmp_path / "progress.bin"
    second = ProgressWriter(path, 2, generation=3)
    first = ProgressWriter(path, 0)
    first.stamp("forward", step=7, micro=1)
    second.stamp("backward", step=2**40, micro=3, waits_for="all_reduce over replicate", number=22)
    ranks = read_progress(path)
    assert [one.rank for one in ranks] == [0, 2]
    assert (ranks[0].phase, ranks[0].step, ranks[0].micro, ranks[0].waits_for) == ("forward", 7, 1, "")
    assert (ranks[1].phase, ranks[1].step, ranks[1].generation) == ("backward", 2**40, 3)
    assert ranks[1].waits_for == "all_reduce over replicate"
    assert ranks[1].collective == "all_reduce over replicate (22nd of the step)" and ranks[0].number == 0
    assert ranks[1].pid == os.getpid()
    assert 0 <= ranks[1].age_s() < 5
    first.close()
    first.close()
    assert read_progress(path)[0].phase == "done"


def test_stamps_outlive_their_process_and_no_reader_sees_half_of_one(tmp_path):
    path = tmp_path / "progress.bin"
    reset_progress(path, 2)
    assert read_progress(path) == []
    enough = tmp_path / "enough"
    child = os.fork()
    if child == 0:
        writer = ProgressWriter(path, 1)
        step = 0
        while not enough.exists():
            for _ in range(2000):
                step += 1
                writer.stamp("forward", step=step, micro=step % 1000, waits_for=str(step))
        writer.stamp("backward", step=2**40)
        os._exit(0)
    seen: set[int] = set()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        for one in read_progress(path):
            if one.phase == "forward":
                assert one.waits_for == str(one.step) and one.micro == one.step % 1000
                seen.add(one.step)
        if len(seen) > 100:
            enough.touch()
    (last,) = read_progress(path)
    assert (last.rank, last.pid, last.step) == (1, child, 2**40)


def test_a_rank_killed_within_a_stamp_leaves_the_one_before(tmp_path):
    path = tmp_path / "progress.bin"
    writer = ProgressWriter(path, 0)
    writer.stamp("forward", step=5)
    writer.stamp("backward", step=6)
    whole = path.read_bytes()
    for half in (0, 128):
        for cut in range(1, 128, 9):
            torn = bytearray(whole)
            torn[half + cut : half + 128] = bytes(128 - cut)
            path.write_bytes(torn)
            (one,) = read_progress(path)
            assert (one.phase, one.step) in (("forward", 5), ("backward", 6))


def test_a_stamp_costs_little(tmp_path):
    writer = ProgressWriter(tmp_path / "progress.bin", 0)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(2000):
            writer.stamp("backward", 12, 3, "all_reduce over replicate")
        best = min(best, (time.perf_counter() - start) / 2000)
    assert best < 1e-4, f"{best * 1e6:.2f} us a stamp"


def test_bad_use_is_refused(tmp_path):
    writer = ProgressWriter(tmp_path / "progress.bin", 0)
    with pytest.raises(KeyError):
        writer.stamp("dreaming")
    with pytest.raises(RankError, match="can't be written"):
        ProgressWriter(tmp_path / "none" / "progress.bin", 0)
    assert read_progress(tmp_path / "other.bin") == []
    (tmp_path / "short.bin").write_bytes(struct.pack("<i", 1))
    assert read_progress(tmp_path / "short.bin") == []


def stand(rank: int, phase: str, waits_for: str = "", age_s: float = 0.0, step: int = 12) -> RankStamp:
    return RankStamp(
        rank=rank, pid=1, generation=0, step=step, micro=0, phase=phase, waits_for=waits_for, since=100.0 - age_s
    )


def test_sentences_say_who_waits_for_what_and_where_the_others_are():
    ranks = [stand(0, "data", age_s=9), stand(1, "backward", "all_reduce over replicate", 4.24)]
    (sentence,) = waiting_sentences(ranks, describe=lambda rank: f"rank {rank}: replicate {rank}", now=100.0)
    assert sentence == (
        "rank 1 [replicate 1] waits in backward of step 12 for all_reduce over replicate since 4.2 s; rank 0 is in data"
    )
    assert waiting_sentences(ranks, after_s=5, now=100.0) == []
    assert waiting_sentences([stand(0, "data", age_s=9)], now=100.0) == []


def test_sentences_for_many_ranks_stay_short():
    ranks = [stand(rank, "backward", "all_reduce over replicate", 3.0) for rank in range(512) if rank not in (7, 9)]
    ranks += [stand(7, "data"), stand(9, "data")]
    (sentence,) = waiting_sentences(ranks, now=100.0)
    assert sentence.startswith("ranks 0-6, 8, 10-511 wait in backward of step 12")
    assert sentence.endswith("; ranks 7, 9 are in data")
    apart = [stand(rank, "forward", "all_gather over shard", 3.0, step=rank) for rank in range(20)]
    sentences = waiting_sentences(apart, now=100.0, limit=3)
    assert len(sentences) == 4 and sentences[-1] == "17 more groups wait"


def test_codes_of_phases_are_part_of_the_file_format():
    assert PHASES[:6] == ("start", "data", "forward", "backward", "reduce", "optimizer")
