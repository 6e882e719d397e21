"""Where numbers come from and where they go: the machine, the commit, one JSON file."""

import argparse
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def arguments(doc: str) -> argparse.ArgumentParser:
    """What every benchmark asks for; doc: the module's."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="where the numbers go")
    parser.add_argument("--commit", default=_commit(), help="what is measured")
    return parser


def facts(commit: str) -> dict[str, str]:
    """What a number needs beside it; printed as well."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{gpu}, torch {torch.__version__}, commit {commit}, {now}", flush=True)
    return {"gpu": gpu, "torch": torch.__version__, "commit": commit, "date": now}


def write(path: Path, facts: dict[str, str], **parts: Any) -> None:
    """One object: the facts, and each part's rows under its name."""
    path.write_text(json.dumps({**facts, **parts}, indent=1) + "\n")


def _commit() -> str:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"
