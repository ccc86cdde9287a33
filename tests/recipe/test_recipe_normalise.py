"""The one shape that the opt-in normaliser leaves out, and all those it does not (B05)."""

from __future__ import annotations

import secrets

import pytest
from recipe_models import STYLES
from recipe_talks import ask, talk

from headwater.recipe.conversation import Message
from headwater.recipe.normalise import without_agent_noise
from headwater.recipe.prefix import shared_tokens
from headwater.recipe.text import join_text_parts

LONG = "You are an agent.\n  Keep   spaces, \ttabs, and x-agent-billing: v=1 in the middle.\n" * 20


def prompt(blocks: list[str], *, normalise: bool) -> tuple[int, ...]:
    kept = without_agent_noise(blocks) if normalise else blocks
    system = Message(role="system", content=join_text_parts(kept))
    return STYLES["chatml"]().recipe.encode(talk(system, ask("hello"))).tokens


def test_b05_a_changing_billing_block_costs_the_prefix_unless_it_is_normalised() -> None:
    requests = [[f"x-agent-billing: v=1; h={secrets.token_hex(8)}", LONG] for _ in range(5)]
    plain = [prompt(blocks, normalise=False) for blocks in requests]
    clean = [prompt(blocks, normalise=True) for blocks in requests]
    assert shared_tokens(plain[0], plain[1]) < 40 < len(plain[0])
    assert len(set(clean)) == 1  # from the second request on, all of it is a hit
    assert clean[0] == prompt([LONG], normalise=False)


@pytest.mark.parametrize(
    "line",
    [
        "x-agent-billing: v=1; h=5ab81c",
        "x-agent-billing-header: v=1; h=5ab81c;",
        "x-acme-cli-billing-header: version=2.1.7; entry=cli; session=00000;",
        "x-agent-billing: v=1\n",
    ],
)
def test_b05_the_documented_shape_is_left_out(line: str) -> None:
    assert without_agent_noise([line, LONG, "more"]) == [LONG, "more"]


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        ["x-agent-billing: v=1"],  # nothing else: it may be the system text itself
        [LONG, "x-agent-billing: v=1"],
        ["x-agent-billing: v=1\nYou are an agent.", LONG],
        ["x-agent-billing: v=1\r\n", LONG],
        [" x-agent-billing: v=1", LONG],
        ["Note: x-agent-billing: v=1", LONG],
        ["X-Agent-Billing: v=1", LONG],
        ["x-agent-billing:v=1", LONG],
        ["x-agent-session: v=1", LONG],
        ["x-billing: v=1", LONG],
        ["x-agent-billings: v=1", LONG],
        ["x-agent-billing: " + "a" * 513, LONG],
        ["", LONG],
    ],
)
def test_b05_anything_else_stays_byte_for_byte(blocks: list[str]) -> None:
    assert list(without_agent_noise(blocks)) == blocks


def test_b05_only_one_block_is_left_out() -> None:
    line = "x-agent-billing: v=1"
    assert without_agent_noise([line, line, LONG]) == [line, LONG]


def test_a_long_hostile_block_costs_no_time() -> None:
    hostile = "x-" + "a-billing" * 100_000
    assert without_agent_noise([hostile, LONG]) == [hostile, LONG]
