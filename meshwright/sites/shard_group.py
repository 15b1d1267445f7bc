"""The coordinator's side of the shard processes: starts them, gives them orders, and ends them."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time

from meshwright.errors import LaunchError
from meshwright.forking import die_with_parent
from meshwright.sites.messages import Done
from meshwright.sites.pipe import Pipe
from meshwright.sites.shard import run_shard
from meshwright.transport.key import RunKey

ORDER_S = 600.0
"""Limit of an order: the outer step over a shard, or writing it to a slow disk."""
_END_S = 5.0
"""Limit of a shard's end, and of the wait for the port of a shard whose server was killed."""


class OrderRefusedError(Exception):
    """A shard can't do what was asked for."""


def listen(host: str, port: int, *, taken_s: float = 0.0) -> socket.socket:
    """Returns a listening socket, once a port is free that another process has for ``taken_s`` seconds more.

    Raises:
        LaunchError: when the address isn't this machine's, or the port stays taken.
    """
    deadline = time.monotonic() + taken_s
    while True:
        try:
            return socket.create_server((host, port), backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                why = error.strerror or error
                raise LaunchError(f"can't listen at {host}:{port}: {why}; give another --listen") from None
        time.sleep(0.01)


class ShardGroup:
    """The shard processes.

    Args:
        shards: number of them.
        host: address to listen at.
        first_port: of the first; the others follow. 0 for free ones.
        key: of the server.
        coordinator: its listener, which no shard may keep: a server that is killed can be started again at once.
    """

    def __init__(self, shards: int, host: str, first_port: int, key: RunKey, coordinator: socket.socket) -> None:
        self.count, self._coordinator = shards, coordinator
        self._pipes: list[Pipe] = []
        self._pids: list[int] = []
        listeners = []
        try:
            for index in range(shards):
                # Shards of a server that was killed end a moment after it.
                listeners.append(listen(host, first_port + index if first_port else 0, taken_s=_END_S))
            self.ports = tuple(int(listener.getsockname()[1]) for listener in listeners)
            """Port of each shard."""
            for index in range(shards):
                self._start(index, listeners, key)
        except BaseException:
            self.close()
            raise
        finally:
            for listener in listeners:
                listener.close()

    def _start(self, index: int, listeners: list[socket.socket], key: RunKey) -> None:
        own, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                die_with_parent(parent)
                own.close()
                self._coordinator.close()
                for pipe in self._pipes:
                    pipe.close()
                for other, listener in enumerate(listeners):
                    if other != index:
                        listener.close()
                status = run_shard(index, self.count, listeners[index], theirs, key)
            finally:
                os._exit(status)
        theirs.close()
        self._pids.append(pid)
        self._pipes.append(Pipe(own))

    def order(self, record: object) -> float:
        """Has all shards do something, at once; returns the sum of what they answer.

        Raises:
            OrderRefusedError: with the first refusal.
            LaunchError: when a shard has ended, or doesn't answer in time.
        """
        total, refusal = 0.0, ""
        try:
            for pipe in self._pipes:
                pipe.send(record)
            # Every answer is read, whatever the others say: the next order's must not be mistaken for it.
            for pipe in self._pipes:
                answer = pipe.receive(ORDER_S)
                if isinstance(answer, Done):
                    total += answer.value
                else:
                    refusal = refusal or str(getattr(answer, "why", answer))
        except OSError as error:
            raise LaunchError(
                f"a shard of the outer server ended or is silent ({error}); start the server again, and it goes on "
                "from its last saved version"
            ) from error
        if refusal:
            raise OrderRefusedError(refusal)
        return total

    def close(self) -> None:
        """Ends the processes: their pipes close, and those that don't end by themselves are killed."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _END_S
        for pid in self._pids:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
        self._pids.clear()
