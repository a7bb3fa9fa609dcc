"""The subscriber's side of verification: digests of what the engine holds now, and evidence when they are disputed.

Owns: reading the live tensors of one plan. Must not know: sockets, what the trainer holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy
import torch

from weightlift.errors import LoaderError, ManifestError, RemoteProtocolError
from weightlift.protocol.codec import MAX_FRAME_FROM_SUBSCRIBER
from weightlift.protocol.messages import Announce, Dispute, Evidence
from weightlift.protocol.plan import Plan
from weightlift.tensors import dtype_name
from weightlift.verify.digests import DIGEST_BYTES, Probe, Probes

__all__ = ["Proof", "block_digests"]

_HELD_BYTES: Final = 32
"""At most, of one entry of Ready.held on the wire."""
_REST_BYTES: Final = 4096


class Proof:
    """What an engine holds of one plan.

    Args:
        plan: of the round.
        live: sent name -> the live tensors that its bytes are written to (loaders.base.Loader.live).
    """

    def __init__(self, plan: Plan, live: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self.plan = plan
        self.live = live
        held: dict[int, tuple[str, ...]] = {}
        self._probes: dict[int, list[Probe]] = {}
        for number, entry in enumerate(plan.manifest.entries):
            if entry.alias_of or not entry.elements:
                continue
            probes = self._probes[number] = [Probe(tensor, tensor.dtype) for tensor in live.get(entry.name, ())]
            if not probes:
                raise LoaderError(
                    f"the loader's live() does not show {entry.name}: it cannot be verified",
                    tensor=entry.name,
                    remedy="let live() return the engine's tensors by sent name, or publish with verify='off'.",
                )
            names = tuple(dtype_name(probe.dtype) for probe in probes)
            if names != (entry.dtype,):
                held[number] = names
        self.held = tuple(held.items())
        digests = DIGEST_BYTES * sum(len(probes) for probes in self._probes.values())
        if max(digests, _HELD_BYTES * len(self.held)) + _REST_BYTES > MAX_FRAME_FROM_SUBSCRIBER:
            raise ManifestError(
                f"the digests of {plan.manifest.tensors} tensors do not fit into one frame",
                remedy="publish with verify='off', or with fewer tensors.",
            )
        self._all = Probes(probe for probes in self._probes.values() for probe in probes)

    @classmethod
    def of(cls, plan: Plan, live: Mapping[str, Sequence[torch.Tensor]], last: Proof | None) -> Proof:
        """The last proof once more, if plan and live tensors are still the same objects."""
        return last if last is not None and last.plan is plan and last.live is live else cls(plan, live)

    def digests(self, offer: Announce) -> bytes:
        """The digests of all live tensors, as the announcement asks for."""
        return self._all.digests(offer.digest, offer.verify, offer.version)

    def evidence(self, dispute: Dispute) -> Evidence:
        """The first block of the disputed tensor that is not as the trainer has it."""
        probes = self._probes.get(dispute.entry, [])
        if not 0 <= dispute.copy < len(probes) or dispute.block < 1 or len(dispute.blocks) % DIGEST_BYTES:
            raise RemoteProtocolError(f"the publisher disputes copy {dispute.copy} of entry {dispute.entry}, which is not held")
        probe = probes[dispute.copy]
        own = block_digests(probe, dispute.block)
        start, data = -1, b""
        if len(own) == len(dispute.blocks) and own != dispute.blocks:
            words = (numpy.frombuffer(side, dtype=">u8") for side in (own, dispute.blocks))
            start = int(numpy.flatnonzero(numpy.not_equal(*words))[0]) * dispute.block
            block = probe.elements(start, min(start + dispute.block, probe.count))
            data = block.to("cpu", copy=True).view(torch.uint8).numpy().tobytes()
        return Evidence(round=dispute.round, version=dispute.version, start=start, data=data)


def block_digests(probe: Probe, block: int) -> bytes:
    """The xxh3 of every `block` elements, 8 bytes each."""
    return b"".join(probe.xxh3((at, min(at + block, probe.count))) for at in range(0, probe.count, block))
