"""A gateway on loopback over a real catalog, and the command that administers it."""

import functools
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from typer.main import get_command
from typer.testing import CliRunner, Result

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import Scope
from lorikeet.catalog.resumable_uploads import PART_BYTES
from lorikeet.catalog.store.local import LocalStore
from lorikeet.catalog.store.object_store import ObjectStore
from lorikeet.cli import app
from lorikeet.gateway.app import create_app
from lorikeet.gateway.call_encoders import CallEncoders
from lorikeet.gateway.services import ServedModel, Services
from lorikeet.parity.figures import Parity, Verdict
from lorikeet.protocol.messages import (
    Continuation,
    EncodedCall,
    Refusal,
    SmokeResult,
    SmokeTest,
    StreamItem,
)
from lorikeet.protocol.parity import ParityTest
from lorikeet.protocol.replica_report import ReplicaReport
from lorikeet.text.template_server import TemplateProcesses
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import AdapterLimits, BaseCopy
from tests.cli.peft_folders import SHAPE
from tests.forked_processes import start_template_server
from tests.gateway.conftest import demo_encoder


class ReportingEngines:
    """Replicas that report the states that a test sets; no test of the CLI generates.

    second: second token of an adapter's answers in a smoke test; the base model's second token is
        1.
    base_matrices: SHA-256 of the base model's matrices.
    """

    def __init__(self) -> None:
        self.said: list[ReplicaReport] = []
        self.second = 2
        self.base_matrices: set[str] = set()
        self.proofs: list[ParityTest] = []
        self.proved: Parity | Refusal = Parity(Verdict.ACCEPTED, 3, 0.01, 0.03, 0.0002)

    def stream_answer(
        self, base_model: str, encoded: EncodedCall
    ) -> AsyncGenerator[StreamItem, None]:
        raise NotImplementedError

    async def smoke(self, base_model: str, test: SmokeTest) -> SmokeResult | Refusal:
        said = [Continuation((n, 1), f"said {n}") for n, _ in enumerate(test.prompts)]
        other = [Continuation((n, self.second), f"said {n}") for n, _ in enumerate(test.prompts)]
        return SmokeResult("r0", Residency.REMOTE, tuple(said), tuple(other))

    async def parity(self, base_model: str, test: ParityTest) -> Parity | Refusal:
        self.proofs.append(test)
        return self.proved

    async def changed_copies(self, base_model: str, copies: Sequence[BaseCopy]) -> list[str]:
        return [copy.module for copy in copies if copy.sha256 not in self.base_matrices]

    async def reports(self, _: Residency = Residency.DISK) -> Sequence[ReplicaReport]:
        return self.said

    async def deliver(self, base_model: str, ref: AdapterRef, blob: Path) -> bool:
        return True

    async def holds(self, base_model: str, digest: str) -> bool:
        return True

    async def release(self, base_model: str, digest: str) -> None:
        """Do nothing: these replicas hold no adapters."""

    def max_context(self, base_model: str) -> int | None:
        return None

    def ready(self) -> bool:
        return True


@dataclass(frozen=True)
class Lorikeet:
    """A running gateway, and calls of the command-line client on it."""

    url: str
    admin_key: str
    catalog: AdapterCatalog
    engines: ReportingEngines

    def run(self, *arguments: str, **environment: str) -> Result:
        """Run the command in a terminal of 100 columns.

        environment: environment variables to set.
        """
        own = {"LORIKEET_SERVER": self.url, "LORIKEET_ADMIN_KEY": self.admin_key, "COLUMNS": "100"}
        return CliRunner().invoke(app, arguments, env=own | environment, prog_name="lorikeet")

    def do(self, *arguments: str) -> str:
        """Run a command that must succeed; return its stdout."""
        result = self.run(*arguments)
        assert result.exit_code == 0, result.stderr
        return str(result.stdout)


@pytest.fixture(autouse=True, scope="session")
def _commands_built_once() -> Iterator[None]:
    """Build the tree of commands once, not for each call: a quarter of these tests' time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(get_command))
        yield


@pytest.fixture(autouse=True, scope="module")
def _template_servers_forked() -> Iterator[None]:
    """Fork the processes that render templates; tests/text starts them as gateways do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TemplateProcesses, "_start_server", start_template_server)
        yield


@pytest.fixture
def lorikeet(tmp_path: Path) -> Iterator[Lorikeet]:
    """Run a gateway with the tenant acme."""
    catalog, key = new_catalog(LocalStore(tmp_path / "catalog"))
    with serving(catalog, key) as running:
        yield running


def new_catalog(store: ObjectStore) -> tuple[AdapterCatalog, str]:
    """Create a catalog with the tenant acme; return it and an admin's key."""
    catalog = AdapterCatalog.init(store)
    catalog.create_tenant("acme", actor="test")
    _, key = catalog.create_key(None, {Scope.ADMIN}, actor="test")
    return catalog, key


@contextmanager
def serving(
    catalog: AdapterCatalog,
    key: str,
    part_bytes: int = PART_BYTES,
    **served: Any,
) -> Iterator[Lorikeet]:
    """Run a gateway over a catalog.

    key: an admin's key.
    part_bytes: size of the parts in which blobs are uploaded.
    served: fields of the base model, such as quantization.
    """
    engines = ReportingEngines()
    services = Services(
        catalog=catalog,
        base_models={"tiny": ServedModel(SHAPE, **served)},
        limits=AdapterLimits(max_rank=16, max_bytes=2**20),
        engines=engines,
        encoders=CallEncoders({"tiny": demo_encoder()}),
        part_bytes=part_bytes,
    )
    config = uvicorn.Config(create_app(services), log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        yield Lorikeet(f"http://127.0.0.1:{listener.getsockname()[1]}", key, catalog, engines)
        server.should_exit = True
        thread.join(timeout=10)
