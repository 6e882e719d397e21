"""From the local disk to the host arena: a blob that is packed, an image that was packed before.

python -m engine.benchmarks.packing --json packing.json

Adapters of rank 16 on all linears of Llama-3.1-8B, their files in the page cache, loaded one at a
time as an engine loads them: from the request for it until its image is whole in the arena. What
lands is compared with the packed adapter to the bit.
"""

import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median

import torch

from engine.benchmarks import results
from engine.benchmarks.random_adapters import Shelf, random_layout
from engine.benchmarks.random_model import LLAMA_3_1_8B
from lorikeet_engine.adapter import AdapterRef, Residency
from lorikeet_engine.adapter_format import AdapterLimits, BaseShape, read_spec
from lorikeet_engine.residency.disk import DiskCache
from lorikeet_engine.residency.host import HostArena
from lorikeet_engine.residency.image_file import fingerprint
from lorikeet_engine.residency.loading import Loader
from lorikeet_engine.residency.packing import PackedLayout, pack

RANK = 16
LOADS = 20
DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Row:
    """The loads from one kind of file."""

    source: str
    image_bytes: int
    loads: int
    median_ms: float
    worst_ms: float


class Bench:
    """Two adapters on the disk, and an arena with room for one of them: each load is a new one."""

    def __init__(self, folder: Path, shape: BaseShape, rank: int) -> None:
        shelf = Shelf(folder / "remote", shape, count=2, rank=rank)
        limits, elements = AdapterLimits(rank, 1 << 40), random_layout(shape, rank).elements
        self._image_bytes = elements * DTYPE.itemsize
        self._disk = DiskCache(folder / "disk", 1 << 40, shelf, fingerprint(shape, limits, DTYPE))
        self._host = HostArena(self._image_bytes, DTYPE, pin=torch.cuda.is_available())
        self._woken = threading.Event()
        self._loader = Loader(shape, limits, self._disk, self._host, elements, self._woken.set)
        self._turns = cycle(shelf.refs)
        self._want: dict[AdapterRef, torch.Tensor] = {}
        for ref in shelf.refs:
            self._disk.fetch(ref)
            blob = self._disk.blob(ref.digest)
            spec = read_spec(blob, shape, limits)
            self._want[ref] = torch.empty(elements, dtype=DTYPE)
            pack(blob, spec, PackedLayout.of(spec, shape), self._want[ref])

    def measure(self, source: str, loads: int) -> Row:
        """Load the two in turn from "blob" or "image".

        Raises AssertionError when what lands is not the packed adapter.
        """
        took_ms = []
        for ref in islice(self._turns, loads + 2):
            if source == "blob":
                self._disk.remove_image(ref.digest)
            took_ms.append(1e3 * self._load(ref))
            while not self._disk.has_image(ref.digest):  # its writing is not to slow the next load
                time.sleep(0.001)
        took_ms = took_ms[2:]  # the first find an arena that the system has not given yet
        return Row(source, self._image_bytes, loads, median(took_ms), max(took_ms))

    def close(self) -> None:
        """End the loader's threads."""
        self._loader.close()

    def _load(self, ref: AdapterRef) -> float:
        """In seconds."""
        began_s = time.perf_counter()
        self._loader.load(ref, Residency.HOST, urgent=True)
        while not (landings := self._loader.landings()):
            self._woken.wait()
            self._woken.clear()
        took_s = time.perf_counter() - began_s
        held = self._host.hold(ref.digest)
        assert held is not None, landings
        assert torch.equal(held[1], self._want[ref]), f"{ref}: another image than was packed"
        for _ in range(2):  # the landing's hold, and this one
            self._host.release(ref.digest)
        return took_s


def measure_all(folder: Path, shape: BaseShape, rank: int, loads: int) -> list[Row]:
    """Both kinds; prints each row as it comes."""
    print("from            image    loads     median      worst")
    bench, rows = Bench(folder, shape, rank), []
    for source in ("blob", "image"):
        row = bench.measure(source, loads)
        print(
            f"{source:<8}{row.image_bytes / 1e6:>10.1f} MB{row.loads:>9}{row.median_ms:>8.1f} ms"
            f"{row.worst_ms:>8.1f} ms",
            flush=True,
        )
        rows.append(row)
    bench.close()
    return rows


def main() -> None:
    """Measure on this machine's disk."""
    options = results.arguments(__doc__).parse_args()
    facts = results.facts(options.commit)
    with tempfile.TemporaryDirectory() as folder:
        shape = BaseShape.from_config(LLAMA_3_1_8B)
        rows = measure_all(Path(folder), shape, RANK, LOADS)
    results.write(options.json, facts, packing=[asdict(row) for row in rows])


if __name__ == "__main__":
    main()
