"""Origins of strings through JSON: which characters of ``json.dumps``' text came from where.

Only outside text keeps its origin. A literal that a template sends through
``tojson`` counts as outside text, so nothing in JSON can become a control token.
Called by the sandbox's ``tojson`` filter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring, encode_basestring_ascii

from headwater.recipe.provenance import PLACED, Span, Traced, clipped, shifted, spans_of

# Characters that stand for themselves in a JSON string.
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_PLAIN_ASCII = re.compile(r"[ !#-\[\]-~]+")


def traced_json(text: str, value: object, *, ensure_ascii: bool, sort_keys: bool) -> str:
    """``text``, which is ``json.dumps(value)`` with these options, with the origins in ``value``.

    The strings of ``value`` stand in ``text`` in the order of a walk. Between two of
    them there is no quotation mark (but for keys that are numbers), so each is found at
    the next place where its JSON form stands.

        value   {"a": Traced('x"y')}        text   {"a": "x\\"y"}
        spans   x at 7 from character 0, y at 10 from character 2
    """
    encode = encode_basestring_ascii if ensure_ascii else encode_basestring
    plain = _PLAIN_ASCII if ensure_ascii else _PLAIN
    spans: list[Span] = []
    position = 0
    for item in _strings(value, sort_keys):
        encoded = encode(item)
        position = text.find(encoded, position)
        if position < 0:
            break  # printed in some other way; what is not known is outside text
        if sources := tuple(span for span in spans_of(item) if span[2] != PLACED):
            spans += _encoded_spans(item, encoded, sources, position + 1, plain)
        position += len(encoded)
    return Traced(text, tuple(spans)) if spans else text


def _encoded_spans(
    item: str, encoded: str, sources: tuple[Span, ...], start: int, plain: re.Pattern[str]
) -> Iterator[Span]:
    """``sources`` of ``item`` where its JSON form begins (after the quote) at ``start``."""
    if len(encoded) == len(item) + 2:
        yield from shifted(sources, start)
        return
    # Each run of plain characters is the same length in both; what lies between is escaped.
    runs = zip(plain.finditer(item), _runs(encoded, plain), strict=True)
    for run, at in runs:
        yield from shifted(clipped(sources, *run.span()), start + at)


def _runs(encoded: str, plain: re.Pattern[str]) -> Iterator[int]:
    """Where the plain runs of a JSON string begin, counted from behind its first quote."""
    position = 1
    while position < len(encoded) - 1:
        if encoded[position] == "\\":
            position += 6 if encoded[position + 1] == "u" else 2
            continue
        match = plain.match(encoded, position)
        assert match is not None  # the encoder escapes everything else
        yield position - 1
        position = match.end()


def _strings(value: object, sort_keys: bool) -> Iterator[str]:
    """Strings of ``value``, keys included, in the order in which ``json.dumps`` prints them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value) if sort_keys else value:
            if isinstance(key, str):
                yield key
            yield from _strings(value[key], sort_keys)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, sort_keys)
