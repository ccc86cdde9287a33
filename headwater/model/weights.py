"""Where a model's tensors come from, and the checks made before any is read.

A source lists names, shapes and dtypes at once and reads one tensor at a time,
so that loading needs little more memory than the model itself. Names are those
of Hugging Face checkpoints whatever the format. Implemented by
``safetensors_source``, ``gguf_source`` and ``toy_source``; read by families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from headwater.core.errors import ModelError

MAX_NAMED = 5  # names listed in one message


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor: shape [out, in] or [size], and the dtype's name in the file."""

    shape: tuple[int, ...]
    dtype: str


class TensorSource(Protocol):
    """The tensors of one checkpoint."""

    @property
    def where(self) -> str:
        """The folder or file, for messages."""
        ...

    def tensors(self) -> Mapping[str, TensorInfo]:
        """All tensors by name, without reading them."""
        ...

    def read(self, name: str) -> Tensor:
        """A float tensor of the listed shape on the CPU, owned by the caller."""
        ...

    def stored_bytes(self, name: str) -> memoryview:
        """The tensor's bytes as stored: what a fingerprint covers."""
        ...

    def close(self) -> None:
        """Release the files. Tensors already read stay valid."""
        ...


class ReadTensor(Protocol):
    """How a family reads weights: by name, one at a time."""

    def __call__(self, name: str) -> Tensor: ...


def check_tensors(
    source: TensorSource,
    expected: Mapping[str, tuple[int, ...]],
    unused: frozenset[str] = frozenset(),
) -> None:
    """Raise ModelError unless ``source`` holds exactly ``expected``.

    Missing, wrongly shaped and unknown tensors are named. A tensor nobody reads
    means arithmetic nobody does, so unknown names are refused, not skipped;
    except those in ``unused`` and rotary tables that old checkpoints carry.
    """
    found = source.tensors()
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelError(
            f"{source.where}: {len(missing)} of {len(expected)} tensors are missing: "
            f"{_listed(missing)}"
        )
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise ModelError(
                f"{source.where}: tensor {name} has shape {list(found[name].shape)}, "
                f"the config asks for {list(shape)}"
            )
    unknown = [
        name
        for name in found
        if name not in expected and name not in unused and not name.endswith(".rotary_emb.inv_freq")
    ]
    if unknown:
        raise ModelError(
            f"{source.where}: {len(unknown)} tensors have no place in this architecture: "
            f"{_listed(unknown)}"
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown}, and {len(names) - MAX_NAMED} more"
