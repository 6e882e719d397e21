"""Validation of a folder's adapters in a process of its own: `judge_adapters.py FOLDER`.

Each subfolder holds a blob or a PEFT folder. Prints a line of JSON for each: the refusal if there
is one, CPU seconds, and the peak growth of the process in bytes.
"""

import json
import sys
import time
from pathlib import Path

from lorikeet.errors import InvalidAdapter
from lorikeet.gateway.admin.blob_validation import validate_blob
from lorikeet.gateway.services import ServedModel
from lorikeet_engine.adapter_format import write_blob
from lorikeet_engine.errors import AdapterError
from tests.engine.malformed import BLOB, LIMITS, SHAPE

BASE_MODELS = {"tiny": ServedModel(SHAPE)}


def judge(folder: Path) -> dict[str, object]:
    """Validate an adapter as register and then the gateway do; measure time and memory."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory in use
    held, began_s = _status("VmRSS"), time.process_time()
    said = _refusal(folder)
    cost_s, peak = time.process_time() - began_s, _status("VmHWM")
    return {"name": folder.name, "said": said, "cpu_s": cost_s, "bytes": peak - held}


def _refusal(folder: Path) -> str | None:
    try:
        if not (folder / BLOB).exists():
            write_blob(folder, folder / BLOB)
        validate_blob(folder / BLOB, BASE_MODELS, LIMITS)
    except (AdapterError, InvalidAdapter) as error:
        return error.message
    return None


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


if __name__ == "__main__":
    for found in sorted(Path(sys.argv[1]).iterdir()):
        print(json.dumps(judge(found)))
