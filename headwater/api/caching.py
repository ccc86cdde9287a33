"""The fields with which a call speaks to the cache, the same in every dialect.

    cache_retention: "agent" | "chat" | "none" | seconds     how long its KV is kept
    cache_salt: text                                         whose prefixes it may hit: fewer
    return_cache_report: true                                say what hit, and why not more

OpenAI's ``prompt_cache_retention`` is understood where that API has it.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final

import msgspec

from headwater.api import ranges
from headwater.api.retention import CacheAsk
from headwater.core.cache import RetentionClass
from headwater.core.errors import InvalidRequest

MAX_SALT_CHARS = 256
MAX_KEEP_S = 1e10  # some centuries: any number that a person means

# What marks a narrowed namespace; no key's name may hold it.
SALT_MARK: Final = "~"

_OPENAI_KEEP_S: Final = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0}


class CacheFields(msgspec.Struct, kw_only=True):
    cache_retention: str | float | None = None
    cache_salt: str | None = None
    return_cache_report: bool | None = None


def cache_ask(
    fields: CacheFields, *, has_tools: bool, prompt_cache_retention: str | None = None
) -> CacheAsk:
    """What ``fields`` ask, checked. Raises InvalidRequest naming the field."""
    kind: RetentionClass | None = None
    keep_s = _openai_keep_s(prompt_cache_retention)
    match fields.cache_retention:
        case None:
            pass
        case "none":
            keep_s = 0.0
        case str(word):
            kind = _class_of(word)
        case seconds:
            asked_s = ranges.number("cache_retention", seconds, 0.0, 0.0, MAX_KEEP_S)
            keep_s = min(keep_s, asked_s)
    salt = fields.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt must have 1 to {MAX_SALT_CHARS} characters",
            param="cache_salt",
            code="invalid_value",
        )
    return CacheAsk(
        has_tools=has_tools,
        kind=kind,
        keep_s=keep_s,
        salt=salt,
        wants_report=bool(fields.return_cache_report),
    )


def namespace(tenant: str, salt: str | None) -> str:
    """The tenant's own, or a part of it that only this tenant with this salt reaches (C12).

    A digest over both: no salt, whatever it says, leads into another tenant's.

    >>> namespace("a", None), namespace("a", "s") == namespace("b", "s")
    ('a', False)
    """
    if salt is None:
        return tenant
    parts = (tenant.encode(), salt.encode())
    # Length prefixes: ("ab", "c") and ("a", "bc") must not meet.
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    digest = hashlib.blake2b(message, digest_size=16, person=b"headwater-salt")
    return f"{tenant}{SALT_MARK}{digest.hexdigest()}"


def _class_of(word: str) -> RetentionClass:
    try:
        return RetentionClass(word)
    except ValueError:
        raise InvalidRequest(
            "cache_retention must be agent, chat, none or a number of seconds",
            param="cache_retention",
            code="invalid_value",
        ) from None


def _openai_keep_s(word: str | None) -> float:
    if word is None:
        return math.inf
    if word not in _OPENAI_KEEP_S:
        raise InvalidRequest(
            "prompt_cache_retention must be in_memory or 24h",
            param="prompt_cache_retention",
            code="invalid_value",
        )
    return _OPENAI_KEEP_S[word]
