"""Shared by all tiers: every test leaves nothing behind in shared memory, and torch stays on few threads."""

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from weightlift.testing.processes import Leftovers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Other runs on this machine must neither see these tests nor be seen by them.
os.environ["WEIGHTLIFT_RUN_DIR"] = tempfile.mkdtemp(prefix="wl-tests-")
atexit.register(shutil.rmtree, os.environ["WEIGHTLIFT_RUN_DIR"], ignore_errors=True)
torch.set_num_threads(1)
# Where a change is judged, the same inputs on every run; anywhere else, new ones each time.
settings.register_profile("judged", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("judged")


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves shared memory, run files, descriptors or threads."""
    before = Leftovers()
    yield
    from weightlift.transports.endpoint import release_addresses

    release_addresses()
    before.check()


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
