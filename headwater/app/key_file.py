"""API keys with what they allow, from settings and the key file.

    sk-abc                                     a key; its tenant is named after a digest of it
    sk-def name=team-a cache=agent cache_max_days=2

One key a line, attributes after it, in any order. Errors name the line, never the
key. Knows the file's form and not what the door does with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from headwater.api.config import KEY_NAME, ApiKey
from headwater.api.retention import DAY_S
from headwater.app.groups import ServerSettings
from headwater.app.options import nearest
from headwater.core.cache import RetentionClass
from headwater.core.errors import ConfigError

ATTRIBUTES = ("name", "cache", "cache_max_days")
COMMENT = "#"


@dataclass(frozen=True, slots=True)
class _Line:
    """Where a key stands, for messages."""

    path: Path
    number: int

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(f"server.api_key_file {self.path}, line {self.number}: {what}")


def read_keys(server: ServerSettings) -> tuple[ApiKey, ...]:
    """All keys, each once: the file's with its attributes, then those of the settings.

    Raises ConfigError if the file cannot be read, holds no key or a line that is wrong.
    """
    found: dict[str, ApiKey] = {}
    if server.api_key_file is not None:
        found = _from_file(server.api_key_file)
    for secret in server.api_key:
        found.setdefault(secret, ApiKey.unnamed(secret))
    return tuple(found.values())


def _from_file(path: Path) -> dict[str, ApiKey]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read server.api_key_file: {error}") from None
    found: dict[str, ApiKey] = {}
    names: dict[str, str] = {}  # to the secret
    for number, text in enumerate(lines, start=1):
        words = text.split()
        if not words or words[0].startswith(COMMENT):
            continue
        line = _Line(path, number)
        key = _key(words, line)
        if found.get(key.secret, key) != key:
            raise line.wrong("a key that stands in an earlier line with other attributes")
        if names.setdefault(key.name, key.secret) != key.secret:
            raise line.wrong("a name that another key has: tenants never share a name")
        found[key.secret] = key
    if not found:
        raise ConfigError(f"server.api_key_file {path} holds no key")
    return found


def _key(words: list[str], line: _Line) -> ApiKey:
    secret, *rest = words
    given: dict[str, str] = {}
    for position, word in enumerate(rest, start=1):
        attribute, equals, value = word.partition("=")
        # A word may be a piece of a secret: only what looks like an attribute is repeated.
        if not equals or not (attribute.isidentifier() and attribute.islower()):
            raise line.wrong(f"word {position} after the key is no attribute such as name=team-a")
        if attribute not in ATTRIBUTES:
            known = nearest(attribute, ATTRIBUTES) or f"; known: {', '.join(ATTRIBUTES)}"
            raise line.wrong(f"word {position} after the key is an unknown attribute{known}")
        if attribute in given:
            raise line.wrong(f"{attribute} stands there twice")
        given[attribute] = value
    plain = ApiKey.unnamed(secret)
    return ApiKey(
        name=_name(given["name"], line) if "name" in given else plain.name,
        secret=secret,
        kind=_class(given["cache"], line) if "cache" in given else None,
        max_keep_s=_seconds(given["cache_max_days"], line)
        if "cache_max_days" in given
        else math.inf,
    )


def _name(value: str, line: _Line) -> str:
    if not KEY_NAME.fullmatch(value):
        raise line.wrong("name must be 1 to 64 letters, digits and ._@-, a letter or digit first")
    return value


def _class(value: str, line: _Line) -> RetentionClass:
    try:
        return RetentionClass(value)
    except ValueError:
        raise line.wrong(f"cache must be one of {', '.join(RetentionClass)}") from None


def _seconds(value: str, line: _Line) -> float:
    try:
        days = float(value)
    except ValueError:
        days = math.nan
    if not 0 <= days < math.inf:
        raise line.wrong("cache_max_days must be a number of days, at least 0")
    return days * DAY_S
