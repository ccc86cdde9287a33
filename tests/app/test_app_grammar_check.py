"""The process that tries constraints: verdicts, limits, and what survives its death."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from headwater.app.grammar_check import CheckLimits, GrammarChecker
from headwater.core.constraint import Constraint
from headwater.core.errors import InvalidRequest

GOOD = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "string"}}}')
# A regex of 5,000 repetitions side by side: seconds and hundreds of megabytes.
HEAVY = Constraint("regex", ".*" * 20_000)


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(512, CheckLimits(cpu_s=1, memory_bytes=128 * 2**20))
    yield made
    made.close()


def test_a_good_constraint_passes_and_a_bad_one_says_why(checker: GrammarChecker) -> None:
    checker.check(GOOD)
    with pytest.raises(InvalidRequest, match="unclosed group") as caught:
        checker.check(Constraint("regex", "((("))
    assert caught.value.code == "invalid_regex"
    checker.check(GOOD)
    checker.check(Constraint("turn", 'start: "a" <[300]>'))
    checker.check(Constraint("regex", "é\n\ud7ff"))


def test_i03_what_takes_too_much_is_refused_and_the_next_one_passes(
    checker: GrammarChecker,
) -> None:
    checker.check(GOOD)
    with pytest.raises(InvalidRequest) as caught:
        checker.check(HEAVY)
    assert caught.value.code == "constraint_too_complex"
    checker.check(Constraint("regex", "ab"))


def test_nothing_runs_before_the_first_constraint_and_it_can_be_closed_twice() -> None:
    checker = GrammarChecker(512)
    checker.close()
    checker.check(GOOD)
    checker.close()
    checker.close()
    checker.check(GOOD)
    checker.check(Constraint("json_schema", json.dumps({"type": "array"})))
    checker.close()


def test_j09_what_is_remembered_is_bounded() -> None:
    checker = GrammarChecker(512, CheckLimits(max_remembered=2))
    for index in range(5):
        checker.check(Constraint("regex", f"a{index}"))
        assert checker.num_remembered <= 2
    checker.close()
