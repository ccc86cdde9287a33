"""Who may come in: keys, and for keyless servers the Host and Origin checks.

Pure decisions over headers; ``guard`` applies them to every request. The tenant
of the caller that comes out is the key's name, never anything from a request body.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from headwater.api.config import ApiConfig, ApiKey
from headwater.api.failure import FailureKind, Refused, refused
from headwater.api.retention import Caller

Headers = Sequence[tuple[bytes, bytes]]

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARDS = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - addresses to bind, names of no host


class Keyring:
    """Digests of the keys: the secrets themselves are not kept."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._digests = tuple((key.caller, _digest(key.secret.encode())) for key in keys)

    def caller_of(self, headers: Headers) -> Caller:
        """Whom the key that the request carries stands for. Raises Refused (401).

        Both ``Authorization: Bearer KEY`` and ``x-api-key: KEY`` are understood.
        """
        presented = _presented_keys(headers)
        if not presented:
            raise _unauthenticated(
                "no API key given; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        caller: Caller | None = None
        for secret in presented:
            digest = _digest(secret)
            # Every stored key is compared, so that time tells nothing about which one is near.
            for owner, known in self._digests:
                if hmac.compare_digest(digest, known):
                    caller = owner
        if caller is None:
            raise _unauthenticated("this API key is not known here")
        return caller


class HostList:
    """Names under which a keyless server may be addressed.

    A web page that points its own name at 127.0.0.1 (DNS rebinding) still sends
    that name in Host; a page that posts across sites says so in Origin.
    """

    def __init__(self, config: ApiConfig) -> None:
        extra = {_bare(name) for name in (config.bound_host, *config.allowed_hosts)}
        self._names = (LOOPBACK_NAMES | extra) - WILDCARDS

    def check(self, headers: Headers) -> None:
        """Raises Refused (403) unless Host, and Origin if there is one, are on the list."""
        hosts = _values(headers, b"host")
        if len(hosts) != 1 or not self._allows(_host_of(hosts[0])):
            raise refused(
                403,
                FailureKind.FORBIDDEN,
                "this Host is not served without an API key; use a loopback name or set "
                "allowed_hosts",
                code="host_not_allowed",
            )
        for origin in _values(headers, b"origin"):
            if not self._allows(_host_of_origin(origin)):
                raise refused(
                    403,
                    FailureKind.FORBIDDEN,
                    "requests from other sites are not served",
                    code="origin_not_allowed",
                )

    def _allows(self, host: str | None) -> bool:
        # "localhost." is the same name.
        return host is not None and host.rstrip(".") in self._names


def _presented_keys(headers: Headers) -> list[bytes]:
    presented: list[bytes] = []
    authorization = _values(headers, b"authorization")
    own = _values(headers, b"x-api-key")
    # A repeated header would let one request try many keys.
    if len(authorization) > 1 or len(own) > 1:
        return []
    for value in authorization:
        scheme, _, secret = value.strip().partition(b" ")
        if scheme.lower() == b"bearer" and secret.strip():
            presented.append(secret.strip())
    presented.extend(value.strip() for value in own if value.strip())
    return presented


def _unauthenticated(message: str) -> Refused:
    return refused(
        401,
        FailureKind.UNAUTHENTICATED,
        message,
        code="invalid_api_key",
        headers=(("WWW-Authenticate", "Bearer"),),
    )


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def _host_of(value: bytes) -> str | None:
    """The host part of a Host header, without port or brackets; None if it makes no sense.

    >>> _host_of(b"LOCALHOST:8000"), _host_of(b"[::1]:80"), _host_of(b"user@evil.test")
    ('localhost', '::1', None)
    """
    try:
        text = value.decode("ascii")
        parts = urlsplit("//" + text)
        _ = parts.port  # raises for a port that is no number
    except ValueError:
        return None
    if parts.netloc != text or "@" in text or not parts.hostname:
        return None
    return _bare(parts.hostname)


def _host_of_origin(value: bytes) -> str | None:
    try:
        parts = urlsplit(value.decode("ascii"))
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or parts.path or parts.query:
        return None
    return _host_of(parts.netloc.encode())


def _bare(host: str) -> str:
    """One spelling per host: lower case, no brackets, addresses in their short form."""
    text = host.strip().lower().removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return text
