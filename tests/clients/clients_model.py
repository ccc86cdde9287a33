"""The scripted model: a Generator that plays given turns token by token, behind the real recipe.

Which turn to play is read from the prompt itself (how many assistant turns it
holds), so a client that repeats a request gets the same turn again and the
repetition shows. Knows no dialect and no client. Used by ``clients_server``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, trainers

from headwater.core.control import StepTiming
from headwater.core.ports import ServiceStatus
from headwater.core.request import (
    FinishReason,
    ModelInfo,
    PromptReport,
    Request,
    SampledToken,
    SequenceOutput,
)
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.load import load_recipe
from headwater.recipe.recipe import Recipe

MODEL_ID: Final = "headwater-scripted"
CONTEXT_TOKENS: Final = 200_000
BLOCK_TOKENS: Final = 16

_HIDDEN: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKUP: Final = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<tools>", "</tools>"),
)
_ASSISTANT: Final = "<|im_start|>assistant\n"

# Written for this test, in the habits of the Hermes family: tools listed in the
# system turn, calls as JSON between two markers, results in a user turn.
_TEMPLATE: Final = (Path(__file__).parent / "hermes.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model makes."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant turn."""

    thinking: str = ""
    text: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The turns of the conversation whose first user text holds ``opening``."""

    opening: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One answer, as ids: what the next prompt of the conversation may begin with."""

    opening: str  # of its script; empty for an aside
    turn_index: int
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]
    num_hit_tokens: int


def scripted_recipe() -> Recipe:
    """A byte-level BPE of a few thousand tokens, trained on this repository's own text."""
    root = Path(__file__).resolve().parents[2]
    texts = [path.read_text(encoding="utf-8") for path in sorted(root.glob("docs/**/*.md"))]
    library = LibraryTokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4000, show_progress=False, initial_alphabet=alphabet)
    )
    document = json.loads(library.to_str())
    document["decoder"] = document["pre_tokenizer"]
    first_id = 1 + max(document["model"]["vocab"].values())
    document["added_tokens"] = [
        {
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            "id": first_id + index,
            "content": literal,
            "special": literal in _HIDDEN,
        }
        for index, literal in enumerate((*_HIDDEN, *_MARKUP))
    ]
    return load_recipe(
        TokenizerSource(
            kind="hf",
            tokenizer_json=json.dumps(document).encode(),
            tokenizer_config={"eos_token": "<|im_end|>", "add_bos_token": False},
            chat_template=_TEMPLATE,
            end_token_ids=frozenset({first_id + _HIDDEN.index("<|im_end|>")}),
            vocab_size=first_id + len(_HIDDEN) + len(_MARKUP),
            model_id=MODEL_ID,
        )
    )


def turn_text(turn: Turn) -> str:
    """How the model writes ``turn``; the template prints a finished turn in the same way."""
    thinking = f"<think>\n{turn.thinking}\n</think>\n\n" if turn.thinking else ""
    calls = [json.dumps({"name": c.name, "arguments": dict(c.arguments)}) for c in turn.calls]
    marked = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return thinking + "\n".join([turn.text, *marked] if turn.text else marked)


@dataclass(slots=True)
class ScriptedModel:
    """Implements the Generator port. Remembers what it played; ``script`` may be changed."""

    recipe: Recipe
    scripts: Sequence[Script] = ()
    aside: Turn = Turn(text="Fix the greeting")  # for calls without tools, such as titles
    played: list[Played] = field(default_factory=list)

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            model_id=MODEL_ID,
            family="llama",
            fingerprint="scripted",
            vocab_size=self.recipe.tokenizer.vocab_size,
            context_tokens=CONTEXT_TOKENS,
            block_tokens=BLOCK_TOKENS,
            num_blocks=CONTEXT_TOKENS // BLOCK_TOKENS,
            kv_bytes_per_token=1,
            weights_format="fp32",
            weights_bytes=0,
            numerics="reference",
            device="cpu",
        )

    def status(self) -> ServiceStatus:
        return ServiceStatus(
            ready=True,
            reason="ready",
            num_in_flight=0,
            num_worker_restarts=0,
            load=None,
            step_totals=StepTiming(
                plan_s=0.0,
                forward_s=0.0,
                sample_s=0.0,
                apply_s=0.0,
                num_prefill_tokens=0,
                num_decode_tokens=0,
            ),
        )

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        opening, turn_index, turn = self._choose(request.prompt_tokens)
        tokens = self._encode(turn)[: request.stop.max_output_tokens]
        num_hit_tokens = self._num_hit_tokens(request.prompt_tokens)
        self.played.append(
            Played(
                opening=opening,
                turn_index=turn_index,
                prompt_tokens=request.prompt_tokens,
                output_tokens=tokens,
                num_hit_tokens=num_hit_tokens,
            )
        )
        report: PromptReport | None = PromptReport(
            num_hit_tokens=num_hit_tokens,
            num_miss_tokens=request.num_prompt_tokens - num_hit_tokens,
        )
        for token in tokens:
            await asyncio.sleep(0.001)  # a frame of its own for each token
            yield SequenceOutput(
                request_id=request.request_id,
                index=0,
                tokens=(SampledToken(token),),
                prompt=report,
            )
            report = None
        yield SequenceOutput(
            request_id=request.request_id,
            index=0,
            prompt=report,
            finish=FinishReason.STOP,
            stop_token_id=min(self.recipe.end_token_ids),
        )

    async def abort_choice(self, request: Request, index: int) -> None:
        """Nothing to stop: turns are short, and scripts hold no stop strings."""

    def _choose(self, prompt_tokens: Sequence[int]) -> tuple[str, int, Turn]:
        prompt = self.recipe.decode(prompt_tokens, keep_control=True)
        first_turn, *later_turns = prompt.split(_ASSISTANT)
        if "<tools>" in first_turn:
            for script in self.scripts:
                if script.opening in first_turn:
                    turn_index = len(later_turns) - 1
                    last = len(script.turns) - 1
                    return script.opening, turn_index, script.turns[min(turn_index, last)]
        return "", 0, self.aside

    def _encode(self, turn: Turn) -> tuple[int, ...]:
        text = turn_text(turn)
        tokenizer = self.recipe.tokenizer
        # Only the markup of this module becomes control ids, never the words of a turn.
        return tuple(tokenizer.encode_rendered(text, list(_markup_ranges(text))))

    def _num_hit_tokens(self, prompt_tokens: tuple[int, ...]) -> int:
        """What a prefix cache would hold of the prompt: whole blocks, and never its last token."""
        longest = max(
            (
                num_common_tokens(prompt_tokens, earlier.prompt_tokens + earlier.output_tokens)
                for earlier in self.played
            ),
            default=0,
        )
        return min(longest, len(prompt_tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def num_common_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def _markup_ranges(text: str) -> Iterator[tuple[int, int]]:
    at = 0
    while at < len(text):
        literal = next((m for m in _MARKUP if text.startswith(m, at)), None)
        if literal is not None:
            yield at, at + len(literal)
        at += len(literal) if literal is not None else 1
