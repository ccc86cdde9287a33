"""What the door is told at start: keys, names, caps and timers, checked once.

Knows nothing of flags, files or the environment; ``app`` reads those and builds
one of these. Every limit here is a hard cap with a 4xx answer over it.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, field

from headwater.api.retention import Caller, KeepTimes
from headwater.core.cache import RetentionClass
from headwater.core.errors import ConfigError

# Names are tenants: they stand in logs, and the mark of a narrowed tenant is none of them.
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One credential. ``name`` becomes the tenant: it may appear in logs, the secret never.

    ``kind`` is the retention class of its requests unless they say otherwise; none keeps
    KV longer than ``max_keep_s``.
    """

    name: str
    secret: str = field(repr=False)
    kind: RetentionClass | None = None
    max_keep_s: float = math.inf

    @property
    def caller(self) -> Caller:
        return Caller(tenant=self.name, kind=self.kind, max_keep_s=self.max_keep_s)

    @classmethod
    def unnamed(cls, secret: str) -> ApiKey:
        """A key named after a digest of its secret, so that the name tells nothing.

        >>> ApiKey.unnamed("sk-1").name == ApiKey.unnamed("sk-1").name
        True
        """
        return cls("key-" + hashlib.sha256(secret.encode()).hexdigest()[:12], secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConfig:
    """Settings of the door.

    Without ``keys`` the server is *keyless*: only callers that name a loopback
    host, ``bound_host`` or one of ``allowed_hosts`` are served.
    """

    keys: tuple[ApiKey, ...] = ()
    bound_host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    served_names: tuple[str, ...] = ()  # empty: the model's own id
    strict: bool = False  # unknown fields and a missing model are refused
    normalise_agent_noise: bool = False  # of system blocks; see recipe.normalise
    max_body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0  # for the whole body to arrive
    keepalive_s: float = 3.0  # silence in a stream before a comment line is sent
    # A stream's headers wait this long for a refusal (queue full, not ready): refusals
    # come at once, prefill does not.
    refusal_wait_s: float = 0.05
    max_open_calls: int = 1024  # calls inside the door, from first body byte to last answer byte
    max_messages: int = 8192
    max_choices: int = 128  # prompts x n of one call
    max_stop_strings: int = 16
    max_stop_chars: int = 1024  # of one stop string
    max_bias_entries: int = 1024
    keep: KeepTimes = field(default_factory=KeepTimes)  # of KV beyond the device, by class
    access_log: bool = True
    log_probes: bool = False  # health and metrics requests in the access log

    def __post_init__(self) -> None:
        for name in (
            "max_body_bytes",
            "max_open_calls",
            "max_messages",
            "max_choices",
            "max_stop_strings",
            "max_stop_chars",
            "max_bias_entries",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"api.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("body_timeout_s", "keepalive_s"):
            value: float = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"api.{name} must be > 0 seconds, got {value}")
        if not 0 <= self.refusal_wait_s <= 10:
            raise ConfigError(
                f"api.refusal_wait_s must be between 0 and 10, got {self.refusal_wait_s}"
            )
        names = [key.name for key in self.keys]
        if len(set(names)) != len(names) or "" in names:
            raise ConfigError("api.keys: each key needs its own, non-empty name")
        if not all(KEY_NAME.fullmatch(name) for name in names):
            raise ConfigError("api.keys: a name has other characters than letters, digits and ._@-")
        if not all(key.max_keep_s >= 0 for key in self.keys):
            raise ConfigError("api.keys: max_keep_s must be at least 0")
        if not (self.keep.agent_s >= 0 and self.keep.chat_s >= 0):
            raise ConfigError("api.keep: days must be at least 0")
        if any(not key.secret or key.secret != key.secret.strip() for key in self.keys):
            raise ConfigError("api.keys: a key is empty or has spaces around it")
        if any(not name for name in self.served_names):
            raise ConfigError("api.served_names: a name is empty")
