"""Parts of an answer as output items, and as the events of their lives (A21).

    item.added, part.added, delta*, text.done, part.done, item.done      (message, reasoning)
    item.added, arguments.delta*, arguments.done, item.done              (function_call)

One item is open at a time; a part of another kind ends it. The same writer
makes the items of a whole answer, so both forms hold the same output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET

from headwater.api.openai import responses_wire as wire
from headwater.api.openai.responses_tools import CallName
from headwater.recipe.parts import (
    AnswerText,
    Part,
    ReasoningText,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

ItemKind = Literal["message", "reasoning", "function_call"]
_ID_PREFIXES: dict[ItemKind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_NO_NAME = CallName("")


@dataclass(slots=True)
class _Open:
    """The item being written."""

    kind: ItemKind
    item_id: str
    output_index: int
    call_id: str = ""
    name: CallName = _NO_NAME
    pieces: list[str] = field(default_factory=list)


class ItemWriter:
    """The items and events of one answer. ``tag`` makes their ids unique."""

    def __init__(
        self,
        tag: str,
        *,
        as_summary: bool,
        callers_name: Callable[[str], CallName] = CallName,
    ) -> None:
        """``as_summary``: the caller asked for summaries, so the reasoning comes as one.

        ``callers_name`` tells how the caller names the function that the model called.
        """
        self._callers_name = callers_name
        self._tag = tag
        self._as_summary = as_summary
        self._open: _Open | None = None
        self._items: list[wire.OutputItem] = []
        self._num_events = 0

    @property
    def items(self) -> list[wire.OutputItem]:
        """Items that are done."""
        return self._items

    def numbered(self, make: Callable[[int], wire.Event]) -> bytes:
        """An event with the next sequence number."""
        number = self._num_events
        self._num_events += 1
        return wire.frame(make(number))

    def write(self, parts: Iterable[Part]) -> list[bytes]:
        frames: list[bytes] = []
        for part in parts:
            match part:
                case AnswerText(text=text):
                    frames += self._delta(self._opened("message", frames), text)
                case ReasoningText(text=text):
                    frames += self._delta(self._opened("reasoning", frames), text)
                case ToolCallStart(call_id=call_id, name=name):
                    self._start("function_call", frames, call_id, self._callers_name(name))
                case ToolCallArguments(text=text):
                    frames += self._delta(self._opened("function_call", frames), text)
                case ToolCallEnd():
                    frames += self._finish("completed")
        return frames

    def _close(self, *, is_cut: bool) -> list[bytes]:
        """End the open item; ``is_cut``: the output limit came first."""
        is_call = self._open is not None and self._open.kind == "function_call"
        # A call that is still open lacks its end, whatever ended the output.
        return self._finish("incomplete" if is_cut or is_call else "completed")

    def finish(self, *, is_cut: bool) -> list[bytes]:
        """The output has ended. One without anything is an empty message: the turn must not
        be missing from the history that the caller builds."""
        frames: list[bytes] = []
        if self._open is None and not self._items:
            self._start("message", frames)
        return frames + self._close(is_cut=is_cut)

    def _opened(self, kind: ItemKind, frames: list[bytes]) -> _Open:
        if self._open is None or self._open.kind != kind:
            return self._start(kind, frames)
        return self._open

    def _start(
        self,
        kind: ItemKind,
        frames: list[bytes],
        call_id: str = "",
        name: CallName = _NO_NAME,
    ) -> _Open:
        frames += self._close(is_cut=False)
        index = len(self._items)
        opened = _Open(kind, f"{_ID_PREFIXES[kind]}{self._tag}_{index}", index, call_id, name)
        self._open = opened
        item = self._item(opened, "in_progress", text="")
        frames.append(
            self.numbered(lambda n: wire.ItemEvent("response.output_item.added", n, index, item))
        )
        frames += self._part(opened, "added", "")
        return opened

    def _delta(self, opened: _Open, text: str) -> list[bytes]:
        opened.pieces.append(text)
        make = {
            "message": wire.TextDeltaEvent,
            "reasoning": wire.SummaryDeltaEvent if self._as_summary else wire.ReasoningDeltaEvent,
            "function_call": wire.ArgumentsDeltaEvent,
        }[opened.kind]
        return [self.numbered(lambda n: make(n, opened.item_id, opened.output_index, text))]

    def _finish(self, status: wire.ItemStatus) -> list[bytes]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        text = "".join(opened.pieces)
        item = self._item(opened, status, text)
        self._items.append(item)
        item_id, index = opened.item_id, opened.output_index
        frames: list[bytes] = []
        match opened.kind:
            case "message":
                frames.append(self.numbered(lambda n: wire.TextDoneEvent(n, item_id, index, text)))
            case "reasoning":
                done = wire.SummaryDoneEvent if self._as_summary else wire.ReasoningDoneEvent
                frames.append(self.numbered(lambda n: done(n, item_id, index, text)))
            case "function_call" if status == "completed":
                name = opened.name.name
                frames.append(
                    self.numbered(lambda n: wire.ArgumentsDoneEvent(n, item_id, index, name, text))
                )
            case _:
                pass
        frames += self._part(opened, "done", text)
        frames.append(
            self.numbered(lambda n: wire.ItemEvent("response.output_item.done", n, index, item))
        )
        return frames

    def _part(self, opened: _Open, moment: Literal["added", "done"], text: str) -> list[bytes]:
        item_id, index = opened.item_id, opened.output_index
        if opened.kind == "function_call":
            return []
        if opened.kind == "reasoning" and self._as_summary:
            summary_type = f"response.reasoning_summary_part.{moment}"
            summary = wire.SummaryText(text)
            return [
                self.numbered(
                    lambda n: wire.SummaryPartEvent(summary_type, n, item_id, index, 0, summary)
                )
            ]
        is_message = opened.kind == "message"
        part = wire.OutputText(text) if is_message else wire.ReasoningText(text)
        event_type = f"response.content_part.{moment}"
        return [self.numbered(lambda n: wire.PartEvent(event_type, n, item_id, index, 0, part))]

    def _item(self, opened: _Open, status: wire.ItemStatus, text: str) -> wire.OutputItem:
        is_new = status == "in_progress"
        match opened.kind:
            case "message":
                content = () if is_new else (wire.OutputText(text),)
                return wire.MessageItem(opened.item_id, status, content)
            case "reasoning" if self._as_summary:
                summary = () if is_new else (wire.SummaryText(text),)
                return wire.ReasoningItem(opened.item_id, status, summary)
            case "reasoning":
                said = () if is_new else (wire.ReasoningText(text),)
                return wire.ReasoningItem(opened.item_id, status, (), said)
            case "function_call":
                called = opened.name
                return wire.FunctionCallItem(
                    opened.item_id,
                    status,
                    opened.call_id,
                    called.name,
                    text,
                    UNSET if called.namespace is None else called.namespace,
                )
