"""Reads the head of a GGUF file: metadata as Python values, and where each tensor lies.

Knows the container format only (github.com/ggml-org/ggml/blob/master/docs/gguf.md),
not what any key means. Called by ``gguf_source``. The ``gguf`` package has a
reader too, but it wraps every array element in numpy objects: 2.3 s for
SmolLM2's vocabulary against 0.05 s here, and it does not notice a cut file until
a tensor is read. Its tables of types and sizes, and its dequantisation, are used.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from headwater.core.errors import ModelError

_SCALARS: Mapping[GGUFValueType, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
    GGUFValueType.BOOL: struct.Struct("<?"),
}
_U32 = _SCALARS[GGUFValueType.UINT32]
_U64 = _SCALARS[GGUFValueType.UINT64]
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor: bytes [offset, offset + num_bytes) of the file, ``shape`` outermost first."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def read_header(path: Path, data: mmap.mmap) -> GgufHeader:
    """The header of ``data``, the mapped file ``path``.

    Raises ModelError when the file is not GGUF, is damaged, or is shorter than
    its tensors say.
    """
    return _HeaderReader(path, data).read()


class _HeaderReader:
    """A cursor over the file's first bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._offset = 0

    def read(self) -> GgufHeader:
        try:
            return self._read()
        except struct.error:  # the cursor ran over the end
            raise self._truncated("its header is not complete") from None
        except UnicodeDecodeError:
            raise self._damaged("a string in its header is not UTF-8") from None

    def _read(self) -> GgufHeader:
        if self._scalar(_U32) != GGUF_MAGIC:
            raise self._damaged("it does not start with the GGUF magic")
        version = self._scalar(_U32)
        if version not in _VERSIONS:
            raise self._damaged(f"its version is {version}; supported: 2, 3 (little endian)")
        num_tensors, num_values = self._scalar(_U64), self._scalar(_U64)
        metadata: dict[str, object] = {}
        for _ in range(num_values):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"metadata key {key!r} is there twice")
            metadata[key] = self._value(self._value_type())
        declared = [self._declaration() for _ in range(num_tensors)]

        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._damaged(f"general.alignment = {alignment!r} is not a positive integer")
        data_start = -(-self._offset // alignment) * alignment
        tensors = self._placed(declared, data_start)
        return GgufHeader(metadata=metadata, tensors=tensors)

    def _placed(
        self, declared: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], start: int
    ) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, quantization, offset in declared:
            if name in tensors:
                raise self._damaged(f"tensor {name!r} is there twice")
            block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
            if not shape or shape[-1] % block_elements:
                raise self._damaged(
                    f"tensor {name!r} of shape {list(shape)} does not divide into "
                    f"{quantization.name} blocks of {block_elements}"
                )
            num_bytes = math.prod(shape) // block_elements * block_bytes
            tensor = GgufTensor(
                shape=shape,
                quantization=quantization,
                offset=start + offset,
                num_bytes=num_bytes,
            )
            if tensor.offset + num_bytes > self._size:
                raise self._truncated(
                    f"tensor {name!r} needs bytes up to {tensor.offset + num_bytes:,}"
                )
            tensors[name] = tensor
        return tensors

    def _declaration(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        num_dims = self._scalar(_U32)
        # GGUF counts dimensions from the innermost.
        shape = tuple(reversed([self._scalar(_U64) for _ in range(min(num_dims, 8))]))
        number = self._scalar(_U32)
        try:
            quantization = GGMLQuantizationType(number)
        except ValueError:
            raise self._damaged(f"tensor {name!r} has unknown type number {number}") from None
        return name, shape, quantization, self._scalar(_U64)

    def _value_type(self) -> GGUFValueType:
        number = self._scalar(_U32)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._damaged(f"unknown metadata value type {number}") from None

    def _value(self, kind: GGUFValueType) -> object:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._scalar(_SCALARS[kind])
        kind, length = self._value_type(), self._scalar(_U64)
        if kind == GGUFValueType.ARRAY:
            raise self._damaged("it has an array of arrays, which no known key uses")
        # Each element takes a byte or more: a damaged length must not allocate.
        if length > self._size - self._offset:
            raise self._truncated(f"an array of its header has {length:,} elements")
        if kind == GGUFValueType.STRING:
            return self._strings(length)
        packed = struct.Struct(f"<{length}{_SCALARS[kind].format[1:]}")
        values = list(packed.unpack_from(self._data, self._offset))
        self._offset += packed.size
        return values

    def _strings(self, length: int) -> list[str]:
        # A vocabulary has 10^5 strings: locals keep this loop at 0.3 us a string.
        data, size, offset, unpack = self._data, self._size, self._offset, _U64.unpack_from
        strings = []
        for _ in range(length):
            (num_bytes,) = unpack(data, offset)
            offset += 8
            if num_bytes > size - offset:
                raise self._truncated(f"a string of its header has {num_bytes:,} bytes")
            strings.append(data[offset : offset + num_bytes].decode())
            offset += num_bytes
        self._offset = offset
        return strings

    def _string(self) -> str:
        return self._strings(1)[0]

    def _scalar(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._offset)
        self._offset += form.size
        number: int = value
        return number

    def _damaged(self, reason: str) -> ModelError:
        return ModelError(f"{self._path} cannot be read as GGUF: {reason}")

    def _truncated(self, reason: str) -> ModelError:
        return ModelError(
            f"{self._path} is truncated: {reason}, the file has {self._size:,}; "
            "download or copy it again"
        )
