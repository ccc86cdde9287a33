"""The two DeepSeek formats, and how a tokenizer declares them: by its control tokens.

The literals are the library's own (``deepseek_recipe``), so they cannot drift from
what it renders. Knows no conversation; used by every ``deepseek_*`` file and ``load``.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from deepseek_recipe import SpecialToken

from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.tokenizer_json import read_tokenizer_json

DSML: Final = SpecialToken.Dsml.default_str()  # inside every tag of a tool call
THINK: Final = SpecialToken.ThinkingStart.default_str()
END_THINK: Final = SpecialToken.ThinkingEnd.default_str()
ASSISTANT: Final = SpecialToken.Assistant.default_str()
END: Final = SpecialToken.Eos.default_str()
_SYSTEM: Final = SpecialToken.System.default_str()

# What a prompt of either format may hold. <reminder> and <image> are never rendered here.
_LITERALS: Final = frozenset(
    {
        DSML,
        THINK,
        END_THINK,
        ASSISTANT,
        END,
        SpecialToken.Bos.default_str(),
        SpecialToken.User.default_str(),
    }
)


class DeepseekVersion(StrEnum):
    """Which encoding the model was trained with."""

    V4 = "deepseek-v4"
    V4_1 = "deepseek-v4.1"  # has a System token; tags are spelt with a space

    @property
    def control_literals(self) -> frozenset[str]:
        """Control tokens that a prompt of this format needs."""
        return _LITERALS | {_SYSTEM} if self is DeepseekVersion.V4_1 else _LITERALS

    def tag(self, name: str) -> str:
        """What follows the DSML token in the tag ``name``: calls, invoke or parameter.

        >>> DeepseekVersion.V4.tag("calls"), DeepseekVersion.V4_1.tag("calls")
        ('tool_calls', ' calls')
        """
        if self is DeepseekVersion.V4_1:
            return " " + name
        return "tool_calls" if name == "calls" else name


def declared_version(source: TokenizerSource) -> DeepseekVersion | None:
    """The format whose control tokens ``source`` declares, if it does."""
    declared = set(_declared_literals(source))
    for version in (DeepseekVersion.V4_1, DeepseekVersion.V4):
        if version.control_literals <= declared:
            return version
    return None


def _declared_literals(source: TokenizerSource) -> Iterable[str]:
    if source.kind == "gguf":
        tokens = source.gguf_metadata.get("tokenizer.ggml.tokens")
        return (t for t in tokens if isinstance(t, str)) if isinstance(tokens, list) else ()
    data = source.tokenizer_json
    # The one word that no other family's vocabulary has: most files need no parsing here.
    if source.kind != "hf" or data is None or b"DSML" not in data:
        return ()
    return (token["content"] for token in read_tokenizer_json(data)["added_tokens"])
