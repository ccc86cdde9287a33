"""``headwater cache explain``: how much of a saved request a folder holds, and why not more.

For the operator of the folder, who may see every tenant and model in it; a caller is told
what is in ``docs/cache.md``. Prints counts and places, never what stands there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec
from rich.console import Console
from rich.text import Text

from headwater.api.cache_report import EndedAt, ended_at
from headwater.api.caching import namespace
from headwater.api.config import ApiConfig
from headwater.api.reasons import REASON_TEXTS
from headwater.app.cache_bodies import BodyDialect, ReadBody, read_body, read_file
from headwater.app.cache_folder import (
    EXIT_OK,
    folder_of,
    print_json,
    shown_model,
    shown_tenant,
    table,
)
from headwater.app.recipe_show import tokenizer_source
from headwater.app.settings import Settings
from headwater.core.blocks import CacheIdentity
from headwater.core.cache import MissReason
from headwater.disk.inspect import IdentityMatch, match
from headwater.recipe.load import load_recipe
from headwater.recipe.recipe import EncodedPrompt
from headwater.recipe.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one identity holds of one prompt."""

    identity: CacheIdentity
    num_tokens: int
    num_tail_tokens: int
    reason: MissReason
    ended_at: EndedAt | None  # None: all but the last token is held


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """One prompt; most tokens first. Empty: nothing in the folder begins as it does."""

    num_prompt_tokens: int
    held: tuple[Held, ...]
    num_elsewhere_tokens: int = 0  # the most that any other tenant holds, if one was named


def run(
    settings: Settings,
    file: str,
    *,
    dialect: BodyDialect | None,
    tenant: str | None,
    as_json: bool,
    console: Console | None = None,
) -> int:
    """Explain ``file`` (``-``: standard input) against the folder; ``tenant`` None: all."""
    folder = folder_of(settings)
    recipe = load_recipe(tokenizer_source(settings.model.model), name=settings.recipe.recipe)
    config = ApiConfig(normalise_agent_noise=settings.recipe.normalise_agent_noise)
    read = read_body(read_file(file), recipe, config, dialect)
    now_s = time.time()
    found = [
        explain(
            recipe.tokenizer,
            prompt,
            match(folder, prompt.tokens, settings.engine.block_tokens, now_s=now_s),
            places=read.places,
            # What a call of that key would meet.
            tenant=None if tenant is None else namespace(tenant, read.salt),
        )
        for prompt in read.prompts
    ]
    if as_json:
        print_json(_as_json(read, found))
        return EXIT_OK
    console = console or Console(highlight=False)
    for number, one in enumerate(found):
        _show(one, read.dialect, number if len(found) > 1 else None, console)
    return EXIT_OK


def explain(
    tokenizer: Tokenizer,
    prompt: EncodedPrompt,
    matches: Sequence[IdentityMatch],
    *,
    places: Sequence[str] = (),
    tenant: str | None = None,
) -> Explained:
    """``matches`` in the words of ``prompt``'s body; of ``tenant``, if one is named."""
    held = []
    num_elsewhere_tokens = 0
    for one in matches:
        if tenant is not None and one.identity.tenant != tenant:
            num_elsewhere_tokens = max(num_elsewhere_tokens, one.num_tokens)
            continue
        if one.num_tokens == 0 and one.reason is MissReason.NEW:
            continue  # it has nothing to do with this prompt
        # The last token is always computed: its logits begin the answer.
        is_whole = one.num_tokens >= len(prompt.tokens) - 1
        held.append(
            Held(
                identity=one.identity,
                num_tokens=one.num_tokens,
                num_tail_tokens=one.num_tail_tokens,
                reason=MissReason.NONE if is_whole else one.reason,
                ended_at=None if is_whole else ended_at(tokenizer, prompt, one.num_tokens, places),
            )
        )
    return Explained(
        num_prompt_tokens=len(prompt.tokens),
        held=tuple(held),
        num_elsewhere_tokens=num_elsewhere_tokens,
    )


def place_text(place: EndedAt) -> str:
    """
    >>> place_text(EndedAt(9, "messages[1]", "content", 3, 5))
    'token 9: messages[1], content, characters 3 to 5'
    """
    parts = [place.place, place.part]
    if place.start_char is not None:
        parts.append(f"characters {place.start_char} to {place.end_char}")
    where = ", ".join(part for part in parts if part is not None)
    return f"token {place.token}: {where}" if where else f"token {place.token}"


def _show(one: Explained, dialect: str, number: int | None, console: Console) -> None:
    which = "" if number is None else f" {number}"
    console.print(Text(f"prompt{which} ({dialect}): {one.num_prompt_tokens} tokens"))
    best = max((held.num_tokens for held in one.held), default=0)
    if one.num_elsewhere_tokens > best:
        console.print(
            Text(
                f"another tenant holds {one.num_elsewhere_tokens} tokens of it "
                f"({MissReason.OTHER_TENANT.value})"
            )
        )
    if not one.held:
        console.print(Text("nothing that it could meet in the folder begins as it does"))
        return
    identities = [held.identity for held in one.held]
    rows = [
        (
            shown_model(held.identity, identities),
            shown_tenant(held.identity.tenant),
            str(held.num_tokens),
            "" if held.ended_at is None else place_text(held.ended_at),
            held.reason.value,
        )
        for held in one.held
    ]
    columns = ("model", "tenant", "tokens held", "ends at", "reason")
    console.print(table("", columns, rows))
    for reason in dict.fromkeys(held.reason for held in one.held):
        console.print(Text(f"{reason.value}: {REASON_TEXTS[reason]}"))


def _as_json(read: ReadBody, found: Sequence[Explained]) -> list[dict[str, object]]:
    return [
        {
            "dialect": read.dialect,
            "prompt_tokens": one.num_prompt_tokens,
            "elsewhere_tokens": one.num_elsewhere_tokens,
            "held": [
                {
                    "identity": asdict(held.identity),
                    "tokens": held.num_tokens,
                    "tail_tokens": held.num_tail_tokens,
                    "reason": held.reason.value,
                    "explanation": REASON_TEXTS[held.reason],
                    "ended_at": msgspec.to_builtins(held.ended_at),
                }
                for held in one.held
            ],
        }
        for one in found
    ]
