"""All accepted requests, and what admission has to know of them together.

Each is waiting for a place, placed on workers, or done with and read to its end. Counts are
kept as things happen, so that admission costs the same whatever is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

from headwater.core.errors import AuditError, InvalidRequest
from headwater.core.request import Request, RequestId, SampledToken, SequenceOutput
from headwater.router.call import Attempt, Call


class Calls:
    """By request id, and by the name of the attempt that waits or runs."""

    def __init__(self) -> None:
        self._calls: dict[RequestId, Call] = {}
        self._placed: dict[str, Call] = {}
        self._waiting: dict[str, Call] = {}
        self.num_sequences = 0  # unfinished
        self.num_waiting_tokens = 0  # prompt tokens of those that were told nothing yet

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Call]:
        return iter(list(self._calls.values()))

    def get(self, request_id: RequestId) -> Call | None:
        return self._calls.get(request_id)

    def placed(self, key: str) -> Call | None:
        """Whose attempt that is; None when it was given up or is over."""
        return self._placed.get(key)

    @property
    def waiting(self) -> list[Call]:
        return list(self._waiting.values())

    def open(self, request: Request) -> Call:
        if request.request_id in self._calls:
            raise InvalidRequest("this request id is in use", code="duplicate_request_id")
        call = self._calls[request.request_id] = Call(request)
        self.num_sequences += request.num_choices
        self.num_waiting_tokens += request.num_prompt_tokens
        return call

    def close(self, call: Call) -> None:
        """Its caller has left. It neither waits nor is placed."""
        del self._calls[call.request.request_id]
        self.num_sequences -= call.num_open
        if not call.has_started:
            self.num_waiting_tokens -= call.request.num_prompt_tokens

    def wait(self, call: Call, key: str) -> None:
        call.waiting_key = key
        self._waiting[key] = call

    def stop_waiting(self, call: Call) -> str | None:
        """Gives the name that waited, if one did."""
        key, call.waiting_key = call.waiting_key, None
        if key is not None:
            del self._waiting[key]
        return key

    def place(self, attempt: Attempt) -> Call:
        """The one that waits by the attempt's name is worked on now."""
        call = self._waiting[attempt.key]
        self.stop_waiting(call)
        call.attempt = attempt
        self._placed[attempt.key] = call
        return call

    def unplace(self, call: Call) -> Attempt | None:
        """What its workers say from now on is not heard."""
        attempt, call.attempt = call.attempt, None
        if attempt is not None:
            del self._placed[attempt.key]
        return attempt

    def take(self, call: Call, output: SequenceOutput) -> tuple[SampledToken, ...] | None:
        """As ``Call.take``."""
        had_started, num_open = call.has_started, call.num_open
        tokens = call.take(output)
        self._count(call, had_started, num_open)
        return tokens

    def end_choice(self, call: Call, index: int) -> None:
        """As ``Call.end_choice``."""
        had_started, num_open = call.has_started, call.num_open
        call.end_choice(index)
        self._count(call, had_started, num_open)

    def _count(self, call: Call, had_started: bool, num_open: int) -> None:
        self.num_sequences -= num_open - call.num_open
        if call.has_started and not had_started:
            self.num_waiting_tokens -= call.request.num_prompt_tokens

    def audit(self) -> None:
        """Raises AuditError if the counts or places do not add up."""
        calls = self._calls.values()
        if self.num_sequences != sum(call.num_open for call in calls):
            raise AuditError("sequences in flight do not add up")
        if self.num_waiting_tokens != sum(
            call.request.num_prompt_tokens for call in calls if not call.has_started
        ):
            raise AuditError("waiting tokens do not add up")
        placed = {c.attempt.key for c in calls if c.attempt is not None}
        waiting = {c.waiting_key for c in calls if c.waiting_key is not None}
        if placed != set(self._placed) or waiting != set(self._waiting) or placed & waiting:
            raise AuditError("a request has two places, or one that nobody knows")
