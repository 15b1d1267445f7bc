"""What a hanging rank's device is at: read off dumps of torch's flight recorder, and asked over a thread."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from meshwright.forking import release_threads
from meshwright.launch.addresses import LOOPBACK_INTERFACE
from meshwright.monitor.flight import Unfinished, find_recorder, read_dump, unfinished
from meshwright.monitor.progress import ProgressWriter, reset_progress
from meshwright.resilience.hang_watch import HangError, HangWatch
from meshwright.train import flight as flight_module
from meshwright.train.flight import Flight


def entry(record: int, op: str, state: str, **more: object) -> dict:
    """An entry with the fields and types that FlightRecorderDetail.hpp of torch 2.13 writes (version 2.10)."""
    return {
        "record_id": record, "pg_id": 1, "process_group": ["1", "mesh_tp"], "thread_name": "", "thread_id": "7",
        "collective_seq_id": 40 + record, "p2p_seq_id": 0, "op_id": 40 + record, "profiling_name": f"nccl:{op}",
        "time_created_ns": 10**18 + record, "input_sizes": [[4, 1024, 256]], "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 1024, 256]], "output_dtypes": ["BFloat16"], "state": state,
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": False, "timeout_ms": 600000,
        "is_p2p": False,
    } | more  # fmt: skip


def dump(*entries: dict) -> dict:
    config = {"1": {"name": "1", "desc": "mesh_tp", "ranks": "[0, 1]"}}
    seen = {"last_enqueued_collective": "43", "last_started_collective": "-1", "last_completed_collective": "41"}
    head = {"version": "2.10", "comm_lib_version": "2.27.3", "pg_config": config, "pg_status": {"1": seen}}
    return head | ({"entries": list(entries)} if entries else {})


def test_the_first_that_is_not_complete_is_what_the_device_is_at() -> None:
    found = unfinished(
        dump(
            entry(1, "all_reduce", "completed"),
            entry(3, "_reduce_scatter_base", "scheduled"),
            entry(2, "all_reduce", "scheduled"),
        )
    )
    assert found == Unfinished(op="all_reduce", group="tp", number=42, size_bytes=2 * 2**20, started=False, behind=1)
    assert str(found) == "all_reduce over tp, 2.00 MiB (number 42 of its group), and 1 behind it"
    later = unfinished(dump(entry(2, "all_reduce", "scheduled"), entry(3, "_reduce_scatter_base", "started")))
    assert later is not None and (later.op, later.started) == ("reduce_scatter_base", True), "of another stream"
    send = unfinished(
        dump(entry(5, "send 1->2", "scheduled", is_p2p=True, p2p_seq_id=9, process_group=["0", "default_pg"]))
    )
    assert send is not None and (send.op, send.group, send.number) == ("send", "world", 9)
    unnamed = unfinished(dump(entry(1, "all_to_all", "scheduled", process_group=["12", "undefined"], input_sizes=[])))
    assert unnamed is not None and str(unnamed) == "all_to_all over group 12 (number 41 of its group)"
    assert unfinished(dump(entry(1, "all_reduce", "completed"))) is None and unfinished(dump()) is None
    odd = unfinished(dump(entry(1, "all_reduce", "scheduled", input_dtypes=["Quantum"])))
    assert odd is not None and odd.size_bytes == 0, "better none than a wrong one"
    assert read_dump(b"") == {} and read_dump(b"[]") == {} and read_dump(b'{"version": "2.10"}')["version"] == "2.10"


def batch(record: int, sequence: int, state: str) -> list[dict]:
    """What torch 2.11 records of ``batch_isend_irecv`` over NCCL: operations without a state, and one for all."""
    numbers = {"collective_seq_id": 3, "p2p_seq_id": sequence, "input_sizes": [[10]], "input_dtypes": ["Float"]}
    return [
        entry(record, "recv 0<-1", "scheduled", is_p2p=True, **numbers),
        entry(record + 1, "send 0->1", "scheduled", is_p2p=True, **numbers),
        entry(record + 2, "coalesced", state, retired=state == "completed", **numbers),
    ]


def test_operations_of_a_batch_are_complete_when_the_batch_is() -> None:
    done, pending = batch(1, 1, "completed"), batch(4, 2, "scheduled")
    assert unfinished(dump(*done)) is None
    later = unfinished(dump(*done, entry(9, "all_reduce", "scheduled")))
    assert later is not None and (later.op, later.number, later.behind) == ("all_reduce", 49, 0)
    told = unfinished(dump(*done, *pending, entry(9, "all_reduce", "scheduled")))
    assert told is not None and (told.op, told.number, told.size_bytes, told.behind) == ("recv", 2, 40, 1)
    # One that isn't in a batch has its own state.
    alone = unfinished(dump(*done, batch(7, 5, "")[1]))
    assert alone is not None and (alone.op, alone.number) == ("send", 5)


def one_of_two(rank: int, meeting: Path, flight: Flight, come: int, go: int) -> None:
    """Rank 1 never comes to the second sum, for which rank 0 waits in a thread of its backend."""
    torch.set_num_threads(1)
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "100", "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
    dist.init_process_group("gloo", store=dist.FileStore(str(meeting), 2), rank=rank, world_size=2)
    recorder = find_recorder()
    assert recorder is not None
    dist.all_reduce(torch.ones(3, 5))
    while unfinished(read_dump(recorder())) is not None:
        time.sleep(0.002)  # until the first has been put away
    flight.answer(rank, recorder)
    work = dist.all_reduce(torch.ones(7, dtype=torch.float64), async_op=True) if rank == 0 else None
    os.write(come, b"x")
    os.read(go, 1)
    del work


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Flight]:
    """Two ranks of which one waits for the other, and how they are asked."""
    flight = Flight(2)
    (came, come), (go, end) = os.pipe(), os.pipe()
    release_threads()
    pids = []
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                one_of_two(rank, tmp_path / "meeting", flight, come, go)
            finally:
                os._exit(0)
    os.close(come)
    try:
        assert [os.read(came, 1) for _ in pids] == [b"x", b"x"]
        yield flight
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        flight.close()
        for fd in (came, go, end):
            os.close(fd)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="gloo records nothing before torch 2.13")
def test_ranks_are_asked_for_what_torch_itself_recorded(
    two: Flight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's recorder is the same code as NCCL's, so that the format is the real one of the torch that is here."""
    monkeypatch.setattr(flight_module, "WAIT_S", 300.0)  # both answer, however slow the machine is
    path = tmp_path / "progress.bin"
    reset_progress(path, 2)
    writers = [ProgressWriter(path, rank) for rank in range(2)]
    for writer in writers:
        writer.stamp("optimizer", 7)
    watch = HangWatch(path, 0, 2, 0.2, query_devices=two.query)
    with pytest.raises(HangError) as told:
        while True:
            watch.poll()
            time.sleep(0.02)
    waits = "; the GPU of rank 0 hasn't finished all_reduce over world, 56 B (number 2 of its group)"
    assert waits in str(told.value)
    assert "GPU of rank 1" not in str(told.value), "it has given its device nothing"


def test_who_cannot_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a recorder, or with one that fails; whatever was dumped in another form."""
    monkeypatch.setattr(flight_module, "WAIT_S", 0.05)
    flight = Flight(4)

    def fails() -> bytes:
        raise RuntimeError("no device")

    dumps = (None, fails, lambda: b'{"entries": [{"state": "scheduled"}]}')
    for rank, given in enumerate(dumps):
        flight.answer(rank, given)
    assert flight.query() == {}
    for thread in threading.enumerate():
        if thread.name == "flight":
            thread.join()
    flight.close()


def test_what_is_dumped_here_has_the_fields_that_are_read() -> None:
    recorder = find_recorder()
    if recorder is None:
        pytest.skip("this torch has no flight recorder")
    found = read_dump(recorder())
    assert "version" in found and "pg_config" in found, json.dumps(found)[:300]
