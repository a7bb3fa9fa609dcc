"""The engine's process of `weightlift bench shm`: pulls, and reads the limit's ring. Started by bench_shm.py.

Owns: the commands `pull`, `limit`, `check`; the answers carry this process's CPU seconds.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any, cast, get_args

import numpy
import torch

from weightlift.api import Subscriber
from weightlift.cli.workloads import Workload, make_tensors
from weightlift.loaders import MappingLoader

__all__ = ["copy_out", "tokens"]


def tokens(nbytes: int, slot_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, last) byte of every slot's content, in order."""
    for first in range(0, nbytes, slot_bytes):
        yield first, min(first + slot_bytes, nbytes)


def copy_out(memory: int, bell: socket.socket, flat: numpy.ndarray[Any, Any], *, slots: int, slot_bytes: int) -> None:
    """Read a whole ring transfer into `flat`."""
    with mmap.mmap(memory, slots * slot_bytes) as ring:
        view = numpy.frombuffer(ring, dtype=numpy.uint8)
        for number, (first, last) in enumerate(tokens(flat.nbytes, slot_bytes)):
            bell.recv(1)
            at = (number % slots) * slot_bytes
            flat[first:last] = view[at : at + last - first]
            bell.send(b"x")
        del view


def main() -> None:
    """Serve commands until the other end is closed."""
    descriptor, address, workload, name = int(sys.argv[1]), sys.argv[2], cast(Workload, sys.argv[3]), sys.argv[4]
    assert workload in get_args(Workload), "bench_shm.py starts this process"
    torch.set_num_threads(1)
    held = make_tensors(workload, fill=False)
    nbytes = sum(t.numel() * t.element_size() for t in held.values())
    flat = numpy.zeros(max(nbytes, mmap.PAGESIZE), dtype=numpy.uint8)
    with socket.socket(fileno=descriptor) as control, Subscriber(MappingLoader(held), address, name) as subscriber:
        while True:
            data, files, _, _ = socket.recv_fds(control, 1 << 16, 4)
            if not data:
                return
            answer = _serve(json.loads(data), files, control, subscriber, held, flat, workload)
            control.send(json.dumps(answer).encode())


def _serve(
    command: dict[str, Any],
    files: list[int],
    control: socket.socket,
    subscriber: Subscriber,
    held: dict[str, torch.Tensor],
    flat: numpy.ndarray[Any, Any],
    workload: Workload,
) -> dict[str, Any]:
    start = time.process_time()
    if command["do"] == "pull":
        subscriber.pull(timeout_s=600.0)
    elif command["do"] == "limit":
        memory, bell = files
        with socket.socket(fileno=bell) as connection:
            control.send(json.dumps({"ready": True}).encode())
            copy_out(memory, connection, flat, slots=command["slots"], slot_bytes=command["slot_bytes"])
        os.close(memory)
    elif command["do"] == "check":
        expected = make_tensors(workload, fill=True)
        next(iter(expected.values())).view(-1)[0] = subscriber.ensure_serving()
        return {"wrong": sum(not torch.equal(held[name].view(torch.int16), t.view(torch.int16)) for name, t in expected.items())}
    return {"cpu_s": time.process_time() - start}


if __name__ == "__main__":
    main()
