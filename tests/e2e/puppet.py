"""Replica that reports the contents of a file; its process imports nothing else of the tests."""

import json
from pathlib import Path


class Puppet:
    """Replica that reports the contents of a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    async def record_autoscaling_stats(self) -> dict[str, float]:
        stats: dict[str, float] = json.loads(self._file.read_text())
        return stats
