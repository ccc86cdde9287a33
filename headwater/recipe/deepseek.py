"""The recipe of models that speak DeepSeek's V4 or V4.1 format.

Joins the library's rendering (``deepseek_render``) to our tokenizer, and opens its
parser and its grammar for the same turn. Knows no dialect.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from headwater.core.constraint import Constraint
from headwater.core.errors import ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.conversation import Conversation
from headwater.recipe.deepseek_format import DSML, END_THINK, DeepseekVersion
from headwater.recipe.deepseek_grammar import DeepseekTokens, turn_constraint
from headwater.recipe.deepseek_parser import DeepseekParser
from headwater.recipe.deepseek_render import DeepseekPrompt, forces_call, render, thinks
from headwater.recipe.messages import check_conversation
from headwater.recipe.parsers import OutputParser, Stage
from headwater.recipe.recipe import (
    Capabilities,
    EncodedPrompt,
    NewCallId,
    PromptSpan,
    random_call_id,
)
from headwater.recipe.text_prompts import TextPrompts
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_load import load_tokenizer

_NOTES = (
    "drops the reasoning of earlier turns when no tools are given, so turn n+1 does not "
    "extend turn n",
    "writes the tool call that a request forces in place of its reasoning, so the next turn "
    "does not extend it",
    "has no place for the names of participants",
)


class DeepseekRecipe:
    """Implements :class:`headwater.recipe.recipe.Recipe`. Threads may share one."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        version: DeepseekVersion,
        end_token_ids: frozenset[int],
        new_call_id: NewCallId = random_call_id,
    ) -> None:
        """Raises ModelError if ``tokenizer`` lacks a control token of the format."""
        ids = {literal: tokenizer.control_id(literal) for literal in version.control_literals}
        missing = sorted(literal for literal, token_id in ids.items() if token_id is None)
        if missing:
            raise ModelError(
                f"the tokenizer has no control token {missing[0]!r}, which {version} needs"
            )
        self._tokenizer = tokenizer
        self._version = version
        self._tokens = DeepseekTokens(
            dsml_id=_known(ids[DSML]), end_think_id=_known(ids[END_THINK])
        )
        self._end_token_ids = end_token_ids
        self._new_call_id = new_call_id
        self._prompts = TextPrompts(tokenizer)

    @classmethod
    def from_source(
        cls,
        source: TokenizerSource,
        version: DeepseekVersion,
        *,
        new_call_id: NewCallId = random_call_id,
    ) -> DeepseekRecipe:
        """Raises ModelError naming what cannot be served."""
        return cls(
            tokenizer=load_tokenizer(source),
            version=version,
            end_token_ids=source.end_token_ids,
            new_call_id=new_call_id,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def version(self) -> DeepseekVersion:
        return self._version

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._end_token_ids

    @property
    def has_chat_template(self) -> bool:
        return True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            chat=True,
            tools=True,
            parallel_tools=True,
            forced_tools=True,
            thinking="optional",
            notes=_NOTES,
        )

    def encode(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> EncodedPrompt:
        check_conversation(conversation)
        prompt = render(conversation, self._version, add_generation_prompt=add_generation_prompt)
        ids, starts = self._tokenizer.encode_with_starts(prompt.text, prompt.special_ranges)
        return EncodedPrompt(
            tokens=tuple(ids),
            control_positions=self._prompts.control_positions(ids),
            spans=tuple(_token_spans(prompt, starts)),
        )

    def open_parser(self, conversation: Conversation) -> OutputParser:
        stage: Stage = "reasoning" if thinks(conversation) else "answer"
        last = conversation.messages[-1]
        if forces_call(conversation):
            stage = "tool_call"
        elif last.continues and last.content:
            stage = "answer"
        return DeepseekParser(
            self._version,
            stage=stage,
            is_continued=last.continues,
            tools=bool(conversation.tools) and conversation.tool_choice.kind != "none",
            new_call_id=self._new_call_id,
        )

    def turn_constraint(self, conversation: Conversation) -> Constraint | None:
        return turn_constraint(conversation, self._version, self._tokens)

    def encode_completion(
        self, text: str, *, allow_control: bool = False, param: str = "prompt"
    ) -> EncodedPrompt:
        return self._prompts.encode_completion(text, allow_control=allow_control, param=param)

    def encode_ids(self, token_ids: Sequence[int], *, param: str = "prompt") -> EncodedPrompt:
        return self._prompts.encode_ids(token_ids, param=param)

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str:
        return self._tokenizer.decode(token_ids, keep_control=keep_control)


def _token_spans(prompt: DeepseekPrompt, starts: Sequence[int]) -> list[PromptSpan]:
    """Origins in tokens; ``starts`` are the characters at which the tokens begin."""
    spans: list[PromptSpan] = []
    for origin in prompt.origins:
        start, end = bisect_left(starts, origin.start), bisect_left(starts, origin.end)
        if start < end:
            spans.append(
                PromptSpan(
                    start=start,
                    end=end,
                    message_index=origin.index,
                    part=origin.part,
                    start_char=origin.start_char,
                    end_char=origin.end_char,
                )
            )
    return spans


def _known(token_id: int | None) -> int:
    assert token_id is not None
    return token_id
