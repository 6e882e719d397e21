"""Service of a random model with real shapes, its catalog on S3, and requests to it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from loadtest.real_service.random_models import SHAPES
from loadtest.real_service.service import RunningService

TENANT = "acme"


@dataclass(frozen=True)
class Said:
    """Greedy answer: tokens, their log probabilities, and the HTTP headers."""

    tokens: list[int]
    logprobs: list[float]
    headers: httpx.Headers

    @property
    def residency(self) -> str | None:
        return self.headers.get("x-lorikeet-residency")

    @property
    def replica(self) -> str:
        return self.headers["x-lorikeet-replica"]


@dataclass(frozen=True)
class Fleet:
    """Running service.

    count: number of replicas.
    tensor_parallel: GPUs (or processes) of each replica.
    """

    running: RunningService
    shape: str
    model: Path
    count: int
    tensor_parallel: int
    admin_key: str
    key: str

    def lorikeet(self, *arguments: str) -> str:
        """Run the admin CLI; return its output."""
        environment = {
            "LORIKEET_SERVER": self.running.admin_url,
            "LORIKEET_ADMIN_KEY": self.admin_key,
        }
        command = "import sys; from lorikeet.cli import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def holders(self, adapter: str) -> set[str]:
        """Return the replicas that hold the adapter on their GPU."""
        return {
            replica["replica"]
            for replica in self.running.replicas(self.admin_key)
            for held in replica["adapters"]
            if held["adapter"] == adapter and held["residency"] == "gpu"
        }

    def ask(self, model: str, prompt: list[int], tokens: int) -> Said:
        """Decode greedily beyond any end token; return the tokens with their log probabilities."""
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 1,
            "return_token_ids": True,  # without ids, special tokens have no logprobs
        }
        answer = httpx.post(
            f"{self.running.url}/v1/completions",
            json=body,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=120,
        ).raise_for_status()
        choice: dict[str, Any] = answer.json()["choices"][0]
        said, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        assert (len(said), len(logprobs)) == (tokens, tokens), answer.text
        return Said(said, logprobs, answer.headers)

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Return random token ids."""
        vocabulary = SHAPES[self.shape]["vocab_size"]
        return np.random.default_rng([seed, tokens]).integers(0, vocabulary, tokens).tolist()


def replica_processes() -> list[int]:
    """Return the service's replica processes that have started an engine."""
    started = psutil.Process().children(recursive=True)
    return [one.ppid() for one in started if "lorikeet_engine.process.server" in one.cmdline()]
