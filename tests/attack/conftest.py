"""The demo service under attack, an attacker beside another tenant, and the table of results.

ATTACK_S: seconds of each attack, ten minutes by default. With 75 the first eight take ten minutes
in all.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest

from tests.e2e.conftest import ROOT, Crowd, Service, free_port, run_service
from tests.e2e.load import Target

ATTACK_S = float(os.environ.get("ATTACK_S", "600"))
COLD_ADAPTERS = 200


@dataclass(frozen=True)
class Row:
    """Effect of an attack on the other tenant's requests and on the service's memory in bytes."""

    attack: str
    attacker_saw: str
    answered: int
    failed: int
    quiet_p99_s: float
    p99_s: float
    quiet_bytes: int
    bytes_after: int

    def __str__(self) -> str:
        return (
            f"{self.attack:<26} {self.answered:>8} {self.failed:>6} {1000 * self.quiet_p99_s:>9.0f}"
            f" {1000 * self.p99_s:>9.0f} {self.quiet_bytes / 2**20:>10.0f}"
            f" {self.bytes_after / 2**20:>9.0f}  {self.attacker_saw}"
        )


TITLE = f"{'attack':<26} answered failed quiet p99 p99 in ms before MiB after MiB  attacker saw"
ROWS: list[Row] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ROWS:
        terminalreporter.write_line(TITLE)
        for row in ROWS:
            terminalreporter.write_line(str(row))


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as environ:
        root = tmp_path_factory.mktemp("attacked")
        environ.setenv("LORIKEET_CATALOG", str(root / "catalog"))
        environ.setenv("LORIKEET_CACHE_DIR", str(root / "cache"))
        environ.setenv("LORIKEET_REPLICAS", "2")
        environ.setenv("LORIKEET_ADAPTER_GPU_MEMORY", "4MiB")  # holds 50 of 200 adapters
        environ.setenv("LORIKEET_ADAPTER_HOST_MEMORY", "4MiB")
        environ.setenv("LORIKEET_ADAPTER_DISK", "16MiB")
        environ.setenv("LORIKEET_FILES_BYTES", str(2**30))
        environ.setenv("LORIKEET_ADMIN_ADDRESS", f"127.0.0.1:{free_port()}")
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environ.setenv("PYTHONPATH", os.pathsep.join(paths))  # for the actors, too
        environ.chdir(ROOT)
        yield from run_service(root)


@pytest.fixture(scope="session")
def attacker(service: Service, tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    """Attacking tenant, with more adapters than replicas hold at once."""
    return Crowd(service, tmp_path_factory.mktemp("crowd") / "peft").adapters(COLD_ADAPTERS)


def service_bytes(service: Service) -> int:
    """Bytes of memory of the service's processes that they share with no other process."""
    ours = 0
    for process in psutil.process_iter():
        try:
            if process.environ().get("LORIKEET_CATALOG") == service.catalog and _serves(process):
                ours += process.memory_full_info().uss
        except (psutil.Error, OSError):  # another user's process, or one that has just ended
            continue
    return ours


def _serves(process: psutil.Process) -> bool:
    line = " ".join(process.cmdline())
    return line.startswith("ray::") or "lorikeet_engine" in line
