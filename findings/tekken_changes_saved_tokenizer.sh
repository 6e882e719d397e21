#!/usr/bin/env bash
# transformers' AutoTokenizer saves other files if mistral-common is installed.
#
# Mistral's folders, as Ministral 3's, have tokenizer.json and tekken.json. With mistral-common
# installed, AutoTokenizer reads tekken.json, and save_pretrained writes tekken.json alone: a merged
# or fine-tuned model's folder then lacks tokenizer.json, which servers with fast tokenizers read.
# PreTrainedTokenizerFast of the same folder writes tokenizer.json.
# One would guess that save_pretrained writes back the kind of files that the folder has.
#
# Seen: AutoTokenizer: tekken.json; PreTrainedTokenizerFast: tokenizer.json, tokenizer_config.json.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet transformers==5.24.0 mistral-common==1.13.1 jinja2
venv/bin/python - <<'PYTHON' 2> /dev/null
import shutil
from pathlib import Path

import mistral_common
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

model = Path("model")
model.mkdir()
data = Path(mistral_common.__file__).parent / "data"
shutil.copy(data / "tekken_240911.json", model / "tekken.json")
(model / "config.json").write_text('{"model_type": "ministral3"}')
PreTrainedTokenizerFast.from_pretrained(model).save_pretrained(model)
print("transformers", transformers.__version__, "mistral-common", mistral_common.__version__)
print("the model's folder:", sorted(file.name for file in model.iterdir()))
saved = {}
for kind in (AutoTokenizer, PreTrainedTokenizerFast):
    folder = Path(kind.__name__)
    kind.from_pretrained(model).save_pretrained(folder)
    saved[kind] = sorted(file.name for file in folder.iterdir())
    print(f"saved by {kind.__name__}:", saved[kind])
assert saved[AutoTokenizer] == ["tekken.json"]
assert "tokenizer.json" in saved[PreTrainedTokenizerFast]
print("AutoTokenizer leaves tokenizer.json out")
PYTHON
