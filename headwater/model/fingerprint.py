"""The identity of loaded weights: equal fingerprints mean equal KV for equal tokens.

Covers every byte of every tensor of the model, as stored, with its name, shape
and dtype, also where only a part is kept; the config's arithmetic; the rotary
frequencies; the weight format and the kernels' name. So a changed checkpoint under an
old name, or the same one quantised differently, never meets the other's cached KV.

Hashing runs on its own thread beside the reading (about 1 GB/s a core with
blake2b): SmolLM2's 98 MB cost 0.12 s of it, hidden behind dequantisation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from torch import Tensor

from headwater.model.config import ModelConfig
from headwater.model.rope import inverse_frequencies
from headwater.model.weights import TensorSource
from headwater.numerics.ops import WeightFormat

_DIGEST_BYTES = 16


class FingerprintingReader:
    """Reads tensors from ``source`` and hashes each once. Use as a context manager:

    with FingerprintingReader(source) as reader:
        model = family.build(config, reader, ops, weight_format)
        reader.cover(family.expected_tensors(config))
        fingerprint = reader.fingerprint(config, weight_format, ops.name)
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._infos = source.tensors()
        self._digests: dict[str, Future[bytes]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fingerprint")

    def __call__(self, name: str) -> Tensor:
        self.cover([name])
        return self._source.read(name)

    def cover(self, names: Iterable[str]) -> None:
        """Hash those of ``names`` that nobody has read, one after the other; keep none."""
        for name in names:
            if name not in self._digests:
                self._digests[name] = self._pool.submit(self._digest, name)

    def __enter__(self) -> FingerprintingReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def fingerprint(
        self, config: ModelConfig, weight_format: WeightFormat, numerics_name: str
    ) -> str:
        """Hex digest over everything read or covered so far, in whatever order."""
        whole = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"headwater-model")
        frequencies, factor = inverse_frequencies(config)
        for part in (
            config.arithmetic_json().encode(),
            frequencies.numpy().tobytes() + repr(factor).encode(),
            weight_format.value.encode(),
            numerics_name.encode(),
        ):
            whole.update(len(part).to_bytes(8, "little") + part)
        for name in sorted(self._digests):
            info = self._infos[name]
            whole.update(f"{name}\0{info.dtype}\0{info.shape}\0".encode())
            whole.update(self._digests[name].result())
        return whole.hexdigest()

    def _digest(self, name: str) -> bytes:
        return hashlib.blake2b(self._source.stored_bytes(name), digest_size=_DIGEST_BYTES).digest()
