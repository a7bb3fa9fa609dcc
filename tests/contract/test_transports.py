"""The transport contract, over every transport of this machine."""

import pathlib
from collections.abc import Callable, Iterator

import pytest

from weightlift.config import ShmConfig
from weightlift.testing.contracts import TransportContract
from weightlift.transports.base import Receiver, Sender
from weightlift.transports.memory import MemoryReceiver, MemorySender
from weightlift.transports.shm import ShmReceiver, ShmSender


@pytest.mark.usefixtures("nothing_left")
class TestMemory(TransportContract):
    def ends(self, capacity: int, slots: int) -> tuple[Sender, Callable[[str], Receiver]]:
        return MemorySender(capacity=capacity), MemoryReceiver


@pytest.mark.usefixtures("nothing_left")
class TestShm(TransportContract):
    directory: pathlib.Path

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: pathlib.Path) -> Iterator[None]:
        self.directory = tmp_path
        yield
        assert list(tmp_path.iterdir()) == []

    def ends(self, capacity: int, slots: int) -> tuple[Sender, Callable[[str], Receiver]]:
        return ShmSender(self.directory, ShmConfig(slot_bytes=capacity, slots=slots)), ShmReceiver
