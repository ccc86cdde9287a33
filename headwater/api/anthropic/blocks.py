"""Parts of an answer as content block events: one open block at a time (A02).

    message_start  [block_start delta* block_stop]*  message_delta message_stop

Indexes rise by one. A part of another kind than the open block closes it first;
a thinking block gets its signature before it closes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from headwater.api.anthropic import wire
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

_NO_INPUT = msgspec.Raw(b"{}")


class BlockWriter:
    """The block events of one streamed message."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._open: Literal["thinking", "text", "tool_use"] | None = None
        self._index = -1
        self._thinking: list[str] = []
        self._had_call = False

    @property
    def had_call(self) -> bool:
        return self._had_call

    def write(self, parts: Iterable[Part]) -> list[bytes]:
        frames: list[bytes] = []
        for part in parts:
            match part:
                case AnswerText(text=text):
                    if self._open != "text":
                        self._start("text", wire.TextBlock(""), frames)
                    frames.append(self._delta(wire.TextDelta(text)))
                case ReasoningText(text=text):
                    if self._open != "thinking":
                        self._start("thinking", wire.ThinkingBlock("", ""), frames)
                    self._thinking.append(text)
                    if self._shows_thinking:
                        frames.append(self._delta(wire.ThinkingDelta(text)))
                case ToolCallStart(call_id=call_id, name=name):
                    self._had_call = True
                    block = wire.ToolUseBlock(call_id, name, _NO_INPUT)
                    self._start("tool_use", block, frames)
                case ToolCallArguments(text=text):
                    frames.append(self._delta(wire.InputDelta(text)))
                case ToolCallEnd():
                    self._stop(frames)
        return frames

    def close(self) -> list[bytes]:
        """The end of whatever block is open."""
        frames: list[bytes] = []
        self._stop(frames)
        return frames

    def _start(
        self,
        kind: Literal["thinking", "text", "tool_use"],
        block: wire.ContentBlock,
        frames: list[bytes],
    ) -> None:
        self._stop(frames)
        self._open = kind
        self._index += 1
        frames.append(wire.frame(wire.BlockStart(self._index, block)))

    def _stop(self, frames: list[bytes]) -> None:
        if self._open is None:
            return
        if self._open == "thinking":
            signature = wire.signature("".join(self._thinking))
            self._thinking.clear()
            frames.append(self._delta(wire.SignatureDelta(signature)))
        frames.append(wire.frame(wire.BlockStop(self._index)))
        self._open = None

    def _delta(
        self, delta: wire.TextDelta | wire.ThinkingDelta | wire.SignatureDelta | wire.InputDelta
    ) -> bytes:
        return wire.frame(wire.BlockDelta(self._index, delta))
