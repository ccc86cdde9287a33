"""The byte tokenizer of toy models: one id per byte, control ids above.

    0..255   the bytes of UTF-8 text
    256      <|bos|>
    257      <|im_start|>
    258      <|im_end|>
    259..    reserved up to the model's vocabulary size, never produced by text

Its chat format is ChatML (``BYTE_CHAT_TEMPLATE``) unless the model brings one.
A prompt begins with ``<|bos|>`` when the source names a begin id. Used by tests
and by models that are trained on bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.errors import ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.detokenizer import decode_ids
from headwater.recipe.tokenizer import CharRange, DummyPrefix

BOS_ID, IM_START_ID, IM_END_ID = 256, 257, 258
NUM_BYTE_IDS = 256
MIN_VOCAB_SIZE = 259

_LITERALS = {BOS_ID: "<|bos|>", IM_START_ID: "<|im_start|>", IM_END_ID: "<|im_end|>"}
_IDS = {literal: token_id for token_id, literal in _LITERALS.items()}

BYTE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class ByteTokenizer:
    """See the module's table; implements :class:`headwater.recipe.tokenizer.Tokenizer`."""

    def __init__(self, *, vocab_size: int = 512, bos_token_id: int | None = BOS_ID) -> None:
        if vocab_size < MIN_VOCAB_SIZE:
            raise ModelError(
                f"a byte tokenizer needs vocab_size >= {MIN_VOCAB_SIZE}, got {vocab_size}"
            )
        self._vocab_size = vocab_size
        self._bos_token_id = bos_token_id

    @classmethod
    def from_source(cls, source: TokenizerSource) -> ByteTokenizer:
        return cls(vocab_size=source.vocab_size, bos_token_id=source.bos_token_id)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._bos_token_id

    @property
    def adds_bos(self) -> bool:
        return self._bos_token_id is not None

    @property
    def dummy_prefix(self) -> DummyPrefix:
        return DummyPrefix.NEVER

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_rendered(self, text: str, special_ranges: Sequence[CharRange]) -> list[int]:
        ids: list[int] = []
        position = 0
        for start, end in special_ranges:
            ids.extend(text[position:start].encode())
            ids.append(self._required_id(text[start:end]))
            position = end
        ids.extend(text[position:].encode())
        return ids

    def encode_with_starts(
        self, text: str, special_ranges: Sequence[CharRange]
    ) -> tuple[list[int], list[int]]:
        starts: list[int] = []
        position = 0
        for start, end in [*special_ranges, (len(text), len(text))]:
            for index in range(position, start):
                starts.extend([index] * len(text[index].encode()))
            if end > start:
                starts.append(start)
            position = end
        return self.encode_rendered(text, special_ranges), starts

    def control_ranges(self, text: str, placed: Sequence[CharRange]) -> list[CharRange]:
        found: list[CharRange] = []
        for start, end in placed:
            for literal in _IDS:  # no literal begins another, so their order is free
                at = text.find(literal, start, end)
                while at >= 0:
                    found.append((at, at + len(literal)))
                    at = text.find(literal, at + len(literal), end)
        return sorted(found)

    def control_id(self, literal: str) -> int | None:
        return _IDS.get(literal)

    def token_literal(self, token_id: int) -> str | None:
        return _LITERALS.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < NUM_BYTE_IDS:
            return bytes((token_id,))
        return _LITERALS.get(token_id, "").encode()

    def is_control(self, token_id: int) -> bool:
        return token_id >= NUM_BYTE_IDS

    def is_hidden(self, token_id: int) -> bool:
        return token_id >= NUM_BYTE_IDS

    def decode(self, ids: Sequence[int], *, keep_control: bool = False) -> str:
        return decode_ids(self, ids, keep_control=keep_control)

    def _required_id(self, literal: str) -> int:
        token_id = _IDS.get(literal)
        if token_id is None:
            raise ValueError("a special range does not hold a control literal")
        return token_id
