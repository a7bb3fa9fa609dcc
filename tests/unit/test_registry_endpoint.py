"""transports/registry.py and endpoint.py: lazy imports with their cause, addresses of any length, directories of dead runs."""

import os
import pathlib
import subprocess
import sys

import pytest

from weightlift.errors import ConfigError, TransportUnavailable
from weightlift.transports import endpoint, registry
from weightlift.transports.endpoint import RunDirectory, join_host_port, new_address, parse_address, split_host_port, sweep


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_FAILURES", {})


@pytest.mark.usefixtures("backends")
@pytest.mark.parametrize("error", ["ImportError('no')", "OSError('libcudart.so: cannot open')", "RuntimeError('driver')"])
def test_a_broken_backend_is_silent_until_it_is_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: str
) -> None:
    (tmp_path / "broken_backend.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.register("broken", "broken_backend", sender=None, receiver=None)  # type: ignore[arg-type]
    assert registry.resolve("shm") is not None
    assert capfd.readouterr() == ("", "")
    for _ in range(2):
        with pytest.raises(TransportUnavailable, match="broken could not be imported") as caught:
            registry.resolve("broken")
        assert repr(caught.value.__cause__) == error
    assert error in registry.available()["broken"]
    assert "memory: available" in registry.explain()


@pytest.mark.usefixtures("backends")
def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="must be new, got 'shm'"):
        registry.register("shm", "x", sender=None, receiver=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must be one of auto, memory, shm"):
        registry.resolve("pigeon")


@pytest.mark.parametrize(
    ("text", "host", "port", "again"),
    [
        ("127.0.0.1:80", "127.0.0.1", 80, "127.0.0.1:80"),
        ("localhost:80", "localhost", 80, "localhost:80"),
        ("::1:80", "::1", 80, "[::1]:80"),
        ("[::1]:80", "::1", 80, "[::1]:80"),
        ("fe80::1%eth0:29500", "fe80::1%eth0", 29500, "[fe80::1%eth0]:29500"),
        ("[fe80::1%eth0]:29500", "fe80::1%eth0", 29500, "[fe80::1%eth0]:29500"),
    ],
)
def test_host_and_port_round_trip(text: str, host: str, port: int, again: str) -> None:
    assert split_host_port(text) == (host, port)
    assert join_host_port(host, port) == again
    assert split_host_port(again) == (host, port)


@pytest.mark.parametrize("text", ["host", "host:", "host:x", ":80", "host:99999", "a:b:80"])
def test_a_bad_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        split_host_port(text)


@pytest.mark.parametrize("length", [90, 107, 150, 300])
@pytest.mark.parametrize("letter", ["x", "ü"])
def test_long_directories_get_short_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, length: int, letter: str
) -> None:
    directory = "/tmp/" + letter * ((length - 5) // len(letter.encode()))
    first, second = parse_address(f"ipc://{directory}a"), parse_address(f"ipc://{directory}b")
    assert first == parse_address(f"ipc://{directory}a"), "both ends find the same place"
    assert first.directory != second.directory, "two long names with an equal start do not collide"
    for found in (first, second):
        assert len(os.fsencode(found.zmq.removeprefix("ipc://"))) <= 107
    base = tmp_path / (letter * 120)
    monkeypatch.setenv("WEIGHTLIFT_RUN_DIR", str(base))
    assert len(os.fsencode(str(parse_address(new_address()).directory) + "/control")) <= 107
    endpoint.release_addresses()


def test_the_sweep_removes_dead_runs_and_leaves_live_ones(tmp_path: pathlib.Path) -> None:
    code = (
        "import os, pathlib, sys; from weightlift.transports.endpoint import RunDirectory; "
        "d = RunDirectory(pathlib.Path(sys.argv[1])); (d.path / 'control').touch(); os.kill(os.getpid(), 9)"
    )
    dead, live = tmp_path / "dead", RunDirectory(tmp_path / "live")
    done = subprocess.run([sys.executable, "-c", code, str(dead)], timeout=60)
    assert done.returncode == -9
    assert dead.is_dir()
    assert sweep(tmp_path) == [], "a directory that was just made is left alone"
    assert sweep(tmp_path, older_than_s=0.0) == [dead]
    assert live.path.is_dir()
    live.close()
    assert not live.path.exists()
    live.close()


def test_the_last_holder_removes_the_directory(tmp_path: pathlib.Path) -> None:
    first, second = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    first.close()
    assert second.path.is_dir()
    second.close()
    assert not second.path.exists()


def test_a_directory_that_others_may_enter_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        RunDirectory(tmp_path / "open")
