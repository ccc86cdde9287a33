"""Why a call is refused or failed, before any dialect puts it into words.

Every error path of the door ends in a :class:`Failure`; a dialect renders it.
Messages come from our own code only and hold neither prompt text nor internals
of the server.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass
from enum import StrEnum

from headwater.core.errors import (
    EngineFault,
    HeadwaterError,
    InvalidRequest,
    NotReady,
    Overloaded,
    WorkerLost,
)

log = logging.getLogger("headwater.api")

MAX_FRAMES = 8  # innermost, of an unexpected error


class FailureKind(StrEnum):
    """Each dialect has a word of its own for these."""

    INVALID_REQUEST = "invalid_request"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    NOT_READY = "not_ready"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """``status`` is the HTTP status to answer with while no header has been sent."""

    status: int
    kind: FailureKind
    message: str
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()


class Refused(HeadwaterError):
    """Carries a Failure that has no error of its own in ``core``."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ClientGone(HeadwaterError):
    """The caller closed the connection; nobody is left to answer."""


UNEXPECTED = Failure(
    status=500,
    kind=FailureKind.INTERNAL,
    message="the server failed on this request; its log has the place",
    code="internal_error",
)


def refused(
    status: int,
    kind: FailureKind,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> Refused:
    return Refused(
        Failure(status=status, kind=kind, message=message, param=param, code=code, headers=headers)
    )


def failure_of(error: Exception) -> Failure:
    """The Failure that ``error`` stands for; unknown errors say nothing about themselves."""
    match error:
        case Refused(failure=failure):
            return failure
        case InvalidRequest(param=param, code=code):
            return Failure(
                status=400,
                kind=FailureKind.INVALID_REQUEST,
                message=str(error),
                param=param,
                code=code,
            )
        case Overloaded(retry_after_s=retry_after_s):
            return Failure(
                status=429,
                kind=FailureKind.OVERLOADED,
                message=str(error),
                code="overloaded",
                headers=_retry_after(retry_after_s),
            )
        case NotReady(retry_after_s=retry_after_s):
            return Failure(
                status=503,
                kind=FailureKind.NOT_READY,
                message=str(error),
                code="not_ready",
                headers=_retry_after(retry_after_s),
            )
        case WorkerLost():
            return Failure(
                status=500,
                kind=FailureKind.INTERNAL,
                message="the worker that computed this request was lost; send it again",
                code="worker_lost",
            )
        case EngineFault():
            return Failure(
                status=500,
                kind=FailureKind.INTERNAL,
                message="the engine failed while it computed this request",
                code="engine_fault",
            )
        case _:
            return UNEXPECTED


def log_failure(error: Exception, call_id: str) -> None:
    """Say in the server's log what the caller is not told.

    An unexpected error's own text is left out: it may quote what the caller
    sent. Its type and the lines it passed through are enough to find it.
    """
    if isinstance(error, WorkerLost | EngineFault):
        log.warning("%s: %s: %s", call_id, type(error).__name__, error)
    elif failure_of(error) is UNEXPECTED:
        frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
        places = " < ".join(f"{f.filename}:{f.lineno} {f.name}" for f in reversed(frames))
        log.error("%s: unexpected %s at %s", call_id, type(error).__name__, places)


def _retry_after(seconds: float) -> tuple[tuple[str, str], ...]:
    # The header takes whole seconds; 0 would invite a busy loop.
    return (("Retry-After", str(max(1, -(-int(seconds * 1000) // 1000)))),)
