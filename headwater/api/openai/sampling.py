"""Checks the numbers of an OpenAI body and puts them into the stack's words.

Defaults and ranges are OpenAI's where OpenAI has the field. Every refusal names
the field; numbers are shown, text never is.
"""

from __future__ import annotations

from collections.abc import Callable

from headwater.api import ranges
from headwater.api.admission import Ask
from headwater.api.caching import cache_ask
from headwater.api.config import ApiConfig
from headwater.api.openai.bodies import CommonBody
from headwater.core.errors import InvalidRequest
from headwater.core.request import ModelInfo, SamplingParams
from headwater.recipe.recipe import EncodedPrompt

MAX_TOP_LOGPROBS = 20
MAX_STOP_IDS = 256
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0


def build_ask(
    body: CommonBody,
    info: ModelInfo,
    config: ApiConfig,
    *,
    prompt_param: str,
    prompts: Callable[[], tuple[EncodedPrompt, ...]],
    max_name: str,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
    has_tools: bool = False,
) -> Ask:
    """Everything that both routes share. ``prompts`` tokenises, after all else was checked.

    ``max_tokens`` is what the caller asked under ``max_name``; None means all the room.
    """
    if max_tokens is not None:
        ranges.integer(max_name, max_tokens, 0, 0, ranges.MAX_TOKENS_ASKED)
    min_tokens = ranges.integer("min_tokens", body.min_tokens, 0, 0, info.context_tokens)
    if max_tokens is not None and min_tokens > max_tokens:
        raise ranges.out_of_range("min_tokens", f"at most {max_name}", str(min_tokens))
    return Ask(
        sampling=_sampling(body, info, config, num_logprobs),
        seed=body.seed,
        num_choices=ranges.integer("n", body.n, 1, 1, config.max_choices),
        max_output_tokens=max_tokens,
        min_output_tokens=min_tokens,
        stop_strings=_stop_strings(body, config),
        stop_token_ids=_stop_token_ids(body, info),
        ignore_end=bool(body.ignore_eos),
        num_prompt_logprobs=num_prompt_logprobs,
        cache=cache_ask(
            body, has_tools=has_tools, prompt_cache_retention=body.prompt_cache_retention
        ),
        prompt_param=prompt_param,
        prompts=prompts(),
    )


def include_usage(body: CommonBody) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _sampling(
    body: CommonBody, info: ModelInfo, config: ApiConfig, num_logprobs: int | None
) -> SamplingParams:
    """``seed`` stays 0 here: admission sets it."""
    return SamplingParams(
        temperature=ranges.number(
            "temperature", body.temperature, 1.0, 0.0, ranges.MAX_TEMPERATURE
        ),
        top_k=min(ranges.integer("top_k", body.top_k, 0, 0, 2**31 - 1), info.vocab_size),
        top_p=ranges.number("top_p", body.top_p, 1.0, 0.0, 1.0, above=True),
        min_p=ranges.number("min_p", body.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=ranges.number(
            "repetition_penalty",
            body.repetition_penalty,
            1.0,
            0.0,
            MAX_REPETITION_PENALTY,
            above=True,
        ),
        frequency_penalty=ranges.number("frequency_penalty", body.frequency_penalty, 0.0, -2, 2),
        presence_penalty=ranges.number("presence_penalty", body.presence_penalty, 0.0, -2, 2),
        logit_bias=_logit_bias(body, info, config),
        num_logprobs=num_logprobs,
    )


def _stop_token_ids(body: CommonBody, info: ModelInfo) -> frozenset[int]:
    ids = body.stop_token_ids or []
    ranges.count("stop_token_ids", len(ids), MAX_STOP_IDS, "ids")
    return frozenset(ranges.token_id("stop_token_ids", value, info.vocab_size) for value in ids)


def _stop_strings(body: CommonBody, config: ApiConfig) -> tuple[str, ...]:
    match body.stop:
        case None:
            return ()
        case str(one):
            return ranges.stop_strings("stop", [one], config)
        case several:
            return ranges.stop_strings("stop", several, config)


def _logit_bias(
    body: CommonBody, info: ModelInfo, config: ApiConfig
) -> tuple[tuple[int, float], ...]:
    entries = body.logit_bias or {}
    ranges.count("logit_bias", len(entries), config.max_bias_entries, "entries")
    bias: dict[int, float] = {}
    for key, value in entries.items():
        # Ten digits hold every id there is; isdecimal alone would allow "٣".
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidRequest(
                "logit_bias: keys must be token ids", param="logit_bias", code="invalid_value"
            )
        token = ranges.token_id("logit_bias", int(key), info.vocab_size)
        bias[token] = ranges.number("logit_bias", value, 0.0, -MAX_BIAS, MAX_BIAS)
    return tuple(sorted(bias.items()))
