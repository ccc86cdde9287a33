"""Messages or text in, exact token ids out: the recipe of one model.

Knows roles, the model's chat template and its tokenizer, and the one rule for
the begin token. Knows no dialect: ``api`` brings every dialect's messages into
:class:`ChatMessage` form, so the same conversation gives the same ids through
each of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from headwater.core.errors import InvalidRequest, ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.messages import (
    ChatMessage,
    MessageLeftOut,
    check_messages,
    has_later_system,
    num_chars,
    require_all_printed,
    template_messages,
    with_one_system_message,
)
from headwater.recipe.sandbox_limits import TemplateLimits
from headwater.recipe.template import ChatTemplate, Rendered, TemplateMessage, TemplateRefused
from headwater.recipe.text import require_encodable
from headwater.recipe.tokenizer import Tokenizer, load_tokenizer
from headwater.recipe.tokenizer_byte import BYTE_CHAT_TEMPLATE, IM_END_ID

# GGUF's names of special tokens -> the names that templates use.
_TEMPLATE_NAMES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "padding": "pad_token",
}


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """Tokens [start, end) of a prompt that came from ``messages[message_index]``."""

    start: int
    end: int
    message_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """A prompt as the model will see it.

    ``control_positions`` are the indexes of control ids: the begin token and
    what the template placed, never anything that came from outside.
    """

    tokens: tuple[int, ...]
    control_positions: tuple[int, ...] = ()
    spans: tuple[PromptSpan, ...] = ()

    @property
    def num_control_tokens(self) -> int:
        return len(self.control_positions)


class ChatRecipe:
    """How one model is spoken to. Holds no state between calls; threads may share it."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        end_token_ids: frozenset[int],
        model_id: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._end_token_ids = end_token_ids
        self._model_id = model_id
        self._require_traceable_template()

    @classmethod
    def from_source(
        cls,
        source: TokenizerSource,
        *,
        now: Callable[[], datetime] = datetime.now,
        limits: TemplateLimits | None = None,
    ) -> ChatRecipe:
        """Build tokenizer and template; raises ModelError naming what cannot be served."""
        tokenizer = load_tokenizer(source)
        text = source.chat_template
        end_token_ids = source.end_token_ids
        if source.kind == "byte":
            text = text or BYTE_CHAT_TEMPLATE
            end_token_ids = end_token_ids or frozenset({IM_END_ID})
        template = None
        if text is not None:
            template = ChatTemplate(
                text, variables=_named_tokens(source, tokenizer), now=now, limits=limits
            )
        return cls(
            tokenizer=tokenizer,
            template=template,
            end_token_ids=end_token_ids,
            model_id=source.model_id,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Ids by which the model ends its turn or the text."""
        return self._end_token_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_chat(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True
    ) -> EncodedPrompt:
        """The prompt that asks for the next assistant message.

        Raises InvalidRequest naming the message: an unknown role, text that is
        not Unicode, a conversation that the model's template refuses, or a
        message that it would leave out in silence.
        """
        if self._template is None:
            raise InvalidRequest(
                f"model {self._model_id!r} has no chat template, so it cannot take messages; "
                "use /v1/completions",
                param="messages",
                code="no_chat_template",
            )
        check_messages(messages)
        rendered = self._render(self._template, messages, add_generation_prompt)
        ranges = self._tokenizer.control_ranges(rendered.text, rendered.placed)
        ids, starts = self._tokenizer.encode_with_starts(rendered.text, ranges)
        shift = self._put_begin_token(ids)
        spans = (
            PromptSpan(
                bisect_left(starts, start) + shift, bisect_left(starts, end) + shift, message_index
            )
            for start, end, message_index in rendered.origins
        )
        return EncodedPrompt(
            tokens=tuple(ids),
            control_positions=self._control_positions(ids),
            spans=tuple(span for span in spans if span.start < span.end),
        )

    def encode_completion(
        self, text: str, *, allow_control: bool = False, param: str = "prompt"
    ) -> EncodedPrompt:
        """``text`` with the model's begin token before it, if the model has that habit.

        Control literals in ``text`` are ordinary text. With ``allow_control``
        the caller vouches for the whole text (a prompt that was rendered
        elsewhere): literals become control ids, and a begin token is not doubled.
        """
        require_encodable(text, param=param)
        ranges = self._tokenizer.control_ranges(text, [(0, len(text))]) if allow_control else ()
        ids = self._tokenizer.encode_rendered(text, ranges)
        self._put_begin_token(ids)
        if not ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        return EncodedPrompt(tokens=tuple(ids), control_positions=self._control_positions(ids))

    def encode_ids(self, token_ids: Sequence[int], *, param: str = "prompt") -> EncodedPrompt:
        """A prompt given as ids, taken as it is; raises InvalidRequest for an id out of range."""
        size = self._tokenizer.vocab_size
        if not token_ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidRequest(
                    f"{param}: token id {token_id} is not in [0, {size})", param=param
                )
        return EncodedPrompt(
            tokens=tuple(token_ids), control_positions=self._control_positions(token_ids)
        )

    def decode(self, token_ids: Sequence[int], *, keep_control: bool = False) -> str:
        return self._tokenizer.decode(token_ids, keep_control=keep_control)

    # -- inside -------------------------------------------------------------------------

    def _put_begin_token(self, ids: list[int]) -> int:
        """Exactly one begin token (B03), whoever placed it; how many this call added."""
        tokenizer = self._tokenizer
        begin = tokenizer.bos_token_id
        if begin is None or not tokenizer.adds_bos or (ids and ids[0] == begin):
            return 0
        ids.insert(0, begin)
        return 1

    def _control_positions(self, ids: Sequence[int]) -> tuple[int, ...]:
        is_control = self._tokenizer.is_control
        return tuple(index for index, token_id in enumerate(ids) if is_control(token_id))

    def _render(
        self, template: ChatTemplate, messages: Sequence[ChatMessage], add_generation_prompt: bool
    ) -> Rendered:
        """As given; where the format has one slot for system text, merged into one (A23)."""

        def render(values: list[TemplateMessage]) -> Rendered:
            rendered = template.render(
                values,
                num_input_chars=num_chars(messages),
                add_generation_prompt=add_generation_prompt,
            )
            require_all_printed(messages, rendered)
            return rendered

        try:
            return render(template_messages(messages))
        except (TemplateRefused, MessageLeftOut):
            if not has_later_system(messages):
                raise
        return render(with_one_system_message(messages))

    def _require_traceable_template(self) -> None:
        """Raise ModelError if the template hides where its control tokens come from.

        Then they would be encoded as ordinary text, and the model would answer
        badly without any error.
        """
        if self._template is None:
            return
        hello = ChatMessage(role="user", content="hello")
        dialogue = [
            ChatMessage(role="system", content="be kind"),
            hello,
            ChatMessage(role="assistant", content="hello"),
            hello,
        ]
        for messages in ([hello], dialogue[1:], dialogue):
            try:
                rendered = self._render(self._template, messages, add_generation_prompt=True)
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
