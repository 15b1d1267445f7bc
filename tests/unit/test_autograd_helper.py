"""The helper process that runs autograd: what comes back from it, and how it ends."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch

from meshwright import autograd_helper, forking
from meshwright.autograd_helper import computed_by_helper, run_in_helper
from meshwright.errors import ConfigError, PlanError
from meshwright.models.analysis.thread_group import ThreadGroup, run_in_threads


class _Demanding(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_it_computes_in_another_process_and_a_nested_call_in_the_same() -> None:
    own, (outer, inner) = os.getpid(), run_in_helper(lambda: (os.getpid(), run_in_helper(os.getpid)))
    assert outer == inner != own


def test_arguments_may_be_anything_and_gradients_come_back() -> None:
    weight = torch.arange(3.0, requires_grad=True)

    @computed_by_helper
    def slope(loss: object) -> torch.Tensor:
        """Returns the gradient."""
        return torch.autograd.grad(loss(), weight)[0]  # type: ignore[operator]

    assert slope(lambda: (weight**2).sum()).tolist() == [0.0, 2.0, 4.0]
    assert slope.__doc__ == "Returns the gradient." and weight.grad is None


@pytest.mark.parametrize("error", [ConfigError("cure"), PlanError("rule"), ValueError("wrong"), SystemExit(3)])
def test_an_error_keeps_type_and_message_and_shows_where_it_arose(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error), match=str(error)) as caught:
        run_in_helper(fail)
    assert "in fail" in str(caught.value.__cause__)


def test_an_error_that_cannot_be_sent_says_what_it_was() -> None:
    def fail() -> None:
        raise _Demanding("this", "that")

    with pytest.raises(RuntimeError, match="_Demanding: this and that"):
        run_in_helper(fail)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(PlanError, match="can't be sent"):
        run_in_helper(lambda: threading.Lock())


def test_a_tensor_comes_without_its_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    assert run_in_helper(lambda: weight * 2).grad_fn is None


def test_warnings_are_given_here_once() -> None:
    def warn() -> int:
        warnings.warn("of the model's code", FutureWarning, stacklevel=1)
        return 7

    with pytest.warns(FutureWarning, match="of the model's code"):
        assert run_in_helper(warn) == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(FutureWarning):
            run_in_helper(warn)


def test_a_helper_that_dies_and_one_that_takes_too_long() -> None:
    with pytest.raises(PlanError, match="SIGKILL; the kernel does that when memory runs out"):
        run_in_helper(lambda: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(PlanError, match="longer than its limit"):
        run_in_helper(lambda: time.sleep(60), limit_s=0.3)
    assert time.monotonic() - began < 20


def test_threads_of_a_helper_find_torch_s_thread_pool() -> None:
    product = torch.ones(300, 300)

    def multiply(wire: ThreadGroup) -> float:
        wire.share(None)  # so that all begin at once
        return float((product * wire.index).mean())

    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # makes the pool that a fork spoils
    try:
        for _ in range(12):
            assert run_in_helper(lambda: run_in_threads(8, multiply)) == [float(index) for index in range(8)]
    finally:
        torch.set_num_threads(threads)


def test_an_interrupt_ends_the_helper_too() -> None:
    (receive, send), own = os.pipe(), os.getpid()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

    def ask() -> None:
        os.write(send, os.getpid().to_bytes(8, "little"))
        os.kill(own, signal.SIGINT)
        time.sleep(60)

    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_helper(ask)
    finally:
        signal.signal(signal.SIGINT, handler)
    pid = int.from_bytes(os.read(receive, 8), "little")
    os.close(receive)
    os.close(send)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_interrupt_just_after_the_fork_ends_the_helper_too(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    fork, pids = autograd_helper._fork, []

    def forked(compute: Any, mask: Any, started: list[int]) -> None:
        fork(compute, mask, started)
        pids.append(started[0])
        os.kill(os.getpid(), signal.SIGINT)  # taken by this thread later, or by another one at once

    monkeypatch.setattr(autograd_helper, "_fork", forked)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_in_helper(lambda: time.sleep(60))
    finally:
        signal.signal(signal.SIGINT, handler)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_process_that_cannot_fork_ranks_computes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_thread_names", lambda: ["python", "pt_autograd_0"])
    assert "autograd engine has run" in (forking.fork_obstacle() or "")
    assert run_in_helper(os.getpid) == os.getpid()


def test_a_helper_computes_in_one_thread_and_leaves_the_callers_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert (run_in_helper(torch.get_num_threads), torch.get_num_threads()) == (1, 2)
    finally:
        torch.set_num_threads(threads)
