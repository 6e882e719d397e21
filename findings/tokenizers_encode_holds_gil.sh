#!/usr/bin/env bash
# tokenizers' Tokenizer.encode keeps Python's lock for as long as it works; encode_batch does not.
#
# A server that encodes long prompts in a thread, as asyncio.to_thread(tokenizer.encode, text), still
# stops its event loop for the whole time. encode_batch and encode_batch_fast with a list of this one
# text release the lock, and return the same ids; encode_batch_fast finds no offsets.
# One would guess that Rust code of this length releases the lock in either function.
#
# Seen: longest pause of another thread as a part of the encoding: encode 1.00, encode_batch 0.00,
# encode_batch_fast 0.01; encode_batch_fast took half of encode's time.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3
TOKENIZERS_PARALLELISM=false venv/bin/python - <<'PYTHON'
import threading
import time

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(letters)}, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
text = "some words of a long prompt " * 60_000


def pauses(encode):
    """Return the longest pause of another thread, the time of the encoding, and its ids."""
    ended, gaps = threading.Event(), []

    def beat():
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    beating = threading.Thread(target=beat)
    beating.start()
    began = time.perf_counter()
    encoded = encode()
    took = time.perf_counter() - began
    ended.set()
    beating.join()
    return max(gaps), took, encoded.ids


print("tokenizers", tokenizers.__version__)
ways = {
    "encode": lambda: tokenizer.encode(text),
    "encode_batch": lambda: tokenizer.encode_batch([text])[0],
    "encode_batch_fast": lambda: tokenizer.encode_batch_fast([text])[0],
}
seen = {}
for name, encode in ways.items():
    pause, took, ids = min((pauses(encode) for _ in range(3)), key=lambda each: each[0] / each[1])
    seen[name] = (pause / took, ids)
    print(f"{name}: another thread paused for {pause / took:.2f} of {took:.2f} s")
assert seen["encode"][0] > 0.9
assert seen["encode_batch"][0] < 0.5
assert seen["encode_batch_fast"][0] < 0.5
assert seen["encode"][1] == seen["encode_batch"][1] == seen["encode_batch_fast"][1]
print("encode stops other threads; encode_batch and encode_batch_fast do not")
PYTHON
