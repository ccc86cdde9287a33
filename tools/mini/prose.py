"""Plain prose from a package: the World English Bible, in the public domain, by paragraphs.

    apt-get install diatheke sword-text-web
    python -m tools.mini.prose --out build/mini/prose.txt

Writes paragraphs of four verses with an empty line between, in plain spelling. Called by
hand, before the tokenizer and the training program.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_MODULE: Final = "engWEB2015eb"
_BOOKS: Final = (
    "Genesis|Exodus 1-20|Ruth|I Samuel|II Samuel|I Kings|Esther|Jonah|Matthew|Mark|Luke|John|Acts|"
    "Ecclesiastes|Proverbs"
).split("|")
_VERSES: Final = 4  # of a paragraph
_VERSE: Final = re.compile(r"^(?:[IV]+ )?[A-Z][A-Za-z ]* \d+:\d+: ?(.*)$")
_NOTES: Final = re.compile(r"<(note|title)\b.*?</\1>")
_TAG: Final = re.compile(r"<[^>]*>")
_PLAIN: Final = {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": " - "}


def verses(output: str) -> Iterator[str]:
    """The verses in what the reader of the package prints, without marks and notes.

    >>> list(verses("Genesis 1:3: <w>God</w><w>said</w>, <note>x</note>and so\\nit was .\\n(WEB)"))
    ['God said, and so it was.']
    """
    found: list[str] = []
    for line in output.splitlines():
        match = _VERSE.match(line)
        if match:
            found.append(match[1])
        elif found and not line.startswith("("):
            found[-1] += " " + line
    for verse in found:
        text = _NOTES.sub("", verse).replace("</w><w", "</w> <w")
        text = _TAG.sub("", text)
        for fancy, plain in _PLAIN.items():
            text = text.replace(fancy, plain)
        text = re.sub(r" ([,.;:!?])", r"\1", " ".join(text.split()))
        if text and text.isascii():
            yield text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    paragraphs: list[str] = []
    for book in _BOOKS:
        printed = subprocess.run(
            ["diatheke", "-b", _MODULE, "-k", book], capture_output=True, text=True, check=True
        )
        lines = list(verses(printed.stdout))
        paragraphs += [" ".join(lines[i : i + _VERSES]) for i in range(0, len(lines), _VERSES)]
    args.out.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    print(f"{len(paragraphs)} paragraphs in {args.out}")


if __name__ == "__main__":
    main()
