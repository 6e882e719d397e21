"""Trainer that pushes steps of a demo adapter, which differ only in strength."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from demo.fill_catalog import ADAPTERS
from demo.tasks import TASKS
from lorikeet.client import Client, PushResult
from lorikeet.errors import LorikeetError
from lorikeet_engine.adapter_format import write_blob
from tests.e2e.conftest import Service

TASK = TASKS[0]


class Steps:
    """Adapter folders and blobs of training steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = shutil.copytree(ADAPTERS / TASK.tenant / TASK.name, folder / "peft")
        self._config = json.loads((self._folder / "adapter_config.json").read_text())

    def folder(self, step: int) -> Path:
        """Write the step as PEFT saves it, over the step before; return the folder."""
        alpha = self._config["lora_alpha"] * (1 + step / 1000)
        changed = json.dumps(self._config | {"lora_alpha": alpha})
        (self._folder / "adapter_config.json").write_text(changed)
        return self._folder

    def blob(self, step: int) -> bytes:
        """Return the step's blob, as it is pushed."""
        path = self._folder.with_name("blob")
        write_blob(self.folder(step), path)
        return path.read_bytes()


class SteadyTrainer:
    """Trainer that pushes versions as prod, one after the other, while it samples from prod.

    pushed: durable versions, in order.
    answered: digest of each answer.
    stale: digests of answers by a version older than the last that was durable when the request
        was sent.
    """

    def __init__(self, service: Service, publish_key: str, name: str, folder: Path) -> None:
        self._client = Client(service.url, service.tenant_keys[TASK.tenant], publish_key)
        self._steps, self._name = Steps(folder), name
        self._stopped = threading.Event()
        self.model = f"{TASK.tenant}/{name}"
        self.pushed: list[PushResult] = []
        self.answered: list[str] = []
        self.stale: list[str] = []

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Push and sample until the block ends; raise any error of either thread."""
        with ThreadPoolExecutor(2) as threads:
            self._working = [threads.submit(self._push), threads.submit(self._ask)]
            try:
                self.wait_for(2)
                yield
            finally:
                self._stopped.set()
            for each in self._working:
                each.result()

    def wait_for(self, versions: int, within_s: float = 90) -> None:
        """Wait until `versions` more are durable."""
        wanted, until_s = len(self.pushed) + versions, time.monotonic() + within_s
        while len(self.pushed) < wanted:
            for each in self._working:
                if each.done():
                    each.result()
            assert time.monotonic() < until_s, f"only {len(self.pushed)} of {wanted} versions"
            time.sleep(0.02)

    def _push(self) -> None:
        step = 0
        while not self._stopped.is_set():
            step += 1
            folder = self._steps.folder(step)
            version = self._client.push(
                folder, self._name, alias="prod", wait="durable", timeout_s=90
            )
            self.pushed.append(version)

    def _ask(self) -> None:
        while not self._stopped.is_set():
            if not (known := [version.digest for version in self.pushed]):
                time.sleep(0.01)
                continue
            try:
                (choice,) = self._client.sample(self.model, TASK.example.prompt, max_tokens=2)
            except LorikeetError:
                time.sleep(0.1)  # a gateway or a replica was killed
                continue
            assert choice.digest is not None
            self.answered.append(choice.digest)
            if choice.digest in known[:-1]:
                self.stale.append(choice.digest)
