#!/usr/bin/env bash
# jsonschema 4.26.0 calls 19.99 no multiple of 0.01, and finds "12\n" to match ^\d+$.
#
# multipleOf divides two floats and asks whether the quotient is whole, so an amount of money fails
# by the rounding of its last bit. Patterns are Python's expressions: `$` also matches before a line
# end, `\d` also digits of other scripts, and \p{…}, which JSON schema recommends, is no pattern.
# jsonschema-rs 0.60.3, with the same schemas, takes numbers as decimal and patterns as JavaScript's.
# One would guess that validators agree on numbers that JSON writes exactly.
#
# Seen: of the 10,000 amounts from 0.00 to 99.99, jsonschema refuses 1,363, jsonschema-rs none;
# jsonschema takes "12\n" and an Arabic digit for ^\d+$, and raises an error for ^\p{L}$.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet jsonschema==4.26.0 jsonschema-rs==0.60.3
cat > run.py <<'PYTHON'
import json
import re

import jsonschema
import jsonschema_rs

amounts = [json.loads(f"{cents // 100}.{cents % 100:02}") for cents in range(10_000)]
kinds = {"jsonschema": jsonschema.Draft202012Validator, "jsonschema-rs": jsonschema_rs.Draft202012Validator}
for name, kind in kinds.items():
    exact = kind({"multipleOf": 0.01})
    refused = sum(not exact.is_valid(amount) for amount in amounts)
    digits = kind({"pattern": r"^\d+$"})
    taken = [text for text in ("12", "12\n", "\u0663", "a") if digits.is_valid(text)]
    try:
        letter = kind({"pattern": r"^\p{L}$"}).is_valid("\u00e9")
    except re.error:
        letter = "no pattern"
    print(f"{name}: refused amounts {refused}; taken as digits {ascii(taken)}; a letter: {letter}")
PYTHON
venv/bin/python run.py | tee seen
diff seen - <<'SEEN'
jsonschema: refused amounts 1363; taken as digits ['12', '12\n', '\u0663']; a letter: no pattern
jsonschema-rs: refused amounts 0; taken as digits ['12']; a letter: True
SEEN
