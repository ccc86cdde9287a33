"""One choice's output, from committed tokens to parts: the same for streams and whole answers.

Ids become text (``detokenizer``), text becomes parts (``parsers``), the answer
is watched for stop strings (``stops``), and each of its tokens keeps its piece of
text for logprobs. A stream sends every delta as it comes; a whole answer is all
deltas joined, so the two cannot differ.
Knows no dialect and no transport; ``api`` runs one per choice.

Positions are characters of the choice's visible answer (A11: reasoning and tool
calls are neither searched for stop strings nor listed):

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
from headwater.recipe.parsers import OutputParser, PlainParser, answer_text, merged_parts
from headwater.recipe.parts import AnswerText, Part
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
    """What one push made visible: ``parts`` in order; ``text`` is the answer text in them.

    ``tokens`` come with the text that they begin, so they may be later than
    the push that brought them; tokens of reasoning and of tool calls are not
    listed. ``num_tokens`` counts all tokens as they are taken,
    ``num_reasoning_tokens`` those among them that the reasoning took, its
    closing mark included.
    ``finish`` comes with the last delta, together with the stop string or id
    that was the reason. ``stopped_early``: the engine does not know yet and must
    be told to stop this choice.
    """

    text: str = ""
    parts: tuple[Part, ...] = ()
    tokens: tuple[OutputToken, ...] = ()
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
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
        parser: OutputParser | None = None,
        list_tokens: bool = True,
    ) -> None:
        """``previous_id`` is the prompt's last token. ``text_offset`` is where this
        text begins in what the caller sees (after an echoed prompt). Without a
        ``parser`` all text is the answer. ``list_tokens`` is for those who show
        logprobs; it costs a fifth of the whole."""
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(
            tokenizer, keep_control=keep_control, previous_id=previous_id
        )
        self._parser = parser or PlainParser()
        self._list_tokens = list_tokens
        self._marks = _marks(tokenizer, self._parser)
        self._stops = StopMatcher(stop_strings) if stop_strings else None
        self._waiting: deque[OutputToken] = deque()  # tokens whose text is not shown yet
        self._base = text_offset
        self._num_parsed = 0  # characters of the answer given by the parser
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
        shown: list[Part] = []
        num_before = self._num_tokens
        num_reasoning_tokens = 0
        stop_string = None
        parser = self._parser
        for token in output.tokens:
            self._num_tokens += 1
            stage = parser.stage
            if stage == "reasoning":
                num_reasoning_tokens += 1
            offset = self._base + self._num_parsed
            stop_string = self._take(self._parse(token.token_id), shown)
            if self._list_tokens and stage == "answer" and parser.stage == "answer":
                self._waiting.append(describe_token(self._tokenizer, token, offset))
            if stop_string is not None:
                break
        if stop_string is None and output.finish is not None:
            stop_string = self._take(
                [*parser.push(self._detokenizer.flush()), *parser.finish()], shown
            )
            if stop_string is None and self._stops is not None:
                self._show(self._stops.flush(), shown)
        self._finish = output.finish if stop_string is None else FinishReason.STOP
        by_string = stop_string is not None
        parts = tuple(shown)
        return OutputDelta(
            text=answer_text(parts),
            parts=parts,
            tokens=self._released(),
            num_tokens=self._num_tokens - num_before,
            num_reasoning_tokens=num_reasoning_tokens,
            finish=self._finish,
            stop_string=stop_string,
            stop_token_id=None if by_string else output.stop_token_id,
            stopped_early=by_string and output.finish is None,
            error=None if by_string else output.error,
        )

    def _parse(self, token_id: int) -> list[Part]:
        mark = self._marks.get(token_id)
        if mark is None:
            text = self._detokenizer.push(token_id)
            return self._parser.push(text) if text else []
        broken = self._detokenizer.push_mark()
        parts = self._parser.push(broken) if broken else []
        return parts + self._parser.push_control(mark)

    def _take(self, parts: Sequence[Part], shown: list[Part]) -> str | None:
        """Pass the answer through the stop strings; the one that it completes."""
        for part in parts:
            if not isinstance(part, AnswerText):
                self._interrupt(shown)
                shown.append(part)
                continue
            self._num_parsed += len(part.text)
            if self._stops is None:
                self._show(part.text, shown)
                continue
            result = self._stops.push(part.text)
            self._show(result.text, shown)
            if result.stop is not None:
                return result.stop
        return None

    def _interrupt(self, shown: list[Part]) -> None:
        """Something other than answer text follows: what is held back is no stop string."""
        if self._stops is not None:
            self._show(self._stops.restart(), shown)
        # Tokens that began no answer text were markup.
        end = self._base + self._num_parsed
        while self._waiting and self._waiting[-1].text_offset >= end:
            self._waiting.pop()

    def _show(self, text: str, shown: list[Part]) -> None:
        if text:
            shown.append(AnswerText(text))
            self._num_shown += len(text)

    def _released(self) -> tuple[OutputToken, ...]:
        """Tokens that begin in the text shown so far; at a natural end, all that wait.

        A token at exactly the end of the shown text waits: it may turn out to be
        the first of a stop string or of markup, and then it is not listed at all.
        """
        waiting = self._waiting
        if self._finish is not None and self._num_shown == self._num_parsed:
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
        parts=merged_parts(part for delta in all_deltas for part in delta.parts),
        tokens=tuple(token for delta in all_deltas for token in delta.tokens),
        num_tokens=sum(delta.num_tokens for delta in all_deltas),
        num_reasoning_tokens=sum(delta.num_reasoning_tokens for delta in all_deltas),
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


def _marks(tokenizer: Tokenizer, parser: OutputParser) -> dict[int, str]:
    """The control ids that the parser wants to see as such."""
    found = {tokenizer.control_id(literal): literal for literal in parser.control_literals}
    return {token_id: literal for token_id, literal in found.items() if token_id is not None}


def _entry(tokenizer: Tokenizer, alternative: TokenLogprob) -> LogprobEntry:
    piece = tokenizer.token_bytes(alternative.token_id)
    return LogprobEntry(alternative.token_id, token_text(piece), piece, alternative.logprob)
