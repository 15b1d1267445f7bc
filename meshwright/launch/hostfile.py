"""Launches on several nodes from one terminal: reads a hostfile, prints each host's command, or runs them over ssh."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import ClusterError, LaunchError
from meshwright.launch.contract import CommandLauncher, HostCommand

_LINE = re.compile(r"(?P<name>[A-Za-z0-9._:@\[\]-]+)(?:\s+slots\s*=\s*(?P<slots>\d+))?\s*$")
SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
"""A terminal (-tt) makes the remote command end with its connection; BatchMode prevents an endless password prompt."""
_CONNECTION_LOST = 255
"""Source: ssh(1), EXIT STATUS."""


@dataclass(frozen=True, slots=True)
class HostfileLine:
    """A line of a hostfile."""

    name: str
    """As ssh takes it: a name, an address, or user@name."""
    slots: int
    """Ranks on this host."""

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True, slots=True)
class HostOutput:
    """What a command printed on a host."""

    name: str
    """The host, as in the hostfile."""
    status: int | None
    """Its exit status, 255 when ssh has no connection; None when it did not end in time."""
    output: str
    """Standard output."""
    complaint: str
    """Standard error."""

    @property
    def connected(self) -> bool:
        """Whether ssh reached the host."""
        return self.status != _CONNECTION_LOST


def read_hostfile(path: Path) -> list[HostfileLine]:
    """Reads a hostfile: a ``host slots=8`` a line, ``#`` starts a comment, slots default to 1.

    Raises:
        ClusterError: when it can't be read, is empty, names a host twice or holds another kind of line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"the hostfile {path} can't be read: {error}; give a text file of 'host slots=8'") from None
    hosts: dict[str, HostfileLine] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.match(text)
        slots = int(match["slots"] or 1) if match else 0
        # A name that begins with - would be read by ssh as an option.
        if match is None or match["name"].startswith("-") or slots < 1:
            raise ClusterError(f"{path}:{number}: {line.strip()[:80]!r} is not a host; write it as 'host slots=8'")
        if match["name"] in hosts:
            raise ClusterError(f"{path}:{number}: {match['name']} is named twice; give one line with all its slots")
        hosts[match["name"]] = HostfileLine(match["name"], slots)
    if not hosts:
        raise ClusterError(f"the hostfile {path} names no host; write a line such as 'host slots=8' for each")
    return list(hosts.values())


class HostfileLauncher(CommandLauncher):
    """Runs a supervisor or torchrun on each host over ssh; a `CommandLauncher`.

    Without supervisors the first host that fails takes the others down.
    """

    def __init__(
        self,
        hosts: Sequence[HostfileLine],
        *,
        port: int = 29400,
        python: str = sys.executable,
        folder: Path | None = None,
        ssh: Sequence[str] = SSH,
        run_id: str = "meshwright",
        supervised: bool = False,
    ) -> None:
        """Configures the launch; starts nothing.

        Args:
            hosts: in the order of their ranks; the first is the head, where all rendezvous.
            port: free port of the head.
            python: interpreter on every host.
            folder: working directory on every host; this one's when None.
            ssh: command and options before the host's name.
            run_id: name of the run.
            supervised: run a supervisor on each host instead of torchrun; supervisors continue when a host fails.
        """
        self.hosts = list(hosts)
        self._port, self._python, self._folder = port, python, folder or Path.cwd()
        self._ssh, self._run_id = tuple(ssh), run_id
        self._supervised = supervised
        self._started: list[tuple[HostfileLine, subprocess.Popen[bytes]]] = []

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return sum(host.slots for host in self.hosts)

    def commands(self, argv: Sequence[str]) -> list[HostCommand]:
        """Returns the dry run: the command of each host for ``meshwright <argv>``."""
        head = self.hosts[0].address
        if self._supervised:
            nodes = str(len(self.hosts))
            shared = ("--devices", str(self.ranks), "--nodes", nodes, "--meet", f"{head}:{self._port}")
            program = (self._python, "-m", "meshwright", *argv)
            return [
                HostCommand(host.name, (*program, *shared, "--node", str(node), "--slots", str(host.slots)))
                for node, host in enumerate(self.hosts)
            ]
        return [
            HostCommand(
                host.name,
                (
                    *(self._python, "-m", "torch.distributed.run"),
                    f"--nnodes={len(self.hosts)}",
                    f"--node-rank={index}",
                    f"--nproc-per-node={host.slots}",
                    f"--master-addr={head}",
                    f"--master-port={self._port}",
                    f"--rdzv-id={self._run_id}",
                    *("--max-restarts=0", "-m", "meshwright", *argv),
                ),
                (("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),
            )
            for index, host in enumerate(self.hosts)
        ]

    def shell_lines(self, argv: Sequence[str]) -> list[str]:
        """Returns the dry run as lines to paste into a shell."""
        return [shlex.join(self._over_ssh(command)) for command in self.commands(argv)]

    def _over_ssh(self, command: HostCommand) -> list[str]:
        variables = [f"{name}={value}" for name, value in command.environment]
        environment = ["env", *variables] if variables else []
        # exec replaces the shell, so that the terminal's hangup reaches the program itself.
        remote = f"cd {shlex.quote(str(self._folder))} && exec {shlex.join([*environment, *command.argv])}"
        return [*self._ssh, command.host, remote]

    def start(self, argv: Sequence[str]) -> None:
        """Starts ``meshwright <argv>`` on every host.

        Raises:
            LaunchError: when ssh can't be run; nothing is left running then.
        """
        for host, command in zip(self.hosts, self.commands(argv)):
            try:
                # A session of its own: Ctrl-C is sent by `interrupt` in order, not by this terminal to every ssh.
                process = subprocess.Popen(self._over_ssh(command), stdin=subprocess.PIPE, start_new_session=True)
            except OSError as error:
                self.cancel()
                raise LaunchError(f"{self._ssh[0]} can't be run: {error}; install ssh, or paste the dry run") from None
            self._started.append((host, process))

    def wait(self, timeout_s: float | None = None, watch: Callable[[], None] | None = None) -> None:
        """Waits until every host is done.

        Args:
            timeout_s: limit in seconds; None waits as long as the hosts work.
            watch: called some times a second; an exception of it ends the hosts' commands.

        Raises:
            LaunchError: for the first host that failed (the others have been ended then; supervised ones go on, so that
                all must have failed), or when the time is up.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while any(process.poll() is None for _, process in self._started):
                if watch is not None:
                    watch()
                if not self._supervised:
                    self._check_failed()
                if deadline is not None and time.monotonic() > deadline:
                    busy = ", ".join(host.name for host, process in self._started if process.poll() is None)
                    raise LaunchError(f"{busy} did not end within {timeout_s:g} s and were ended")
                time.sleep(0.05)
            # Supervisors survive the loss of other hosts: only the failure of all is a failure.
            if not self._supervised or all(process.returncode for _, process in self._started):
                self._check_failed()
        finally:
            self.cancel(3.0)

    def _check_failed(self) -> None:
        for host, process in self._started:
            status = process.poll()
            if status == _CONNECTION_LOST:
                raise LaunchError(f"[{host.name}] ssh lost or could not make the connection; try: ssh {host.name} true")
            if status:
                raise LaunchError(f"[{host.name}] ended with status {status}; its output above says why")

    def collect(self, argv: Sequence[str], limit_s: float) -> list[HostOutput]:
        """Runs ``meshwright <argv>`` on every host at once, without a terminal, and returns what each printed.

        Args:
            argv: words of the command.
            limit_s: for all hosts; a connection that is still open then is ended.

        Raises:
            LaunchError: when ssh can't be run.
        """
        # Without a terminal standard output stays apart from standard error.
        self._ssh = tuple(word for word in self._ssh if word != "-tt")
        deadline_s, processes = time.monotonic() + limit_s, []
        try:
            for command in self.commands(argv):
                pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
                processes.append(subprocess.Popen(self._over_ssh(command), text=True, errors="replace", **pipes))  # type: ignore[call-overload]
        except OSError as error:
            for process in processes:
                process.kill()
                process.communicate()
            raise LaunchError(f"{self._ssh[0]} can't be run: {error}; install ssh, or paste the dry run") from None
        outputs = []
        for host, process in zip(self.hosts, processes):
            try:
                output, complaint = process.communicate(timeout=max(0.1, deadline_s - time.monotonic()))
                outputs.append(HostOutput(host.name, process.returncode, output, complaint))
            except subprocess.TimeoutExpired:
                process.kill()
                output, complaint = process.communicate()
                outputs.append(HostOutput(host.name, None, output, complaint))
        return outputs

    def interrupt(self) -> None:
        """Types Ctrl-C on every host: torchrun passes it on and the ranks end with a checkpoint."""
        for _, process in self._started:
            if process.poll() is None and process.stdin is not None:
                try:
                    # The remote terminal (-tt) turns the character into SIGINT.
                    process.stdin.write(b"\x03")
                    process.stdin.flush()
                except OSError:
                    continue

    def cancel(self, grace_s: float = 0.0) -> None:
        """Closes every connection, which ends the remote commands; by force after ``grace_s`` seconds."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and any(process.poll() is None for _, process in self._started):
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        for _, process in self._started:
            process.wait(10.0)
            if process.stdin is not None:
                process.stdin.close()
        self._started = []

    def _signal(self, number: int) -> None:
        for _, process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, number)
