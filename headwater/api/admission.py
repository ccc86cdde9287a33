"""From what a call asks to core Requests: room in the context, seeds, ids.

Dialect-neutral. All refusals that depend on sizes are raised here, before any
header is sent; whether there is room in the queue is the router's to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from headwater.api.retention import CacheAsk
from headwater.core.cache import Retention
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest, PromptTooLong
from headwater.core.request import (
    DEVICE_ONLY,
    ModelInfo,
    Request,
    RequestId,
    SamplingParams,
    StopParams,
)
from headwater.recipe.recipe import EncodedPrompt

Entropy = Callable[[int], bytes]

SEED_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One call in the stack's words; each prompt becomes a Request of ``num_choices``.

    ``max_output_tokens`` None means all the room that the context leaves; 0
    means prefill only. ``prompt_param`` is the field to blame for a long prompt.
    """

    prompts: tuple[EncodedPrompt, ...]
    prompt_param: str
    sampling: SamplingParams
    seed: int | None
    num_choices: int
    max_output_tokens: int | None
    min_output_tokens: int
    stop_strings: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_end: bool
    num_prompt_logprobs: int | None = None
    constraint: Constraint | None = None  # of the whole output
    cache: CacheAsk = field(default_factory=CacheAsk)


def build_requests(
    ask: Ask,
    info: ModelInfo,
    end_token_ids: frozenset[int],
    *,
    call_id: str,
    tenant: str,
    entropy: Entropy,
    retention: Retention = DEVICE_ONLY,
) -> tuple[Request, ...]:
    """One Request per prompt, in order. Raises PromptTooLong and InvalidRequest.

    A given seed is the same for every prompt, so that a prompt in a list gives
    what it gives alone; without one, each prompt draws its own.
    """
    requests = []
    for position, prompt in enumerate(ask.prompts):
        tokens = prompt.tokens
        if not tokens:
            raise InvalidRequest(
                f"{ask.prompt_param} is empty: there is no token to start from",
                param=ask.prompt_param,
                code="invalid_value",
            )
        max_output_tokens = _room(ask, len(tokens), info.context_tokens)
        request_id = call_id if len(ask.prompts) == 1 else f"{call_id}-{position}"
        requests.append(
            Request(
                request_id=RequestId(request_id),
                prompt_tokens=tokens,
                sampling=dataclasses.replace(ask.sampling, seed=_seed(ask.seed, entropy)),
                stop=StopParams(
                    max_output_tokens=max_output_tokens,
                    min_output_tokens=min(ask.min_output_tokens, max_output_tokens),
                    stop_token_ids=ask.stop_token_ids,
                    end_token_ids=end_token_ids,
                    ignore_end=ask.ignore_end,
                ),
                num_choices=ask.num_choices,
                num_prompt_logprobs=ask.num_prompt_logprobs,
                constraint=ask.constraint,
                tenant=tenant,
                retention=retention,
            )
        )
    return tuple(requests)


def _room(ask: Ask, num_prompt_tokens: int, context_tokens: int) -> int:
    """Output tokens to allow: what was asked, cut to what the context leaves.

    A prompt is never cut. One that fills the context exactly can still be
    prefilled (a limit of 0), but not continued.
    """
    if num_prompt_tokens > context_tokens:
        raise PromptTooLong(num_prompt_tokens, context_tokens, param=ask.prompt_param)
    room_tokens = context_tokens - num_prompt_tokens
    if room_tokens == 0 and ask.max_output_tokens != 0:
        raise InvalidRequest(
            f"prompt is too long: its {num_prompt_tokens} tokens fill this model's maximum context "
            f"length of {context_tokens} tokens and leave no room for output. "
            "Shorten or compact the prompt.",
            param=ask.prompt_param,
            code="context_length_exceeded",
        )
    if ask.max_output_tokens is None:
        return room_tokens
    return min(ask.max_output_tokens, room_tokens)


def _seed(seed: int | None, entropy: Entropy) -> int:
    if seed is None:
        return int.from_bytes(entropy(SEED_BITS // 8), "little")
    return seed % (1 << SEED_BITS)
