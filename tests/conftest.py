"""What every test may count on: the user's own cache folder is out of reach."""

from __future__ import annotations

import os
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A worker keeps KV in the user's cache folder unless told otherwise. Set before any
    fixture of any scope runs; processes that tests start inherit it."""
    folder = tempfile.TemporaryDirectory(prefix="headwater-test-cache-")
    config.add_cleanup(folder.cleanup)
    os.environ["XDG_CACHE_HOME"] = folder.name
