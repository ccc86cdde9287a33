"""The bytes of a record in a segment file.

    0            header_bytes      payload_at        payload_at + payload_bytes   span_bytes
    | fixed | variable | zeros      | payload ...     | zeros                      |
      ^ 4096-aligned in the file    ^ 4096-aligned                                 ^ next record

Little-endian. Fixed part: magic, version, sizes, keys, positions, times and two xxh3_64 sums,
one over the header (with that sum as zero) and one over the payload. Variable part:
fingerprint, layout, tenant (UTF-8) and the tokens (uint32). Everything that a reader must
compare is in the record itself (C01): the index only finds it. Nothing is unpickled (I08).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from headwater.core.blocks import PREFIX_KEY_BYTES, CacheIdentity, PrefixKey, token_bytes
from headwater.core.cache import KVPart, RecordMeta, Retention, RetentionClass

FORMAT_VERSION = 1  # raise when any byte changes its meaning
MAGIC = b"HWKVREC\0"
ALIGN_BYTES = 4096
MAX_HEADER_BYTES = 2**20
MAX_PAYLOAD_BYTES = 2**40

# magic, version, part, class, header bytes, payload bytes, key, parent, start,
# number of tokens, lengths of the three names, written at, keep, payload sum, header sum
_FIXED = struct.Struct(f"<8sHBBIQ{PREFIX_KEY_BYTES}s{PREFIX_KEY_BYTES}sQIHHHddQQ")
_SUM_AT = _FIXED.size - 8

_PARTS = {KVPart.GLOBAL: 0, KVPart.WINDOW: 1}
_CLASSES = {RetentionClass.AGENT: 0, RetentionClass.CHAT: 1}
_PART_OF = {number: part for part, number in _PARTS.items()}
_CLASS_OF = {number: kind for kind, number in _CLASSES.items()}


def part_number(part: KVPart) -> int:
    return _PARTS[part]


def part_of(number: int) -> KVPart:
    return _PART_OF[number]


def class_number(kind: RetentionClass) -> int:
    return _CLASSES[kind]


def class_of(number: int) -> RetentionClass:
    return _CLASS_OF[number]


class BadRecord(Exception):
    """Bytes that are not a whole, unchanged record; says which check failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """What a record says of itself."""

    meta: RecordMeta
    retention: Retention
    written_s: float  # unix seconds
    payload_bytes: int
    payload_sum: int
    header_bytes: int

    @property
    def payload_at(self) -> int:
        """Offset of the payload from the record's start."""
        return aligned(self.header_bytes)

    @property
    def span_bytes(self) -> int:
        """From this record's start to the next one's."""
        return self.payload_at + aligned(self.payload_bytes)


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def checksum(pieces: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return token_bytes(tokens)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(memoryview(packed).cast("I")) if _IS_NATIVE else _unpack_slowly(packed)


def _unpack_slowly(packed: bytes) -> tuple[int, ...]:  # pragma: no cover - big-endian machines
    return struct.unpack(f"<{len(packed) // 4}I", packed)


_IS_NATIVE = array("I", [1]).tobytes() == b"\1\0\0\0"


def payload_offset(meta: RecordMeta) -> int:
    """From the record's start to its payload."""
    return aligned(_header_bytes(meta))


def _header_bytes(meta: RecordMeta) -> int:
    return _FIXED.size + sum(map(len, _names(meta.identity))) + 4 * len(meta.tokens)


def encode_header(
    meta: RecordMeta, retention: Retention, *, written_s: float, payload: Sequence[memoryview]
) -> RecordHeader:
    """The header of a new record with this payload."""
    header_bytes = _header_bytes(meta)
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError("a record's names and tokens are too long")
    return RecordHeader(
        meta=meta,
        retention=retention,
        written_s=written_s,
        payload_bytes=sum(piece.nbytes for piece in payload),
        payload_sum=checksum(payload),
        header_bytes=header_bytes,
    )


def header_block(header: RecordHeader) -> bytes:
    """The bytes from the record's start to its payload."""
    meta = header.meta
    names = _names(meta.identity)
    fixed = _FIXED.pack(
        MAGIC, FORMAT_VERSION, _PARTS[meta.part], _CLASSES[header.retention.kind],
        header.header_bytes, header.payload_bytes, meta.key, meta.parent, meta.start,
        len(meta.tokens), *map(len, names), header.written_s, header.retention.keep_s,
        header.payload_sum, 0,
    )  # fmt: skip
    block = bytearray(header.payload_at)
    block[: header.header_bytes] = b"".join((fixed, *names, token_bytes(meta.tokens)))
    total = xxhash.xxh3_64_intdigest(memoryview(block)[: header.header_bytes])
    block[_SUM_AT : _SUM_AT + 8] = total.to_bytes(8, "little")
    return bytes(block)


def header_bytes_at(start: bytes | memoryview) -> int:
    """How long the header is, from the first page of a record. Raises BadRecord."""
    if len(start) < _FIXED.size or bytes(start[: len(MAGIC)]) != MAGIC:
        raise BadRecord("no record begins here")
    version, header_bytes = struct.unpack_from("<HxxI", start, len(MAGIC))
    if version != FORMAT_VERSION:
        raise BadRecord(f"the record has version {version}, not {FORMAT_VERSION}")
    if not _FIXED.size <= header_bytes <= MAX_HEADER_BYTES:
        raise BadRecord("the header's length is impossible")
    return int(header_bytes)


def decode_header(block: bytes | memoryview) -> RecordHeader:
    """Every length is checked before it is used. Raises BadRecord."""
    header_bytes = header_bytes_at(block)
    if len(block) < header_bytes:
        raise BadRecord("the header is cut off")
    head = bytearray(block[:header_bytes])
    (
        _, _, part, kind, _, payload_bytes, key, parent, start, num_tokens, *lengths,
        written_s, keep_s, payload_sum, header_sum,
    ) = _FIXED.unpack_from(head)  # fmt: skip
    head[_SUM_AT : _SUM_AT + 8] = bytes(8)
    if xxhash.xxh3_64_intdigest(head) != header_sum:
        raise BadRecord("the header's checksum differs")
    if part not in _PART_OF or kind not in _CLASS_OF or payload_bytes > MAX_PAYLOAD_BYTES:
        raise BadRecord("the header has values that do not exist")
    if _FIXED.size + sum(lengths) + 4 * num_tokens != header_bytes:
        raise BadRecord("the header's lengths do not add up")
    names = []
    at = _FIXED.size
    for length in lengths:
        names.append(bytes(head[at : at + length]))
        at += length
    try:
        identity = CacheIdentity(*(name.decode() for name in names))
    except UnicodeDecodeError as error:
        raise BadRecord("a name is not text") from error
    meta = RecordMeta(
        key=PrefixKey(key),
        parent=PrefixKey(parent),
        identity=identity,
        part=_PART_OF[part],
        start=start,
        tokens=unpack_tokens(bytes(head[at:])),
    )
    return RecordHeader(
        meta=meta,
        retention=Retention(_CLASS_OF[kind], keep_s),
        written_s=written_s,
        payload_bytes=payload_bytes,
        payload_sum=payload_sum,
        header_bytes=header_bytes,
    )


def _names(identity: CacheIdentity) -> tuple[bytes, bytes, bytes]:
    return (
        identity.model_fingerprint.encode(),
        identity.layout.encode(),
        identity.tenant.encode(),
    )
