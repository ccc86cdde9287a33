"""A place with loopback and nothing else, and a name server there that only writes names down.

Whatever runs inside can reach the server under test and nobody more; which hosts
it *tried* to find is what the name server heard. Linux only. Used by ``run_clients``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_NO_SUCH_NAME: Final = b"\x81\x83"  # flags: an answer, recursion available, NXDOMAIN
_QUESTION_AT: Final = 12  # bytes of a DNS header
_RESOLVER: Final = Path("/etc/resolv.conf")


def command_inside(command: Sequence[str]) -> list[str]:
    """``command``, to be run in new network and mount namespaces."""
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *as_root, "--mount", "--net", "--", *command]


def enter() -> None:
    """Bring loopback up and point name look-ups at it. Raises RuntimeError where more is there."""
    interfaces = [name for _, name in socket.if_nameindex()]
    if interfaces != ["lo"]:
        raise RuntimeError(f"this is not an empty network namespace: it has {interfaces}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as resolver:
        resolver.write("nameserver 127.0.0.1\n")
        resolver.flush()
        # The mount holds the file after its name is gone.
        subprocess.run(["mount", "--bind", resolver.name, str(_RESOLVER)], check=True)


@contextlib.contextmanager
def name_server() -> Iterator[list[str]]:
    """Answers every question with "no such name"; yields the list of names asked for."""
    names: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 53))

        def serve() -> None:
            while True:
                try:
                    question, sender = listener.recvfrom(4096)
                except OSError:  # closed: the end
                    return
                name, end = _asked_name(question)
                if not name:  # the wake-up call below
                    return
                names.append(name)
                # Header with one question and no answers, then the question as it came.
                header = question[:2] + _NO_SUCH_NAME + b"\0\1" + bytes(6)
                listener.sendto(header + question[_QUESTION_AT:end], sender)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield names
        finally:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
                caller.sendto(bytes(_QUESTION_AT + 5), listener.getsockname())
            thread.join()


def _asked_name(question: bytes) -> tuple[str, int]:
    """The name in a DNS question, and where the question (name, type, class) ends."""
    labels: list[str] = []
    at = _QUESTION_AT
    while at < len(question) and question[at]:
        length = question[at]
        labels.append(question[at + 1 : at + 1 + length].decode("ascii", errors="replace"))
        at += 1 + length
    return ".".join(labels), at + 5
