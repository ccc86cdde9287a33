"""SentencePiece's BPE written out: slow, obvious, and what a GGUF vocabulary is checked against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headwater.core.tokenizer_source import TokenizerSource

NORMAL, USER_DEFINED = 1, 4  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class SlowSentencePiece:
    """``encode`` as the algorithm is published: user-defined pieces first, as they stand in
    the text, the longest at each place; between them the best-scored pair is joined, the
    leftmost of equals, until none is left; what is no piece is spelt in bytes."""

    ids: dict[str, int]
    scores: dict[str, float]
    user_defined: frozenset[str]

    @staticmethod
    def of(source: TokenizerSource) -> SlowSentencePiece:
        tokens, types, scores = (
            source.gguf_metadata[f"tokenizer.ggml.{name}"]
            for name in ("tokens", "token_type", "scores")
        )
        assert isinstance(tokens, list)
        assert isinstance(types, list)
        assert isinstance(scores, list)
        rows = list(zip(tokens, types, scores, strict=True))
        return SlowSentencePiece(
            ids={spelt(token): index for index, token in enumerate(tokens)},
            scores={token: score for token, kind, score in rows if kind == NORMAL},
            user_defined=frozenset(spelt(token) for token, kind, _ in rows if kind == USER_DEFINED),
        )

    def encode(self, text: str) -> list[int]:
        found: list[int] = []
        plain = ""
        rest = spelt(text)
        longest = max(map(len, self.user_defined), default=0)
        while rest:
            lengths = range(min(longest, len(rest)), 0, -1)
            length = next((n for n in lengths if rest[:n] in self.user_defined), 0)
            if length == 0:
                plain, rest = plain + rest[0], rest[1:]
                continue
            found += [*self._merged(plain), self.ids[rest[:length]]]
            plain, rest = "", rest[length:]
        return [*found, *self._merged(plain)]

    def _merged(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in best_score_first(text, self.scores):
            if piece in self.scores:
                ids.append(self.ids[piece])
            else:
                ids += [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        return ids


def spelt(text: str) -> str:
    return text.replace(" ", "\u2581")


def best_score_first(text: str, scores: dict[str, float]) -> Sequence[str]:
    """Join the best pair, the leftmost of equals."""
    pieces = list(text)
    while True:
        best: tuple[float, int] | None = None
        for index in range(len(pieces) - 1):
            score = scores.get(pieces[index] + pieces[index + 1])
            if score is not None and (best is None or score > best[0]):
                best = (score, index)
        if best is None:
            return pieces
        pieces[best[1] : best[1] + 2] = [pieces[best[1]] + pieces[best[1] + 1]]
