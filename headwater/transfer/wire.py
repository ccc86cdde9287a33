"""The wire form of control messages: one kind byte, then MessagePack of a plain struct.

No pickle (I08): a frame decodes to exactly one of the known message types or
raises WireError. Encoders are reused, since one message per step is the hot path.
"""

from __future__ import annotations

import msgspec

from headwater.core.control import Abort, FromWorker, Hello, StepDone, Stop, Submit, ToWorker
from headwater.core.errors import HeadwaterError


class WireError(HeadwaterError):
    """A frame is not a message of this protocol version."""


_TO_WORKER: dict[int, type[Submit] | type[Abort] | type[Stop]] = {1: Submit, 2: Abort, 3: Stop}
_FROM_WORKER: dict[int, type[Hello] | type[StepDone]] = {65: Hello, 66: StepDone}
_KINDS: dict[type, int] = {t: kind for kind, t in (_TO_WORKER | _FROM_WORKER).items()}

HELLO_KIND = bytes((_KINDS[Hello],))  # a Hello's first byte

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(t) for kind, t in (_TO_WORKER | _FROM_WORKER).items()}


def encode(message: ToWorker | FromWorker) -> bytes:
    """One frame."""
    return bytes((_KINDS[type(message)],)) + _encoder.encode(message)


def _decode(frame: bytes, kinds: dict[int, type]) -> object:
    if not frame or frame[0] not in kinds:
        raise WireError(f"unknown message kind {frame[:1].hex() or 'none'}")
    try:
        return _decoders[frame[0]].decode(memoryview(frame)[1:])
    except msgspec.MsgspecError as error:
        raise WireError(f"malformed {kinds[frame[0]].__name__}: {error}") from error


def decode_to_worker(frame: bytes) -> ToWorker:
    """A frame that the front sent. Raises WireError."""
    message = _decode(frame, dict(_TO_WORKER))
    assert isinstance(message, Submit | Abort | Stop)
    return message


def decode_from_worker(frame: bytes) -> FromWorker:
    """A frame that a worker sent. Raises WireError."""
    message = _decode(frame, dict(_FROM_WORKER))
    assert isinstance(message, Hello | StepDone)
    return message
