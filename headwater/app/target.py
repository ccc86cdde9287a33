"""Which OpenAI-compatible server ``chat`` and ``bench`` talk to.

Standard library only, so that the command line can build one without loading
an HTTP client. Knows nothing of Headwater's own server: any will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from headwater.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """``base_url`` ends before ``/chat/completions``; ``model`` None: the first served."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0  # longest silence of a connection

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(f"--url must be like http://127.0.0.1:8000/v1, got {self.base_url}")
        if self.timeout_s <= 0:
            raise ConfigError(f"--timeout must be more than 0, got {self.timeout_s:g}")

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
