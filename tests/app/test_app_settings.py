"""Settings: order of sources, origins, refusals, masking, and what children receive."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headwater.app.arguments import parse_arguments, settings_from
from headwater.app.cli import build_parser
from headwater.app.key_file import read_keys
from headwater.app.options import format_bytes, parse_value
from headwater.app.settings import (
    GROUPS,
    SETTINGS,
    Settings,
    as_flags,
    describe_settings,
    load_settings,
    worker_environment,
)
from headwater.core.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "headwater.toml"


def test_j07_a_flag_beats_the_environment_beats_a_file_beats_the_default(config: Path) -> None:
    config.write_text('[server]\nport = 2\nhost = "::1"\nlog_level = "debug"\n')
    environment = {"HEADWATER_PORT": "3", "HEADWATER_HOST": "localhost"}
    settings = load_settings({"server.port": "1"}, environment, config)
    assert settings.server.port == 1
    assert settings.server.host == "localhost"
    assert settings.server.log_level == "debug"
    lines = describe_settings(settings)
    assert "server.port 1 (flag --port)" in lines
    assert "server.host localhost (environment HEADWATER_HOST)" in lines
    assert f"server.log_level debug (file {config})" in lines
    assert "engine.max_running 64 (default)" in lines


def test_j07_a_start_from_the_file_alone_works(config: Path) -> None:
    config.write_text(
        '[model]\nweights = "int8"\n[engine]\nkv_bytes = "2GiB"\nthreads = 2\n'
        '[router]\nstuck_after_s = 5\n[server]\naccess_log = false\nallowed_hosts = ["a.test"]\n'
    )
    settings = load_settings({}, {}, config)
    assert settings.model.weights == "int8"
    assert settings.engine.kv_bytes == 2**31
    assert settings.engine.threads == 2
    assert settings.router.stuck_after_s == 5.0
    assert settings.server.access_log is False
    assert settings.server.allowed_hosts == ("a.test",)


def test_the_environment_can_name_the_file_and_the_flag_wins(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    config.write_text("[server]\nport = 1\n")
    other.write_text("[server]\nport = 2\n")
    environment = {"HEADWATER_CONFIG": str(other)}
    assert load_settings({}, environment).server.port == 2
    assert load_settings({}, environment, config).server.port == 1


def test_a_file_that_only_lies_in_the_folder_is_not_read(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text("[server]\nport = 1\n")
    monkeypatch.chdir(config.parent)
    assert load_settings({}, {}) == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1\n", r"unknown setting server\.prot; did you mean server\.port\?"),
        ("[sever]\nport = 1\n", r"unknown section \[sever\]; did you mean server\?"),
        ("port = 1\n", r"did you mean server\.port\?"),
        ("[server\n", "not valid TOML"),
        ("[server]\nport = true\n", r"server\.port must be a whole number, got True \(from file"),
        ("[server]\nport = 99999\n", r"server\.port must be from 0 to 65535, got 99999"),
        ("[server]\nstrict = 1\n", "must be true or false"),
        ('[model]\nweights = "int3"\n', "must be one of auto, fp32, bf16, int8, got 'int3'"),
        ('[engine]\nkv_bytes = "2 parsecs"\n', "must be bytes such as"),
        ('[model]\nmodel = ""\n', "text that is not empty"),
        ("[router]\nstuck_after_s = nan\n", "must be a number"),
    ],
)
def test_j07_a_wrong_file_is_refused_naming_key_and_cure(
    config: Path, text: str, message: str
) -> None:
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings({}, {}, config)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read settings file"):
        load_settings({}, {}, tmp_path / "none.toml")


def test_j07_an_unknown_variable_is_refused_naming_the_nearest() -> None:
    with pytest.raises(ConfigError, match="HEADWATER_PROT; did you mean HEADWATER_PORT"):
        load_settings({}, {"HEADWATER_PROT": "1"})


def test_j07_an_unknown_flag_is_refused_naming_the_nearest() -> None:
    with pytest.raises(ConfigError, match="--prot; did you mean --port"):
        parse_arguments(build_parser(), ["serve", "--prot=1"])


def test_a_flag_that_is_only_begun_is_not_guessed() -> None:
    with pytest.raises(ConfigError, match="--max-run"):
        parse_arguments(build_parser(), ["serve", "--max-run", "1"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"server.host": "0.0.0.0"}, "--api-key-file"),
        ({"server.host": "a.test"}, "no API key is set"),
        ({"engine.block_tokens": "48"}, "power of two"),
        ({"engine.kv_bytes": "1GiB", "engine.num_blocks": "9"}, "both set"),
        ({"engine.max_step_tokens": "64", "engine.max_mixed_prefill_tokens": "65"}, "not be more"),
        ({"engine.max_step_tokens": "512", "engine.max_running": "513"}, "not be more"),
        ({"worker.restart_backoff_s": "31"}, "restart_backoff_max_s"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(flags, {})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.9", "::1", "localhost"])
def test_i09_loopback_needs_no_key(host: str) -> None:
    assert load_settings({"server.host": host}, {}).server.host == host


def test_i01_any_other_address_starts_with_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# team a\nsk-a\n\nsk-b\n")
    settings = load_settings({"server.host": "0.0.0.0", "server.api_key_file": str(keys)}, {})
    assert [key.secret for key in read_keys(settings.server)] == ["sk-a", "sk-b"]


def test_i01_a_key_file_without_keys_does_not_open_the_door(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    for text in ("", "# nothing\n"):
        keys.write_text(text)
        flags = {"server.host": "0.0.0.0", "server.api_key_file": str(keys)}
        with pytest.raises(ConfigError, match="holds no key"):
            load_settings(flags, {})
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({**flags, "server.api_key_file": str(tmp_path / "none")}, {})


def test_j06_keys_are_in_no_line_no_error_and_no_child_flag() -> None:
    settings = load_settings({"server.api_key": ["sk-marker"]}, {"HEADWATER_API_KEY": "sk-other"})
    assert [key.secret for key in read_keys(settings.server)] == ["sk-marker"]
    assert "sk-" not in "\n".join(describe_settings(settings))
    assert "server.api_key *** (flag --api-key)" in describe_settings(settings)
    assert "sk-" not in " ".join(as_flags(settings, [group for group, _ in GROUPS]))
    with pytest.raises(ConfigError) as refusal:
        load_settings({"server.api_key": ["sk-marker", ""]}, {})
    assert "sk-" not in str(refusal.value)


def test_keys_in_the_environment_are_separated_by_commas() -> None:
    settings = load_settings({}, {"HEADWATER_API_KEY": "sk-a, sk-b"})
    assert settings.server.api_key == ("sk-a", "sk-b")


def test_none_unsets_a_value_of_a_lower_source(config: Path) -> None:
    config.write_text("[engine]\nthreads = 4\n")
    assert load_settings({"engine.threads": "none"}, {}, config).engine.threads is None


def test_flags_given_to_a_child_give_it_the_same_settings() -> None:
    flags: dict[str, object] = {
        "model.model": "-odd name", "model.weights": "int8", "model.context_tokens": "512",
        "engine.kv_bytes": "64MiB", "engine.max_running": "7", "worker.start_timeout_s": "9.5",
        "server.log_level": "debug", "server.port": "1",
    }  # fmt: skip
    parent = load_settings(flags, {})
    argv = ["worker", "--connect=a", "--worker-id=b"]
    argv += as_flags(parent)
    child = settings_from(parse_arguments(build_parser(), argv))
    assert (child.model, child.engine, child.worker) == (parent.model, parent.engine, parent.worker)
    assert child.server.log_level == "debug"


def test_a_worker_gets_sleeping_threads_and_none_of_our_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWATER_PORT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    environment = worker_environment(3)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["OMP_NUM_THREADS"] == "7"  # the person's own choice stays
    assert "HEADWATER_PORT" not in environment
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert worker_environment(3)["OMP_NUM_THREADS"] == "3"


def test_each_flag_and_variable_belongs_to_one_setting() -> None:
    assert len({setting.flag for setting in SETTINGS}) == len(SETTINGS)
    assert len({setting.env for setting in SETTINGS}) == len(SETTINGS)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_default_is_a_value_that_would_be_accepted(setting: object) -> None:
    (found,) = (item for item in SETTINGS if item is setting)
    if found.default is not None and found.default != ():
        default = found.default
        # A default names the home folder by its sign, so that the page is the same everywhere.
        meant = default.expanduser() if isinstance(default, Path) else default
        assert parse_value(found, str(default), "a test") == meant
    assert found.option.help.endswith(".")


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1048576", 2**20), ("1MiB", 2**20), ("2 gib", 2**31), ("64kib", 2**16), ("5B", 5)],
)
def test_sizes_are_read_and_shown_exactly(text: str, num_bytes: int) -> None:
    (setting,) = (item for item in SETTINGS if item.name == "engine.kv_bytes")
    if num_bytes >= 2**20:
        assert parse_value(setting, text, "a test") == num_bytes
        assert parse_value(setting, format_bytes(num_bytes), "a test") == num_bytes
    else:
        with pytest.raises(ConfigError, match="at least"):
            parse_value(setting, text, "a test")
