"""One choice's output, from committed tokens to text: the same for streams and for whole answers.

Ids become text (``detokenizer``), text is watched for stop strings (``stops``),
and each token keeps its piece of text for logprobs. A stream sends every delta
as it comes; a whole answer is all deltas joined, so the two cannot differ.
Knows no dialect and no transport; ``api`` runs one per choice.

Positions are characters of the choice's decoded text:

    text      alpha beta gamma delta         stop string "beta gamma"
    shown     [0, 6)                         deltas never show more than this
    cut            6                         where the stop string begins
    tokens    those that begin before 6 are listed; all up to and including
              the one that completed the stop string are counted
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwater.core.request import FinishReason, SampledToken, SequenceOutput, TokenLogprob
from headwater.recipe.detokenizer import Detokenizer, token_text
from headwater.recipe.stops import StopMatcher
from headwater.recipe.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One alternative of a position, as it is shown."""

    token_id: int
    text: str  # "bytes:\\x.." for part of a character
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputToken:
    """One token and the piece of text it stands for.

    ``text_offset`` is the character of the choice's text at which it begins;
    a token that continues a character begins where that character does.
    """

    token_id: int
    text: str
    piece: bytes
    text_offset: int
    logprob: float | None = None
    top: tuple[LogprobEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """What one push made visible.

    ``tokens`` come with the text that they begin, so they may be later than
    the push that brought them. ``num_tokens`` counts tokens as they are taken.
    ``finish`` comes with the last delta, together with the stop string or id
    that was the reason. ``stopped_early``: the engine does not know yet and must
    be told to stop this choice.
    """

    text: str = ""
    tokens: tuple[OutputToken, ...] = ()
    num_tokens: int = 0
    finish: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    stopped_early: bool = False
    error: str | None = None


class OutputStream:
    """The state machine of one choice: push what the engine committed, take what may be shown."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_strings: Sequence[str] = (),
        previous_id: int | None = None,
        keep_control: bool = False,
        text_offset: int = 0,
    ) -> None:
        """``previous_id`` is the prompt's last token. ``text_offset`` is where this
        text begins in what the caller sees (after an echoed prompt)."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, keep_control=keep_control, previous_id=previous_id
        )
        self._stops = StopMatcher(stop_strings) if stop_strings else None
        self._waiting: deque[OutputToken] = deque()  # tokens whose text is not shown yet
        self._base = text_offset
        self._num_decoded = 0  # characters given by the detokenizer
        self._num_shown = 0
        self._num_tokens = 0
        self._finish: FinishReason | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens counted so far. An end or stop *id* is not among them; after a stop
        *string*, the token that completed it is the last."""
        return self._num_tokens

    @property
    def finish(self) -> FinishReason | None:
        return self._finish

    def push(self, output: SequenceOutput) -> OutputDelta:
        """Take one step's output for this choice.

        After the end everything is ignored (an empty delta): the engine may
        have been a step ahead when a stop string was found.
        """
        if self._finish is not None:
            return OutputDelta()
        shown: list[str] = []
        num_before = self._num_tokens
        stop_string = None
        for token in output.tokens:
            self._num_tokens += 1
            stop_string = self._take(self._detokenizer_push(token), shown)
            if stop_string is not None:
                break
        if stop_string is None and output.finish is not None:
            stop_string = self._take(self._detokenizer.flush(), shown)
            if stop_string is None and self._stops is not None:
                self._show(self._stops.flush(), shown)
        if stop_string is not None:
            self._finish = FinishReason.STOP
        else:
            self._finish = output.finish
        by_string = stop_string is not None
        return OutputDelta(
            text="".join(shown),
            tokens=self._released(),
            num_tokens=self._num_tokens - num_before,
            finish=self._finish,
            stop_string=stop_string,
            stop_token_id=None if by_string else output.stop_token_id,
            stopped_early=by_string and output.finish is None,
            error=None if by_string else output.error,
        )

    def _detokenizer_push(self, token: SampledToken) -> str:
        self._waiting.append(describe_token(self._tokenizer, token, self._base + self._num_decoded))
        return self._detokenizer.push(token.token_id)

    def _take(self, text: str, shown: list[str]) -> str | None:
        """Pass decoded text through the stop strings; the one that it completes."""
        self._num_decoded += len(text)
        if self._stops is None:
            self._show(text, shown)
            return None
        result = self._stops.push(text)
        self._show(result.text, shown)
        return result.stop

    def _show(self, text: str, shown: list[str]) -> None:
        if text:
            shown.append(text)
            self._num_shown += len(text)

    def _released(self) -> tuple[OutputToken, ...]:
        """Tokens that begin in the text shown so far; at a natural end, all that wait.

        A token at exactly the end of the shown text waits: it may turn out to be
        the first of a stop string, and then it is not listed at all.
        """
        waiting = self._waiting
        if self._finish is not None and self._num_shown == self._num_decoded:
            released = tuple(waiting)
            waiting.clear()
            return released
        end = self._base + self._num_shown
        found: list[OutputToken] = []
        while waiting and waiting[0].text_offset < end:
            found.append(waiting.popleft())
        return tuple(found)


def joined_deltas(deltas: Iterable[OutputDelta]) -> OutputDelta:
    """All deltas of one choice as one: what a caller who does not stream is sent."""
    all_deltas = list(deltas)
    last = next((d for d in all_deltas if d.finish is not None), OutputDelta())
    return OutputDelta(
        text="".join(delta.text for delta in all_deltas),
        tokens=tuple(token for delta in all_deltas for token in delta.tokens),
        num_tokens=sum(delta.num_tokens for delta in all_deltas),
        finish=last.finish,
        stop_string=last.stop_string,
        stop_token_id=last.stop_token_id,
        stopped_early=last.stopped_early,
        error=last.error,
    )


def describe_token(tokenizer: Tokenizer, token: SampledToken, text_offset: int) -> OutputToken:
    """A token with the text of it and of its alternatives."""
    piece = tokenizer.token_bytes(token.token_id)
    return OutputToken(
        token_id=token.token_id,
        text=token_text(piece),
        piece=piece,
        text_offset=text_offset,
        logprob=token.logprob,
        top=tuple(_entry(tokenizer, alternative) for alternative in token.top),
    )


def describe_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[SampledToken] | None
) -> tuple[OutputToken, ...]:
    """The prompt's own tokens, for ``echo``. ``logprobs`` has one entry for each but the first."""
    detokenizer = Detokenizer(tokenizer)
    described: list[OutputToken] = []
    offset = 0
    for index, token_id in enumerate(prompt):
        token = SampledToken(token_id)
        if logprobs is not None and index > 0:
            token = logprobs[index - 1]
        described.append(describe_token(tokenizer, token, offset))
        offset += len(detokenizer.push(token_id))
    return tuple(described)


def _entry(tokenizer: Tokenizer, alternative: TokenLogprob) -> LogprobEntry:
    piece = tokenizer.token_bytes(alternative.token_id)
    return LogprobEntry(alternative.token_id, token_text(piece), piece, alternative.logprob)
