"""One accepted request: what its caller has been given, and who works on it now.

    waiting --placed--> an attempt --all choices finished--> over
       ^                    |
       +------- lost -------+   (each attempt has a name that is never used again)

What an attempt says after it was given up carries its old name and is not heard, so no
token is told twice. Knows outputs; no workers, no channels.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from headwater.core.errors import HeadwaterError
from headwater.core.fleet import Resume
from headwater.core.request import FinishReason, Request, SampledToken, SequenceOutput


@dataclass(slots=True)
class CallChoice:
    """One choice as its caller knows it."""

    tokens: list[int] = field(default_factory=list)  # committed and told
    is_reported: bool = False  # its PromptReport was told
    is_finished: bool = False
    is_aborting: bool = False


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One placement. ``prefill_id`` is set until the handoff is over."""

    key: str
    decode_id: str
    prefill_id: str | None = None
    is_handed: bool = False  # the decode side has the prompt's KV, or output

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return (self.decode_id,) if self.prefill_id is None else (self.decode_id, self.prefill_id)


class Call:
    """Its ``arrived`` is taken by one reader, who sleeps on ``wake``."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.arrived: list[SequenceOutput] = []
        self.wake = asyncio.Event()
        self.choices = [CallChoice() for _ in range(request.num_choices)]
        self.num_open = request.num_choices
        self.attempt: Attempt | None = None
        self.num_attempts = 0
        self.waiting_key: str | None = None  # while it waits for a place
        self.has_started = False  # something was told of it
        self.error: HeadwaterError | None = None

    def next_key(self) -> str:
        """The name of the next attempt; the first has the request's own."""
        self.num_attempts += 1
        name = str(self.request.request_id)
        return name if self.num_attempts == 1 else f"{name}#{self.num_attempts}"

    def take(self, output: SequenceOutput) -> tuple[SampledToken, ...] | None:
        """Hear what the current attempt says. Gives the tokens that are new to the caller;
        None when nothing is."""
        if not 0 <= output.index < len(self.choices):
            return None
        choice = self.choices[output.index]
        if choice.is_finished:
            return None
        if choice.is_reported and output.prompt is not None:
            output = replace(output, prompt=None)
        if output.request_id != self.request.request_id:
            output = replace(output, request_id=self.request.request_id)
        if output.prompt is None and output.finish is None and not output.tokens:
            return None
        choice.is_reported |= output.prompt is not None
        choice.tokens.extend(token.token_id for token in output.tokens)
        if output.finish is not None:
            choice.is_finished = True
            self.num_open -= 1
        self._tell(output)
        return output.tokens

    def end_choice(self, index: int) -> None:
        """Nobody works on it any more: its abort is answered here."""
        choice = self.choices[index]
        if not choice.is_finished:
            choice.is_finished = True
            self.num_open -= 1
            self._tell(
                SequenceOutput(
                    request_id=self.request.request_id, index=index, finish=FinishReason.ABORTED
                )
            )

    def fail(self, error: HeadwaterError) -> None:
        """What has arrived is still read first."""
        self.error = error
        self.wake.set()

    def resume(self) -> tuple[Resume, ...]:
        """What a new attempt goes on from; empty when it starts at the prompt with all."""
        if all(not choice.tokens and not choice.is_finished for choice in self.choices):
            return ()
        return tuple(
            Resume(index=index, tokens=tuple(choice.tokens))
            for index, choice in enumerate(self.choices)
            if not choice.is_finished
        )

    @property
    def num_resumed_tokens(self) -> int:
        return max((len(c.tokens) for c in self.choices if not c.is_finished), default=0)

    def _tell(self, output: SequenceOutput) -> None:
        self.has_started = True
        self.arrived.append(output)
        self.wake.set()
