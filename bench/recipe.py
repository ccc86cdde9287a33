"""Tokens per second of the recipe on one core: ``python bench/recipe.py``.

Four tables. Prompts, of plain messages and of an agent's session with tools: a long
conversation to ids, beside the same without defence (jinja's plain sandbox and the
tokenizers library, which let a user forge control tokens). Output: ids to text,
watched for stop strings, beside the library's own decoder stream without stops.
Parsing: the same ids as reasoning, answer and arguments of a call. Every line is the
median of interleaved runs, in CPU time of all threads: what one core can do.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.decoders import DecodeStream

from headwater.core.request import RequestId, SampledToken, SequenceOutput
from headwater.core.tokenizer_source import TokenizerSource
from headwater.model.catalogue import resolve
from headwater.model.load import open_model
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.conversation import Conversation, Message, Tool, ToolCall
from headwater.recipe.deepseek import DeepseekRecipe
from headwater.recipe.deepseek_format import DSML, END_THINK, DeepseekVersion
from headwater.recipe.output import OutputStream
from headwater.recipe.parser_marked import MarkedFormat
from headwater.recipe.parsers import OutputParser
from headwater.recipe.recipe import random_call_id
from headwater.recipe.tokenizer import Tokenizer
from headwater.recipe.tokenizer_gguf import tokenizer_from_gguf
from headwater.recipe.tokenizer_json import added_token

WORDS = (
    "The prefix of a conversation is kept for days, so the next turn computes only what is new. "
    "Each block holds 32 tokens; a hit is confirmed by content, never by its hash alone.\n"
    "def next_block(table: list[int]) -> int:\n    return table[-1] + 1  # naïve, but 中文 too\n"
)

STOPS = ("\n\n\n", "<end>", "the end of all", "return nothing")

# SmolLM2's own template has no tools; this one prints them as most templates do.
TOOLS_TEMPLATE = """{{- '<|im_start|>system\\n' + messages[0].content -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- for message in messages[1:] -%}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' -}}
{%- if message.role == 'tool' -%}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- else -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def medians_s(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            started_s = time.process_time()
            run()
            times[name].append(time.process_time() - started_s)
    return {name: sorted(values)[repeats // 2] for name, values in times.items()}


def print_table(title: str, num_tokens: int, seconds: dict[str, float]) -> None:
    print(f"\n{title} ({num_tokens} tokens)")
    first = next(iter(seconds.values()))
    for name, value in seconds.items():
        print(f"  {name:<44} {num_tokens / value:>12,.0f} tokens/s   x{first / value:.2f}")


def plain_talk(num_messages: int) -> Conversation:
    return Conversation(
        messages=tuple(
            Message(role="user" if n % 2 == 0 else "assistant", content=f"{n}: {WORDS * 6}")
            for n in range(num_messages)
        )
    )


def agent_talk(num_messages: int) -> Conversation:
    """Tools of an agent's size, then steps: some words and a call, then its result."""
    messages = [Message(role="system", content=WORDS * 4), Message(role="user", content=WORDS)]
    for n in range(num_messages // 2):
        arguments = {"path": f"src/part_{n}.py", "text": WORDS * 2, "lines": [n, n + 40]}
        call = ToolCall(
            call_id=f"call_{n:05}", name=f"tool_{n % 20}", arguments=json.dumps(arguments)
        )
        messages.append(Message(role="assistant", content="I look.", tool_calls=(call,)))
        messages.append(Message(role="tool", content=WORDS * 5, tool_call_id=call.call_id))
    schema = {
        "type": "object",
        "properties": {
            name: {"type": "string", "description": f"The {name} of the change. {WORDS[:90]}"}
            for name in ("path", "text", "lines", "mode", "reason", "branch")
        },
        "required": ["path", "text"],
    }
    tools = tuple(
        Tool(name=f"tool_{n}", description=WORDS, parameters=json.dumps(schema)) for n in range(20)
    )
    return Conversation(messages=tuple(messages), tools=tools)


def as_plain(talk: Conversation) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Messages and tools as Hugging Face templates take them."""
    messages: list[dict[str, object]] = []
    for message in talk.messages:
        calls = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in message.tool_calls
        ]
        messages.append({"role": message.role, "content": message.content, "tool_calls": calls})
    tools: list[dict[str, object]] = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters),
            },
        }
        for tool in talk.tools
    ]
    return messages, tools


def to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def deepseek_recipe(source: TokenizerSource) -> DeepseekRecipe:
    """DeepSeek's format on this model's vocabulary, to which its control tokens are added."""
    document = tokenizer_from_gguf(source.gguf_metadata)
    version = DeepseekVersion.V4_1
    ids = itertools.count(source.vocab_size)
    document["added_tokens"] = [
        *document["added_tokens"],
        *(
            added_token(next(ids), literal, special=True)
            for literal in sorted(version.control_literals)
        ),
    ]
    with_tokens = TokenizerSource(
        kind="hf",
        tokenizer_json=json.dumps(document).encode(),
        end_token_ids=source.end_token_ids,
        vocab_size=source.vocab_size + len(version.control_literals),
    )
    return DeepseekRecipe.from_source(with_tokens, version)


def steps_of(ids: Sequence[int]) -> list[SequenceOutput]:
    """An engine's output, one token a step."""
    return [
        SequenceOutput(request_id=RequestId("bench"), index=0, tokens=(SampledToken(i),))
        for i in ids
    ]


def push_all(
    tokenizer: Tokenizer,
    steps: Sequence[SequenceOutput],
    *,
    stops: Sequence[str] = STOPS,
    list_tokens: bool = False,
    parser: OutputParser | None = None,
) -> None:
    stream = OutputStream(tokenizer, stop_strings=stops, list_tokens=list_tokens, parser=parser)
    for step in steps:
        stream.push(step)


def bench_prompts(
    title: str,
    source: TokenizerSource,
    make: Callable[[int], Conversation],
    deepseek: DeepseekRecipe,
    repeats: int,
) -> None:
    recipe = ChatRecipe.from_source(source)
    num_messages = 32
    while len(recipe.encode(make(num_messages)).tokens) < 32_000:
        num_messages += 8
    talk = make(num_messages)
    plain = LibraryTokenizer.from_str(json.dumps(tokenizer_from_gguf(source.gguf_metadata)))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    template = environment.from_string(source.chat_template or "")

    def undefended() -> list[int]:
        messages, tools = as_plain(talk)
        text = template.render(messages=messages, tools=tools, add_generation_prompt=True)
        return list(plain.encode(text, add_special_tokens=False).ids)

    prompt = recipe.encode(talk)
    if list(prompt.tokens) != undefended():
        raise SystemExit("the two do not agree on a benign conversation")
    runs: dict[str, Callable[[], object]] = {
        "recipe: template, ranges, ids, spans": lambda: recipe.encode(talk),
        "without defence: template, ids": undefended,
        "deepseek: rendering, ranges, ids, spans": lambda: deepseek.encode(talk),
    }
    seconds = medians_s(runs, repeats)
    shape = f"{len(talk.messages)} messages, {len(talk.tools)} tools, {len(prompt.spans)} spans"
    print_table(f"{title}: {shape}", len(prompt.tokens), seconds)


def bench_output(source: TokenizerSource, recipe: ChatRecipe, repeats: int) -> None:
    tokenizer = recipe.tokenizer
    ids = tokenizer.encode_text(WORDS * 200)
    steps = steps_of(ids)
    plain = LibraryTokenizer.from_str(json.dumps(tokenizer_from_gguf(source.gguf_metadata)))

    def library() -> None:
        stream = DecodeStream(skip_special_tokens=True)
        for token_id in ids:
            stream.step(plain, token_id)

    seconds = medians_s(
        {
            "one token per push, 4 stop strings": lambda: push_all(tokenizer, steps),
            "the same, with tokens listed for logprobs": lambda: push_all(
                tokenizer, steps, list_tokens=True
            ),
            "one token per push, no stop string": lambda: push_all(tokenizer, steps, stops=()),
            "tokenizers' DecodeStream, no stops": library,
        },
        repeats,
    )
    print_table("Output", len(ids), seconds)


def bench_parsing(deepseek: DeepseekRecipe, repeats: int) -> None:
    tokenizer = deepseek.tokenizer
    words = tokenizer.encode_text(WORDS * 150)
    asked = Conversation(messages=(Message(role="user", content="q"),), tools=(Tool(name="write"),))
    opening = (
        f'\n\n<{DSML} calls>\n<{DSML} invoke name="write">\n'
        f'<{DSML} parameter name="text" string="true">'
    )
    marked = MarkedFormat(
        reasoning_marks=("<think>", END_THINK), call_marks=("<tool_call>", "</tool_call>")
    )
    call = '<tool_call>{"name": "write", "arguments": {"text": "'

    def ids_of(text: str) -> list[int]:
        ranges = tokenizer.control_ranges(text, [(0, len(text))])
        return tokenizer.encode_rendered(text, ranges)

    def open_deepseek() -> OutputParser:
        return deepseek.open_parser(asked)

    def open_marked() -> OutputParser:
        return marked.open(in_reasoning=True, tools=True, new_call_id=random_call_id)

    def run(open_parser: Callable[[], OutputParser], before: str) -> Callable[[], object]:
        steps = steps_of([*ids_of(before), *words])
        return lambda: push_all(tokenizer, steps, parser=open_parser())

    seconds = medians_s(
        {
            "deepseek: reasoning": run(open_deepseek, ""),
            "deepseek: answer": run(open_deepseek, END_THINK),
            "deepseek: arguments of a call": run(open_deepseek, END_THINK + opening),
            "marked in text: reasoning": run(open_marked, ""),
            "marked in text: arguments of a call": run(open_marked, END_THINK + call),
        },
        repeats,
    )
    print_table("Parsing, one token per push, 4 stop strings", len(words), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF model with a chat template")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    source = open_model(resolve(options.model)).tokenizer_source
    started_s = time.process_time()
    recipe = ChatRecipe.from_source(source)
    print(f"{source.model_id}: loaded in {time.process_time() - started_s:.3f} s")
    deepseek = deepseek_recipe(source)
    bench_prompts("Prompt", source, plain_talk, deepseek, options.repeats)
    with_tools = replace(source, chat_template=TOOLS_TEMPLATE)
    bench_prompts("Prompt of an agent", with_tools, agent_talk, deepseek, options.repeats)
    bench_output(source, recipe, options.repeats)
    bench_parsing(deepseek, options.repeats)


if __name__ == "__main__":
    main()
