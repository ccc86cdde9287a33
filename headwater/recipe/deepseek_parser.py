"""DeepSeek's output to parts: parsed by ``deepseek_recipe``, kept whole here.

The library's ``StreamProcessor`` splits reasoning from answer and turns tags into
JSON arguments. It works on text, and it is made for output that ends with its
block of calls; this adds what a server needs:

- a control token reaches it under a spelling that nobody can write, and text
  that is merely spelt like a tag stays text;
- it only ever sees a whole stretch: up to the end of a block, or of the output.
  What follows a block is a new stretch, so nothing after it is lost:

      reasoning </think> answer <DSML calls> ... </DSML calls> | more answer <DSML calls> ...
      first stretch                                            | second stretch

- a block without any call comes out as the text that it is.

Text between the tags of a block that does hold a call has no place in the
format and is dropped, as the library does.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Final

import deepseek_recipe as library
import msgspec

from headwater.recipe.deepseek_format import DSML, END_THINK, DeepseekVersion
from headwater.recipe.parser_json_call import is_json_object
from headwater.recipe.parsers import Stage
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_CONTROLS: Final = frozenset({DSML, END_THINK})

# (stage, whether the prompt holds its beginning) -> where the library begins; else in an
# answer from which it takes the line breaks at the start.
_INITIAL_STAGES: Final[dict[tuple[Stage, bool], library.ThinkingInitialStage]] = {
    ("reasoning", False): library.ThinkingInitialStage.ReasoningStart,
    ("reasoning", True): library.ThinkingInitialStage.ReasoningContinuation,
    ("answer", True): library.ThinkingInitialStage.ContentContinuation,
}


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str = ""


class _Call(msgspec.Struct):
    index: int
    function: _Function
    id: str | None = None  # only where a call begins


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class DeepseekParser:
    """Implements :class:`headwater.recipe.parsers.OutputParser`."""

    def __init__(
        self,
        version: DeepseekVersion,
        *,
        stage: Stage,
        is_continued: bool = False,
        tools: bool,
        new_call_id: Callable[[], str],
    ) -> None:
        """``stage`` is where the prompt left off: ``tool_call`` if it opened the block
        of calls. ``is_continued``: it holds the beginning of that reasoning or answer.
        Without ``tools`` a tag is text."""
        self._calls_tag = version.tag("calls") + ">"
        self._tools = tools
        self._new_call_id = new_call_id
        nonce = secrets.token_hex(16)
        self._dsml = f"|D{nonce}|"
        self._end_think = f"|E{nonce}|"
        self._tokens = library.SpecialTokens(
            dsml=self._dsml, thinking_start=f"|S{nonce}|", thinking_end=self._end_think
        )
        self._stage: Stage = stage
        self._tail = ""  # the last two characters of text
        self._tag: str | None = None  # what followed a DSML token whose tag is not known yet
        self._block: list[str] | None = [] if stage == "tool_call" else None
        self._after_block = False  # of calls, with no text since
        self._num_calls = 0
        self._first_call = 0  # of this stretch
        self._arguments: list[str] | None = None  # of the call that is open
        self._processor = self._open_stretch(_INITIAL_STAGES.get((stage, is_continued)))

    @property
    def control_literals(self) -> frozenset[str]:
        return _CONTROLS

    @property
    def stage(self) -> Stage:
        return self._stage

    def push(self, text: str) -> list[Part]:
        if self._tag is not None:
            return self._push_tag(text)
        return self._feed(text)

    def push_control(self, literal: str) -> list[Part]:
        parts = self._settle_tag()
        if literal == END_THINK:
            match self._stage:
                case "reasoning":
                    self._stage = "answer"
                    return parts + self._feed(self._end_think)
                case "answer":
                    return parts  # closes what is not open
                case _:
                    return parts + self._feed(literal)
        if not self._tools or not self._tail.endswith("<" if self._block is None else ("<", "</")):
            return parts + self._feed(literal)
        if self._block is not None and self._tail != "</":
            return parts + self._feed(self._dsml)
        # Opens or closes a block, perhaps: the tag's name will tell.
        self._tag = ""
        return parts

    def finish(self) -> list[Part]:
        return [*self._settle_tag(), *self._end_stretch()]

    # -- tags ---------------------------------------------------------------------------

    def _push_tag(self, text: str) -> list[Part]:
        assert self._tag is not None
        self._tag += text
        wanted = self._calls_tag
        if len(self._tag) < len(wanted) and wanted.startswith(self._tag):
            return []
        if not self._tag.startswith(wanted):
            return self._settle_tag()
        rest = self._tag[len(wanted) :]
        self._tag = None
        if self._block is None:
            self._stage = "tool_call"
            self._block = ["<"]
            return self._feed(self._dsml + wanted) + self._feed(rest)
        parts = self._feed(self._dsml + wanted) + self._end_stretch()
        self._stage = "answer"
        self._processor = self._open_stretch(None)
        return parts + self._feed(rest)

    def _settle_tag(self) -> list[Part]:
        """The tag is not one that opens or closes a block."""
        if self._tag is None:
            return []
        tag, self._tag = self._tag, None
        return self._feed((DSML if self._block is None else self._dsml) + tag)

    # -- stretches ----------------------------------------------------------------------

    def _open_stretch(
        self, initial: library.ThinkingInitialStage | None
    ) -> library.StreamProcessor:
        request = library.ConversationRequest(
            library.Conversation([]), library.ModelVersion.DeepseekV41Flash
        )
        return library.StreamProcessor(
            library.ChatCompletionRequest.chunk_generator(request, "", ""),
            library.ParsingOptions(
                parse_tool_calls=self._tools,
                starts_in_tool_calls=self._stage == "tool_call",
                thinking_initial_stage=initial,
                special_tokens=self._tokens,
            ),
        )

    def _feed(self, text: str) -> list[Part]:
        if self._after_block:
            text = text.lstrip()
            self._after_block = not text
        if not text:
            return []
        self._tail = (self._tail + text)[-2:]
        if self._block is not None and self._first_call == self._num_calls:
            self._block.append(text)
        return self._parts(self._processor.push(library.InferenceChunk.text(text)))

    def _end_stretch(self) -> list[Part]:
        parts = self._parts(self._processor.finish())
        block, self._block = self._block, None
        self._after_block = self._first_call != self._num_calls
        if block and not self._after_block:
            parts.append(AnswerText("".join(block).replace(self._dsml, DSML)))
        self._end_call(parts)
        self._first_call = self._num_calls
        return parts

    def _parts(self, chunks: Iterable[object]) -> list[Part]:
        parts: list[Part] = []
        for chunk in chunks:
            assert isinstance(chunk, library.ChatCompletionChunk)
            for choice in _decode_chunk(chunk.to_json()).choices:
                delta = choice.delta
                if delta.reasoning_content:
                    parts.append(ReasoningText(self._spelt(delta.reasoning_content)))
                if delta.content:
                    parts.append(AnswerText(self._spelt(delta.content)))
                for call in delta.tool_calls or ():
                    self._take_call(call, parts)
        return parts

    def _take_call(self, call: _Call, parts: list[Part]) -> None:
        if call.id is not None:
            self._end_call(parts)
            self._arguments = []
            name = self._spelt(call.function.name or "")
            parts.append(ToolCallStart(self._num_calls, self._new_call_id(), name))
            self._num_calls += 1
        if call.function.arguments and self._arguments is not None:
            text = self._spelt(call.function.arguments)
            self._arguments.append(text)
            parts.append(ToolCallArguments(self._num_calls - 1, text))

    def _end_call(self, parts: list[Part]) -> None:
        """The open call is over; it is complete if its arguments are an object."""
        if self._arguments is None:
            return
        text = "".join(self._arguments)
        self._arguments = None
        if is_json_object(text):
            parts.append(ToolCallEnd(self._num_calls - 1))

    def _spelt(self, text: str) -> str:
        """A control token in the wrong place is shown as it is usually spelt."""
        return text.replace(self._dsml, DSML).replace(self._end_think, END_THINK)
