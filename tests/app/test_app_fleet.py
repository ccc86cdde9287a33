"""The fleet as settings: which workers start, what each gets, who may join, what is refused."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from headwater.app.arguments import parse_arguments, settings_from
from headwater.app.assemble import kv_limits, model_part
from headwater.app.cli import build_parser
from headwater.app.fleet_plan import (
    advise_fleet,
    plan_endpoint,
    plan_handoff_endpoint,
    plan_roles,
    share_threads,
)
from headwater.app.launch import router_config
from headwater.app.run_folder import LOCK, RunFolder, remove_if_left
from headwater.app.secret_file import make_secret, read_secret
from headwater.app.settings import (
    Settings,
    as_flags,
    load_settings,
    local_roles,
    usable_cores,
    worker_settings,
    worker_threads,
)
from headwater.core.errors import ConfigError
from headwater.core.fleet import Role
from headwater.engine.kv_plan import KVLimits
from headwater.model.family import ModelPart

SECRET = "0123456789abcdef0123456789abcdef"


def settings_for(**flags: object) -> Settings:
    return load_settings({f"fleet.{name}": str(value) for name, value in flags.items()}, {})


@pytest.mark.parametrize(
    ("flags", "roles"),
    [
        ({}, [Role.BOTH]),
        ({"both": 2}, [Role.BOTH] * 2),
        ({"prefill": 1, "decode": 1}, [Role.PREFILL, Role.DECODE]),
        ({"prefill": 1, "decode": 2, "both": 1}, [Role.PREFILL, *[Role.DECODE] * 2, Role.BOTH]),
        ({"prefill": 1, "both": 1}, [Role.PREFILL, Role.BOTH]),
    ],
)
def test_the_flags_name_the_workers(flags: dict[str, object], roles: list[Role]) -> None:
    settings = settings_for(**flags)
    assert list(local_roles(settings)) == roles
    assert list(router_config(settings).roles) == roles


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prefill": 1}, "at least one fleet.decode worker"),
        ({"decode": 3}, "at least one fleet.prefill worker"),
        ({"decode": 3, "both": 0}, "at least one fleet.prefill worker"),
        ({"both": 0}, "no other worker is asked for"),
        ({"control_listen": "7000"}, "--secret-file"),
        ({"control_listen": "here", "secret_file": "s"}, "must be PORT, HOST:PORT"),
        ({"control_listen": "::1:70", "secret_file": "s"}, r"must be PORT, HOST:PORT or \[IPV6\]"),
        ({"control_listen": "a:70000", "secret_file": "s"}, "must be PORT"),
    ],
)
def test_a_fleet_that_could_serve_nobody_or_is_open_to_all_is_refused(
    flags: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_for(**flags)


def test_a_front_without_workers_of_its_own_waits_for_those_that_join() -> None:
    assert local_roles(settings_for(both=0, control_listen="7000", secret_file="s")) == ()
    assert plan_roles(0, 0, 0, may_join=True) == ()


def test_who_may_join_is_nobody_unless_asked_and_loopback_unless_said() -> None:
    assert Settings().fleet.control_listen is None
    assert plan_endpoint("7000", "x") == "tcp://127.0.0.1:7000"
    assert plan_endpoint("10.0.0.7:7000", "x") == "tcp://10.0.0.7:7000"
    assert plan_endpoint("[::1]:7000", "x") == "tcp://[::1]:7000"


def test_workers_of_one_machine_share_cores_and_default_memory() -> None:
    alone = settings_for()
    two = worker_settings(settings_for(prefill=1, decode=1))
    assert worker_threads(alone) == usable_cores()
    assert worker_threads(two) == share_threads(usable_cores(), 2)
    (one_cap, two_cap) = (kv_limits(s).default_cap_bytes for s in (alone, two))
    assert one_cap == KVLimits().default_cap_bytes
    assert two_cap is not None
    assert one_cap is not None
    assert 2 * two_cap == one_cap
    assert 2 * kv_limits(two).memory_share == kv_limits(alone).memory_share


def test_what_was_chosen_is_each_workers_and_is_not_divided() -> None:
    flags: dict[str, object] = {
        "fleet.both": "3", "engine.threads": "5", "engine.kv_bytes": "1GiB",
    }  # fmt: skip
    settings = worker_settings(load_settings(flags, {}))
    assert worker_threads(settings) == 5
    assert kv_limits(settings).kv_bytes == 2**30


def test_a_worker_process_learns_how_many_share_its_machine() -> None:
    parent = worker_settings(settings_for(both=3, secret_file="/tmp/s"))
    argv = ["worker", "--connect=ipc://x", *as_flags(parent)]
    child = settings_from(parse_arguments(build_parser(), argv))
    assert child.worker.machine_workers == 3
    assert child.fleet.secret_file == Path("/tmp/s")
    assert child.fleet.both is None


def test_share_threads_never_gives_none() -> None:
    assert [share_threads(cores, 3) for cores in (1, 3, 8)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("num_cores", "is_accelerator", "says"),
    [(2, False, "2 cores"), (64, False, "worth a try"), (64, True, "one device")],
)
def test_the_advice_says_why(num_cores: int, is_accelerator: bool, says: str) -> None:
    advice = advise_fleet(
        num_cores=num_cores, is_accelerator=is_accelerator, weights_bytes=2**28,
        prefill_bytes=2**28, free_bytes=2**36,
    )  # fmt: skip
    assert says in advice.why
    parse_arguments(build_parser(), ["serve", *advice.flags.split()])


@pytest.mark.parametrize(
    ("prefill_bytes", "free_bytes", "says"),
    [
        (2**30, 3 * 2**30, "twice would take the room"),
        (2**29, 3 * 2**30 - 1, "1.5 times would take the room"),
        (2**29, 3 * 2**30, "worth a try"),
    ],
)
def test_the_advice_counts_what_a_prefill_worker_keeps(
    prefill_bytes: int, free_bytes: int, says: str
) -> None:
    advice = advise_fleet(
        num_cores=64, is_accelerator=False, weights_bytes=2**30, prefill_bytes=prefill_bytes,
        free_bytes=free_bytes,
    )  # fmt: skip
    assert says in advice.why


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("prefill_weights", ["auto", "all"])
@pytest.mark.parametrize("decoder_replay", ["on", "off"])
def test_only_a_prefill_worker_with_decoder_replay_is_spared_the_late_layers(
    role: Role, prefill_weights: str, decoder_replay: str
) -> None:
    flags: dict[str, object] = {
        "worker.prefill_weights": prefill_weights, "engine.decoder_replay": decoder_replay,
    }  # fmt: skip
    is_spared = (role, prefill_weights, decoder_replay) == (Role.PREFILL, "auto", "on")
    part = model_part(load_settings(flags, {}), role)
    assert part is (ModelPart.EARLY if is_spared else ModelPart.ALL)


def test_where_kv_is_taken_is_an_address_that_others_can_be_told() -> None:
    assert plan_handoff_endpoint(None) == "tcp://127.0.0.1:*"
    assert plan_handoff_endpoint("10.0.0.7:0") == "tcp://10.0.0.7:*"
    for everywhere in ("0.0.0.0:7001", "[::]:7001", "*:7001"):
        with pytest.raises(ConfigError, match="name the one"):
            load_settings({"worker.handoff_listen": everywhere}, {})


def test_settings_of_the_fleet_reach_the_router() -> None:
    assert router_config(settings_for()).elastic is None
    flags: dict[str, object] = {
        "fleet.elastic": "true", "router.stuck_after_s": "70", "router.max_queue_s": "9",
    }  # fmt: skip
    config = router_config(load_settings(flags, {}))
    assert config.elastic is not None
    assert config.limits.max_queue_s == 9
    assert config.lost_after_s == 70, "nobody is replaced before it counts as stuck"


# The secret


def secret_file(folder: Path, text: str = SECRET, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_secret_is_the_files_text_and_never_the_text_itself(tmp_path: Path) -> None:
    found = read_secret(secret_file(tmp_path, f"  {SECRET}\n"))
    assert len(found) == 32
    assert found == read_secret(secret_file(tmp_path))
    assert found != read_secret(secret_file(tmp_path, SECRET[::-1]))
    assert SECRET.encode() not in found


def test_a_secret_that_nobody_named_is_made_new_and_can_be_read_by_us_only(tmp_path: Path) -> None:
    one, other = (make_secret(tmp_path / name) for name in ("a", "b"))
    assert read_secret(one) != read_secret(other)
    with pytest.raises(FileExistsError):
        make_secret(one)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_i08_a_secret_that_others_could_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600") as refusal:
        read_secret(secret_file(tmp_path, mode=mode))
    assert SECRET not in str(refusal.value)


def test_a_secret_that_could_be_guessed_is_refused_without_being_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs 32") as refusal:
        read_secret(secret_file(tmp_path, "hunter2"))
    assert "hunter2" not in str(refusal.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--connect=tcp://127.0.0.1:1"], "--secret-file"),
        (["--connect=127.0.0.1:1"], "must be like tcp://HOST:PORT"),
    ],
)
def test_a_worker_that_cannot_join_says_so_in_one_line(words: list[str], says: str) -> None:
    command = [sys.executable, "-m", "headwater.app.cli", "worker", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("headwater: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


# The folder of sockets


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_its_user_can_enter_the_folder_and_nothing_is_left_of_it(temporary: Path) -> None:
    folder = RunFolder()
    assert folder.path.parent == temporary
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "both-0").touch()
    folder.close()
    folder.close()
    assert list(temporary.iterdir()) == []


def test_a_folder_of_a_front_that_lives_is_left_alone(temporary: Path) -> None:
    first, second = RunFolder(), RunFolder()
    remove_if_left(first.path)
    assert first.path.is_dir()
    for folder in (first, second):
        folder.close()


def test_a_folder_of_a_front_that_was_killed_goes_with_the_next_start(temporary: Path) -> None:
    code = (
        "import tempfile, time; from headwater.app.run_folder import RunFolder\n"
        f"tempfile.tempdir = {str(temporary)!r}; f = RunFolder(); time.sleep(60)"
    )
    front = subprocess.Popen([sys.executable, "-c", code])
    give_up_s = time.monotonic() + 30
    while not (left := list(temporary.glob(f"*/{LOCK}"))) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    front.kill()
    front.wait()
    other = temporary / "headwater-of-somebody-else"
    other.mkdir()
    folder = RunFolder()
    assert not left[0].parent.exists()
    assert other.is_dir(), "no run folder: not ours to remove"
    folder.close()
