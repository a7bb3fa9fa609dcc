"""observe/: events to JSON lines, sinks that raise, the report's sums."""

import json
import logging
import pathlib

import pytest
import torch

from weightlift.loaders import MappingLoader
from weightlift.observe import Event, JsonLines, StopWatch
from weightlift.observe.events import PeerLeft, emit
from weightlift.sources import MappingSource
from weightlift.testing.pair import pair


def test_a_run_as_json_lines(tmp_path: pathlib.Path) -> None:
    sink = JsonLines(tmp_path / "events.jsonl")
    with pair(MappingSource({"w": torch.ones(4)}), MappingLoader({"w": torch.zeros(4)}), sink=sink) as ends:
        ends.sync(1).raise_any()
    sink.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["PeerJoined", "RoundStarted", "RoundEnded"]
    assert events[0]["peer"] == "engine"
    assert events[2]["error"] == ""
    assert events[2]["report"]["replicas"] == {"engine": 1}
    assert events[2]["report"]["seconds"]["total"] > 0
    assert all(event["at_s"] > 1e9 for event in events)


def test_a_sink_that_raises_does_not_end_a_round(caplog: pytest.LogCaptureFixture) -> None:
    def sink(event: Event) -> None:
        raise RuntimeError("full disk")

    with pair(MappingSource({"w": torch.ones(4)}), MappingLoader({"w": torch.zeros(4)}), sink=sink) as ends:
        ends.sync(1).raise_any()
    assert "full disk" in caplog.text


def test_events_are_logged_by_room(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="weightlift"):
        emit(None, "roster", PeerLeft(peer="p", reason="tired"))
    assert [record.name for record in caplog.records] == ["weightlift.roster"]


def test_the_stop_watch_adds_up() -> None:
    watch = StopWatch()
    watch.add("pack", 0.25)
    watch.add("pack", 0.5)
    with watch.measure("load"):
        pass
    seconds = watch.seconds(release=1.0)
    assert (seconds.pack, seconds.release) == (0.75, 1.0)
    assert 0.0 <= seconds.load <= seconds.total
