#!/usr/bin/env bash
# transformers 5.24.0's AutoTokenizer splits a text of a model of type qwen2 as Qwen's, whatever
# tokenizer.json says.
#
# The type is in a list of models whose tokenizer_class is "known to be incorrect": AutoTokenizer
# makes a Qwen2Tokenizer, which takes vocabulary and merges from tokenizer.json, and its own rules
# for normalising and splitting instead of the file's. Models of this architecture that were trained
# with another tokenizer, say with numbers in groups of three digits, so get other ids, also with
# the tokenizer_class TokenizersBackend, which transformers names for reading the file as it is, and
# save_pretrained writes the changed rules. tokenizers and PreTrainedTokenizerFast read the file.
# One would guess that tokenizer.json holds all of a fast tokenizer, or that a warning tells.
#
# Seen: for "12345" with 123 and 45 in the vocabulary, AutoTokenizer gives five tokens for qwen2 and
# two for llama, tokenizers and PreTrainedTokenizerFast two for both; a copy that AutoTokenizer saved
# gives five in tokenizers, too.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3 transformers==5.24.0
cat > run.py <<'PYTHON'
import json
from pathlib import Path

import tokenizers
import transformers
from tokenizers import Regex, decoders, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {token: number for number, token in enumerate([*letters, "12", "123", "45"])}
merges = [("1", "2"), ("12", "3"), ("4", "5")]
made = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
groups = pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated")
made.pre_tokenizer = pre_tokenizers.Sequence([groups, pre_tokenizers.ByteLevel(False, use_regex=False)])
made.decoder = decoders.ByteLevel()


def read(folder):
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("12345").tokens


for model_type in ("llama", "qwen2"):
    folder = Path(model_type)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    auto = transformers.AutoTokenizer.from_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    auto.save_pretrained(folder / "saved")
    print(model_type, "tokenizers", *read(folder), "PreTrainedTokenizerFast", *fast.tokenize("12345"))
    print(model_type, "AutoTokenizer", *auto.tokenize("12345"), "saved", *read(folder / "saved"))
PYTHON
venv/bin/python run.py 2> errors | tee seen || { cat errors; exit 1; }
! grep -i tokenizer_class errors
diff seen - <<'SEEN'
llama tokenizers 123 45 PreTrainedTokenizerFast 123 45
llama AutoTokenizer 123 45 saved 123 45
qwen2 tokenizers 123 45 PreTrainedTokenizerFast 123 45
qwen2 AutoTokenizer 1 2 3 4 5 saved 1 2 3 4 5
SEEN
