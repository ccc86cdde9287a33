"""What two workers must agree on before KV goes between them, and the keys of their fleet.

A record of KV is bytes without a word about their meaning: the contract is that meaning.
It is compared once per connection, by both sides; what differs is named with both values
(D06). Knows no sockets and no sequences.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import zmq
from zmq.utils import z85

from headwater.core.cache import KVPart
from headwater.core.errors import ConfigError

HANDOFF_PROTOCOL = 2
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerContract:
    """``layout`` names the order and dtype of a block's bytes; the sizes are their check."""

    protocol: int = HANDOFF_PROTOCOL
    model_fingerprint: str
    layout: str
    block_tokens: int
    window_tokens: int | None
    global_bytes: int  # of one block's part
    window_bytes: int
    # From them both sides count how much of a prompt is handed over (``core.fleet``).
    alignment: int = 1
    decoder_replay_tokens: int | None = None

    @property
    def part_bytes(self) -> dict[KVPart, int]:
        return {KVPart.GLOBAL: self.global_bytes, KVPart.WINDOW: self.window_bytes}

    def difference(self, theirs: PeerContract) -> str | None:
        """What keeps the two apart, for a person; None when KV may go between them."""
        for field in fields(self):
            here, there = getattr(self, field.name), getattr(theirs, field.name)
            if here != there:
                return (
                    f"{field.name.replace('_', ' ')} is {here} here and {there} there; "
                    "start both workers from one installation, with one model and one settings file"
                )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    """CURVE keys that everybody with the fleet's secret can make, and nobody else.

    A connection needs the listening side's public key and is then encrypted and
    authenticated both ways. That key is nowhere but here, so a peer without the secret
    cannot even say its first word.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def of(cls, secret: bytes) -> FleetKeys:
        """Raises ConfigError for a secret that could be guessed."""
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"the fleet's secret has {len(secret)} bytes; it needs {MIN_SECRET_BYTES} or more"
            )
        server_public, server_secret = _key_pair(secret, b"listens")
        client_public, client_secret = _key_pair(secret, b"connects")
        return cls(
            server_public=server_public,
            server_secret=server_secret,
            client_public=client_public,
            client_secret=client_secret,
        )

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Before ``socket`` is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)

    def join(self, socket: zmq.Socket[bytes]) -> None:
        """Before ``socket`` is connected."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret)


def _key_pair(secret: bytes, purpose: bytes) -> tuple[bytes, bytes]:
    """Public and secret key in zmq's text form; every 32 bytes are a valid secret key."""
    # Hashed first: a blake2b key has at most 64 bytes, a secret may have more.
    key = hashlib.blake2b(secret, digest_size=32, person=b"headwater-fleet").digest()
    secret_key = z85.encode(hashlib.blake2b(purpose, key=key, digest_size=32).digest())
    return zmq.curve_public(secret_key), secret_key
