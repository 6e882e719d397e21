#!/usr/bin/env bash
# tokenizers 0.23.3 and transformers 5.24.0 read one tokenizer.json and give different ids.
#
# A tokenizer that was trained or used with truncation and padding saves both in tokenizer.json.
# tokenizers.Tokenizer.from_file applies them to every encode: a text of eight tokens comes back as
# four, a text of one as four with padding, and no warning. PreTrainedTokenizerFast of transformers
# switches both off for each call that does not ask for them, and returns eight and one.
# So a server that encodes with tokenizers cuts prompts that the same folder keeps in transformers.
#
# Seen: tokenizers 4 and 4 ids, transformers 8 and 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tokenizers==0.23.3 transformers==5.24.0
cd "$folder" && venv/bin/python - <<'PYTHON'
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = ["[PAD]", "[UNK]", *"abcdefgh"]
model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
made = Tokenizer(model)
made.pre_tokenizer = pre_tokenizers.Whitespace()
made.enable_truncation(max_length=4)
made.enable_padding(length=4, pad_token="[PAD]", pad_id=0)
made.save("tokenizer.json")

texts = ["a b c d e f g h", "a"]
plain = Tokenizer.from_file("tokenizer.json")
fast = PreTrainedTokenizerFast(tokenizer_file="tokenizer.json", pad_token="[PAD]")
lengths = [len(plain.encode(text).ids) for text in texts]
lengths_fast = [len(fast(text)["input_ids"]) for text in texts]
print("ids by tokenizers:", lengths, "by transformers:", lengths_fast)
assert lengths == [4, 4], lengths
assert lengths_fast == [8, 1], lengths_fast
PYTHON
echo "as described"
