#!/usr/bin/env bash
# transformers 5.24.0 raises TypeError or ZeroDivisionError for EXAONE 4 configs that its own
# documentation describes, unless they list layer_types as well.
#
# Exaone4Config documents sliding_window_pattern as None (no windows), a number, or a text such as
# "LLLG"; published config.json files have the text, and null where there are no windows. If
# layer_types is not in the file, the class takes the pattern for a number in any case: a text or
# null is a TypeError, and a sliding_window of null sets the number to 0 and divides by it.
# One would guess that each documented value is read, and that "LLLG" means what 4 means.
#
# Seen: 4 gives three layers with windows and one without; "LLLG" and null raise TypeError, and
# sliding_window=null ZeroDivisionError. With layer_types beside them, all are read.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.24.0
cat > run.py <<'PYTHON'
from transformers import Exaone4Config

KINDS = ["sliding_attention"] * 3 + ["full_attention"]
assert '"LLLG"' in Exaone4Config.__doc__
assert Exaone4Config(num_hidden_layers=4, sliding_window_pattern=4).layer_types == KINDS
found = {}
for key, value in (("sliding_window_pattern", "LLLG"), ("sliding_window_pattern", None),
                   ("sliding_window", None)):
    given = {"num_hidden_layers": 4, key: value}
    assert Exaone4Config(**given, layer_types=KINDS).layer_types == KINDS
    try:
        Exaone4Config(**given)
    except (TypeError, ZeroDivisionError) as error:
        found[f"{key}={value!r}"] = f"{type(error).__name__}: {error}"
    else:
        raise SystemExit(f"transformers reads {key}={value!r}")
for given, error in found.items():
    print(f"transformers 5.24.0, EXAONE 4, {given} without layer_types: {error}")
PYTHON
venv/bin/python run.py
