"""A planned start without faults: the demo's model, a catalog on S3, and good machines."""

import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import boto3
import pytest

from demo.fill_catalog import fill_catalog
from loadtest.ports import free_port
from lorikeet.doctor.checks import CHECKS, run_checks
from lorikeet.doctor.finding import Finding, Severity
from lorikeet.doctor.machine import Cuda, Gpu, Host
from lorikeet.doctor.planned_start import PlannedStart
from lorikeet.settings import Settings

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
HOST = Host(memory=64 * GIB, available=60 * GIB, shm=32 * GIB, open_files=65536)
NO_CUDA = Cuda()
H100 = Gpu("NVIDIA H100", 80 * GIB, 79 * GIB)
FLAGS = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_PROXY_USE_GRPC": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "134217728",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "lorikeet.serving.proxy_middleware:middlewares",
    "RAY_worker_niceness": "0",
}


@dataclass(frozen=True)
class Patient:
    """Environment and machine of a planned start.

    environ: environment variables.
    more: variables to set in addition to environ; an empty value unsets one.
    wait_s: time limit of each check.
    """

    environ: Mapping[str, str]
    model: Path
    http_port: int
    cuda: Cuda = NO_CUDA
    host: Host = HOST
    gpu_memory: int | None = None
    wait_s: float = 60.0
    more: Mapping[str, str] = field(default_factory=dict)

    def planned(self, **changes: object) -> PlannedStart:
        """Return the start of a changed patient.

        changes: fields of the Patient to replace.
        """
        it = replace(self, **changes)  # type: ignore[arg-type]
        return PlannedStart(
            {name: value for name, value in {**it.environ, **it.more}.items() if value},
            it.gpu_memory,
            it.http_port,
            find_gpus=lambda: it.cuda,
            find_host=lambda: it.host,
        )

    def examined(self, *names: str, **changes: object) -> list[Finding]:
        """Run checks on a changed patient.

        names: names of the checks to run; none: all checks.
        changes: fields of the Patient to replace.
        """
        within_s = replace(self, **changes).wait_s  # type: ignore[arg-type]
        checks = [check for check in CHECKS if not names or check.name in names]
        timed = [replace(check, within_s=within_s) for check in checks]
        return run_checks(self.planned(**changes), timed)


def faults(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is not Severity.OK]


def keys_of(url: str) -> set[str]:
    """List the keys of a catalog's objects on S3."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    listed = boto3.session.Session().client("s3").list_objects_v2(Bucket=bucket, Prefix=prefix)
    return {found["Key"] for found in listed["Contents"]}


def variable(name: str, value: str) -> dict[str, object]:
    """Return the change of a Patient that sets a LORIKEET_ variable."""
    return {"more": {f"LORIKEET_{name}": value}}


@pytest.fixture(scope="session")
def filled(s3_bucket: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a catalog with the demo's adapters and an admin's key."""
    url = f"{s3_bucket}/doctor-{uuid.uuid4().hex}"
    settings = Settings.from_env({"LORIKEET_CATALOG": url, "LORIKEET_BASE_MODELS": _models()})
    fill_catalog(settings, tmp_path_factory.mktemp("keys"))
    return url


@pytest.fixture
def patient(filled: str, tmp_path: Path) -> Patient:
    model = shutil.copytree(ROOT / "demo" / "model", tmp_path / "model")
    environ = FLAGS | {
        "PATH": os.environ["PATH"],
        "LORIKEET_CATALOG": filled,
        "LORIKEET_BASE_MODELS": f"lorikeet-demo={model}",
        "LORIKEET_CACHE_DIR": str(tmp_path / "cache"),
        "LORIKEET_ADAPTER_DISK": "2MiB",
        "LORIKEET_ADMIN_ADDRESS": f"127.0.0.1:{free_port()}",
    }
    return Patient(environ, model, free_port())


def _models() -> str:
    return f"lorikeet-demo={ROOT / 'demo' / 'model'}"
