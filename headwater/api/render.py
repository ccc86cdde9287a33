"""A failure in the dialect that a path belongs to: for refusals before any route is reached.

Used by the guard, the outermost wrapper, the gate and unknown paths. Routes word
their own failures.
"""

from __future__ import annotations

from starlette.responses import Response

from headwater.api.anthropic import errors as anthropic
from headwater.api.failure import Failure
from headwater.api.openai import errors as openai

MESSAGES_PATH = "/v1/messages"


def render_failure(path: str, failure: Failure) -> Response:
    """Anthropic's words for its own routes, OpenAI's for every other path."""
    if path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/"):
        return anthropic.error_response(failure)
    return openai.error_response(failure)
