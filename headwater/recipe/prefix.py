"""Whether the next turn of a conversation begins with this one, token for token (B04).

A prefix cache serves turn n+1 from turn n only as far as their ids agree. A
format may break that by intent, by leaving out the reasoning of earlier turns for
instance; this says where, and what stands at any token of a prompt. Works with any
recipe; used by the door, by tests and by the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final

from headwater.recipe.conversation import Conversation, Message
from headwater.recipe.recipe import EncodedPrompt, PromptSpan, Recipe, SpanPart
from headwater.recipe.tokenizer import Tokenizer

_INSIDE: Final = bytes(range(0x80, 0xC0))  # bytes that no character of UTF-8 begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """How much of a turn (its prompt and its answer) the next turn's prompt begins with.

    prompt n + answer   [0, num_turn_tokens)
    shared              [0, num_shared_tokens)      the most that a cache can serve
    prompt n+1          [0, num_next_tokens)
    """

    num_turn_tokens: int
    num_shared_tokens: int
    num_next_tokens: int
    parted_in: PromptSpan | None  # of prompt n+1: what stands where the two part, if known

    @property
    def extends(self) -> bool:
        """Whether nothing of the turn has to be computed again."""
        return self.num_shared_tokens == self.num_turn_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one token stands in a conversation; never what it says.

    ``part`` None: the format placed it, right before ``message_index`` if that is known.
    Characters [start_char, end_char) of the part hold the token; where the format prints
    a text anew (JSON), they are all that is printed.
    """

    token_index: int
    message_index: int | None = None
    part: SpanPart | None = None
    start_char: int = 0
    end_char: int = 0


def place_of(tokenizer: Tokenizer, prompt: EncodedPrompt, token_index: int) -> Place:
    """What stands at ``token_index`` of ``prompt``, from the prompt's spans."""
    after: PromptSpan | None = None
    for span in prompt.spans:
        if span.start <= token_index < span.end:
            start_char, end_char = _characters(tokenizer, prompt.tokens, span, token_index)
            return Place(
                token_index=token_index,
                message_index=span.message_index,
                part=span.part,
                start_char=start_char,
                end_char=end_char,
            )
        if span.start > token_index and (after is None or span.start < after.start):
            after = span
    # What stands before a tool's definition stands before no message.
    if after is None or after.part == "tool":
        return Place(token_index=token_index)
    return Place(token_index=token_index, message_index=after.message_index)


def _characters(
    tokenizer: Tokenizer, tokens: Sequence[int], span: PromptSpan, token_index: int
) -> tuple[int, int]:
    """The characters of ``span``'s text that one of its tokens holds, if the tokens spell
    exactly that text; else all of them."""
    pieces = [tokenizer.token_bytes(token) for token in tokens[span.start : span.end]]
    if _num_begun(b"".join(pieces)) != span.end_char - span.start_char:
        return span.start_char, span.end_char
    number = token_index - span.start
    piece, num_before = pieces[number], _num_begun(b"".join(pieces[:number]))
    # A token may begin or end inside a character; then that one counts as its own.
    goes_on = piece[:1] != b"" and piece[0] in _INSIDE
    start_char = span.start_char + num_before - goes_on
    end_char = span.start_char + num_before + _num_begun(piece)
    return start_char, max(end_char, start_char + 1)


def _num_begun(data: bytes) -> int:
    """How many characters of UTF-8 begin in ``data``."""
    return len(data.translate(None, _INSIDE))


def prefix_report(
    recipe: Recipe, conversation: Conversation, answer: Message, *following: Message
) -> PrefixReport:
    """Compare the turn that gave ``answer`` with the prompt of the next turn.

    ``following`` are the messages that come after the answer: the user's next
    one, or tool results. The answer's ids are those that the format itself gives to
    ``answer`` after the prompt, up to the token that ends the turn.
    """
    turn = turn_ids(recipe, conversation, answer)
    after = recipe.encode(
        replace(conversation, messages=(*conversation.messages, answer, *following))
    )
    num_shared = shared_tokens(turn, after.tokens)
    return PrefixReport(
        num_turn_tokens=len(turn),
        num_shared_tokens=num_shared,
        num_next_tokens=len(after.tokens),
        parted_in=next((span for span in after.spans if span.start <= num_shared < span.end), None),
    )


def turn_ids(recipe: Recipe, conversation: Conversation, answer: Message) -> tuple[int, ...]:
    """The prompt's ids, then those of ``answer`` as the model would write it.

    A prompt may end in text that a finished turn does not hold (an empty reasoning
    block); the answer begins where the two part.
    """
    prompt = recipe.encode(conversation).tokens
    done = recipe.encode(
        replace(conversation, messages=(*conversation.messages, answer)),
        add_generation_prompt=False,
    )
    start = shared_tokens(prompt, done.tokens)
    ends = [
        index + 1
        for index in range(start, len(done.tokens))
        if done.tokens[index] in recipe.end_token_ids
    ]
    return prompt + done.tokens[start : ends[0] if ends else len(done.tokens)]


def shared_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids both begin with."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
