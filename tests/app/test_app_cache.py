"""``headwater cache`` on folders of the real store: what is kept, why a request misses, purging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from app_folder import BLOCK_TOKENS, DAY_S, keep, open_store

from headwater.api.caching import namespace
from headwater.api.config import ApiConfig
from headwater.app.cache_bodies import dialect_of, read_body
from headwater.app.cli import main
from headwater.app.recipe_show import tokenizer_source
from headwater.core.blocks import CacheIdentity
from headwater.core.cache import MissReason, Retention, RetentionClass
from headwater.core.errors import InvalidRequest
from headwater.recipe.load import load_recipe
from headwater.recipe.recipe import Recipe

FINGERPRINT = "0123456789abcdef" * 2
TEAM = CacheIdentity(FINGERPRINT, "layout-1", "team")
OTHER = CacheIdentity(FINGERPRINT, "layout-1", "other")
OLD_MODEL = CacheIdentity("fedcba9876543210" * 2, "layout-1", "team")
AGENT = Retention(RetentionClass.AGENT, 3 * DAY_S)
MARKER = "MARKER-TEXT"
SYSTEM = "You are kind, and you answer in one short sentence."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(tokenizer_source("toy"))


class Command:
    """Runs ``headwater cache`` on one folder."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capsys = capsys
        self.code = 0
        self.error = ""

    def __call__(self, *words: str) -> str:
        self.code = main(["cache", *words, "--cache-dir", str(self._folder)])
        shown = self._capsys.readouterr()
        self.error = shown.err
        return shown.out

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def cache(folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(folder, capsys)


# ------------------------------------------------------------------ stats, verify, top, purge


def test_stats_say_what_is_kept_for_whom_and_until_when(folder: Path, cache: Command) -> None:
    keep(folder, range(20), TEAM)
    keep(folder, range(100, 140), OTHER, AGENT)
    found = cache.json("stats")
    assert cache.code == 0
    assert (found["num_records"], found["num_tokens"]) == (3 + 5, 20 + 40)
    assert found["max_bytes"] == 16 * 2**20
    kept = {use["identity"]["tenant"]: use["num_tokens"] for use in found["by_identity"]}
    assert kept == {"team": 20, "other": 40}
    assert {use["kind"]: use["num_records"] for use in found["by_class"]} == {"agent": 5, "chat": 3}
    text = cache("stats")
    for word in ("8 of 60 tokens", "team", "other", "class agent", "16.0 MiB", FINGERPRINT[:8]):
        assert word in text


def test_verify_reads_every_record_and_a_damaged_one_is_exit_code_1(
    folder: Path, cache: Command
) -> None:
    keep(folder, range(64), TEAM)
    whole = cache.json("verify")
    assert (cache.code, whole["num_records"], whole["num_damaged"]) == (0, 8, 0)
    (segment,) = folder.glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[data.index(bytes([8]) * 256) + 100] ^= 1  # the payload of the second block
    segment.write_bytes(data)
    text = cache("verify")
    assert cache.code == 1
    assert "1 damaged, 0 of them dropped" in text
    assert "--drop-damaged" in text
    assert cache.json("verify", "--drop-damaged")["num_dropped"] == 1
    assert cache.json("verify")["num_records"] == 7
    assert cache.code == 0


def test_top_lists_the_most_used_first(folder: Path, cache: Command) -> None:
    keep(folder, range(40), TEAM)
    found = cache.json("top", "-n", "2")
    assert len(found) == 2
    assert {record["identity"]["tenant"] for record in found} == {"team"}
    lines = cache("top").splitlines()
    assert len(lines) == 1 + 5  # one line each, on a terminal of the usual width
    assert lines[0].split()[:4] == ["record", "model", "tenant", "class"]
    assert cache("top", "-n", "0") == ""
    assert (cache.code, "-n must be at least 1" in cache.error) == (2, True)


def test_purge_takes_a_tenant_with_all_its_salts_and_nothing_of_others(
    folder: Path, cache: Command
) -> None:
    salted = CacheIdentity(FINGERPRINT, "layout-1", namespace("team", "secret"))
    namesake = CacheIdentity(FINGERPRINT, "layout-1", "team2")
    for identity in (TEAM, salted, namesake, OTHER):
        keep(folder, range(16), identity)
    assert cache.json("purge", "--tenant", "team")["num_records"] == 4
    kept = [use["identity"]["tenant"] for use in cache.json("stats")["by_identity"]]
    assert sorted(kept) == ["other", "team2"]


def test_purge_by_age_and_by_model(folder: Path, cache: Command) -> None:
    keep(folder, range(16), TEAM, ago_s=2 * DAY_S)
    keep(folder, range(100, 116), TEAM)
    keep(folder, range(16), OLD_MODEL)
    assert "removed 2 records" in cache("purge", "--unused-days", "1")
    assert cache.json("purge", "--fingerprint", OLD_MODEL.model_fingerprint)["num_records"] == 2
    assert cache.json("purge", "--fingerprint", "another")["num_records"] == 0
    assert cache.json("stats")["num_records"] == 2


def test_purge_removes_everything_only_when_that_is_said_twice(
    folder: Path, cache: Command
) -> None:
    keep(folder, range(16), TEAM)
    for words in (
        (),
        ("--yes",),
        ("--all",),
        ("--all", "--yes", "--tenant", "team"),
        ("--unused-days", "-1"),
    ):
        assert cache("purge", *words) == ""
        assert cache.code == 2
        assert cache.error.startswith("headwater: ")
        assert cache.error.count("\n") == 1
    assert cache.json("stats")["num_records"] == 2
    assert cache.json("purge", "--all", "--yes")["num_records"] == 2
    assert cache.json("stats")["num_records"] == 0


def test_actions_work_while_a_server_has_the_folder_open(folder: Path, cache: Command) -> None:
    keep(folder, range(16), TEAM)
    store = open_store(folder)
    try:
        assert cache.json("stats")["num_records"] == 2
        assert cache.json("verify")["num_damaged"] == 0
        assert cache.json("purge", "--tenant", "team")["num_records"] == 2
        assert store.find([TEAM.root_key()]) == [None]
    finally:
        store.close()


@pytest.mark.parametrize("action", ["stats", "verify", "top", "purge", "explain"])
def test_a_folder_that_is_none_is_one_line_and_makes_nothing(
    folder: Path, cache: Command, tmp_path: Path, action: str
) -> None:
    body = tmp_path / "body.json"
    body.write_text('{"prompt": "x"}')
    more = {"purge": ["--all", "--yes"], "explain": [str(body), "--model", "toy"]}
    assert cache(action, *more.get(action, [])) == ""
    assert cache.code == 2
    assert cache.error.count("\n") == 1
    assert "cache" in cache.error
    assert not folder.exists()


def test_no_folder_at_all_says_how_to_name_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "stats", "--cache-dir", "none"]) == 2
    assert "--cache-dir" in capsys.readouterr().err


# ------------------------------------------------------------------ explain


def chat_body(question: str, system: str = SYSTEM, **fields: object) -> dict[str, object]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages} | fields


def tokens_of(recipe: Recipe, body: dict[str, object]) -> tuple[int, ...]:
    (prompt,) = read_body(json.dumps(body).encode(), recipe, ApiConfig()).prompts
    return prompt.tokens


@pytest.fixture
def explain(cache: Command, tmp_path: Path) -> Any:
    def run(body: object, *words: str, as_json: bool = True) -> Any:
        file = tmp_path / "body.json"
        file.write_text(json.dumps(body))
        more = ("--model", "toy", "--block-tokens", str(BLOCK_TOKENS), *words)
        if not as_json:
            return cache("explain", str(file), *more)
        return cache.json("explain", str(file), *more)

    return run


def test_explain_locates_the_first_difference_by_message_and_characters(
    folder: Path, cache: Command, explain: Any, recipe: Recipe
) -> None:
    keep(folder, tokens_of(recipe, chat_body("It is 12:04. What now?")), TEAM)
    asked = chat_body(f"It is 12:05. {MARKER}?")
    ((held,), prompt_tokens) = ((one := explain(asked)[0])["held"], one["prompt_tokens"])
    assert prompt_tokens == len(tokens_of(recipe, asked))
    assert held["identity"]["tenant"] == "team"
    assert held["reason"] == "differs"
    place = held["ended_at"]
    assert (place["place"], place["part"]) == ("messages[1]", "content")
    assert (place["start_char"], place["end_char"]) == (10, 11)
    assert place["token"] == held["tokens"]
    text = explain(asked, as_json=False)
    assert "messages[1]" in text
    assert "differs: What is kept goes on with another token" in text.replace("\n", " ")
    assert MARKER not in text + json.dumps(one)
    assert SYSTEM[:10] not in text + json.dumps(one)
    assert cache.code == 0


def test_explain_of_what_is_held_whole(folder: Path, explain: Any, recipe: Recipe) -> None:
    body = chat_body("hello")
    keep(folder, tokens_of(recipe, body), TEAM)
    (held,) = explain(body)[0]["held"]
    assert (held["reason"], held["ended_at"]) == ("none", None)


def test_explain_tells_the_operator_of_other_tenants_and_models(
    folder: Path, explain: Any, recipe: Recipe
) -> None:
    body = chat_body("hello")
    tokens = tokens_of(recipe, body)
    keep(folder, tokens, OTHER)
    keep(folder, tokens[:20], OLD_MODEL)
    everybody = explain(body)[0]["held"]
    assert [h["identity"]["tenant"] for h in everybody] == ["other", "team"]
    one = explain(body, "--tenant", "team")[0]
    assert [h["tokens"] for h in one["held"]] == [20]
    assert one["elsewhere_tokens"] == len(tokens)
    text = explain(body, "--tenant", "team", as_json=False)
    assert MissReason.OTHER_TENANT.value in text
    assert "nothing that it could meet" in explain(body, "--tenant", "nobody", as_json=False)


def test_explain_follows_the_bodys_salt(folder: Path, explain: Any, recipe: Recipe) -> None:
    body = chat_body("hello")
    salted = CacheIdentity(FINGERPRINT, "layout-1", namespace("team", "s"))
    keep(folder, tokens_of(recipe, body), salted)
    assert explain(body, "--tenant", "team")[0]["held"] == []
    (held,) = explain(body | {"cache_salt": "s"}, "--tenant", "team")[0]["held"]
    assert held["reason"] == "none"


def test_explain_says_that_a_prefix_was_purged_or_expired(
    folder: Path, explain: Any, recipe: Recipe
) -> None:
    body = chat_body("hello")
    keep(folder, tokens_of(recipe, body), TEAM, Retention(RetentionClass.CHAT, 60.0), ago_s=3600)
    open_store(folder).close()  # a server starts: what expired goes, its name stays for a while
    (held,) = explain(body)[0]["held"]
    assert (held["tokens"], held["reason"]) == (0, "expired")


@pytest.mark.parametrize(
    ("body", "dialect"),
    [
        ([{"role": "user", "content": "hello"}], "chat"),
        ({"messages": [{"role": "user", "content": "hello"}]}, "chat"),
        ({"messages": [{"role": "user", "content": "hello"}], "stop_sequences": []}, "messages"),
        ({"messages": [{"role": "user", "content": "hello"}], "system": ""}, "messages"),
        ({"input": "hello"}, "responses"),
        ({"input": [{"role": "user", "content": "hello"}]}, "responses"),
    ],
)
def test_b03_a_body_is_read_as_its_dialect_and_gives_the_same_ids(
    recipe: Recipe, body: object, dialect: str
) -> None:
    data = json.dumps(body).encode()
    read = read_body(data, recipe, ApiConfig())
    assert read.dialect == dialect
    assert read.prompts[0].tokens == tokens_of(recipe, {"messages": body_messages("hello")})


def body_messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_completions_may_hold_several_prompts(folder: Path, explain: Any, recipe: Recipe) -> None:
    keep(folder, recipe.encode_completion("a long text, kept").tokens, TEAM)
    first, second = explain({"prompt": ["a long text, kept", "another"]})
    assert first["held"][0]["reason"] == "none"
    assert second["held"] == [] or second["held"][0]["tokens"] < BLOCK_TOKENS
    assert "prompt 1 (completions)" in explain({"prompt": ["a", "b"]}, as_json=False)


@pytest.mark.parametrize("body", ["", "[", "{}", "5", '{"messages": 5}', '{"prompt": []}'])
def test_a_body_that_is_none_is_one_line(
    folder: Path, cache: Command, tmp_path: Path, body: str
) -> None:
    keep(folder, range(16), TEAM)
    file = tmp_path / "body.json"
    file.write_text(body)
    assert cache("explain", str(file), "--model", "toy") == ""
    assert (cache.code, cache.error.count("\n")) == (2, 1)
    assert cache("explain", str(tmp_path / "nowhere"), "--model", "toy") == ""
    assert "cannot read" in cache.error


def test_the_dialect_of_something_else_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no JSON object"):
        dialect_of(b"\xff")
