"""Writer in its own process: python one_writer.py URL NAME COUNT.

Registers COUNT versions of acme/support, each with its own blob, and makes each version prod.
Prints a line for each version once it is committed.
"""

import hashlib
import sys
import tempfile
from itertools import count, islice
from pathlib import Path

from lorikeet.catalog.catalog import AdapterCatalog
from lorikeet.catalog.records import BlobFacts
from lorikeet.catalog.store.object_store import open_store


def main(url: str, name: str, versions: int) -> None:
    catalog = AdapterCatalog(open_store(url))
    catalog.reader.refresh()
    print("ready", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        blob = Path(folder) / "blob"
        for number in islice(count(), versions):
            data = f"{name} {number}".encode() * 1000
            blob.write_bytes(data)
            digest = hashlib.sha256(data).hexdigest()
            facts = BlobFacts(digest, len(data), 8, "demo", 10)
            version = catalog.register("acme", "support", blob, facts, promote=True, actor=name)
            print(version.version, digest, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
