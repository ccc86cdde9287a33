"""From a model's tokenizer files to a Tokenizer, by the kind of file.

Apart from ``tokenizer``, which every form builds on. Called by the recipes and by
``constraints``.
"""

from __future__ import annotations

from headwater.core.errors import ModelError
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.tokenizer import Tokenizer


def load_tokenizer(source: TokenizerSource) -> Tokenizer:
    """Build the tokenizer that ``source`` describes.

    Raises ModelError naming the field when it is of a kind that Headwater
    cannot reproduce exactly: a wrong split would silently cost answer quality.
    """
    # Imported here: the two forms below need the tokenizers library, a byte model does not.
    match source.kind:
        case "byte":
            from headwater.recipe.tokenizer_byte import ByteTokenizer

            return ByteTokenizer.from_source(source)
        case "hf":
            from headwater.recipe.tokenizer_bpe import BpeTokenizer
            from headwater.recipe.tokenizer_json import read_tokenizer_json

            if source.tokenizer_json is None:
                raise ModelError(
                    "the model folder has no tokenizer.json; convert its tokenizer with "
                    "transformers (AutoTokenizer(...).save_pretrained) and try again"
                )
            return BpeTokenizer(read_tokenizer_json(source.tokenizer_json), source)
        case "gguf":
            from headwater.recipe.tokenizer_bpe import BpeTokenizer
            from headwater.recipe.tokenizer_gguf import tokenizer_from_gguf

            return BpeTokenizer(tokenizer_from_gguf(source.gguf_metadata), source)
