"""Trains the byte-level BPE of the small model and writes its two files.

    python -m tools.mini.tokenizer --out build/mini/tok --teacher teacher.jsonl --prose prose.txt

Every byte is a base token, digits stand alone, and DeepSeek's control tokens are added
as special tokens with the library's own spellings, so that the recipe picks V4.1 by
itself. Knows no model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import deepseek_recipe as library
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.mini.chat_format import BOS, EOS
from tools.mini.mixture import sample_texts
from tools.mini.text import Texts

VOCABULARY: Final = 4096
_SPECIAL_NAMES: Final = (
    "Bos Eos ThinkingStart ThinkingEnd System User Assistant LatestReminder Dsml Image Ref RefEnd "
    "Box BoxEnd Point PointEnd Polygon PolygonEnd"
).split()
SPECIAL: Final = tuple(getattr(library.SpecialToken, n).default_str() for n in _SPECIAL_NAMES)
# One digit, a word with its space, marks, line breaks and other space. Digits never take the
# space before them: a number is the same tokens wherever it stands.
_SPLIT: Final = r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A tokenizer of ``vocabulary`` ids, control tokens first among them at 0, 1, ..."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``, as a model folder has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for text in SPECIAL
        },
    }
    text = json.dumps(settings, ensure_ascii=False, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--prose", type=Path)
    parser.add_argument("--documents", type=int, default=20000)
    args = parser.parse_args()
    texts = Texts.load(teacher=args.teacher, prose=args.prose)
    tokenizer = train(sample_texts(texts, count=args.documents, seed=1))
    save(tokenizer, args.out)
    print(f"{tokenizer.get_vocab_size()} ids in {args.out}")


if __name__ == "__main__":
    main()
