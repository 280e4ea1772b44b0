"""Nodes of a cluster are namespaces on this machine.

A rack is a network with a bridge, in a namespace of its own: the machine's own network is never
touched. A node is joined to the bridge and has its own address, host name, processes, `/tmp`,
`/run` and `/root`; `/srv` is the directory that nodes share. All of it, processes, networks and
files in memory, is gone when the first process of the rack's PID namespace is, and the kernel ends
that one with the process that made it, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.launched import ROOT
from tests.support.waits import patience, wait_until
from zero_tp.run.process.node import die_with

SHARED = Path("/srv")
TOOLS = [
    "ip",
    "unshare",
    "nsenter",
    "ps",
    "ssh",
    "sshd",
    "pdsh",
    "slurmctld",
    "slurmd",
    "srun",
    "munged",
    "sshfs",
]
NETWORK = "10.77.0"

# The kernel reaps what such a first process inherits, as it ignores SIGCHLD.
_FIRST = "trap '' CHLD; exec sleep infinity"
_SPACES = ("--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")


def require() -> None:
    """Fail unless this process may create nodes and has their tools."""
    missing = [
        tool
        for tool in TOOLS
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None
    ]
    if missing:
        pytest.fail(
            f"{', '.join(missing)} not found: install what tests/cluster/packages.txt lists",
            pytrace=False,
        )
    if os.geteuid():
        pytest.fail(
            "the tests of a cluster make network namespaces, which takes root", pytrace=False
        )


def _mount_own(directory: str, content: str) -> str:
    """Return shell lines that replace a directory by `content`, in which the project and Python
    stay visible.
    """
    lines = [f"mkdir -p {content}"]
    for path in (ROOT, Path(sys.prefix), Path(sys.base_prefix)):
        if path.is_relative_to(directory):
            inside = f"{content}/{path.relative_to(directory)}"
            lines += [f"mkdir -p {inside}", f"mount --rbind {path} {inside}"]
    return "\n".join([*lines, f"mount --rbind {content} {directory}"])


class Space:
    """A space has namespaces of its own, for as long as its first process lives."""

    def __init__(
        self, words: Sequence[str], first: str, preexec: Callable[[], None] | None = None
    ) -> None:
        self.starter = subprocess.Popen([*words, "bash", "-euc", first], preexec_fn=preexec)
        self.pid = 0

        def ready() -> bool:
            assert self.starter.poll() is None, "the namespaces could not be made"
            for each in psutil.Process(self.starter.pid).children(recursive=True):
                # A command of `first` that has ended.
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.pid = each.pid if each.name() == "sleep" else self.pid
            return self.pid > 0

        wait_until(ready, 10, "the namespaces were not made", 0.01)

    def enter(self, *more: str) -> list[str]:
        """Return the words that start a command inside."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--pid", *more]

    def shell(self, script: str) -> str:
        done = subprocess.run(
            [*self.enter(), "bash", "-euc", script], capture_output=True, text=True
        )
        assert done.returncode == 0, f"{script}\n{done.stderr}"
        return done.stdout


class Node(Space):
    """A node of a rack.

    Attributes:
        name, address: its host name and its address on the bridge.
    """

    def __init__(self, rack: Rack, number: int) -> None:
        self.name, self.address = f"node{number}", f"{NETWORK}.{number}"
        home = f"/mnt/{self.name}"
        own = [
            _mount_own(directory, f"{home}{directory}") for directory in ("/tmp", "/run", "/root")
        ]
        first = "\n".join(
            [
                f"hostname {self.name}",
                f"mkdir -p {home}",
                *own,
                "chmod 1777 /tmp",
                f"mount --bind /mnt/shared {SHARED}",
                "mount --bind /mnt/hosts /etc/hosts",
                "ip link set lo up",
                _FIRST,
            ]
        )
        super().__init__([*rack.enter(), "unshare", "--uts", "--ipc", *_SPACES], first)
        rack.join(self)

    def enter(self, *more: str) -> list[str]:
        return super().enter("--uts", "--ipc", *more)

    def start(
        self,
        *words: str,
        directory: Path = SHARED,
        variables: Mapping[str, str] | None = None,
        output: Any = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Start a command on the node as a session of its own: stdout and stderr to `output`."""
        return subprocess.Popen(
            [*self.enter(f"--wd={self.seen(directory)}"), *words],
            env=environment() | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        *words: str,
        limit: float = 120,
        directory: Path = SHARED,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node; its stdout has stderr too. `limit`: seconds of an idle
        machine.
        """
        process = self.start(
            *words, directory=directory, variables=variables, output=subprocess.PIPE
        )
        try:
            output, _ = process.communicate(timeout=patience(limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(
                f"{' '.join(words)} on {self.name} took more than {limit} s:\n{output}"
            ) from None
        return subprocess.CompletedProcess(words, process.returncode, output)

    def seen(self, path: Path) -> Path:
        """Return the path in this process's namespace of a path on the node."""
        return Path(f"/proc/{self.pid}/root") / path.relative_to("/")

    def processes(self) -> list[psutil.Process]:
        """Return all processes on the node, however they were started."""
        own, processes = os.readlink(f"/proc/{self.pid}/ns/net"), []
        for pid in psutil.pids():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended
                if os.readlink(f"/proc/{pid}/ns/net") == own:
                    processes.append(psutil.Process(pid))
        return processes

    def pids(self, pattern: str) -> list[int]:
        """Return the node's own numbers of its processes whose command lines contain `pattern`."""
        return [int(word) for word in self.run("pgrep", "-f", pattern).stdout.split()]

    # --- what runs on it --------------------------------------------------------------------------

    def serve_ssh(self) -> None:
        """Start an sshd; nodes whose homes have the rack's key let each other in."""
        self.shell(
            f"""
            mkdir -p /run/sshd ~root/.ssh; chmod 700 ~root ~root/.ssh
            cp /mnt/key ~root/.ssh/id_ed25519; cp /mnt/key.pub ~root/.ssh/authorized_keys
            printf 'Host *\\n StrictHostKeyChecking no\\n UserKnownHostsFile /dev/null\\n LogLevel ERROR\\n' \
                > ~root/.ssh/config
            ssh-keygen -q -t ed25519 -N '' -f /run/sshd/host
            printf '%s\\n' 'HostKey /run/sshd/host' 'PidFile /run/sshd/pid' 'UsePAM no' 'PermitRootLogin yes' \
                'ListenAddress {self.address}' 'Subsystem sftp internal-sftp' 'StrictModes no' > /run/sshd/config
            /usr/sbin/sshd -f /run/sshd/config
            """  # noqa: E501
        )

    def mount_late(self, server: Node, directory: Path) -> None:
        """Mount a directory of another node, with views that are up to 60 s old and without
        common locks.
        """
        late = ",".join(f"{name}_timeout=60" for name in ("attr", "entry", "negative", "dcache"))
        self.shell(
            f"sshfs {server.name}:{directory} {directory} -o {late} </dev/null >/dev/null 2>&1"
        )

    def unmount(self, directory: Path) -> None:
        self.shell(f"umount -l {directory}")


class Rack(Space):
    """A rack has a bridge that its nodes are joined to."""

    def __init__(self, nodes: int) -> None:
        require()
        super().__init__(["unshare", *_SPACES], _FIRST, partial(die_with, psutil.Process()))
        hosts = "\n".join(
            ["127.0.0.1 localhost", *(f"{NETWORK}.{n} node{n}" for n in range(1, nodes + 1))]
        )
        self.shell(
            f"""
            mount -t tmpfs -o mode=755 rack /mnt
            mkdir /mnt/shared; echo '{hosts}' > /mnt/hosts
            ssh-keygen -q -t ed25519 -N '' -f /mnt/key
            ip link set lo up; ip link add bridge type bridge; ip link set bridge up
            """
        )
        self.nodes = [Node(self, number) for number in range(1, nodes + 1)]

    def join(self, node: Node) -> None:
        """Join a node to the bridge by a pair of network devices: `eth0` there, its name here."""
        # `ip` runs among this machine's processes, where the node's number is known, and in the
        # rack's network.
        words = ["nsenter", f"--target={self.pid}", "--net", "--"]
        for command in (
            f"ip link add {node.name} type veth peer name eth0 netns {node.pid}",
            f"ip link set {node.name} master bridge up",
        ):
            subprocess.run([*words, *command.split()], check=True)
        node.shell(f"ip address add {node.address}/24 dev eth0; ip link set eth0 up")

    def close(self) -> None:
        """End all that runs in the rack, and wait for it."""
        self.starter.kill()
        self.starter.wait()
        for node in self.nodes:
            node.starter.wait(10)


def environment() -> dict[str, str]:
    """What a shell on a node has: this process's Python first, one thread, no accelerator."""
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
