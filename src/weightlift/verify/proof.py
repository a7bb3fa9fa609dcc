"""The subscriber's side of verification: digests of what the engine holds now, and evidence when they are disputed.

Owns: reading the live tensors of one plan. Must not know: sockets, what the trainer holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy
import torch

from weightlift.errors import LoaderError, ManifestError, RemoteProtocolError
from weightlift.protocol.codec import MAX_FRAME_FROM_SUBSCRIBER
from weightlift.protocol.messages import Announce, Dispute, Evidence
from weightlift.protocol.plan import Plan
from weightlift.tensors import Witnessed, dtype_name
from weightlift.verify.digests import DIGEST_BYTES, Probe, Probes, digests

__all__ = ["Proof", "block_digests"]

_HELD_BYTES: Final = 32
"""At most, of one entry of Ready.held on the wire."""
_REST_BYTES: Final = 4096
_NOT_SEEN: Final = b"\xff" * DIGEST_BYTES


class Proof:
    """What an engine holds of one plan.

    Args:
        plan: of the round.
        live: sent name -> the live tensors that its bytes are written to (loaders.base.Loader.live).
    """

    def __init__(self, plan: Plan, live: Mapping[str, Sequence[torch.Tensor | Witnessed]]) -> None:
        self.plan = plan
        self.live = live
        held: dict[int, tuple[str, ...]] = {}
        self._probes: dict[int, list[Probe | Witnessed]] = {}
        self._seen: dict[Witnessed, bytes] = {}
        for number, entry in enumerate(plan.manifest.entries):
            if entry.alias_of or not entry.elements:
                continue
            tensors = live.get(entry.name, ())
            probes = self._probes[number] = [t if isinstance(t, Witnessed) else Probe(t, t.dtype) for t in tensors]
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
        nbytes = DIGEST_BYTES * sum(len(probes) for probes in self._probes.values())
        if max(nbytes, _HELD_BYTES * len(self.held)) + _REST_BYTES > MAX_FRAME_FROM_SUBSCRIBER:
            raise ManifestError(
                f"the digests of {plan.manifest.tensors} tensors do not fit into one frame",
                remedy="publish with verify='off', or with fewer tensors.",
            )
        self._order = [probe for probes in self._probes.values() for probe in probes]
        self._all = Probes(probe for probe in self._order if isinstance(probe, Probe))

    @classmethod
    def of(
        cls, offer: Announce, plan: Plan, look: Callable[[], Mapping[str, Sequence[torch.Tensor | Witnessed]]], last: Proof | None
    ) -> Proof | None:
        """A proof for the round of an announcement: the last one once more, if plan and live tensors are still the same objects. None
        if the publisher does not want any: `look` (Loader.live) is not called then."""
        if offer.verify == "off":
            return None
        live = look()
        proof = last if last is not None and last.plan is plan and last.live is live else cls(plan, live)
        proof._watch(offer)
        return proof

    def _watch(self, offer: Announce) -> None:
        """Be there when the tensors pass that cannot be looked at afterwards."""
        self._seen.clear()

        def see(witnessed: Witnessed, tensor: torch.Tensor) -> None:
            self._seen[witnessed] = digests([Probe(tensor, witnessed.dtype)], offer.digest, offer.verify, offer.version)

        for probe in self._order:
            if isinstance(probe, Witnessed):
                probe.see = functools.partial(see, probe)

    def digests(self, offer: Announce) -> bytes:
        """The digests of all live tensors, as the announcement asks for."""
        found = self._all.digests(offer.digest, offer.verify, offer.version)
        if len(found) == DIGEST_BYTES * len(self._order):
            return found
        live = iter(found[at : at + DIGEST_BYTES] for at in range(0, len(found), DIGEST_BYTES))
        # One that never passed counts as different from whatever was sent.
        return b"".join(next(live) if isinstance(p, Probe) else self._seen.get(p, _NOT_SEEN) for p in self._order)

    def evidence(self, dispute: Dispute) -> Evidence:
        """The first block of the disputed tensor that is not as the trainer has it."""
        probes = self._probes.get(dispute.entry, [])
        if not 0 <= dispute.copy < len(probes) or dispute.block < 1 or len(dispute.blocks) % DIGEST_BYTES:
            raise RemoteProtocolError(f"the publisher disputes copy {dispute.copy} of entry {dispute.entry}, which is not held")
        probe = probes[dispute.copy]
        if isinstance(probe, Witnessed):
            return Evidence(
                round=dispute.round, version=dispute.version, start=0, data=b""
            )  # it is gone: there is no place to show
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
