"""The key file: keys as ever, and what each allows; errors that name the line and no key."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from headwater.api.config import ApiConfig, ApiKey
from headwater.api.retention import KeepTimes
from headwater.app.groups import CacheSettings, ServerSettings
from headwater.app.key_file import read_keys
from headwater.app.launch import api_config
from headwater.app.settings import Settings
from headwater.core.cache import RetentionClass
from headwater.core.errors import ConfigError

DAY_S = 86400.0
SECRET = "sk-marker"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def keys_of(path: Path, text: str, *more: str) -> tuple[ApiKey, ...]:
    path.write_text(text, encoding="utf-8")
    return read_keys(ServerSettings(api_key=more, api_key_file=path))


def test_a_file_of_plain_keys_is_read_as_ever(path: Path) -> None:
    keys = keys_of(path, "# team a\nsk-a\n\n  sk-b  \n#sk-c\n", "sk-b", "sk-d")
    assert [key.secret for key in keys] == ["sk-a", "sk-b", "sk-d"]
    for key in keys:
        assert key == ApiKey.unnamed(key.secret)
        assert (key.kind, key.max_keep_s) == (None, math.inf)


def test_attributes_follow_the_key_in_any_order(path: Path) -> None:
    agent, plain, none = keys_of(
        path,
        "sk-a name=team-a cache=agent cache_max_days=2\n"
        "sk-b\tcache_max_days=0.5   name=b.c@d_9\n"
        "sk-c cache=chat cache_max_days=0\n",
    )
    assert agent == ApiKey("team-a", "sk-a", kind=RetentionClass.AGENT, max_keep_s=2 * DAY_S)
    assert plain == ApiKey("b.c@d_9", "sk-b", max_keep_s=DAY_S / 2)
    assert none.name == ApiKey.unnamed("sk-c").name
    assert (none.kind, none.max_keep_s) == (RetentionClass.CHAT, 0.0)
    # The door takes them.
    ApiConfig(keys=(agent, plain, none))


def test_a_key_of_the_settings_has_the_files_attributes(path: Path) -> None:
    (key,) = keys_of(path, f"{SECRET} name=team\n{SECRET} name=team\n", SECRET)
    assert key.name == "team"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{SECRET} nam=x", "unknown attribute; did you mean name"),
        (f"{SECRET} colour=x", "unknown attribute; known: name, cache, cache_max_days"),
        (f"{SECRET} {SECRET}", "word 1 after the key is no attribute"),
        (f"{SECRET} name=a {SECRET}=5", "word 2 after the key is no attribute"),
        (f"{SECRET} =", "word 1 after the key is no attribute"),
        (f"{SECRET} name=", "name must be"),
        (f"{SECRET} name=a~b", "name must be"),
        (f"{SECRET} name=a name=b", "name stands there twice"),
        (f"{SECRET} cache=forever", "cache must be one of agent, chat"),
        (f"{SECRET} cache_max_days=x", "cache_max_days must be a number"),
        (f"{SECRET} cache_max_days=-1", "cache_max_days must be a number"),
        (f"{SECRET} cache_max_days=nan", "cache_max_days must be a number"),
        (f"{SECRET} cache_max_days=inf", "cache_max_days must be a number"),
        (f"{SECRET}-2 name=first", "a name that another key has"),
        ("sk-first cache=chat", "a key that stands in an earlier line"),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_the_key_by_nothing(
    path: Path, line: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=r"line 3: ") as refusal:
        keys_of(path, f"# keys\nsk-first name=first\n{line}\n")
    assert says in str(refusal.value)
    assert "sk-" not in str(refusal.value)


def test_i01_a_file_without_keys_or_without_a_file_does_not_open_the_door(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(ServerSettings(api_key_file=path))
    for text in ("", "# nothing\n", " \n"):
        with pytest.raises(ConfigError, match="holds no key"):
            keys_of(path, text)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(ServerSettings(api_key_file=path))


def test_the_door_gets_keys_and_days_from_the_settings(path: Path) -> None:
    path.write_text("sk-a name=a\n", encoding="utf-8")
    settings = Settings(
        server=ServerSettings(api_key_file=path),
        cache=CacheSettings(cache_agent_days=1.5, cache_chat_days=0.0),
    )
    config = api_config(settings)
    assert [key.name for key in config.keys] == ["a"]
    assert config.keep == KeepTimes(agent_s=1.5 * DAY_S, chat_s=0.0)
    assert api_config(Settings()).keep == KeepTimes(agent_s=3 * DAY_S, chat_s=7 * DAY_S)
