"""What a model's files say about its tokenizer and chat format, as plain values.

``model`` reads it out of a Hugging Face folder or a GGUF file; ``recipe`` builds
the tokenizer and the template from it. So neither knows the other, and no file
is opened twice. The values are as found in the files: nothing is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSource:
    """One model's tokenizer files or metadata.

    ``kind`` says which fields are filled: ``hf`` has ``tokenizer_json`` and
    ``tokenizer_config``, ``gguf`` has ``gguf_metadata``, and ``byte`` has neither:
    ids 0..255 are the bytes, and ids above them are control ids.
    """

    kind: Literal["hf", "gguf", "byte"]
    tokenizer_json: bytes | None = None  # tokenizer.json, undecoded
    tokenizer_config: Mapping[str, object] = field(default_factory=dict)  # tokenizer_config.json
    # tokenizer.ggml.* and tokenizer.chat_template under their full names.
    gguf_metadata: Mapping[str, object] = field(default_factory=dict)
    chat_template: str | None = None
    bos_token_id: int | None = None
    # Every id that ends a turn or a text: eos, eot and the generation config's list.
    end_token_ids: frozenset[int] = frozenset()
    vocab_size: int
    model_id: str = ""
