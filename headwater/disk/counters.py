"""What a store has done since it opened. Threads share it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    num_found: int = 0
    num_loaded: int = 0
    num_loaded_bytes: int = 0
    num_put: int = 0
    num_put_bytes: int = 0
    num_refused: int = 0
    num_damaged: int = 0
    num_errors: int = 0
    last_error: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def found(self, num_records: int) -> None:
        with self._lock:
            self.num_found += num_records

    def loaded(self, num_bytes: int) -> None:
        with self._lock:
            self.num_loaded += 1
            self.num_loaded_bytes += num_bytes

    def put(self, num_bytes: int) -> None:
        with self._lock:
            self.num_put += 1
            self.num_put_bytes += num_bytes

    def refused(self) -> None:
        with self._lock:
            self.num_refused += 1

    def damaged(self, message: str) -> None:
        with self._lock:
            self.num_damaged += 1
            self.last_error = message

    def failed(self, message: str) -> None:
        """The system refused; ``message`` is what it said."""
        with self._lock:
            self.num_errors += 1
            self.last_error = message
