"""What one worker's steps and requests may take at most.

Pure values and checks; knows no queues and no blocks' states. ``app`` builds
the config, ``scheduler`` keeps to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.errors import ConfigError, InvalidRequest, PromptTooLong
from headwater.core.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of one worker's steps.

    ``max_step_tokens``: no step computes more. ``max_mixed_prefill_tokens``:
    prefill's share of a step that also decodes, which bounds the token gap of
    running answers. ``reserve_blocks_per_sequence`` stay available when a
    sequence starts, so that growth does not preempt it at once.
    ``decoder_replay_tokens``: as in ``ModelInfo``.
    """

    context_tokens: int
    max_step_tokens: int = 2048
    max_mixed_prefill_tokens: int = 512
    max_running_sequences: int = 64
    reserve_blocks_per_sequence: int = 1
    decoder_replay_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("context_tokens", "max_mixed_prefill_tokens", "max_running_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"scheduler.{name} must be >= 1, got {getattr(self, name)}")
        if self.reserve_blocks_per_sequence < 0:
            raise ConfigError(
                "scheduler.reserve_blocks_per_sequence must be >= 0, "
                f"got {self.reserve_blocks_per_sequence}"
            )
        if self.max_step_tokens < self.max_running_sequences:
            # Else a full set of decode rows alone would pass the limit.
            raise ConfigError(
                f"scheduler.max_step_tokens ({self.max_step_tokens}) must be >= "
                f"scheduler.max_running_sequences ({self.max_running_sequences})"
            )


def check_fits(request: Request, *, context_tokens: int, pool_tokens: int) -> None:
    """Refuse now what could never finish (E03), instead of when blocks run out.

    Raises PromptTooLong if the prompt leaves no room, InvalidRequest if prompt
    and output together can never be held by a KV pool of ``pool_tokens``.
    """
    num_prompt, max_output = request.num_prompt_tokens, request.stop.max_output_tokens
    if num_prompt < 1:
        raise InvalidRequest("the prompt is empty", param="prompt", code="empty_prompt")
    if request.num_choices < 1 or max_output < 0:
        raise InvalidRequest("n must be >= 1 and max tokens >= 0")
    limit_tokens = min(context_tokens - 1 if max_output else context_tokens, pool_tokens)
    if num_prompt > limit_tokens:
        raise PromptTooLong(num_prompt, limit_tokens)
    # The last output token is only told, never computed on: it needs no KV.
    max_output = min(max_output, context_tokens - num_prompt)
    if num_prompt + max(max_output - 1, 0) > pool_tokens:
        raise InvalidRequest(
            f"{num_prompt} prompt tokens + {max_output} maximum output tokens do not fit in "
            f"the KV cache of {pool_tokens} tokens; ask for at most "
            f"{pool_tokens - num_prompt + 1} output tokens",
            param="max_tokens",
            code="kv_capacity_exceeded",
        )
