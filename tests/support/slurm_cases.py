"""A real Slurm on this machine, of several nodes, without root's services: it is started for the
tests that need one, on free ports, and ended with everything it ran.

Taken from PATH where Slurm is installed, else from what `make` unpacked into `.venv/slurm`.
"""

import contextlib
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from getpass import getuser
from pathlib import Path

import pytest
from cli_cases import surroundings

from rloo_cli.utils import paths

NODES = ("gpu-node-01", "gpu-node-02", "gpu-node-03")
UNPACKED = Path(__file__).parents[2] / ".venv" / "slurm"
DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
CLIENTS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
CONF = """
ClusterName=rlootest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/ctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/ctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ReturnToService=2
KillWait=10
MinJobAge=600
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
SchedulerParameters=sched_min_interval=200000
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL")


def missing() -> str:
    """Why there can be no Slurm here; "" where there can."""
    if sys.platform != "linux":
        return f"Slurm runs on Linux, this is {sys.platform}"
    lost = [name for name in (*DAEMONS[:2], *CLIENTS) if _program(name) is None]
    return f"no {', '.join(lost)} in PATH, and none in {UNPACKED} (make test)" if lost else ""


def _program(name: str) -> Path | None:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found:
        return Path(found)
    places = [UNPACKED / "usr" / f for f in (f"bin/{name}", f"sbin/{name}", f"sbin/{name}-wlm")]
    return next((p for p in places if p.is_file()), None)


def _libraries() -> tuple[Path, Path] | None:
    """Of unpacked packages: the folder of Slurm's plug-ins, and that of the libraries it needs."""
    plugins = next(iter(UNPACKED.glob("usr/lib/*/slurm-wlm")), None)
    return None if plugins is None or shutil.which("slurmctld") else (plugins, plugins.parent)


def free_ports(count: int) -> list[int]:
    """So many ports that nobody has at this moment."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


@dataclass
class Slurm:
    """A controller and its nodes, from `start` to `stop`. `environment` is that of its users."""

    folder: Path
    base: Path  # of the session: pytest's temporary folder
    nodes: Sequence[str] = NODES
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Start all of it; all nodes are idle then."""
        for name in ("state", "spool", "log", "run", "bin", "work"):
            (self.folder / name).mkdir()
        self._programs()
        first, *ports = free_ports(1 + len(self.nodes))
        here = platform.node().partition(".")[0]
        text = CONF.format(host=here, port=first, user=getuser(), folder=self.folder).lstrip()
        if (found := _libraries()) is not None:
            text += f"PluginDir={found[0]}\n"
        for name, port in zip(self.nodes, ports, strict=True):
            text += f"NodeName={name} NodeHostname={here} NodeAddr=127.0.0.1 Port={port}"
            text += " CPUs=2 RealMemory=2000\n"
        every = f"Nodes={','.join(self.nodes)}"
        text += f"PartitionName=low {every} Default=YES PriorityTier=1"
        text += " PreemptMode=REQUEUE GraceTime=20 MaxTime=60\n"
        text += f"PartitionName=high {every} PriorityTier=100 PreemptMode=OFF\n"
        text += f"PartitionName=small Nodes={self.nodes[0]} PriorityTier=1 MaxTime=4\n"
        (self.folder / "slurm.conf").write_text(text)
        self.environment = surroundings(self.base) | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
        }
        for name in [n for n in self.environment if n.startswith(("SLURM_", "SBATCH_"))]:
            if name != "SLURM_CONF":
                del self.environment[name]
        self.run("slurmctld", "-i", "-c")
        for name in self.nodes:
            self.run("slurmd", "-N", name, "-d", str(self.folder / "bin" / "slurmstepd"))
        assert self.idle(30), self.logs()

    def _programs(self) -> None:
        """`rloo` and Slurm's programs, in a folder for PATH.

        The unpacked ones get their libraries by the loader's own option: a variable would reach
        the jobs too.
        """
        python = f'exec "{sys.executable}" -P -m rloo_cli "$@"'
        self._script("rloo", python)
        libraries = _libraries()
        for name in (*DAEMONS, *CLIENTS):
            program = _program(name)
            if libraries is None or program is None:
                self._script(name, f'exec "{program or name}" "$@"')
                continue
            loader = next(iter(Path("/").glob("lib*/ld-linux*.so.2")))
            folders = [*libraries, *UNPACKED.glob("lib/*")]
            where = ":".join(str(p) for p in folders)
            self._script(name, f'exec {loader} --library-path "{where}" "{program}" "$@"')

    def _script(self, name: str, line: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def command(self, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        """A command that ended, started in the folder `work`; its streams are one."""
        return subprocess.run(
            [str(self.folder / "bin" / words[0]), *words[1:]],
            cwd=self.work,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=300,
        )

    def run(self, *words: str, check: bool = True, **variables: str) -> str:
        """What a command says."""
        ended = self.command(*words, **variables)
        assert not check or ended.returncode == 0, f"{words}: {ended.stdout}"
        return ended.stdout

    def submit(self, *words: str, **variables: str) -> "Job":
        """`sbatch` with these words."""
        said = self.run("sbatch", "--parsable", *words, **variables)
        return Job(self, said.strip().splitlines()[-1].partition(";")[0])

    def idle(self, limit: float) -> bool:
        """Whether all nodes are idle, within so many seconds."""
        until = time.monotonic() + limit
        while True:
            states = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
            if states and set(states) == {"idle"}:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        found = sorted((self.folder / "log").glob("*.log"))
        return "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in found)

    def stop(self) -> None:
        """Cancel every job, end the daemons."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user", getuser(), check=False)
            for job in self.run("squeue", "-h", "-o", "%i", check=False).split():
                Job(self, job).wait(20)
        pids = [int(p.read_text()) for p in (self.folder / "run").glob("*.pid")]
        for number in (15, 9):
            for pid in filter(_runs, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            until = time.monotonic() + 10
            while any(map(_runs, pids)) and time.monotonic() < until:
                time.sleep(0.1)

    @property
    def work(self) -> Path:
        """The folder that jobs are submitted from."""
        return self.folder / "work"


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass(frozen=True)
class Job:
    """One job."""

    slurm: Slurm
    number: str

    def facts(self) -> dict[str, str]:
        """What `scontrol show job` says."""
        said = self.slurm.run("scontrol", "show", "job", "-o", self.number)
        return dict(re.findall(r"(\S+?)=(\S*)", said.splitlines()[0]))

    @property
    def state(self) -> str:
        """Its state."""
        return self.facts()["JobState"]

    def wait(self, limit: float, *states: str) -> dict[str, str]:
        """Its facts once it is in one of these states (default: at its end)."""
        until = time.monotonic() + limit
        while (facts := self.facts())["JobState"] not in (states or ENDED):
            assert time.monotonic() < until, f"{facts}\n{self.said()[-3000:]}\n{self.slurm.logs()}"
            time.sleep(0.2)
        return facts

    def until_said(self, text: str, limit: float) -> float:
        """Wait until its log holds this; the time when it did."""
        until = time.monotonic() + limit
        while text not in self.said():
            assert time.monotonic() < until, f"no {text!r} in:\n{self.said()}\n{self.facts()}"
            assert self.state not in ENDED, self.said()
            time.sleep(0.1)
        return time.monotonic()

    def said(self) -> str:
        """Its log."""
        path = Path(self.facts()["StdOut"])
        return path.read_text(errors="replace") if path.exists() else ""

    def at_once(self) -> None:
        """A requeued job waits two minutes; this one need not."""
        until = time.monotonic() + 60
        while self.facts()["JobState"] != "PENDING":
            assert time.monotonic() < until, self.facts()
            time.sleep(0.2)
        time.sleep(2)  # the credential that was revoked has the time in seconds: not this one too
        self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")


def script(name: str) -> str:
    """The path of one of our batch scripts."""
    return str(paths.SLURM / f"{name}.sbatch")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Three nodes, shared by all tests."""
    if reason := missing():
        pytest.skip(reason)
    made = Slurm(tmp_path_factory.mktemp("slurm"), tmp_path_factory.getbasetemp())
    try:
        made.start()
        yield made
    finally:
        made.stop()
