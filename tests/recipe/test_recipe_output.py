"""One choice's output: the same however the steps cut it, streamed or whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_models import REQUEST_ID, STYLES

from headwater.core.request import FinishReason, SampledToken, SequenceOutput, TokenLogprob
from headwater.recipe.output import (
    OutputDelta,
    OutputStream,
    describe_prompt,
    joined_deltas,
)
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_byte import IM_END_ID, ByteTokenizer

BYTES = ByteTokenizer()


def output(
    ids: Sequence[int],
    finish: FinishReason | None = None,
    *,
    stop_token_id: int | None = None,
    error: str | None = None,
) -> SequenceOutput:
    return SequenceOutput(
        request_id=REQUEST_ID,
        index=0,
        tokens=tuple(SampledToken(i, -0.5, (TokenLogprob(i, -0.5),)) for i in ids),
        finish=finish,
        stop_token_id=stop_token_id,
        error=error,
    )


def chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    bounds = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [ids[start:end] for start, end in pairwise(bounds)]


def run(
    tokenizer: Tokenizer,
    pieces: Sequence[Sequence[int]],
    stops: Sequence[str],
    finish: FinishReason = FinishReason.LENGTH,
) -> list[OutputDelta]:
    """All deltas; the finish comes with the last piece, as the engine sends it."""
    stream = OutputStream(tokenizer, stop_strings=stops)
    deltas = [
        stream.push(output(piece, finish if index == len(pieces) - 1 else None))
        for index, piece in enumerate(pieces)
    ]
    assert stream.num_output_tokens == sum(delta.num_tokens for delta in deltas)
    return deltas


def test_a09_text_ends_before_a_stop_string_that_spans_steps() -> None:
    stream = OutputStream(BYTES, stop_strings=["beta gamma"])
    deltas = [stream.push(output(p)) for p in (b"alpha be", b"ta gam", b"ma delta", b"more")]
    assert [delta.text for delta in deltas] == ["alpha ", "", "", ""]
    end = deltas[2]
    assert end.finish is FinishReason.STOP
    assert end.stop_string == "beta gamma"
    assert end.stopped_early  # the engine must be told
    assert stream.num_output_tokens == len("alpha beta gamma")
    assert deltas[3] == OutputDelta()  # the engine was a step ahead


def test_a_stop_string_in_the_engines_own_last_step_needs_no_abort() -> None:
    stream = OutputStream(BYTES, stop_strings=["."])
    delta = stream.push(output(b"ok. x", FinishReason.LENGTH))
    assert (delta.text, delta.finish, delta.stop_string) == ("ok", FinishReason.STOP, ".")
    assert not delta.stopped_early
    assert delta.num_tokens == 3


def test_text_held_back_is_shown_when_the_model_ends() -> None:
    stream = OutputStream(BYTES, stop_strings=["beta gamma"])
    assert stream.push(output(b"alpha beta")).text == "alpha "
    last = stream.push(output(b"", FinishReason.STOP, stop_token_id=IM_END_ID))
    assert last.text == "beta"
    assert last.stop_token_id == IM_END_ID
    assert last.stop_string is None
    assert len(last.tokens) == 4
    assert stream.finish is FinishReason.STOP
    assert stream.num_output_tokens == 10  # the end id is not counted


def test_a12_the_end_inside_a_character_is_flushed_once() -> None:
    stream = OutputStream(BYTES, stop_strings=["x"])
    assert stream.push(output("é🙂".encode()[:4])).text == "é"
    last = stream.push(output(b"", FinishReason.LENGTH))
    assert last.text == "\ufffd"
    assert stream.push(output(b"", FinishReason.LENGTH)) == OutputDelta()


def test_failure_and_abort_are_passed_on_with_the_text_so_far() -> None:
    stream = OutputStream(BYTES, stop_strings=["ab"])
    stream.push(output(b"xa"))
    last = stream.push(output(b"", FinishReason.FAILED, error="out of memory"))
    assert (last.text, last.finish, last.error) == ("a", FinishReason.FAILED, "out of memory")


def test_tokens_carry_their_text_bytes_logprobs_and_offset() -> None:
    stream = OutputStream(BYTES, text_offset=100)
    delta = stream.push(output("a🙂b".encode(), FinishReason.LENGTH))
    assert [token.text_offset for token in delta.tokens] == [100, 101, 101, 101, 101, 102]
    assert [token.text for token in delta.tokens][:2] == ["a", "bytes:\\xf0"]
    assert b"".join(token.piece for token in delta.tokens).decode() == delta.text
    assert delta.tokens[0].logprob == -0.5
    assert delta.tokens[0].top[0].text == "a"
    assert delta.tokens[0].top[0].piece == b"a"


def test_tokens_come_with_their_text_and_those_of_a_stop_string_are_not_listed() -> None:
    stream = OutputStream(BYTES, stop_strings=["beta"])
    first = stream.push(output(b"a bet"))
    assert (first.text, len(first.tokens)) == ("a ", 2)
    second = stream.push(output(b"x bet"))
    assert (second.text, len(second.tokens)) == ("betx ", 5)
    third = stream.push(output(b"a"))
    assert (third.text, third.tokens, third.num_tokens) == ("", (), 1)
    assert stream.num_output_tokens == 11


def test_hidden_control_tokens_are_listed_without_text() -> None:
    stream = OutputStream(BYTES)
    delta = stream.push(output([*b"a", IM_END_ID, *b"b"], FinishReason.LENGTH))
    assert delta.text == "ab"
    assert [token.text for token in delta.tokens] == ["a", "<|im_end|>", "b"]
    assert [token.text_offset for token in delta.tokens] == [0, 1, 1]


@settings(deadline=None)
@given(
    ids=st.lists(
        st.one_of(st.sampled_from(list(b"ab\n")), st.sampled_from(list("🙂é".encode())),
                  st.sampled_from([256, 258, 400])),
        max_size=24,
    ),
    stops=st.lists(st.sampled_from(["ab", "abb", "b\na", "🙂", "é", "\ufffd", "aa"]), max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=8),
    finish=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)  # fmt: skip
def test_every_way_of_cutting_the_same_ids_gives_the_same_answer(
    ids: list[int], stops: list[str], cuts: list[int], finish: FinishReason
) -> None:
    whole = joined_deltas(run(BYTES, [ids], stops, finish))
    streamed = joined_deltas(run(BYTES, chunks(ids, cuts), stops, finish))
    one_by_one = joined_deltas(run(BYTES, [*([i] for i in ids), []], stops, finish))
    for other in (streamed, one_by_one):
        assert other.text == whole.text
        assert other.tokens == whole.tokens
        assert other.num_tokens == whole.num_tokens
        assert other.finish is whole.finish
        assert other.stop_string == whole.stop_string
    decoded = BYTES.decode(ids)
    if whole.stop_string is None:
        assert whole.text == decoded
        assert whole.num_tokens == len(ids)
        assert whole.finish is finish
    else:
        assert decoded.startswith(whole.text + whole.stop_string) or "\ufffd" in decoded
        assert all(token.text_offset < len(whole.text) for token in whole.tokens)


@pytest.mark.parametrize("name", ["chatml", "gemma", "inst"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_real_tokens_give_the_same_answer_however_they_are_cut(
    name: str, data: st.DataObject
) -> None:
    tokenizer = STYLES[name]().recipe.tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    text = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stops = [text[start : start + data.draw(st.integers(1, 6))] or "x"]
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=6))
    whole = joined_deltas(run(tokenizer, [ids], stops))
    streamed = joined_deltas(run(tokenizer, chunks(ids, cuts), stops))
    assert (streamed.text, streamed.tokens, streamed.stop_string, streamed.num_tokens) == (
        whole.text, whole.tokens, whole.stop_string, whole.num_tokens
    )  # fmt: skip


def test_the_prompts_tokens_are_described_for_echo() -> None:
    prompt = BYTES.encode_text("é!")
    scores = [SampledToken(i, -1.0) for i in prompt[1:]]
    described = describe_prompt(BYTES, prompt, scores)
    assert [token.text_offset for token in described] == [0, 0, 1]
    assert [token.logprob for token in described] == [None, -1.0, -1.0]
    assert [token.logprob for token in describe_prompt(BYTES, prompt, None)] == [None] * 3
