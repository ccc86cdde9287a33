"""Where the disk tier is when nobody says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.app.settings import as_flags, cache_folder, is_default_cache, load_settings


@pytest.mark.parametrize(
    ("xdg", "expected"),
    [
        ("/somewhere/cache", "/somewhere/cache/headwater/kv"),
        ("", "/home/me/.cache/headwater/kv"),
        ("not/absolute", "/home/me/.cache/headwater/kv"),  # to be ignored, says its standard
    ],
)
def test_the_default_folder_is_in_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, xdg: str, expected: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    monkeypatch.setenv("HOME", "/home/me")
    settings = load_settings({}, {})
    assert cache_folder(settings) == Path(expected)
    assert is_default_cache(settings)


def test_a_named_folder_and_none_are_taken_as_they_are_and_reach_the_worker() -> None:
    named = load_settings({"cache.cache_dir": "/x/kv"}, {})
    assert cache_folder(named) == Path("/x/kv")
    assert not is_default_cache(named)
    assert "--cache-dir=/x/kv" in as_flags(named)
    none = load_settings({"cache.cache_dir": "none"}, {})
    assert cache_folder(none) is None
    assert "--cache-dir=none" in as_flags(none)


def test_a_chosen_cap_is_a_choice_of_the_disk_tier_too() -> None:
    assert not is_default_cache(load_settings({"cache.cache_max_bytes": "1GiB"}, {}))
