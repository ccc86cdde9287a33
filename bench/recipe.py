"""Tokens per second of the recipe on one core: ``python bench/recipe.py``.

Two tables. Prompts: a long conversation to ids, beside the same without defence
(jinja's plain sandbox and the tokenizers library, which let a user forge control
tokens). Output: ids to text, watched for stop strings, beside the library's own
decoder stream without stops. Every line is the median of interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import DecodeStream

from headwater.core.request import RequestId, SampledToken, SequenceOutput
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.catalogue import resolve
from headwater.model.load import open_model
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.messages import ChatMessage
from headwater.recipe.output import OutputStream
from headwater.recipe.tokenizer_gguf import tokenizer_from_gguf

WORDS = (
    "The prefix of a conversation is kept for days, so the next turn computes only what is new. "
    "Each block holds 32 tokens; a hit is confirmed by content, never by its hash alone.\n"
    "def next_block(table: list[int]) -> int:\n    return table[-1] + 1  # naïve, but 中文 too\n"
)


def medians_s(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started_s = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started_s)
    return {name: sorted(values)[repeats // 2] for name, values in times.items()}


def print_table(title: str, num_tokens: int, seconds: dict[str, float]) -> None:
    print(f"\n{title} ({num_tokens} tokens)")
    first = next(iter(seconds.values()))
    for name, value in seconds.items():
        print(f"  {name:<44} {num_tokens / value:>12,.0f} tokens/s   x{first / value:.2f}")


def conversation(num_messages: int) -> list[ChatMessage]:
    return [
        ChatMessage(role="user" if n % 2 == 0 else "assistant", content=f"{n}: {WORDS * 6}")
        for n in range(num_messages)
    ]


def bench_prompts(source: TokenizerSource, recipe: ChatRecipe, repeats: int) -> None:
    messages = conversation(64)
    while len(recipe.encode_chat(messages).tokens) < 32_000:
        messages = conversation(len(messages) + 8)
    plain_messages = [{"role": m.role, "content": m.content} for m in messages]
    plain = LibraryTokenizer.from_str(json.dumps(tokenizer_from_gguf(source.gguf_metadata)))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(source.chat_template or "")

    def undefended() -> list[int]:
        text = template.render(messages=plain_messages, add_generation_prompt=True)
        return list(plain.encode(text, add_special_tokens=False).ids)

    prompt = recipe.encode_chat(messages)
    if list(prompt.tokens) != undefended():
        raise SystemExit("the two do not agree on a benign conversation")
    seconds = medians_s(
        {
            "recipe: template, ranges, ids, spans": lambda: recipe.encode_chat(messages),
            "without defence: template, ids": undefended,
        },
        repeats,
    )
    print_table(f"Prompt: {len(messages)} messages", len(prompt.tokens), seconds)


def bench_output(source: TokenizerSource, recipe: ChatRecipe, repeats: int) -> None:
    tokenizer = recipe.tokenizer
    ids = tokenizer.encode_text(WORDS * 200)
    steps = [
        SequenceOutput(request_id=RequestId("bench"), index=0, tokens=(SampledToken(i),))
        for i in ids
    ]
    plain = LibraryTokenizer.from_str(json.dumps(tokenizer_from_gguf(source.gguf_metadata)))

    def push_all(stops: tuple[str, ...]) -> str:
        stream = OutputStream(tokenizer, stop_strings=stops)
        return "".join(stream.push(step).text for step in steps)

    def library() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in ids:
            stream.step(plain, token_id)

    stops = ("\n\n\n", "<end>", "the end of all", "return nothing")
    seconds = medians_s(
        {
            "one token per push, 4 stop strings": lambda: push_all(stops),
            "one token per push, no stop string": lambda: push_all(()),
            "tokenizers' DecodeStream, no stops": library,
        },
        repeats,
    )
    print_table("Output", len(ids), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF model with a chat template")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    source = open_model(resolve(options.model)).tokenizer_source
    started_s = time.perf_counter()
    recipe = ChatRecipe.from_source(source)
    print(f"{source.model_id}: loaded in {time.perf_counter() - started_s:.3f} s")
    bench_prompts(source, recipe, options.repeats)
    bench_output(source, recipe, options.repeats)


if __name__ == "__main__":
    main()
