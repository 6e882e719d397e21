"""Runs clients' examples against a service, each in its own process."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

RUN_S = 600
PYTEST = ("-m", "pytest", "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-q")


@dataclass(frozen=True)
class Served:
    """A service, its key, a model, and a model that writes down orders (examples/orders.py)."""

    url: str
    key: str
    model: str
    orders_model: str

    def run(self, command: list[str], folder: Path) -> None:
        """Run a command; fail unless it succeeds."""
        done = subprocess.run(
            command,
            cwd=folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert not done.returncode, done.stdout + done.stderr

    def _environment(self) -> dict[str, str]:
        return {name: os.environ[name] for name in ("PATH", "HOME")} | {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "MODEL": self.model,
            "ORDERS_MODEL": self.orders_model,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it is downloaded
            "AI_SDK_LOG_WARNINGS": "false",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
