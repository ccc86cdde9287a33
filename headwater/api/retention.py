"""How long a request's KV is kept beyond the device: by its traffic, its key and its own word.

    class:  the request's word > the key's default > agent with tools, else chat
    days:   the least of the class's, the key's longest and what the request asks

So a request may choose a class or shorten, and never keep longer than its key allows.
Pure: values in, a value out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headwater.core.cache import Retention, RetentionClass

DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAsk:
    """What one call says of the cache. ``salt`` narrows whose prefixes it may hit."""

    has_tools: bool = False
    kind: RetentionClass | None = None
    keep_s: float = math.inf  # asked; only ever shortens
    salt: str | None = None
    wants_report: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whom a credential stands for, and what it allows. Without keys: everybody."""

    tenant: str = ""
    kind: RetentionClass | None = None  # of its requests, unless they say otherwise
    max_keep_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepTimes:
    """Seconds since the last use, by class."""

    agent_s: float = 3 * DAY_S
    chat_s: float = 7 * DAY_S

    def of(self, kind: RetentionClass) -> float:
        return self.agent_s if kind is RetentionClass.AGENT else self.chat_s


def choose_retention(ask: CacheAsk, caller: Caller, times: KeepTimes) -> Retention:
    """
    >>> ask = CacheAsk(has_tools=True, keep_s=3600.0)
    >>> choose_retention(ask, Caller(), KeepTimes())
    Retention(kind=<RetentionClass.AGENT: 'agent'>, keep_s=3600.0)
    """
    by_traffic = RetentionClass.AGENT if ask.has_tools else RetentionClass.CHAT
    kind = ask.kind or caller.kind or by_traffic
    return Retention(kind, min(times.of(kind), caller.max_keep_s, ask.keep_s))
