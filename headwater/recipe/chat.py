"""A conversation or text in, exact token ids out: the recipe of a model with a chat template.

Knows the model's chat template, its tokenizer, what both can carry, and the one
rule for the begin token. Knows no dialect: ``api`` brings every dialect into
one :class:`Conversation`, so it gives the same ids through each of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest, ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.conversation import Conversation
from headwater.recipe.messages import check_conversation
from headwater.recipe.parser_choice import choose_parser
from headwater.recipe.parser_marked import MarkedFormat
from headwater.recipe.parser_plain import PLAIN
from headwater.recipe.parsers import OutputParser, ParserFormat
from headwater.recipe.recipe import (
    Capabilities,
    EncodedPrompt,
    NewCallId,
    random_call_id,
)
from headwater.recipe.sandbox_limits import TemplateLimits
from headwater.recipe.template import ChatTemplate
from headwater.recipe.template_conversation import RenderedConversation, render_conversation
from headwater.recipe.template_probe import (
    TemplateFormat,
    probe_conversations,
    probe_template,
)
from headwater.recipe.template_spans import token_spans
from headwater.recipe.template_turn import ReasoningPlace, marked_turn
from headwater.recipe.text_prompts import TextPrompts
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_byte import BYTE_CHAT_TEMPLATE, IM_END_ID
from headwater.recipe.tokenizer_load import load_tokenizer

log = logging.getLogger(__name__)

UNREADABLE_CALLS = (
    "prints tools, but calls of its kind cannot be read back from the output, so tools are refused"
)

# GGUF's names of special tokens -> the names that templates use.
_TEMPLATE_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


class ChatRecipe:
    """Implements :class:`headwater.recipe.recipe.Recipe`. Threads may share one."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        template_format: TemplateFormat | None,
        parser_format: ParserFormat = PLAIN,
        end_token_ids: frozenset[int],
        model_id: str = "",
        new_call_id: NewCallId = random_call_id,
    ) -> None:
        """``template_format`` is what ``probe_template`` found out about ``template``."""
        self._tokenizer = tokenizer
        self._prompts = TextPrompts(tokenizer)
        self._template = template
        self._format = template_format
        self._parser_format = parser_format
        self._end_token_ids = end_token_ids
        self._model_id = model_id
        self._new_call_id = new_call_id
        self._capabilities = _capabilities(template_format, parser_format)
        self._require_traceable_template()

    @classmethod
    def from_source(
        cls,
        source: TokenizerSource,
        *,
        now: Callable[[], datetime] = datetime.now,
        limits: TemplateLimits | None = None,
        parser_format: ParserFormat | None = None,
        new_call_id: NewCallId = random_call_id,
    ) -> ChatRecipe:
        """Build tokenizer and template; raises ModelError naming what cannot be served.

        Without a ``parser_format`` the template's marks decide. What the format
        cannot do is written to the log, once.
        """
        tokenizer = load_tokenizer(source)
        text = source.chat_template
        end_token_ids = source.end_token_ids
        if source.kind == "byte":
            text = text or BYTE_CHAT_TEMPLATE
            end_token_ids = end_token_ids or frozenset({IM_END_ID})
        template, template_format = None, None
        if text is not None:
            template = ChatTemplate(
                text, variables=_named_tokens(source, tokenizer), now=now, limits=limits
            )
            template_format = probe_template(template, text)
            parser_format = parser_format or choose_parser(text, tokenizer)
        recipe = cls(
            tokenizer=tokenizer,
            template=template,
            template_format=template_format,
            parser_format=parser_format or PLAIN,
            end_token_ids=end_token_ids,
            model_id=source.model_id,
            new_call_id=new_call_id,
        )
        for note in recipe.capabilities.notes:
            log.info("the chat format of %s %s", source.model_id or "this model", note)
        return recipe

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def end_token_ids(self) -> frozenset[int]:
        return self._end_token_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def encode(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> EncodedPrompt:
        """See :meth:`Recipe.encode`; a last message that ``continues`` is left open."""
        check_conversation(conversation)
        conversation = self._supported(conversation)
        prompt = self._rendered(conversation, add_generation_prompt)
        rendered = prompt.rendered
        ranges = self._tokenizer.control_ranges(rendered.text, rendered.placed)
        ids, starts = self._tokenizer.encode_with_starts(rendered.text, ranges)
        shift = self._prompts.put_begin_token(ids)
        return EncodedPrompt(
            tokens=tuple(ids),
            control_positions=self._prompts.control_positions(ids),
            spans=tuple(token_spans(prompt, starts, shift)),
        )

    def open_parser(self, conversation: Conversation) -> OutputParser:
        return self._parser_format.open(
            in_reasoning=self._reasoning(conversation) == "open",
            tools=bool(conversation.tools) and conversation.tool_choice.kind != "none",
            new_call_id=self._new_call_id,
        )

    def turn_constraint(self, conversation: Conversation) -> Constraint | None:
        reasoning = self._reasoning(conversation)
        forced = conversation.tool_choice.kind in ("required", "named")
        if isinstance(self._parser_format, MarkedFormat):
            if not forced or self._capabilities.forced_tools:
                return marked_turn(conversation, self._parser_format, self._tokenizer, reasoning)
        elif conversation.answer is not None and reasoning != "none":
            raise InvalidRequest(
                f"model {self._model_id!r} reasons before it answers, in a format in which its "
                "answer cannot be constrained; switch thinking off or ask for plain text",
                param="response_format",
                code="unsupported_value",
            )
        if forced:
            raise InvalidRequest(
                f"model {self._model_id!r} cannot be made to call a tool; "
                "use tool_choice auto or none",
                param="tool_choice",
                code="unsupported_value",
            )
        return conversation.answer

    def encode_completion(
        self, text: str, *, allow_control: bool = False, param: str = "prompt"
    ) -> EncodedPrompt:
        return self._prompts.encode_completion(text, allow_control=allow_control, param=param)

    def encode_ids(self, token_ids: Sequence[int], *, param: str = "prompt") -> EncodedPrompt:
        return self._prompts.encode_ids(token_ids, param=param)

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str:
        return self._tokenizer.decode(token_ids, keep_control=keep_control)

    # -- inside -------------------------------------------------------------------------

    def _rendered(
        self, conversation: Conversation, add_generation_prompt: bool
    ) -> RenderedConversation:
        if self._template is None or self._format is None:
            raise InvalidRequest(
                f"model {self._model_id!r} has no chat template, so it cannot take messages; "
                "use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        return render_conversation(
            self._template,
            conversation,
            self._format.form,
            add_generation_prompt=add_generation_prompt,
        )

    def _reasoning(self, conversation: Conversation) -> ReasoningPlace:
        """What the model's output begins with, as far as the prompt decides it."""
        last = conversation.messages[-1]
        if last.continues:
            return "none" if last.content.strip() else "open"
        mode = conversation.thinking.mode
        if self._format is not None and self._format.opens_reasoning[mode]:
            return "open"
        return "none" if self._capabilities.thinking == "none" or mode == "off" else "possible"

    def _supported(self, conversation: Conversation) -> Conversation:
        """``conversation`` as the format can carry it; raises InvalidRequest for the rest."""
        can = self._capabilities
        mode = conversation.thinking.mode
        if conversation.tools and self._template is not None and not can.tools:
            if conversation.tool_choice.kind != "none":
                raise InvalidRequest(
                    f"model {self._model_id!r} has no format for tools; send no tools",
                    param="tools",
                    code="tools_not_supported",
                )
            conversation = replace(conversation, tools=())  # none of them may be called anyway
        if mode == "on" and can.thinking == "none":
            raise InvalidRequest(
                f"model {self._model_id!r} does not reason; switch thinking off",
                param="thinking",
                code="thinking_not_supported",
            )
        if mode == "off" and can.thinking == "always":
            raise InvalidRequest(
                f"model {self._model_id!r} always reasons; thinking cannot be switched off",
                param="thinking",
                code="thinking_not_supported",
            )
        return conversation

    def _require_traceable_template(self) -> None:
        """Raise ModelError if the template hides where its control tokens come from.

        Then they would be encoded as ordinary text, and the model would answer
        badly without any error.
        """
        if self._template is None or self._format is None:
            return
        for conversation in probe_conversations():
            if conversation.tools and not self._format.tools:
                continue
            try:
                rendered = self._rendered(conversation, True).rendered
            except InvalidRequest:
                continue  # the format does not allow this conversation
            text = rendered.text
            seen = self._tokenizer.control_ranges(text, rendered.placed)
            for start, end in self._tokenizer.control_ranges(text, [(0, len(text))]):
                if (start, end) not in seen:
                    raise ModelError(
                        f"the chat template makes the control token {text[start:end]!r} in a way "
                        "that cannot be told from typed text (str.format, for instance)"
                    )


def _capabilities(found: TemplateFormat | None, parser_format: ParserFormat) -> Capabilities:
    if found is None:
        return Capabilities()
    notes = found.notes
    tools = found.tools and found.calls and parser_format.tools
    if found.tools and not tools:
        notes = (*notes, UNREADABLE_CALLS)
    return Capabilities(
        chat=True,
        tools=tools,
        parallel_tools=tools and found.parallel_calls,
        forced_tools=tools and isinstance(parser_format, MarkedFormat),
        thinking=found.thinking,
        notes=notes,
    )


def _named_tokens(source: TokenizerSource, tokenizer: Tokenizer) -> dict[str, str]:
    """Tokens that templates refer to by name: ``bos_token``, ``eos_token`` and so on."""
    named: dict[str, str] = {}
    for key, value in source.tokenizer_config.items():
        if not key.endswith("_token"):
            continue
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            named[key] = value
    for name, template_name in _TEMPLATE_NAMES.items():
        token_id = source.gguf_metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token_id, int) and (literal := tokenizer.token_literal(token_id)):
            named[template_name] = literal
    if source.bos_token_id is not None and "bos_token" not in named:
        literal = tokenizer.token_literal(source.bos_token_id)
        if literal:
            named["bos_token"] = literal
    return named
