"""Hosts on one machine: a network, a process table, a name and a disk of its own for each.

    with Hosts(2, tmp_path) as hosts:
        processes = [hosts.start(i, ["torchrun", ...]) for i in range(2)]

Network namespaces on a bridge, 10.77.0.1 and so on. Every host has a private memory disk at the
same path, `hosts.work`, so nothing is shared but the installed software. Needs root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from pathlib import Path
from types import TracebackType

NETWORK, PORT = "10.77.0", 29500
_TOOLS = ("ip", "unshare", "hostname", "mount")


def why_not() -> str | None:
    """Why this machine can make no hosts; None where it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (Debian: iproute2, util-linux)"
    probe = "ip link add sumgrad0 type veth peer name sumgrad1 && mount -t tmpfs none /mnt"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-c", probe],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no namespaces here: {tried.stderr.strip()[:200]}" if tried.returncode else None


class Hosts:
    """Use as a context manager; on leaving, every process of every host is gone."""

    def __init__(self, number: int, place: Path) -> None:
        self.number, self.place = number, place
        self.work = place / "work"  # private to each host
        self._names = [f"sg{uuid.uuid4().hex[:6]}{i}" for i in range(number)]
        self._bridge = f"sg{uuid.uuid4().hex[:8]}"
        self._started: list[tuple[int, subprocess.Popen[str]]] = []

    def __enter__(self) -> Hosts:
        self.work.mkdir(parents=True)
        known = [f"{self.address(i)} host{i}" for i in range(self.number)]
        (self.place / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        _ip("netns add", self._bridge)
        _ip(f"-n {self._bridge} link add bridge type bridge")
        _ip(f"-n {self._bridge} link set bridge up")
        for i, name in enumerate(self._names):
            _ip("netns add", name)
            _ip(f"link add {name}e type veth peer name {name}b")
            _ip(f"link set {name}e netns {name} name eth0")
            _ip(f"link set {name}b netns {self._bridge}")
            _ip(f"-n {self._bridge} link set {name}b master bridge up")
            _ip(f"-n {name} addr add {self.address(i)}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
            _ip(f"-n {name} link set lo up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _, process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for name in (*self._names, self._bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def start(self, host: int, command: list[str], **environment: str) -> subprocess.Popen[str]:
        """A command on a host, in its private folder; its output is stdout, text."""
        inside = (
            f"hostname host{host} && mount -t tmpfs none {shlex.quote(str(self.work))} && "
            f"mount --bind {shlex.quote(str(self.place / 'hosts'))} /etc/hosts && "
            f"cd {shlex.quote(str(self.work))} && {shlex.join(command)}; exit $?"
        )
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], *namespaces, "--mount-proc",
             "sh", "-c", inside],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        self._started.append((host, process))
        return process

    def power_off(self, host: int) -> None:
        """Every process of a host ends, and nothing of it is answered any more."""
        self.cut(host)
        for at, process in self._started:
            if at == host and process.poll() is None:
                process.kill()

    def cut(self, host: int) -> None:
        """Its cable is pulled: no packet comes or goes, and no connection is told."""
        _ip(f"-n {self._bridge} link set {self._names[host]}b down")

    def mend(self, host: int) -> None:
        _ip(f"-n {self._bridge} link set {self._names[host]}b up")

    def narrow(self, host: int, rate: str) -> None:
        """A line of so many bits a second, as `2mbit`; what does not fit in a moment is dropped."""
        _run(["tc", "-n", self._names[host], "qdisc", "add", "dev", "eth0", "root", "tbf",
              "rate", rate, "burst", "4kb", "latency", "50ms"])  # fmt: skip

    def processes(self, host: int) -> list[int]:
        """What runs on a host, as process ids of this machine."""
        told = subprocess.run(
            ["ip", "netns", "pids", self._names[host]], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in told.stdout.split()]


def _ip(words: str, *more: str) -> None:
    _run(["ip", *words.split(), *more])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"
