"""The secret that a front and workers on other machines share, from its file.

Only its owner may be able to read the file. The secret is in no message and no log.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from headwater.core.errors import ConfigError

MIN_SECRET_CHARS = 32
_SALT = b"headwater fleet 1"


def make_secret(path: Path) -> Path:
    """A new file with a secret of its own."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def read_secret(path: Path) -> bytes:
    """32 bytes that follow from the file's text, less space around it.

    Raises ConfigError if the file cannot be read, others could read it, or it is too short.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(2**16).strip()
    except OSError as error:
        raise ConfigError(f"cannot read fleet.secret_file {path}: {error.strerror}") from None
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"fleet.secret_file {path} can be read by others (mode "
            f"{stat.S_IMODE(status.st_mode):04o}); chmod 600 {path}"
        )
    if len(text) < MIN_SECRET_CHARS:
        raise ConfigError(
            f"fleet.secret_file {path} holds {len(text)} characters and needs "
            f"{MIN_SECRET_CHARS}; make one with: (umask 077; openssl rand -hex 32 > {path})"
        )
    # Slow on purpose: who records a handshake could try secrets against it.
    return hashlib.scrypt(text, salt=_SALT, n=2**14, r=8, p=1, dklen=32)
