"""Liveness where a pid means nothing: no pidfd, a tcp address, and a peer that is stopped or killed in another process."""

import signal
import time

import pytest
import torch

from weightlift import Deadlines, PeerLost, Publisher, Subscriber
from weightlift.loaders import MappingLoader
from weightlift.sources import MappingSource
from weightlift.testing.processes import Worker, say

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


def idle_engine(address: str) -> None:
    """Connects, and is never inside pull()."""
    with Subscriber(MappingLoader({"w": torch.zeros(4)}), address, "far"):
        say(connected=True)
        time.sleep(300)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_far_peer_that_falls_silent_is_lost_long_before_the_deadline(
    monkeypatch: pytest.MonkeyPatch, free_port: int, number: signal.Signals
) -> None:
    monkeypatch.setattr("weightlift.transports.channel.open_pidfd", lambda pid, host: None)
    address, deadlines = f"tcp://127.0.0.1:{free_port}", Deadlines(announce_s=100.0)
    source = MappingSource({"w": torch.ones(4)})
    publisher = Publisher(source, address, transport="memory", deadlines=deadlines)
    with Worker(__file__, "idle_engine", address=address) as worker, publisher:
        assert worker.hear()["connected"]
        publisher.wait_for_peers(1, timeout_s=60.0)
        time.sleep(2.0)  # the first heartbeat, half a second after connecting, tells how long silence may last
        worker.signal(number)
        start = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            publisher.publish(1)
        assert time.monotonic() - start < 50.0, "the heartbeats, not the deadline"
        assert caught.value.message.startswith("no subscriber is connected any more: far") or caught.value.peer == "far"
        assert publisher.version is None
