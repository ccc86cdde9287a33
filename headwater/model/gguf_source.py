"""Tensors of a GGUF file under Hugging Face names, dequantised to float32.

Undoes what conversion did to a checkpoint: names, for the ``llama`` architecture
the order of query and key rows, for ``gemma3`` the one added to its norms. Checks
every tensor's type when the file is opened. Called by ``load``.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from headwater.core.errors import ModelError
from headwater.model.config import ModelConfig
from headwater.model.gemma3_config import GGUF_ARCHITECTURE as GEMMA3
from headwater.model.gguf_config import TensorFacts, config_from_gguf
from headwater.model.gguf_header import GgufTensor, read_header
from headwater.model.weights import TensorInfo

ROPE_DIVISORS = "rope_freqs.weight"
_PLAIN = ("F32", "F16", "BF16")
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_SUPPORTED = tuple(GGMLQuantizationType[name] for name in (*_PLAIN, *_QUANTISED))
# Stored bytes dequantised at a time: temporaries stay in the processor's cache.
# Twice as fast as whole rows in the library's own groups, and as larger chunks;
# a second thread gained nothing (two cores, most time in memory traffic).
_CHUNK_BYTES = 64 * 1024

_WHOLE_MODEL: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_PER_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Norms that an architecture has besides, or that have another place in it.
_OWN_PER_LAYER: Mapping[str, Mapping[str, str]] = {
    GEMMA3: {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """Opens one GGUF file; raises ModelError naming what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.stat().st_size == 0:
            raise ModelError(f"{path} is truncated: it is empty")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = read_header(path, self._map)
        self.metadata = header.metadata
        self._check_types(header.tensors)
        self.config = config_from_gguf(
            header.metadata, self._facts(header.tensors), f"{path} metadata"
        )
        self._placed = {
            _checkpoint_name(name, self.config.architecture): tensor
            for name, tensor in header.tensors.items()
            if name != ROPE_DIVISORS
        }

    @property
    def where(self) -> str:
        return str(self._path)

    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(tensor.shape, tensor.quantization.name)
            for name, tensor in self._placed.items()
        }

    def read(self, name: str) -> Tensor:
        values = self._dequantised(self._placed[name])
        if self.config.architecture == GEMMA3 and name.endswith("norm.weight"):
            return values - 1.0
        num_heads = _num_interleaved_heads(name, self.config)
        return values if num_heads is None else _half_split(values, num_heads)

    def stored_bytes(self, name: str) -> memoryview:
        tensor = self._placed[name]
        return memoryview(self._map)[tensor.offset : tensor.offset + tensor.num_bytes]

    def close(self) -> None:
        # A failed read's traceback may still hold a view into the file; then the
        # map goes with it. The first error must not be replaced by a BufferError.
        with suppress(BufferError):
            self._map.close()

    def _check_types(self, tensors: Mapping[str, GgufTensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.quantization not in _SUPPORTED:
                raise ModelError(
                    f"{self._path}: tensor {name} has type {tensor.quantization.name}; "
                    f"supported: {', '.join(t.name for t in _SUPPORTED)}"
                )

    def _facts(self, tensors: Mapping[str, GgufTensor]) -> TensorFacts:
        table, divisors = tensors.get("token_embd.weight"), tensors.get(ROPE_DIVISORS)
        if table is None:
            raise ModelError(f"{self._path}: tensor token_embd.weight is missing")
        return TensorFacts(
            names=frozenset(tensors),
            vocab_size=table.shape[0],
            rope_divisors=None if divisors is None else tuple(self._dequantised(divisors).tolist()),
        )

    def _dequantised(self, tensor: GgufTensor) -> Tensor:
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.quantization]
        num_blocks = tensor.num_bytes // block_bytes
        stored = np.frombuffer(
            self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset
        )
        values = np.empty((num_blocks, block_elements), dtype=np.float32)
        step = max(_CHUNK_BYTES // block_bytes, 1)
        for start in range(0, num_blocks, step):
            chunk = stored[start * block_bytes : (start + step) * block_bytes]
            values[start : start + step] = quants.dequantize(chunk, tensor.quantization).reshape(
                -1, block_elements
            )
        return torch.from_numpy(values.reshape(tensor.shape))


def _checkpoint_name(name: str, architecture: str) -> str:
    """The Hugging Face name of a GGUF tensor; names without one stay as they are."""
    per_layer = {**_PER_LAYER, **_OWN_PER_LAYER.get(architecture, {})}
    match = _LAYER_NAME.fullmatch(name)
    if match is not None and match[2] in per_layer:
        return f"model.layers.{match[1]}.{per_layer[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_WHOLE_MODEL[stem]}.{kind}" if stem in _WHOLE_MODEL else name


def _num_interleaved_heads(name: str, config: ModelConfig) -> int | None:
    """How many heads' rows of ``name`` were reordered by conversion; None: it was not."""
    if config.architecture != "llama":
        return None
    if ".self_attn.q_proj." in name:
        return config.num_heads
    if ".self_attn.k_proj." in name:
        return config.num_kv_heads
    return None


def _half_split(rows: Tensor, num_heads: int) -> Tensor:
    """Back from interleaved rotary pairs (2i, 2i + 1) to half-split pairs (i, i + D/2).

    With one head of four rows: (a0, b0, a1, b1) -> (a0, a1, b0, b1), where
    (a, b) rotate together.
    """
    head_dim = rows.shape[0] // num_heads
    paired = rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
