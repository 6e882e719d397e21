"""Single tokens as text and bytes."""

from collections.abc import Iterable

import regex
from tokenizers import Tokenizer, decoders

_SHOWN = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = (byte for byte in range(256) if byte not in _SHOWN)
_BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + index): byte for index, byte in enumerate(_HIDDEN)
}
"""The byte for which each character stands in byte-level vocabularies (GPT-2's)."""
_BYTE = regex.compile("<0x([0-9A-F]{2})>")  # in SentencePiece's vocabularies


class Vocabulary:
    """The tokens of one tokenizer. added: its own tokens for whole words, special or text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.special = frozenset(i for i, token in self._added.items() if token.special)
        self.added = {str(token.content): i for i, token in self._added.items()}

    def special_except(self, shown: Iterable[str]) -> frozenset[int]:
        """Return the special tokens except these."""
        return self.special.difference(map(self.tokenizer.token_to_id, shown))

    def bytes_of(self, token: int) -> bytes | None:
        """Return a token's UTF-8 bytes, which may end within a character; None if it is no text."""
        if token in self._added:
            return None if token in self.special else str(self._added[token].content).encode()
        word = self.tokenizer.id_to_token(token)
        if word is None:  # beyond the tokenizer: checkpoints round their vocabulary up
            return None
        if self._byte_level:
            return bytes(_BYTE_OF[character] for character in word)
        if byte := _BYTE.fullmatch(word):
            return bytes([int(byte[1], 16)])
        return str(word).replace("▁", " ").encode()

    def name_of(self, token: int) -> str:
        r"""Return a token's text; for a part of a character its bytes, as \xf0\x9f."""
        octets = self.bytes_of(token)
        if octets is None:
            return str(self.tokenizer.id_to_token(token) or "")
        try:
            return octets.decode()
        except UnicodeDecodeError:
            return "".join(f"\\x{byte:02x}" for byte in octets)
