"""A model file that comes in parts: whole or not there, whoever dies, writes or has no room."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from model_files import GEMMA3, random_tensors, write_gguf

from headwater.core.errors import ModelError
from headwater.model import joined_file as joining
from headwater.model.hf_config import config_from_hf
from headwater.model.joined_file import PartsLocation, joined_file
from headwater.model.load import open_model

CONTENT = bytes(range(256)) * 10_000  # several chunks of reading, and not a multiple of one


def parts_of(folder: Path, content: bytes = CONTENT) -> PartsLocation:
    cuts = [0, len(content) // 3, len(content) // 2, len(content)]
    parts = []
    for number, (start, end) in enumerate(pairwise(cuts)):
        part = folder / f"file.part{number:02}"
        part.write_bytes(content[start:end])
        parts.append(part)
    return PartsLocation(
        parts=tuple(parts),
        folder=folder / "cache" / "models",
        file_name="big.gguf",
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        install="big-gguf",
        model_id="big",
    )


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_parts_are_joined_once(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    file = joined_file(location)
    assert file == location.folder / "big.gguf"
    assert file.read_bytes() == CONTENT
    assert names_in(location.folder) == {"big.gguf", "big.gguf.lock"}
    written_at = file.stat().st_mtime_ns
    for part in location.parts:
        part.unlink()  # no longer needed, not even looked at
    assert joined_file(location).stat().st_mtime_ns == written_at


def test_a_model_in_parts_opens_as_its_file_does(tmp_path: Path) -> None:
    config = config_from_hf(GEMMA3, "c")
    every: dict[str, int | float | str | bool] = {"gemma3.attention.sliding_window_pattern": 3}
    write_gguf(
        tmp_path / "m.gguf",
        config,
        random_tensors(config),
        architecture="gemma3",
        metadata=every,
    )
    opened = open_model(parts_of(tmp_path, (tmp_path / "m.gguf").read_bytes()))
    opened.source.close()
    assert opened.model_id == "big"
    assert opened.config.window == config.window


def test_a_torn_part_leaves_no_file_and_says_what_to_install(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    location.parts[1].write_bytes(location.parts[1].read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"big-gguf .* --force-reinstall"):
        joined_file(location)
    assert names_in(location.folder) == {"big.gguf.lock"}


def test_parts_with_another_checksum_leave_no_file(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    with pytest.raises(ModelError, match=r"sha256 \w+, expected 0000"):
        joined_file(replace(location, sha256="0000"))
    assert names_in(location.folder) == {"big.gguf.lock"}


def test_a_part_that_is_gone_is_named(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    location.parts[2].unlink()
    with pytest.raises(ModelError, match=r"cannot read .*file.part02.*--force-reinstall"):
        joined_file(location)
    assert names_in(location.folder) == {"big.gguf.lock"}


def test_what_a_killed_start_left_is_written_over(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    location.folder.mkdir(parents=True)
    (location.folder / "big.gguf.part").write_bytes(b"half of anoth")
    (location.folder / "big.gguf").write_bytes(CONTENT[:100])  # by somebody's copy
    assert joined_file(location).read_bytes() == CONTENT
    assert names_in(location.folder) == {"big.gguf", "big.gguf.lock"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    location.folder.mkdir(parents=True)
    location.folder.chmod(0o500)
    with pytest.raises(ModelError, match=r"cannot write its weights, 2,560,000 bytes, to .*big"):
        joined_file(location)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(ModelError, match=r"cannot write its weights, 2,560,000 bytes, to .*big"):
        joined_file(location)


def test_a_user_without_a_home_is_told_to_pass_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(ModelError, match=r"home directory.*\.gguf file of your own"):
        joined_file(parts_of(tmp_path))


def test_a_disk_without_room_leaves_no_file(tmp_path: Path) -> None:
    """In a process of its own, whose files may not grow beyond a megabyte."""
    location = parts_of(tmp_path)
    program = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
from pathlib import PosixPath
from headwater.core.errors import ModelError
from headwater.model.joined_file import PartsLocation, joined_file
try:
    joined_file({location!r})
except ModelError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "cannot write its weights" in done.stdout
    assert "File too large" in done.stdout
    assert names_in(location.folder) == {"big.gguf.lock"}


def test_processes_that_start_at_once_all_get_the_whole_file(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    program = f"""
from pathlib import PosixPath
from headwater.model.joined_file import PartsLocation, joined_file
import sys
print("ready", flush=True)
sys.stdin.read()  # until all are ready
print(len(joined_file({location!r}).read_bytes()))
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None  # so that communicate does not close it again
    outputs = [process.communicate(timeout=60)[0] for process in started]
    assert outputs == [f"{len(CONTENT)}\n"] * 3
    assert (location.folder / "big.gguf").read_bytes() == CONTENT
    assert names_in(location.folder) == {"big.gguf", "big.gguf.lock"}


def test_a_start_waits_for_the_one_that_joins_and_takes_its_file(tmp_path: Path) -> None:
    location = parts_of(tmp_path)
    location.folder.mkdir(parents=True)
    found: list[Path] = []
    waiting = threading.Thread(target=lambda: found.append(joined_file(location)))
    with (location.folder / "big.gguf.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(timeout=0.2)
        assert waiting.is_alive()
        for part in location.parts:
            part.unlink()  # so that only the other's file can be the answer
        (location.folder / "big.gguf").write_bytes(CONTENT)
    waiting.join(timeout=30)
    assert found == [location.folder / "big.gguf"]


def test_a_lock_that_is_never_released_is_an_error_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_LOCK_WAIT_S", 0.1)
    location = parts_of(tmp_path)
    location.folder.mkdir(parents=True)
    with (location.folder / "big.gguf.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match=r"another process has held .*big.gguf.lock"):
            joined_file(location)
