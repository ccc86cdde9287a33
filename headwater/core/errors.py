"""Errors that cross rooms. Each message says what is wrong and what to do.

Rooms raise these; only ``api`` turns them into HTTP answers and only ``app``
into exit codes. Messages never carry prompt or output text.
"""

from __future__ import annotations


class HeadwaterError(Exception):
    """Base of every error that Headwater raises on purpose."""


class ConfigError(HeadwaterError):
    """A setting is unknown, out of range, or contradicts another."""


class ModelError(HeadwaterError):
    """A model cannot be found, read or run; the message names the file or field."""


class InvalidChange(HeadwaterError):
    """A state machine was asked for a change it does not have; names both states."""


class AuditError(HeadwaterError):
    """Bookkeeping does not add up: a bug of ours, never the caller's."""


class InvalidRequest(HeadwaterError):
    """The caller's request cannot be served as asked (HTTP 400).

    ``param`` names the offending field as the caller spelt it, ``code`` is a
    short machine-readable reason.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room in the context window, or none in the KV pool."""

    def __init__(
        self, num_prompt_tokens: int, limit_tokens: int, *, param: str = "messages"
    ) -> None:
        super().__init__(
            f"prompt is too long: {num_prompt_tokens} tokens > {limit_tokens} maximum; "
            f"this model's maximum context length is {limit_tokens} tokens. "
            "Shorten or compact the prompt.",
            param=param,
            code="context_length_exceeded",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.limit_tokens = limit_tokens


class Overloaded(HeadwaterError):
    """A queue is full (HTTP 429); try again after ``retry_after_s``."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotReady(HeadwaterError):
    """The service cannot take work now (HTTP 503): starting, restarting or draining."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerLost(HeadwaterError):
    """The worker that held the request died or stopped answering (HTTP 500)."""


class EngineFault(HeadwaterError):
    """A step failed for a reason that is not the caller's (HTTP 500)."""


class StoreError(HeadwaterError):
    """A store of KV cannot be opened or used as asked; says which setting to change."""


class RecordLost(HeadwaterError):
    """A record that a lookup found is gone or did not pass its checks: a miss.

    ``is_damaged`` tells a failed check from a record that was only dropped meanwhile.
    """

    def __init__(self, message: str, *, is_damaged: bool) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged
