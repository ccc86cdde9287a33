"""What an answer says of its hit: the ``cache`` object for who asks, the header for everybody.

    x-headwater-cache: hit=1792; device=0; host=0; disk=1792; replayed=0; prompt=1900; reason=new

Counts, a reason and a place in the caller's own words; never text. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from headwater.api.reasons import REASON_TEXTS
from headwater.core.cache import CacheReport, MissReason
from headwater.core.request import PromptReport
from headwater.recipe.prefix import place_of
from headwater.recipe.recipe import EncodedPrompt
from headwater.recipe.tokenizer import Tokenizer

CACHE_HEADER = "x-headwater-cache"
SEVERAL_REASONS = "several"
FORMAT_PART = "format"


class EndedAt(msgspec.Struct):
    """The first token that was no hit: its index, and where it stands in the body.

    ``place`` is a message (or a tool) as the caller spells it; part ``format`` is what the
    model's format puts before it. Characters are half-open.
    """

    token: int
    place: str | None
    part: str | None
    start_char: int | None
    end_char: int | None


class CacheWire(msgspec.Struct):
    """One prompt's hit. The three tiers add up to ``hit_tokens``; replayed ones are hits too."""

    prompt_tokens: int
    hit_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    replayed_tokens: int
    load_seconds: float
    reason: str
    explanation: str
    ended_at: EndedAt | None


@dataclass(frozen=True, slots=True)
class HitExplainer:
    """Words the reports of one call. ``places`` are its messages as the caller counts them."""

    tokenizer: Tokenizer
    prompts: Sequence[EncodedPrompt]
    places: Sequence[str] = ()

    def explain(self, report: PromptReport | None, position: int = 0) -> CacheWire | None:
        """The hit of prompt ``position``; None where the worker has not said it."""
        if report is None or report.cache is None:
            return None
        cache = report.cache
        return CacheWire(
            prompt_tokens=report.num_hit_tokens + report.num_miss_tokens,
            hit_tokens=report.num_hit_tokens,
            device_tokens=cache.num_device_tokens,
            host_tokens=cache.num_host_tokens,
            disk_tokens=cache.num_disk_tokens,
            replayed_tokens=cache.num_replayed_tokens,
            load_seconds=cache.load_s,
            reason=cache.reason.value,
            explanation=REASON_TEXTS[cache.reason],
            ended_at=self._ended_at(report.num_hit_tokens, cache, self.prompts[position]),
        )

    def _ended_at(
        self, num_hit_tokens: int, cache: CacheReport, prompt: EncodedPrompt
    ) -> EndedAt | None:
        if cache.reason is MissReason.NONE or num_hit_tokens >= len(prompt.tokens):
            return None
        return ended_at(self.tokenizer, prompt, num_hit_tokens, self.places)


def ended_at(
    tokenizer: Tokenizer, prompt: EncodedPrompt, token_index: int, places: Sequence[str]
) -> EndedAt:
    """``token_index`` of ``prompt`` in the caller's words."""
    place = place_of(tokenizer, prompt, token_index)
    index = place.message_index
    name: str | None = None
    if index is not None:
        if place.part == "tool":
            name = f"tools[{index}]"
        else:
            name = places[index] if index < len(places) else f"messages[{index}]"
    if place.part is None:
        part = FORMAT_PART if prompt.spans else None  # a prompt of text or ids has no parts
        return EndedAt(token_index, name, part, None, None)
    return EndedAt(token_index, name, place.part, place.start_char, place.end_char)


def cache_header(reports: Iterable[PromptReport]) -> str:
    """The header's value: sums over a call's prompts.

    >>> cache_header([PromptReport(num_hit_tokens=0, num_miss_tokens=7)])
    'hit=0; prompt=7'
    """
    found = list(reports)
    num_hit = sum(report.num_hit_tokens for report in found)
    num_prompt = num_hit + sum(report.num_miss_tokens for report in found)
    caches = [report.cache for report in found if report.cache is not None]
    if len(caches) < len(found):  # a worker that does not say more
        return f"hit={num_hit}; prompt={num_prompt}"
    reasons = {cache.reason for cache in caches}
    fields = {
        "hit": num_hit,
        "device": sum(cache.num_device_tokens for cache in caches),
        "host": sum(cache.num_host_tokens for cache in caches),
        "disk": sum(cache.num_disk_tokens for cache in caches),
        "replayed": sum(cache.num_replayed_tokens for cache in caches),
        "prompt": num_prompt,
        "reason": reasons.pop().value if len(reasons) == 1 else SEVERAL_REASONS,
    }
    return "; ".join(f"{name}={value}" for name, value in fields.items())
