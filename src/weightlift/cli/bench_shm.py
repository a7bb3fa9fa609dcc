"""`weightlift bench shm`: a sync between two processes over shared memory, next to the two-copy limit of the machine.

Owns: the measurement of the publisher's side and the report. The other process is bench_peer.py.

The limit is what nobody can beat with two copies: one flat tensor of the same size goes through the same kind of ring, one process
writes and the other reads, nothing else happens. Ours and the limit are measured in turn, in the same two processes, and compared by
their medians: the machine's speed drifts, their ratio does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.table import Table

import weightlift
from weightlift.cli.bench_peer import tokens
from weightlift.cli.workloads import Workload, make_tensors
from weightlift.config import Deadlines, ShmConfig, check_int
from weightlift.errors import TransferTimeout
from weightlift.observe.report import SyncReport
from weightlift.sources import MappingSource
from weightlift.verify.digests import Scope

__all__ = ["BenchShmConfig", "measure", "run"]

_LIMIT_SLOTS = ((4, 2 << 20), (4, 4 << 20))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BenchShmConfig:
    """Times a sync over shared memory against the two-copy limit, in one run."""

    workload: Workload = "qwen3-0.6b"
    """qwen3-0.6b: 310 tensors, 1.19 GB. moe-20k: 20,000 tensors, 1.0 GB. one-huge: one tensor of 1.5 GB and 50 small ones."""
    subscribers: int = 1
    """Engine processes. The limit is measured with the first."""
    verify: Scope = "sample"
    """As of Publisher."""
    rounds: int = 7
    """Measured rounds of ours and of the limit, after one warm-up each; medians are compared."""
    slot_bytes: int = ShmConfig().slot_bytes
    slots: int = ShmConfig().slots
    json: bool = False
    """Print one JSON object instead of a table."""
    out: pathlib.Path | None = None
    """Also write the JSON to this file."""

    def __post_init__(self) -> None:
        check_int("rounds", self.rounds, at_least=1)
        check_int("subscribers", self.subscribers, at_least=1)
        ShmConfig(slot_bytes=self.slot_bytes, slots=self.slots)


def run(config: BenchShmConfig) -> int:
    """Measure and print."""
    found = measure(config)
    if config.out is not None:
        config.out.write_text(json.dumps(found, indent=2) + "\n")
    if config.json:
        print(json.dumps(found))
    else:
        _print(found, Console(soft_wrap=True))
    return 0


def measure(config: BenchShmConfig) -> dict[str, Any]:
    """Everything measured, as plain values: seconds are medians, cpu_s is of all processes per round."""
    torch.set_num_threads(1)
    source = make_tensors(config.workload, fill=True)
    nbytes = sum(t.numel() * t.element_size() for t in source.values())
    address = weightlift.new_address()
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(_Peer(address, config.workload, f"bench-{i}")) for i in range(config.subscribers)]
        publisher = weightlift.Publisher(
            MappingSource(source),
            address,
            transport="shm",
            shm=ShmConfig(slot_bytes=config.slot_bytes, slots=config.slots),
            deadlines=Deadlines(announce_s=300.0),
            verify=config.verify,
        )
        with publisher:
            publisher.wait_for_peers(config.subscribers, timeout_s=300.0)
            ours, cpu, limits = _rounds(config, publisher, peers, source, nbytes)
        wrong = sum(peer.ask(do="check")["wrong"] for peer in peers)
    limit_s = min(statistics.median(seconds) for seconds in limits.values())
    ours_s = statistics.median(report.seconds.total for report in ours)
    middle = min(ours, key=lambda report: abs(report.seconds.total - ours_s))
    return {
        "workload": config.workload,
        "tensors": middle.tensors,
        "bytes": nbytes,
        "buckets": middle.buckets,
        "slot_bytes": config.slot_bytes,
        "slots": config.slots,
        "rounds": config.rounds,
        "subscribers": config.subscribers,
        "verify": config.verify,
        "seconds": ours_s,
        "limit_seconds": limit_s,
        "gbps": nbytes / ours_s / 1e9,
        "limit_gbps": nbytes / limit_s / 1e9,
        "ratio_to_limit": limit_s / ours_s,
        "cpu_s": statistics.median(cpu["ours"]),
        "limit_cpu_s": statistics.median(cpu["limit"]),
        "shm_bytes": middle.host_bytes_retained,
        "phases": dataclasses.asdict(middle.seconds),
        "wrong_tensors": wrong,
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "weightlift": weightlift.__version__,
        },
    }


def _rounds(
    config: BenchShmConfig, publisher: weightlift.Publisher, peers: list[_Peer], source: dict[str, torch.Tensor], nbytes: int
) -> tuple[list[SyncReport], dict[str, list[float]], dict[tuple[int, int], list[float]]]:
    """Ours and the limit in turn; the first of each is a warm-up."""
    flat = numpy.zeros(max(nbytes, mmap.PAGESIZE), dtype=numpy.uint8)
    ours: list[SyncReport] = []
    cpu: dict[str, list[float]] = {"ours": [], "limit": []}
    limits: dict[tuple[int, int], list[float]] = {shape: [] for shape in _LIMIT_SLOTS}
    for number in range(config.rounds + 1):
        next(iter(source.values())).view(-1)[0] = number
        for peer in peers:
            peer.tell(do="pull")
        start = time.process_time()
        report = publisher.publish(number)
        own_cpu = time.process_time() - start
        peers_cpu = sum(peer.hear()["cpu_s"] for peer in peers)
        if number:
            ours.append(report)
            cpu["ours"].append(own_cpu + peers_cpu)
        for shape in _LIMIT_SLOTS:
            seconds, cpu_s = _limit(peers[0], flat, *shape)
            if number:
                limits[shape].append(seconds)
                cpu["limit"].append(cpu_s)
    return ours, cpu, limits


def _limit(peer: _Peer, flat: numpy.ndarray[Any, Any], slots: int, slot_bytes: int) -> tuple[float, float]:
    """(wall seconds, CPU seconds of both) for one flat transfer through a ring that this process writes."""
    memory = os.memfd_create("weightlift-limit")
    try:
        os.ftruncate(memory, slots * slot_bytes)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs, mmap.mmap(memory, slots * slot_bytes) as ring:
            peer.pass_files([memory, theirs.fileno()], do="limit", nbytes=flat.nbytes, slots=slots, slot_bytes=slot_bytes)
            theirs.close()
            peer.hear()
            view = numpy.frombuffer(ring, dtype=numpy.uint8)
            start, start_cpu = time.perf_counter(), time.process_time()
            for number, (first, last) in enumerate(tokens(flat.nbytes, slot_bytes)):
                if number >= slots:
                    ours.recv(1)
                at = (number % slots) * slot_bytes
                view[at : at + last - first] = flat[first:last]
                ours.send(b"x")
            answer = peer.hear()
            seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
            del view
        return seconds, cpu_s + answer["cpu_s"]
    finally:
        os.close(memory)


class _Peer:
    """The other process: bench_peer.py, spoken to by JSON lines over a socket that can carry open files."""

    def __init__(self, address: str, workload: Workload, name: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(600.0)
        command = [sys.executable, "-m", "weightlift.cli.bench_peer", str(theirs.fileno()), address, workload, name]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()

    def tell(self, **command: Any) -> None:
        self._socket.send(json.dumps(command).encode())

    def pass_files(self, files: list[int], **command: Any) -> None:
        socket.send_fds(self._socket, [json.dumps(command).encode()], files)

    def hear(self) -> dict[str, Any]:
        data = self._socket.recv(1 << 20)
        if not data:
            raise TransferTimeout(f"the other process ended with status {self._process.wait(30.0)}")
        answer: dict[str, Any] = json.loads(data)
        return answer

    def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return self.hear()

    def __enter__(self) -> _Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30.0)


def _print(found: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", min_width=22)
    table.add_column()
    table.add_row(
        "workload", f"{found['workload']}: {found['tensors']} tensors, {found['bytes'] / 1e9:.2f} GB, {found['buckets']} buckets"
    )
    table.add_row("ours", f"{found['seconds']:.3f} s, {found['gbps']:.2f} GB/s, CPU {found['cpu_s']:.2f} s")
    table.add_row(
        "two-copy limit", f"{found['limit_seconds']:.3f} s, {found['limit_gbps']:.2f} GB/s, CPU {found['limit_cpu_s']:.2f} s"
    )
    table.add_row("ratio to the limit", f"{found['ratio_to_limit']:.2f}")
    table.add_row("shared memory", f"{found['shm_bytes'] / 2**20:.1f} MiB ({found['slots']} slots of {found['slot_bytes']} bytes)")
    table.add_row("phases, seconds", ", ".join(f"{name} {value:.4f}" for name, value in found["phases"].items() if value))
    table.add_row("wrong tensors", str(found["wrong_tensors"]))
    console.print(table)
