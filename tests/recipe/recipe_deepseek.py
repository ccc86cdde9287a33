"""A small tokenizer that declares DeepSeek's control tokens, recipes over it, and the oracle."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from functools import cache

import deepseek_recipe as library
from deepseek_recipe import SpecialToken
from recipe_vocabularies import CORPUS
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import models, pre_tokenizers, trainers

from headwater.core.request import FinishReason, RequestId, SampledToken, SequenceOutput
from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.conversation import Conversation
from headwater.recipe.deepseek import DeepseekRecipe
from headwater.recipe.deepseek_format import DSML, END, END_THINK, THINK, DeepseekVersion
from headwater.recipe.output import OutputDelta, OutputStream, joined_deltas

V4, V4_1 = DeepseekVersion.V4, DeepseekVersion.V4_1
BOTH = [V4, V4_1]
BEGIN = SpecialToken.Bos.default_str()
USER = SpecialToken.User.default_str()
# As the models' own files have them: two are special, the others merely added.
SPECIAL = {BEGIN, END}
_NEWER = {SpecialToken.System.default_str()}
_ALL = [
    BEGIN, END, THINK, END_THINK, USER, SpecialToken.Assistant.default_str(), DSML,
    SpecialToken.LatestReminder.default_str(), SpecialToken.Image.default_str(),
    SpecialToken.System.default_str(),
]  # fmt: skip


@cache
def deepseek_source(version: DeepseekVersion) -> TokenizerSource:
    tokenizer = LibraryTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        [CORPUS + ' invoke name="f"> parameter string="true"> calls> tool_calls>\n' * 3],
        trainers.BpeTrainer(
            vocab_size=700,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    document = json.loads(tokenizer.to_str())
    first = 1 + max(document["model"]["vocab"].values())
    literals = [name for name in _ALL if version is V4_1 or name not in _NEWER]
    document["added_tokens"] = [
        {
            "id": first + index, "content": literal, "single_word": False, "lstrip": False,
            "rstrip": False, "normalized": False, "special": literal in SPECIAL,
        }
        for index, literal in enumerate(literals)
    ]  # fmt: skip
    document["decoder"] = document["pre_tokenizer"]
    return TokenizerSource(
        kind="hf",
        tokenizer_json=json.dumps(document).encode(),
        bos_token_id=first,
        end_token_ids=frozenset({first + 1}),
        vocab_size=first + len(literals) + 8,
        model_id="deepseek-test",
    )


@cache
def deepseek_recipe(version: DeepseekVersion) -> DeepseekRecipe:
    numbers = itertools.count()
    return DeepseekRecipe.from_source(
        deepseek_source(version), version, new_call_id=lambda: f"call_{next(numbers)}"
    )


LibraryRequest = (
    type[library.ChatCompletionRequest]
    | type[library.MessagesRequest]
    | type[library.ResponsesRequest]
)


def library_ids(
    version: DeepseekVersion, kind: LibraryRequest, body: dict[str, object]
) -> list[int]:
    """Ids of a body for model "m": read, rendered and encoded by the library alone."""
    models = {
        V4: library.ModelVersion.DeepseekV4Pro,
        V4_1: library.ModelVersion.DeepseekV41Flash,
    }
    options = library.ConversionOptions().with_model_alias("m", models[version])
    request = kind(json.dumps({"model": "m", **body})).convert(options)
    source = deepseek_source(version).tokenizer_json
    assert source is not None
    tokenizer = library.Tokenizer.from_str(source.decode())
    if version is V4:
        return library.DeepseekV4Encoding().with_tokenizer(tokenizer).encode(request.conversation)
    return library.DeepseekV41Encoding().with_tokenizer(tokenizer).encode(request.conversation)


def output_ids(recipe: DeepseekRecipe, text: str, *, as_text: bool = False) -> list[int]:
    """What a model writes: control literals in ``text`` are control tokens, unless ``as_text``."""
    tokenizer = recipe.tokenizer
    ranges = [] if as_text else tokenizer.control_ranges(text, [(0, len(text))])
    return tokenizer.encode_rendered(text, ranges)


def read_output(
    recipe: DeepseekRecipe,
    conversation: Conversation,
    pieces: Sequence[Sequence[int]],
    *,
    stop_strings: Sequence[str] = (),
    finish: FinishReason = FinishReason.STOP,
) -> OutputDelta:
    stream = OutputStream(
        recipe.tokenizer, stop_strings=stop_strings, parser=recipe.open_parser(conversation)
    )
    last = len(pieces) - 1
    return joined_deltas(
        stream.push(
            SequenceOutput(
                request_id=RequestId("r"),
                index=0,
                tokens=tuple(SampledToken(token_id) for token_id in piece),
                finish=finish if number == last else None,
            )
        )
        for number, piece in enumerate(pieces)
    )


def dsml_calls(version: DeepseekVersion, *calls: tuple[str, Sequence[tuple[str, str, str]]]) -> str:
    """A block of calls as the model writes it; parameters are (name, "true"|"false", value)."""
    tag = version.tag
    lines = [f"\n\n<{DSML}{tag('calls')}>\n"]
    for name, parameters in calls:
        lines.append(f'<{DSML}{tag("invoke")} name="{name}">\n')
        lines += [
            f'<{DSML}{tag("parameter")} name="{key}" string="{is_text}">{value}'
            f"</{DSML}{tag('parameter')}>\n"
            for key, is_text, value in parameters
        ]
        lines.append(f"</{DSML}{tag('invoke')}>\n")
    return "".join([*lines, f"</{DSML}{tag('calls')}>"])


def in_old_spelling(version: DeepseekVersion, text: str) -> str:
    """Tags spelt for V4.1 in ``version``'s own way."""
    if version is V4_1:
        return text
    text = text.replace(f"{DSML} calls", f"{DSML}tool_calls")
    return re.sub(f"({re.escape(DSML)}) ", r"\1", text)
