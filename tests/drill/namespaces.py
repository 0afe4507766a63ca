"""Several machines played on this one: network namespaces with addresses of their own, joined by a bridge.

    with Machines(3) as machines:
        machines.start_ray(cpus=(0, 1, 1))
        run = machines[0].popen(["hacrl", "train", "run.yaml", f"execution.address={machines.ray_address}"])
        machines[1].cut()      # its cable is pulled; the processes on it go on
        machines[1].heal()

All share the file system, but for /tmp/ray, and the cores, and each sees all processes: `address: auto` could find
another cluster. Processes of one machine do not see another's network, nor this one's. Needs root; `not_permitted`
tells. What a killed owner has left behind is removed by the next one.

From a shell: `python tests/drill/namespaces.py 0 1 1` starts a cluster with so many cores on each machine, prints how
to run a command on the first one, and takes it away at Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT = 6379
START_SECONDS = 60.0
STOP_SECONDS = 10.0
NAME = re.compile(r"hacrl-(\d+)-(\d+)")

# Each machine has its own /tmp/ray, name and list of names, as separate ones would. A token that some earlier use of
# Ray has left in the home folder would turn authentication on for the head, and not for those that join it.
ENTER = (
    'mount --bind "$1" /tmp/ray && mount --bind "$2" /etc/hosts && hostname "$3" && export PATH="$4:$PATH" && '
    'export RAY_AUTH_MODE=disabled && shift 4 && exec "$@"'
)


def not_permitted() -> str | None:
    """Why there can be no machines here; None if there can."""
    if sys.platform != "linux" or shutil.which("ip") is None or shutil.which("unshare") is None:
        return "network namespaces need Linux, `ip` and `unshare`"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name, link = f"hacrl-{os.getpid()}-99", f"hb{os.getpid()}x"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode == 0:
        tried = subprocess.run(["ip", "link", "add", link, "type", "bridge"], capture_output=True, text=True)
        subprocess.run(["ip", "link", "del", link], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"network namespaces are refused here: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine. `namespace` is that of `ip netns`, `cable` its end of the link at the bridge."""

    namespace: str
    host: str
    address: str
    cable: str
    folder: Path

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs these arguments on this machine; programs of this Python's environment are found
        by name."""
        return [
            *("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", ENTER, "sh"),
            *(str(self.folder / "ray"), str(self.folder.parent / "hosts"), self.host, str(Path(sys.executable).parent)),
            *arguments,
        ]

    def popen(self, arguments: Sequence[str], **settings: Any) -> subprocess.Popen[Any]:
        """Start a process here; `settings` are those of `subprocess.Popen`. Its pid is that of the program itself."""
        return subprocess.Popen(self.command(arguments), **settings)

    def processes(self) -> list[int]:
        """Everything that runs here."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def cut(self) -> None:
        _ip("link", "set", self.cable, "down")

    def heal(self) -> None:
        _ip("link", "set", self.cable, "up")

    def kill(self) -> None:
        """The machine loses its power: whatever runs on it is gone at once."""
        end = time.monotonic() + STOP_SECONDS
        while (left := self.processes()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


class Machines:
    """So many machines on one bridge, for the length of a `with`. The first is the head of what `start_ray` starts."""

    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hacrl-machines-"))
        self._bridge = f"hb{os.getpid()}"
        self._ray: list[subprocess.Popen[bytes]] = []
        self._keepers: list[threading.Thread] = []
        self._over = threading.Event()
        self._machines = [
            Machine(
                namespace=f"hacrl-{os.getpid()}-{number}",
                host=f"machine-{number}",
                address=f"10.77.0.{number + 1}",
                cable=f"hv{os.getpid()}x{number}",
                folder=self.folder / str(number),
            )
            for number in range(count)
        ]

    def __enter__(self) -> Machines:
        _remove_of_dead_owners()
        names = "".join(f"{machine.address} {machine.host}\n" for machine in self._machines)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        Path("/tmp/ray").mkdir(exist_ok=True)  # something to mount each machine's own over
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for machine in self._machines:
                (machine.folder / "ray").mkdir(parents=True)
                _ip("netns", "add", machine.namespace)
                _ip("link", "add", machine.cable, "type", "veth", "peer", "name", "eth0", "netns", machine.namespace)
                _ip("link", "set", machine.cable, "master", self._bridge, "up")
                _ip("-n", machine.namespace, "address", "add", f"{machine.address}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    _ip("-n", machine.namespace, "link", "set", device, "up")
                # It leads nowhere, but a machine finds out its own address by asking for the way to the world.
                _ip("-n", machine.namespace, "route", "add", "default", "dev", "eth0")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        _remove([machine.namespace for machine in self._machines], self._bridge)
        for keeper in self._keepers:
            keeper.join()
        for process in self._ray:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, number: int) -> Machine:
        return self._machines[number]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __len__(self) -> int:
        return len(self._machines)

    @property
    def ray_address(self) -> str:
        return f"{self[0].address}:{PORT}"

    def start_ray(self, *, cpus: Sequence[int], settings: Sequence[str] = ()) -> None:
        """`ray start` on every machine, with so many cores each; `settings` are more of its arguments. Returns when all
        have joined."""
        for machine, cores in zip(self._machines, cpus, strict=True):
            self.start_ray_on(machine, cpus=cores, settings=settings)

    def keep_ray_on(self, machine: Machine, *, cpus: int) -> None:
        """`start_ray_on`, and again whenever Ray has ended there, as whoever looks after a machine would do."""

        def keep() -> None:
            while not self._over.wait(1):
                if process.poll() is None:
                    continue
                machine.kill()
                with contextlib.suppress(RuntimeError):  # the others cannot be reached yet
                    start()

        def start() -> None:
            nonlocal process
            process = self.start_ray_on(machine, cpus=cpus)

        process = self.start_ray_on(machine, cpus=cpus)
        self._keepers.append(threading.Thread(target=keep, daemon=True))
        self._keepers[-1].start()

    def start_ray_on(
        self, machine: Machine, *, cpus: int, settings: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """The same on one machine, also again, where Ray was killed there; `environment` is put over this process's."""
        head = machine is self[0]
        place = ["--head", f"--port={PORT}", "--include-dashboard=false"] if head else [f"--address={self.ray_address}"]
        log = machine.folder / "ray-start.log"
        variables = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"} | (environment or {})
        arguments = [
            *("ray", "start", "--block", "--disable-usage-stats", f"--node-ip-address={machine.address}"),
            *(f"--num-cpus={cpus}", "--object-store-memory=100000000", *place, *settings),
        ]
        with log.open("wb") as output:
            process = machine.popen(
                arguments,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=variables,
                start_new_session=True,
            )
        self._ray.append(process)
        end = time.monotonic() + START_SECONDS
        while "--block" not in (text := log.read_text(errors="replace")):  # the last it prints when all is up
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{machine.host}: `{shlex.join(arguments)}` did not start Ray:\n{text}")
            time.sleep(0.1)
        return process


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`ip {shlex.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


def _remove(namespaces: Sequence[str], bridge: str) -> None:
    """Whatever of it there is."""
    there = {line.split()[0] for line in _ip("netns", "list").splitlines() if line.strip()}
    for name in namespaces:
        if name in there:
            Machine(namespace=name, host="", address="", cable="", folder=Path()).kill()
            # By itself it would go some time after its namespace, and until then nobody could have its name.
            owner, number = NAME.fullmatch(name).groups()
            subprocess.run(["ip", "link", "del", f"hv{owner}x{number}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _remove_of_dead_owners() -> None:
    owners: dict[str, list[str]] = {}
    for line in _ip("netns", "list").splitlines():
        match = NAME.match(line)
        if match and not Path("/proc", match[1]).exists():
            owners.setdefault(match[1], []).append(match[0])
    for owner, names in owners.items():
        _remove(names, f"hb{owner}")


def main() -> None:
    with Machines(len(sys.argv) - 1) as machines:
        machines.start_ray(cpus=[int(cores) for cores in sys.argv[1:]])
        for machine in machines:
            print(f"{machine.host} {machine.address}  cable {machine.cable}  # ip link set {machine.cable} down|up")
        print(f"on the first: {shlex.join(machines[0].command([]))} COMMAND", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
