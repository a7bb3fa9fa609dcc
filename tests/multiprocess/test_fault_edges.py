"""Edges of the fault matrix: what the exact place of an error is, and what a process leaves that ended at a bad moment.

Cells of the matrix strike at a point of one process; these also fix what the other one is doing at that moment.
"""

import os
import pathlib
import signal
import threading
from collections.abc import Iterator

import pytest
from fault_crew import BOUND_S, BUCKETS, Answer, Crew, Scene, assert_serves, assert_torn

from weightlift import PeerLost, ShmConfig
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.protocol.messages import PeerId
from weightlift.protocol.plan import Plan
from weightlift.transports.base import SendJob
from weightlift.transports.doorbell import Doorbell
from weightlift.transports.endpoint import release_addresses
from weightlift.transports.shm import ShmSender, _Attach, _BucketDone, _BucketReady, _from_sender, _offer

pytestmark = [pytest.mark.multiprocess, pytest.mark.usefixtures("nothing_left")]
ENGINE = "engine-0"


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A publisher and one engine that serves version 1."""
    crew = Crew()
    scene = Scene(crew, 1, faulty_source=True)
    yield scene
    scene.close()
    crew.close()
    release_addresses()


def kill_publisher_while_held(scene: Scene, at: str, bucket: int | None = None) -> Answer:
    """The engine is inside a call of its loader while the publisher is killed; what it ends with."""
    scene.pull(scene.names, at=at, bucket=bucket, act="hold")
    scene.publish()
    assert scene.hear_engines(scene.names) == {ENGINE: {"holding": True}}
    scene.publisher.signal(signal.SIGKILL)
    assert scene.publisher.wait() == -signal.SIGKILL
    scene.engines[ENGINE].tell()
    return scene.hear_engines(scene.names)[ENGINE]


@pytest.mark.parametrize("bucket", [0, 4, BUCKETS - 1])
def test_an_acknowledgement_that_cannot_be_sent_names_its_bucket(scene: Scene, bucket: int) -> None:
    told = kill_publisher_while_held(scene, "install", bucket)
    error = told["error"]
    assert (error["type"], error["peer"], error["phase"]) == ("PeerLost", "publisher", "TRANSFER"), error["text"]
    assert (error["bucket"], error["buckets"], error["tensor"]) == (bucket, BUCKETS, f"w{bucket}"), error["text"]
    assert_torn(told)
    scene.replace_publisher()
    scene.sync()


def test_a_publisher_that_died_before_the_engine_could_attach_is_lost(scene: Scene) -> None:
    scene.replace_engine(ENGINE)  # one that has no data plane yet
    told = kill_publisher_while_held(scene, "prepare")
    error = told["error"]
    assert (told["state"], told["version"]) == ("SERVING", None)
    scene.replace_publisher()
    scene.sync()
    assert (error["type"], error["peer"], error["phase"]) == ("PeerLost", "publisher", "PREPARE"), error["text"]


def test_a_killed_publisher_leaves_no_file_to_the_one_that_follows(scene: Scene) -> None:
    before = scene.run_files()
    for _ in range(2):
        kill_publisher_while_held(scene, "install", 0)
        scene.replace_publisher()
        scene.sync()
    assert len(scene.run_files()) == len(before), scene.run_files()


def test_a_killed_publisher_can_be_followed_while_a_child_of_it_lives(scene: Scene) -> None:
    """A trainer that ran out of memory leaves data-loading workers, which hold all its sockets, for a moment or for good."""
    scene.pull(scene.names)
    scene.publish(fork=True, at="tensor", bucket=4, act="kill")
    killed = scene.publisher
    assert killed.wait() == -signal.SIGKILL
    try:
        told = scene.hear_engines(scene.names)[ENGINE]
        assert (told["error"]["type"], told["error"]["bucket"]) == ("PeerLost", 4), told["error"]["text"]
        assert_torn(told)
        scene.publisher_follows()
        scene.sync()
    finally:
        killed.close()


def test_a_dead_engine_is_not_reported_as_serving(scene: Scene) -> None:
    scene.pull(scene.names, at="prepare", act="kill")
    scene.publish(new_manifest=True)
    published = scene.publisher.hear(BOUND_S)
    assert published["error"]["type"] == "PeerLost"
    scene.replace_engine(ENGINE)
    scene.sync()
    assert published["replicas"] == {ENGINE: None}, "its process is gone: it serves nothing"


def test_a_bucket_that_was_acknowledged_is_not_blamed(tmp_path: pathlib.Path) -> None:
    """The reader acknowledges bucket 4 and is gone before bucket 5 is sent: bucket 5 could not be delivered."""
    plan = Plan(Manifest([Entry(f"w{i}", "uint8", (64,)) for i in range(BUCKETS)]), capacity=64)
    sender, peer, gone = ShmSender(tmp_path, ShmConfig(slot_bytes=64, slots=2)), PeerId(ENGINE), threading.Event()
    offer = _offer.decode(sender.offer(plan, [peer]))

    def read() -> None:
        bell = Doorbell.connect(offer.path, _from_sender, peer="publisher")
        bell.send(_Attach(ENGINE, offer.segment))
        _, descriptor = bell.receive_with_descriptor(BOUND_S, waiting_for="the segment")
        assert descriptor is not None
        os.close(descriptor)
        for bucket in range(5):
            assert bell.receive(BOUND_S, waiting_for="a bucket") == _BucketReady(1, 1, bucket)
            bell.send(_BucketDone(1, 1, bucket))
        bell.close()
        gone.set()

    def fill(bucket: int, memory: object) -> None:
        if bucket == 5:
            assert gone.wait(BOUND_S)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        error = sender.send(SendJob(round=1, version=1, plan=plan, peers=[peer], fill=fill, stall_s=BOUND_S))[peer]
    finally:
        reader.join(BOUND_S)
        sender.close()
    assert type(error) is PeerLost
    assert (error.bucket, error.buckets, error.tensor) == (5, BUCKETS, "w5"), str(error)


def test_an_engine_serves_what_it_was_told_to_commit_though_the_publisher_dies(scene: Scene) -> None:
    """And the next publisher may publish that version again, or a higher one; the engine follows."""
    told = kill_publisher_while_held(scene, "commit")
    assert told["error"] is None
    assert_serves(told, scene.version)
    scene.version -= 1
    scene.replace_publisher()
    scene.sync()
