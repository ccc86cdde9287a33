"""A request as the stack sees it: token ids in, rules for choosing and stopping.

Text is gone by here (``recipe`` turned it into ids); stop *strings* therefore
stay with ``recipe``, which watches the text and aborts the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from headwater.core.cache import CacheReport, Retention, RetentionClass
from headwater.core.constraint import Constraint

RequestId = NewType("RequestId", str)


DEVICE_ONLY = Retention(RetentionClass.CHAT, 0.0)


class FinishReason(StrEnum):
    """Why a sequence ended. Dialects map these to their own words."""

    STOP = "stop"  # end-of-turn id, stop id or stop string
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"
    HANDED_OVER = "handed_over"  # a prompt's KV, to another worker: no caller is told of it


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one token is chosen from logits. Ranges are checked by ``api``.

    Applied in this order: logit_bias, penalties, bans (the output constraint's
    included), temperature, top_k, top_p, min_p, draw. ``temperature == 0`` takes the
    highest logit (lowest id on a tie) and ignores top_k, top_p and min_p.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off; keeps p >= min_p * max(p)
    repetition_penalty: float = 1.0  # 1: off; over prompt and output tokens
    frequency_penalty: float = 0.0  # over output tokens
    presence_penalty: float = 0.0  # over output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    num_logprobs: int | None = None  # None: none; 0: chosen token only; k: and the top k


@dataclass(frozen=True, slots=True, kw_only=True)
class StopParams:
    """When a sequence ends by token count or id."""

    max_output_tokens: int
    min_output_tokens: int = 0  # stop ids and end-of-turn are masked before this many
    stop_token_ids: frozenset[int] = frozenset()  # asked for by the caller
    end_token_ids: frozenset[int] = frozenset()  # the model's own end of turn / text
    ignore_end: bool = False  # go on past end_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one client call asked, as ids.

    ``num_choices`` sequences share the prompt. ``max_output_tokens == 0`` means
    prefill only: the prompt is computed (and its logprobs returned when asked
    for) and the sequence finishes with LENGTH and no output token.
    """

    request_id: RequestId
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    num_choices: int = 1
    num_prompt_logprobs: int | None = None  # as num_logprobs, for each prompt token but the first
    tenant: str = ""  # whose cache it may hit; the server's word, narrowed by the caller
    retention: Retention = DEVICE_ONLY  # how long its KV is kept beyond the device
    priority: int = 0  # smaller is sooner
    constraint: Constraint | None = None  # on the output of every choice

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float  # natural log


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One committed token. ``logprob`` and ``top`` are those of the model's own
    distribution (before temperature, penalties and bias), None when not asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """Sent once per sequence, with its first output: hit + miss = prompt tokens."""

    num_hit_tokens: int
    num_miss_tokens: int
    cache: CacheReport | None = None  # the hit by tier, and why it ended
    # One entry per prompt token after the first, when asked for.
    logprobs: tuple[SampledToken, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutput:
    """What one step committed for one choice of one request.

    ``prompt`` comes with the choice's first output. ``finish`` comes with its
    last; then ``stop_token_id`` is the id that ended it, if an id did (that id
    is not in ``tokens``).
    """

    request_id: RequestId
    index: int
    tokens: tuple[SampledToken, ...] = ()
    prompt: PromptReport | None = None
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None  # with FAILED: what to tell the caller


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one request; every dialect and metric derives from this one."""

    num_hit_tokens: int = 0
    num_miss_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_hit_tokens + self.num_miss_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a worker serves, as it says at start."""

    model_id: str
    family: str
    fingerprint: str
    vocab_size: int
    context_tokens: int
    block_tokens: int
    num_blocks: int
    kv_bytes_per_token: int
    weights_format: str
    weights_bytes: int  # that the worker holds
    numerics: str
    device: str
    kernels: dict[str, str] = field(default_factory=dict)
    window_tokens: int | None = None  # of the layers with a window, if there are any
    layout: str = ""  # of KV, as in CacheIdentity
    alignment: int = 1  # hits end at multiples of it; it divides ``block_tokens``
    # Late layers compute so many of a prompt's last tokens (``late_start``). None: there are
    # none, or they compute every token.
    decoder_replay_tokens: int | None = None
    saved_weights_bytes: int = 0  # of the model that the worker does not hold


# Tokens that a drafter proposes at once: a step then takes back up to so many that were not
# accepted. No drafter is served yet; with DeepSeek's 5 a prompt's late layers compute what
# theirs do (140 tokens for a window of 128), and a drafter will change no output.
DRAFT_TOKENS = 5


def replay_tokens(window_tokens: int) -> int:
    """How many of a prompt's last tokens late layers compute under decoder replay: a window,
    and what two steps may take back, so that no token after the prompt ever looks before them.

    >>> replay_tokens(128)
    140
    """
    return window_tokens + 2 * (DRAFT_TOKENS + 1)


def late_start(request: Request, decoder_replay_tokens: int | None) -> int | None:
    """From which position on late layers compute the request's tokens; None as for
    ``ModelInfo.decoder_replay_tokens``.

    By the request's own prompt, whatever was generated since: so a sequence that is computed
    again has the numbers that it had.
    """
    if decoder_replay_tokens is None:
        return None
    if request.num_prompt_logprobs is not None:  # every hidden state is read
        return 0
    return max(0, request.num_prompt_tokens - decoder_replay_tokens)
