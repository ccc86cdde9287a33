"""What the two sides of a handoff say to each other, and its form on the wire.

    prefill -> decode   Greet  Offer  Prompt  Rows | Frame + bytes  Abort  Alive
    prefill <- decode   Welcome  Accept  Took  Done  Stranger       Abort  Alive

Each is one MessagePack map with its name; only Frame has a second part, the bytes. What does
not decode to exactly one of them raises WireError. Knows no sockets and no states.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from headwater.core.cache import CacheReport, KVPart
from headwater.core.errors import HeadwaterError
from headwater.transfer.peer import PeerContract

T = TypeVar("T")

FRAME_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 << 20  # beyond this a connection is cut, whatever it says
MAX_ID_CHARS = 200
MAX_REASON_CHARS = 500
TICKET_BYTES = 16


class HandoffWireError(HeadwaterError):
    """A peer said something that is not a message of a handoff. ``handoff_id`` if it said that."""

    def __init__(self, message: str, handoff_id: str | None = None) -> None:
        super().__init__(message)
        self.handoff_id = handoff_id


class Greet(Struct, frozen=True, tag=True, kw_only=True):
    """First on each connection. ``nonce`` lies at ``nonce_address`` of process ``pid``: who
    can read it there is on the same machine and may read that process."""

    contract: PeerContract
    pid: int
    nonce_address: int
    nonce: bytes


class Welcome(Struct, frozen=True, tag=True, kw_only=True):
    """The answer. ``refusal`` says what differs, in the words of who refuses."""

    contract: PeerContract
    refusal: str | None = None


class Stranger(Struct, frozen=True, tag=True):
    """This connection is not known (any more): greet again. What was under way is over."""


class Offer(Struct, frozen=True, tag=True, kw_only=True):
    handoff_id: str


class Prompt(Struct, frozen=True, tag=True, kw_only=True):
    """What of the prompt was a hit on the prefill side: for the caller's report."""

    handoff_id: str
    num_hit_tokens: int
    cache: CacheReport


class Accept(Struct, frozen=True, tag=True, kw_only=True):
    """The decode side has blocks and lacks these rows' parts. ``is_direct``: it will read
    them itself; else they are to come in frames. A later attempt takes the place of one before."""

    handoff_id: str
    attempt: int
    is_direct: bool
    rows: tuple[int, ...]  # increasing
    window_rows: tuple[int, ...]  # of them or of others, increasing


class Place(Struct, frozen=True, array_like=True):
    """Where one part of a row lies in the prefill process: addresses as packed uint64."""

    row: int
    part: KVPart
    key: bytes
    addresses: bytes


class Rows(Struct, frozen=True, tag=True, kw_only=True):
    """Parts that can be read now. They are what they were as long as ``ticket`` is what lies
    at ``ticket_address``: it is wiped before a block is given up."""

    handoff_id: str
    attempt: int
    ticket_address: int
    ticket: bytes
    places: tuple[Place, ...]


class Frame(Struct, frozen=True, tag=True, kw_only=True):
    """Bytes [offset, offset + len(second part)) of one part of a row."""

    handoff_id: str
    attempt: int
    row: int
    part: KVPart
    key: bytes
    offset: int


class Took(Struct, frozen=True, tag=True, kw_only=True):
    """The first ``num_moves`` of what was accepted are the decode side's own now."""

    handoff_id: str
    attempt: int
    num_moves: int


class Done(Struct, frozen=True, tag=True, kw_only=True):
    """Nothing lacks any more: the prefill side may forget it. ``num_bytes`` were moved."""

    handoff_id: str
    num_bytes: int


class Abort(Struct, frozen=True, tag=True, kw_only=True):
    handoff_id: str
    reason: str


class Alive(Struct, frozen=True, tag=True):
    """Nothing else to say, but still here."""


FromPrefill = Greet | Offer | Prompt | Rows | Frame | Abort | Alive
FromDecode = Welcome | Stranger | Accept | Took | Done | Abort | Alive

_encoder = msgspec.msgpack.Encoder()
_from_prefill = msgspec.msgpack.Decoder(FromPrefill)
_from_decode = msgspec.msgpack.Decoder(FromDecode)


class _Named(Struct):
    """The one field by which a message that is wrong otherwise can still be answered."""

    handoff_id: str


def encode(message: FromPrefill | FromDecode) -> bytes:
    return _encoder.encode(message)


def decode_from_prefill(parts: Sequence[bytes]) -> tuple[FromPrefill, bytes]:
    """A message and the bytes that came with it. Raises HandoffWireError."""
    message = _decode(_from_prefill, parts)
    payload = parts[1] if len(parts) > 1 else b""
    if isinstance(message, Frame) != bool(payload) or len(payload) > FRAME_BYTES:
        raise HandoffWireError(
            f"{type(message).__name__} with {len(payload)} bytes behind it", _named(parts[0])
        )
    return message, payload


def decode_from_decode(parts: Sequence[bytes]) -> FromDecode:
    """Raises HandoffWireError."""
    message = _decode(_from_decode, parts)
    if len(parts) != 1:
        raise HandoffWireError(f"{type(message).__name__} with bytes behind it", _named(parts[0]))
    return message


def _decode(decoder: msgspec.msgpack.Decoder[T], parts: Sequence[bytes]) -> T:
    if not 1 <= len(parts) <= 2:
        raise HandoffWireError(f"a message of {len(parts)} parts")
    try:
        message = decoder.decode(parts[0])
    except msgspec.MsgspecError as error:
        raise HandoffWireError(f"malformed: {error}", _named(parts[0])) from error
    handoff_id = getattr(message, "handoff_id", "")
    if len(handoff_id) > MAX_ID_CHARS:
        raise HandoffWireError(f"a handoff id of {len(handoff_id)} characters")
    return message


def _named(part: bytes) -> str | None:
    try:
        handoff_id = msgspec.msgpack.decode(part, type=_Named).handoff_id
    except msgspec.MsgspecError:
        return None
    return handoff_id if len(handoff_id) <= MAX_ID_CHARS else None


def pack_addresses(addresses: Sequence[int]) -> bytes:
    """Both processes are on one machine, so its byte order is theirs."""
    return array("Q", addresses).tobytes()


def unpack_addresses(packed: bytes) -> list[int]:
    """Raises HandoffWireError."""
    if len(packed) % 8:
        raise HandoffWireError(f"{len(packed)} bytes are no addresses")
    return array("Q", packed).tolist()
