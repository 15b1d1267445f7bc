"""Hostile requests at the planner's page: each is refused in a sentence or is a question within its bounds."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from meshwright.jobs.plan_desk import PlanDesk, PlanProcess
from meshwright.jobs.plan_question import PlanQuestion, page_presets
from meshwright.jobs.plan_server import PlanServer
from tests.fuzz.mutations import mutations

pytestmark = pytest.mark.slow
STAND_IN = """
import json, sys
from meshwright.jobs.plan_question import PlanQuestion
for line in sys.stdin:
    PlanQuestion.from_dict(json.loads(line)["question"]).check_all()
    print(json.dumps({"sections": {}, "state": ""}), flush=True)
"""
"""A worker that dies of a question that isn't within its bounds."""
ROUNDS = 250


@pytest.fixture
def server() -> Iterator[PlanServer]:
    process = PlanProcess((sys.executable, "-c", STAND_IN))
    with PlanServer(0, PlanQuestion(), PlanDesk(process)) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield running
        running.shutdown()
        thread.join()
    process.close()


def posted(server: PlanServer, body: bytes) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", "/api/plan", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_damaged_questions_are_refused_or_within_bounds(server: PlanServer) -> None:
    draw = random.Random(11)
    body = {"kind": "plan", "page": "a", "number": 7, "question": page_presets()["mixtral-8x7b"] | {"network": ""}}
    seen = set()
    for data in mutations(json.dumps(body).encode(), draw, ROUNDS):
        try:
            status, text = posted(server, data)
        except (BrokenPipeError, ConnectionResetError):
            # Of a body that is too long only the head is read.
            assert len(data) > 4096
            continue
        # 503 would be a worker that died of what the server let through.
        assert status in (200, 400, 409) and text, (status, text, data[:300])
        seen.add(status)
    assert {200, 400} <= seen


def test_noise_and_silence_leave_the_page_as_it_was(server: PlanServer) -> None:
    draw, address = random.Random(12), ("127.0.0.1", server.server_address[1])
    silent = []
    for number in range(60):
        stranger = socket.create_connection(address, 5.0)
        with contextlib.suppress(OSError):
            stranger.sendall(
                draw.choice((b"", b"GET / HTTP/1.1\r\n", draw.randbytes(200), b"POST /api/plan HTTP/9\r\n\r\n"))
            )
        if number % 2:
            silent.append(stranger)
        else:
            stranger.close()
    for stranger in silent:
        stranger.close()
    # Closed connections give their places back.
    for _ in range(500):
        with contextlib.suppress(OSError, http.client.HTTPException):
            if posted(server, b'{"kind": "plan", "page": "b", "number": 1, "question": {}}')[0] == 200:
                return
        time.sleep(0.02)
    raise AssertionError("the page doesn't answer any more")
