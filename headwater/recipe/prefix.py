"""Whether the next turn of a conversation begins with this one, token for token (B04).

A prefix cache serves turn n+1 from turn n only as far as their ids agree. A
format may break that by intent, by leaving out the reasoning of earlier turns for
instance; this says where. Works with any recipe; used by tests and the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from headwater.recipe.conversation import Conversation, Message
from headwater.recipe.recipe import PromptSpan, Recipe


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
