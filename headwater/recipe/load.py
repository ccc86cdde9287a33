"""The recipe of a model, by what its tokenizer declares. Called by ``app`` once per model."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Literal

from headwater.core.tokenizer_source import TokenizerSource
from headwater.recipe.chat import ChatRecipe
from headwater.recipe.deepseek import DeepseekRecipe
from headwater.recipe.deepseek_format import DeepseekVersion, declared_version
from headwater.recipe.recipe import NewCallId, Recipe, random_call_id
from headwater.recipe.sandbox_limits import TemplateLimits

RecipeName = Literal["auto", "template", "deepseek-v4", "deepseek-v4.1"]


def load_recipe(
    source: TokenizerSource,
    *,
    name: RecipeName = "auto",
    now: Callable[[], datetime] = datetime.now,
    limits: TemplateLimits | None = None,
    new_call_id: NewCallId = random_call_id,
) -> Recipe:
    """``auto`` takes a DeepSeek format if the tokenizer declares all its control tokens.

    Raises ModelError naming what cannot be served.
    """
    version = None
    if name != "template":
        version = declared_version(source) if name == "auto" else DeepseekVersion(name)
    if version is not None:
        return DeepseekRecipe.from_source(source, version, new_call_id=new_call_id)
    return ChatRecipe.from_source(source, now=now, limits=limits, new_call_id=new_call_id)
