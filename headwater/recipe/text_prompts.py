"""Prompts that are text or ids already, the same for every recipe: one rule for the begin token.

Knows a tokenizer and no chat format; recipes hand their completions here.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.core.errors import InvalidRequest
from headwater.recipe.recipe import EncodedPrompt
from headwater.recipe.text import require_encodable
from headwater.recipe.tokenizer import Tokenizer


class TextPrompts:
    """The part of :class:`headwater.recipe.recipe.Recipe` that needs no chat format."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode_completion(
        self, text: str, *, allow_control: bool = False, param: str = "prompt"
    ) -> EncodedPrompt:
        """See :meth:`headwater.recipe.recipe.Recipe.encode_completion`."""
        require_encodable(text, param=param)
        ranges = self._tokenizer.control_ranges(text, [(0, len(text))]) if allow_control else ()
        ids = self._tokenizer.encode_rendered(text, ranges)
        self.put_begin_token(ids)
        if not ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        return EncodedPrompt(tokens=tuple(ids), control_positions=self.control_positions(ids))

    def encode_ids(self, token_ids: Sequence[int], *, param: str = "prompt") -> EncodedPrompt:
        """See :meth:`headwater.recipe.recipe.Recipe.encode_ids`."""
        size = self._tokenizer.vocab_size
        if not token_ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"{param}: token id {token_id} is not in [0, {size})", param=param
                )
        return EncodedPrompt(
            tokens=tuple(token_ids), control_positions=self.control_positions(token_ids)
        )

    def put_begin_token(self, ids: list[int]) -> int:
        """Exactly one begin token (B03), whoever placed it; how many this call added."""
        tokenizer = self._tokenizer
        begin = tokenizer.bos_token_id
        if begin is None or not tokenizer.adds_bos or (ids and ids[0] == begin):
            return 0
        ids.insert(0, begin)
        return 1

    def control_positions(self, ids: Sequence[int]) -> tuple[int, ...]:
        is_control = self._tokenizer.is_control
        return tuple(index for index, token_id in enumerate(ids) if is_control(token_id))
