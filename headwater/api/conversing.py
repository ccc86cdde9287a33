"""From a dialect's Conversation to prompt, constraint and output: what all chat routes share.

A dialect fills a :class:`Spoken`; from here on the same conversation gives the
same ids, refusals and parts through each of them. Runs in a parse thread.
Knows the recipe, no body and no wire form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headwater.api.cache_report import HitExplainer
from headwater.api.tidy import TidyParser
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest
from headwater.recipe.conversation import Conversation
from headwater.recipe.output import OutputStream
from headwater.recipe.recipe import EncodedPrompt, Recipe

# Raises InvalidRequest for what cannot be compiled. ``app`` hands it in.
ConstraintCheck = Callable[[Constraint], None]

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """How the caller spells what a refusal may have to name."""

    messages: str = "messages"
    tool_choice: str = "tool_choice"
    thinking: str = "reasoning_effort"
    answer: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A conversation, and where each of its messages stood in the body."""

    conversation: Conversation
    names: FieldNames = field(default_factory=FieldNames)
    # One per message, such as "input[3]"; empty: as the conversation counts them.
    places: tuple[str, ...] = ()


def refuse_constraints(_: Constraint) -> None:
    """The check of a server that has no compiler."""
    raise InvalidRequest(
        "constrained output is not supported by this server", code="unsupported_parameter"
    )


@dataclass(frozen=True, slots=True)
class Conversing:
    """Encodes conversations and opens their outputs."""

    recipe: Recipe
    check_constraint: ConstraintCheck

    def encode(self, spoken: Spoken, *, add_generation_prompt: bool = True) -> EncodedPrompt:
        """Raises InvalidRequest in the caller's own field names."""
        try:
            return self.recipe.encode(
                spoken.conversation, add_generation_prompt=add_generation_prompt
            )
        except InvalidRequest as error:
            raise _in_callers_words(error, spoken) from None

    def explainer(self, spoken: Spoken, prompt: EncodedPrompt) -> HitExplainer:
        """Says where in ``spoken`` the hit of its prompt ended."""
        return HitExplainer(self.recipe.tokenizer, (prompt,), spoken.places)

    def constraint(self, spoken: Spoken) -> Constraint | None:
        """The grammar of the turn, known to compile. Raises InvalidRequest otherwise."""
        names = spoken.names
        blamed = names.answer if spoken.conversation.answer is not None else names.tool_choice
        try:
            constraint = self.recipe.turn_constraint(spoken.conversation)
            if constraint is not None:
                self.check_constraint(constraint)
        except InvalidRequest as error:
            told = _in_callers_words(error, spoken)
            if told.param is not None:
                raise told from None
            raise InvalidRequest(
                f"{blamed}: {told}", param=blamed, code=told.code or "invalid_value"
            ) from None
        return constraint

    def open_output(
        self,
        conversation: Conversation,
        *,
        stop_strings: Sequence[str],
        previous_id: int,
        list_tokens: bool = False,
    ) -> OutputStream:
        """The text side of one choice; ``list_tokens`` for an answer that shows logprobs."""
        parser = self.recipe.open_parser(conversation)
        if conversation.tools:
            parser = TidyParser(parser, parallel=conversation.tool_choice.parallel)
        return OutputStream(
            self.recipe.tokenizer,
            stop_strings=stop_strings,
            previous_id=previous_id,
            parser=parser,
            list_tokens=list_tokens,
        )


def _in_callers_words(error: InvalidRequest, spoken: Spoken) -> InvalidRequest:
    """``error`` with recipes' field names turned into the caller's.

    >>> from headwater.recipe.conversation import Conversation, Message
    >>> spoken = Spoken(
    ...     conversation=Conversation(messages=(Message(role="user"),)), places=("input[4]",)
    ... )
    >>> _in_callers_words(InvalidRequest("messages[0].content is odd"), spoken)
    InvalidRequest('input[4].content is odd')
    """
    names = spoken.names

    def place(match: re.Match[str]) -> str:
        index = int(match[1])
        return spoken.places[index] if index < len(spoken.places) else match[0]

    param = error.param
    if param is not None:
        known = {
            "messages": names.messages,
            "thinking": names.thinking,
            "response_format": names.answer,
        }
        param = known.get(param, _MESSAGE.sub(place, param))
    return InvalidRequest(_MESSAGE.sub(place, str(error)), param=param, code=error.code)
