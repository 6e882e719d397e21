"""Ceph's S3 server, radosgw, from Debian packages unpacked into a cache folder; needs no root.

The cluster has one monitor, one OSD with objects in memory, no manager and no internal
authentication. Its processes listen only on localhost and end with the process that started them.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from loadtest.ports import free_port

_PACKAGES = ("radosgw", "ceph-mon", "ceph-osd")
_START_S = 120
_CONFIG = """\
[global]
fsid = {fsid}
mon host = {monitor}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind msgr1 = false
ms mon client mode = crc
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
plugin dir = {libraries}/ceph
erasure code dir = {libraries}/ceph/erasure-code
osd class dir = {libraries}/rados-classes
osd objectstore = memstore
memstore device bytes = 4294967296
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon max pg per osd = 500
mon data avail crit = 0
# Each pool takes a round of Paxos: start in 4 s instead of 13.
paxos propose interval = 0.05
paxos min wait = 0.01
# Tests send small parts; by default only the last part may be below 5 MiB.
rgw multipart min part size = 1
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
"""


class NotInstallable(Exception):
    """The packages cannot be had on this machine; the message names what is missing."""


@contextlib.contextmanager
def radosgw(access_key: str, secret_key: str) -> Iterator[str]:
    """Run a server with one user; yield its URL.

    access_key, secret_key: the user's keys.

    Raises NotInstallable if Ceph's packages cannot be had.
    """
    programs = _Programs(install())
    with tempfile.TemporaryDirectory(prefix="radosgw-") as name, contextlib.ExitStack() as running:
        folder, port = Path(name), free_port()
        config, monmap = folder / "ceph.conf", str(folder / "monmap")
        fsid, monitor = str(uuid.uuid4()), f"[v2:127.0.0.1:{free_port()}]"
        config.write_text(
            _CONFIG.format(
                fsid=fsid,
                monitor=monitor,
                folder=folder,
                libraries=programs.libraries,
                port=port,
            )
        )
        ceph = _Cluster(programs, config, running)
        osd = str(uuid.uuid4())
        for part in ("mon", "osd", "rgw"):
            (folder / part).mkdir()
        ceph.run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", monitor, monmap)
        ceph.run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        ceph.start("ceph-mon", "-i", "a")
        ceph.run("ceph", "osd", "new", osd)
        ceph.run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        ceph.start("ceph-osd", "-i", "0")
        user = ("--uid", "test", "--display-name", "test")
        keys = ("--access-key", access_key, "--secret-key", secret_key)
        ceph.run("radosgw-admin", "user", "create", *user, *keys)
        ceph.start("radosgw", "-n", "client.rgw")
        ceph.wait_for_port(port)
        yield f"http://127.0.0.1:{port}"


def install() -> Path:
    """Unpack Ceph's programs; return their root folder, / if Debian has installed them."""
    if all(map(shutil.which, _PACKAGES)):
        return Path("/")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise NotInstallable("radosgw comes from Debian's packages: this needs apt-get and dpkg")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lorikeet"
    target = cache / "ceph"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as name:
            unpacked = Path(name) / "ceph"
            _unpack(Path(name), unpacked)
            with contextlib.suppress(OSError):  # another process has renamed first
                unpacked.rename(target)
    return target


def _unpack(folder: Path, target: Path) -> None:
    plan = _apt("--simulate", "install", *_PACKAGES, cwd=folder)
    wanted = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    print(f"Fetching radosgw and its dependencies, {len(wanted)} Debian packages…", flush=True)
    _apt("download", *wanted, cwd=folder)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", package, target], check=True)


def _apt(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        ["apt-get", "-qq", "--no-install-recommends", "-o", "APT::Sandbox::User=root", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"LC_ALL": "C"},
    )
    if done.returncode:
        raise NotInstallable(
            f"apt-get {arguments[0]} failed: {done.stderr.strip()}\n"
            "Ceph needs Debian's package lists: run `apt-get update` as root"
        )
    return done.stdout


class _Programs:
    """Ceph's programs under a root folder, which need not be /."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def libraries(self) -> Path:
        return next(self._root.glob("usr/lib/*/ceph/libceph-common.so.*")).parent.parent

    @cached_property
    def environment(self) -> dict[str, str]:
        folders = [
            self.libraries,
            self.libraries / "ceph",
            self._root / "lib" / self.libraries.name,
        ]
        return os.environ | {
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders)),
            "PYTHONPATH": str(self._root / "usr/lib/python3/dist-packages"),
        }

    def command(self, name: str) -> list[str]:
        program = str(self._root / "usr/bin" / name)
        # ceph is a script for Debian's Python; its modules are unpacked beside it.
        return ["/usr/bin/python3", program] if name == "ceph" else [program]


class _Cluster:
    """Configuration of a cluster, and its processes in order of start."""

    def __init__(self, programs: _Programs, config: Path, running: contextlib.ExitStack) -> None:
        self._programs = programs
        self._config = config
        self._running = running
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self, name: str, *arguments: str) -> None:
        """Run a program to its end; fail unless it succeeds."""
        done = subprocess.run(
            self._command(name, *arguments),
            env=self._programs.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_START_S,
        )
        assert done.returncode == 0, f"{name} {' '.join(arguments)}: {done.stdout}"

    def start(self, name: str, *arguments: str) -> None:
        """Start a program in the background, until the exit stack closes."""
        with (self._config.parent / f"{name}.out").open("wb") as out:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self._command(name, "-f", *arguments)],
                env=self._programs.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self._running.callback(_end, process)
        self._processes.append(process)

    def wait_for_port(self, port: int) -> None:
        """Wait until the newest process accepts connections at the port."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            assert self._processes[-1].poll() is None, self._output()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.05)
        raise AssertionError(f"radosgw did not start in {_START_S} s: {self._output()}")

    def _command(self, name: str, *arguments: str) -> list[str]:
        return [*self._programs.command(name), "-c", str(self._config), *arguments]

    def _output(self) -> str:
        return "\n".join(path.read_text() for path in self._config.parent.glob("*.out"))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # kill: nobody needs the data
    process.wait()
