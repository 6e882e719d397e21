"""Own files and functions that one warm chat request enters: python -m loadtest.request_files.

The service runs on this machine with the demo's base model, one gateway and one replica. Functions
that its processes also enter without a request are left out. Prints the files of each kind of
process in order of first call, and their numbers.
"""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from loadtest.cluster import ROOT
from loadtest.real_service.adapters import fill_catalog, model_name
from loadtest.real_service.service import parts_of_processes, service
from lorikeet.settings import Settings

_IDLE_S = 8.0
"""Seconds without requests in which the service's background work is recorded."""
_WRITTEN_S = 2.0
"""Seconds in which each process starts to record, ends its last work or writes its functions."""
_WARM_REQUESTS = 3
_TOKENS = 8


def main() -> None:
    """Run the service, send one warm chat and print what it entered."""
    with tempfile.TemporaryDirectory(prefix="request-files-") as name:
        folder = Path(name)
        variables = {
            "LORIKEET_CATALOG": f"{folder}/catalog",
            "LORIKEET_CACHE_DIR": f"{folder}/cache",
            "LORIKEET_BASE_MODELS": f"lorikeet-demo={ROOT / 'demo/model'}",
        }
        key = fill_catalog(Settings.from_env(variables), [8]).key
        variables["REQUEST_FILES_FOLDER"] = name
        path = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{path}"
        with service(variables, "Serve's proxy") as running:
            for _ in range(_WARM_REQUESTS):
                chat(running.url, key)
            time.sleep(_WRITTEN_S)
            with recording(folder) as idle:
                time.sleep(_IDLE_S)
            with recording(folder) as entered:
                chat(running.url, key)
    show(
        {part: [f for f in found if f not in idle.get(part, [])] for part, found in entered.items()}
    )


def chat(url: str, key: str) -> None:
    """Stream a chat with an adapter. Raises httpx.HTTPError."""
    body: dict[str, Any] = {
        "model": model_name(0),
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": _TOKENS,
        "min_tokens": _TOKENS,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    assert answer.text.endswith("data: [DONE]\n\n")


@contextmanager
def recording(folder: Path) -> Iterator[dict[str, list[str]]]:
    """Record until the end of the block; then yield's dict has the entered functions, as
    path:name, by kind of process.
    """
    entered: dict[str, list[str]] = {}
    mark = folder / "on"
    mark.touch()
    time.sleep(_WRITTEN_S)
    yield entered
    time.sleep(_WRITTEN_S)
    mark.unlink()
    time.sleep(_WRITTEN_S)
    parts = parts_of_processes()
    for file in folder.glob("[0-9]*"):
        found = entered.setdefault(parts.get(int(file.name), "this program"), [])
        found += file.read_text().splitlines()
        file.unlink()


def show(entered: Mapping[str, list[str]]) -> None:
    """Print the entered functions' files, by kind of process, and the numbers of both."""
    together: set[str] = set()
    for part, functions in entered.items():
        files = dict.fromkeys(function.rpartition(":")[0] for function in functions)
        together |= files.keys()
        print(f"{part}: {len(files)} files, {len(functions)} functions")
        for file in files:
            print("   ", file.removeprefix(f"{ROOT}/"))
    print(f"together: {len(together)} files")


if __name__ == "__main__":
    main()
