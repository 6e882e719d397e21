#!/usr/bin/env bash
# compressed-tensors 0.20 reads no checkpoint that was quantised with activation ordering by group.
#
# actorder "group" (in configs also "dynamic" or true) stores which group each input belongs to
# (weight_g_idx). Releases to 0.18 write it into quantization_config; 0.20.1 refuses the config
# itself, with the advice to quantise otherwise, so that transformers cannot load the checkpoint.
# One would guess that a format's library goes on reading what its earlier releases wrote.
# Lorikeet reads such checkpoints, by their weight_g_idx.
#
# Seen: 0.18.0 writes and reads actorder "group"; 0.20.1 raises ValidationError for the same config,
# and reads "static", "weight" and null.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 loguru psutil pydantic
for version in 0.18.0 0.20.1; do
  venv/bin/pip install --quiet --no-deps --target "$version" compressed-tensors=="$version"
done
cat > write.py <<'PYTHON'
import json

from compressed_tensors.quantization import QuantizationArgs

args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
for order in ("group", "static", "weight", None):
    written = QuantizationArgs(**args, actorder=order).model_dump_json()
    with open(f"{order}.json", "w") as file:
        file.write(written)
    print("0.18.0 writes actorder", json.loads(written)["actorder"])
PYTHON
cat > read.py <<'PYTHON'
from pathlib import Path

import compressed_tensors
from compressed_tensors.quantization import QuantizationArgs
from pydantic import ValidationError

refused = []
for path in sorted(Path().glob("*.json")):
    try:
        QuantizationArgs.model_validate_json(path.read_text())
    except ValidationError as error:
        refused.append(path.stem)
        print(compressed_tensors.__version__, "refuses", path.stem, "-", error.errors()[0]["msg"])
    else:
        print(compressed_tensors.__version__, "reads", path.stem)
assert refused == ([] if compressed_tensors.__version__ == "0.18.0" else ["group"]), refused
PYTHON
PYTHONPATH=0.18.0 venv/bin/python write.py 2> /dev/null
PYTHONPATH=0.18.0 venv/bin/python read.py 2> /dev/null
PYTHONPATH=0.20.1 venv/bin/python read.py 2> /dev/null
