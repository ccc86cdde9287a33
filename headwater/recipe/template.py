"""A model's chat template: messages in, text out, with the origin of every character.

The text is what the model's own template prints. What the template placed and
what came from outside is known for each character, however the template trimmed,
split or joined it, and without assuming that outside text is unique or harmless.
Knows no tokenizer; ``chat`` turns placed literals into control tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from headwater.core.errors import InvalidRequest, ModelError
from headwater.recipe.provenance import PLACED, Span, clipped, placed, spans_of
from headwater.recipe.sandbox import TemplateEnvironment
from headwater.recipe.sandbox_filters import Refused
from headwater.recipe.sandbox_limits import LimitExceeded, TemplateLimits
from headwater.recipe.template_values import TemplateMessage

_MAX_REASON_CHARS = 200
# What template code can raise by itself: a missing field, a wrong type, an endless macro.
_TEMPLATE_FAULTS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class TemplateRefused(InvalidRequest):
    """The template itself turned the messages down (``raise_exception``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt as text. ``spans`` say where it came from; text between them is from outside,
    and not known more closely."""

    text: str
    spans: tuple[Span, ...]

    @property
    def placed(self) -> list[tuple[int, int]]:
        """Half-open ranges of the template's own literals, ascending, in characters."""
        return [(start, end) for start, end, origin, _ in self.spans if origin == PLACED]

    @property
    def origins(self) -> list[Span]:
        """Spans of outside text."""
        return [span for span in self.spans if span[2] != PLACED]

    def before(self, end: int) -> Rendered:
        """The first ``end`` characters."""
        return Rendered(text=self.text[:end], spans=clipped(self.spans, 0, end))


class ChatTemplate:
    """A compiled template. Threads may share one: each rendering has its own meter."""

    def __init__(
        self,
        source: str,
        *,
        variables: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        limits: TemplateLimits | None = None,
    ) -> None:
        """``variables`` are the model's named tokens (``bos_token`` and so on).

        Raises ModelError if the template does not compile or uses what the
        sandbox does not have.
        """
        self._limits = limits or TemplateLimits()
        if len(source) > self._limits.max_source_chars:
            raise ModelError(
                f"the chat template has {len(source)} characters; "
                f"at most {self._limits.max_source_chars} are accepted"
            )
        self._variables = {name: placed(text) for name, text in variables.items()}
        self._environment = TemplateEnvironment(now, self._limits)
        try:
            self._code = self._environment.compile(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template, line {error.lineno}: {error.message}") from None
        except (*_TEMPLATE_FAULTS, SyntaxError, MemoryError) as error:
            raise ModelError(
                f"the chat template cannot be compiled: {type(error).__name__}"
            ) from error

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        num_input_chars: int,
        tools: Sequence[Mapping[str, object]] | None = None,
        switches: Mapping[str, bool | str] | None = None,
        add_generation_prompt: bool = True,
    ) -> Rendered:
        """The prompt for ``messages``, which hold ``num_input_chars`` characters in all.

        ``tools`` are as Hugging Face templates iterate them. ``switches`` are further
        variables, named and valued by the server, never by a request (I05).
        Raises TemplateRefused with the template's own words if it turns the
        messages down, InvalidRequest if it cannot print them or they cost more
        than the limits allow, ModelError if it breaks the sandbox's rules.
        """
        environment = self._environment.metered(self._limits.meter(len(messages), num_input_chars))
        values = {
            **(switches or {}),
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,  # templates of retrieval models test it without `is defined`
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = environment.run(self._code, values)
        except Refused as refused:
            raise TemplateRefused(
                f"the model's chat template refuses these messages: {_reason(refused.reason)}",
                param="messages",
                code="template_refused",
            ) from None
        except LimitExceeded as error:
            raise InvalidRequest(
                f"{error} for these messages; send fewer or shorter ones",
                param="messages",
                code="template_limit",
            ) from None
        except SecurityError as error:
            raise ModelError(f"the chat template does what the sandbox forbids: {error}") from None
        except _TEMPLATE_FAULTS as error:
            # The error's own text may quote a message, so only its kind is told.
            raise InvalidRequest(
                "the model's chat template cannot print these messages "
                f"({type(error).__name__}); check roles, their order and the content's form",
                param="messages",
                code="template_failed",
            ) from None
        return Rendered(text=str.__str__(text), spans=spans_of(text))


def _reason(reason: str) -> str:
    """The template's words; text from outside is left out, it never enters an error."""
    shown = ""
    position = 0
    for start, end, origin, _ in spans_of(reason):
        if origin == PLACED:
            shown += ("" if start == position else "…") + reason[start:end]
            position = end
    shown += "" if position == len(reason) else "…"
    return str.__str__(shown)[:_MAX_REASON_CHARS] or "no reason given"
