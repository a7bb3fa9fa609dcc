"""The publisher's side of verification: what every peer should hold, and where one differs.

Owns: the expected digests of a round, for each way in which peers hold them; the question to a peer that differs, and the error that
comes of its answer. Must not know: sockets, who is a peer, what follows from a difference (protocol/round.py).

A source whose tensors stay is read when the transfer is over, while the peers compute their side. A streaming source is looked at while
it streams: its tensors are gone afterwards, so for the values in an error it is asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy
import torch

from weightlift.errors import DigestMismatch, RemoteProtocolError
from weightlift.protocol.manifest import ITEM_BYTES
from weightlift.protocol.messages import Dispute, Evidence, PeerId, Ready, Released
from weightlift.protocol.plan import Plan
from weightlift.tensors import dtype_name, torch_dtype
from weightlift.verify.digests import DIGEST_BYTES, Algorithm, Probe, Probes, Scope, digests
from weightlift.verify.proof import block_digests

__all__ = ["Auditor"]

_Holding: TypeAlias = tuple[int, torch.dtype]
"""One live tensor of a peer: entry in the manifest, dtype in which it is held."""
_Held: TypeAlias = tuple[tuple[int, tuple[str, ...]], ...]
"""Ready.held: what is not held as it was sent. Empty for most peers, and the same for all engines of one kind."""

BLOCK_ELEMENTS: Final = 1024
MOST_BLOCKS: Final = 1 << 17


class Auditor:
    """Audits the rounds of one plan. Implements protocol.round.Audit.

    Args:
        plan: of the rounds. scope: how much is looked at; not "off".
        recall: position in the stream -> the tensor, once more; for the values in an error.
    """

    def __init__(self, plan: Plan, scope: Scope, recall: Callable[[int], torch.Tensor]) -> None:
        self.scope: Scope = scope
        self.algorithm: Algorithm = "xxh3"
        self._plan = plan
        self._recall = recall
        sent = (number for number, entry in enumerate(plan.manifest.entries) if not entry.alias_of)
        self._position = {number: position for position, number in enumerate(sent)}
        self._default = tuple(
            (n, torch_dtype(e.dtype)) for n, e in enumerate(plan.manifest.entries) if n in self._position and e.elements
        )
        self._tensors: Sequence[torch.Tensor] | None = None
        self._probes: dict[_Held, Probes] = {}
        self._streamed: dict[_Holding, bytes] = {}
        self._held: dict[PeerId, _Held] = {}
        self._expected: dict[_Held, bytes] = {}
        self._asked: dict[PeerId, Dispute] = {}
        self._version = -1

    def begin(self, version: int, tensors: Sequence[torch.Tensor] | None) -> None:
        """A round begins. `tensors`: those of a stable source, the same object as long as nothing moved; None of a streaming one."""
        if tensors is not self._tensors:
            self._probes.clear()
            self.algorithm = "lanes" if tensors and any(tensor.device.type != "cpu" for tensor in tensors) else "xxh3"
        self._tensors = tensors
        self._version = version
        for kept in (self._streamed, self._held, self._expected, self._asked):
            kept.clear()

    def look(self, entry: int, tensor: torch.Tensor) -> None:
        """A streaming source yields the tensor of an entry."""
        for held in set(self._held.values()):
            for name in dict(held).get(entry, (self._plan.manifest.entries[entry].dtype,)):
                holding = entry, torch_dtype(name)
                if holding not in self._streamed:
                    self._streamed[holding] = digests([self._probe(holding, tensor)], self.algorithm, self.scope, self._version)

    def settle(self) -> None:
        """The transfer is over: read what the peers are reading now, too."""
        for held in set(self._held.values()):
            self._expect(held)

    def expect(self, peer: PeerId, frame: Ready) -> None:
        """See Audit."""
        sent = {number for number, _ in self._default}
        for number, names in frame.held:
            if number not in sent or not names or set(names) - set(ITEM_BYTES):
                raise RemoteProtocolError(f"Ready speaks of entry {number}, which carries no bytes, or says nothing of it")
        self._held[peer] = frame.held

    def _holdings(self, held: _Held) -> Sequence[_Holding]:
        """Every live tensor of a peer, in the order of its digests."""
        if not held:
            return self._default
        other = dict(held)
        return [
            (number, torch_dtype(name))
            for number, dtype in self._default
            for name in other.get(number, (dtype_name(dtype),))
        ]  # fmt: skip

    def examine(self, peer: PeerId, frame: Released) -> tuple[Dispute, DigestMismatch] | None:
        """See Audit."""
        held = self._held.get(peer, ())
        expected = self._expect(held)
        if frame.digests == expected:
            return None
        if len(frame.digests) != len(expected):
            raise RemoteProtocolError(f"Released carries {len(frame.digests)} bytes of digests, expected {len(expected)}")
        words = (numpy.frombuffer(data, dtype=">u8") for data in (frame.digests, expected))
        differ = numpy.flatnonzero(numpy.not_equal(*words))
        at, holdings = int(differ[0]), self._holdings(held)
        number, dtype = holdings[at]
        entry = self._plan.manifest.entries[number]
        error = DigestMismatch(
            f"{entry.name} has other bytes in {peer} than in the trainer after the transfer; "
            f"so have {len(differ) - 1} more of {len(holdings)} tensors",
            tensor=entry.name,
        )
        block = max(BLOCK_ELEMENTS, -(-entry.elements // MOST_BLOCKS))
        try:
            blocks = block_digests(self._probe((number, dtype), self._again(number)), block)
        except Exception as failure:
            # Where the difference lies cannot be said then; that there is one is what matters.
            error.add_note(f"its place is not known: the source raised {failure!r} when it was asked again")
            blocks = b""
        copy = sum(other == number for other, _ in holdings[:at])
        question = self._asked[peer] = Dispute(
            round=frame.round, version=frame.version, entry=number, copy=copy, block=block, blocks=blocks
        )
        return question, error

    def conclude(self, peer: PeerId, frame: Evidence) -> DigestMismatch:
        """See Audit."""
        asked = self._asked[peer]
        entry = self._plan.manifest.entries[asked.entry]
        held = [dtype for number, dtype in self._holdings(self._held.get(peer, ())) if number == asked.entry][asked.copy]
        if frame.start < 0 and not asked.blocks:
            return DigestMismatch(
                f"{entry.name} has other bytes in {peer} than in the trainer; where is not known, the source could not be read again",
                tensor=entry.name,
            )
        if frame.start < 0:
            return DigestMismatch(
                f"{entry.name} had other bytes in {peer} than in the trainer, and no longer has: somebody writes it during the sync",
                tensor=entry.name,
            )
        stop = min(frame.start + asked.block, entry.elements)
        try:
            mine = self._probe((asked.entry, held), self._again(asked.entry)).elements(min(frame.start, stop), stop).cpu()
        except Exception as failure:
            return DigestMismatch(
                f"{entry.name} has other bytes in {peer} than in the trainer; where is not known, the source raised {failure!r}",
                tensor=entry.name,
            )
        if len(frame.data) != mine.numel() * mine.element_size() or not len(frame.data):
            return DigestMismatch(
                f"{entry.name} has other bytes in {peer} than in the trainer, which cannot be placed", tensor=entry.name
            )
        theirs = torch.frombuffer(bytearray(frame.data), dtype=held)
        return _mismatch(entry.name, entry.shape, str(peer), frame.start, mine, theirs)

    def _expect(self, held: _Held) -> bytes:
        """The digests that a peer should report that holds its tensors in this way."""
        known = self._expected.get(held)
        if known is None:
            if self._tensors is None:
                known = b"".join(self._streamed.get(holding, bytes(DIGEST_BYTES)) for holding in self._holdings(held))
            else:
                known = self._kept(held).digests(self.algorithm, self.scope, self._version)
            self._expected[held] = known
        return known

    def _kept(self, held: _Held) -> Probes:
        assert self._tensors is not None, "asked of a stable source only"
        probes = self._probes.get(held)
        if probes is None:
            tensors = self._tensors
            made = (self._probe(holding, tensors[self._position[holding[0]]]) for holding in self._holdings(held))
            probes = self._probes[held] = Probes(made)
        return probes

    def _probe(self, holding: _Holding, tensor: torch.Tensor) -> Probe:
        return Probe(tensor, holding[1], via=torch_dtype(self._plan.manifest.entries[holding[0]].dtype))

    def _again(self, entry: int) -> torch.Tensor:
        return self._recall(self._position[entry])

    def close(self) -> None:
        """Drop every reference to the source's tensors. Idempotent."""
        self._probes.clear()
        self._tensors = None


def _mismatch(name: str, shape: Sequence[int], peer: str, start: int, mine: torch.Tensor, theirs: torch.Tensor) -> DigestMismatch:
    """The error for a block of both sides that starts at element `start`: first difference, both values."""
    rows = (side.view(torch.uint8).view(side.numel(), -1) for side in (mine, theirs))
    differ = torch.ne(*rows).any(dim=1).nonzero().flatten().tolist()
    if not differ:
        return DigestMismatch(f"{name} has other bytes in {peer} than in the trainer, but its evidence is the same", tensor=name)
    first = differ[0]
    index = [int(i) for i in numpy.unravel_index(start + first, tuple(shape))] if shape else []
    element = f"{name}{index if index else ''}"
    return DigestMismatch(
        f"{element} is {mine[first].item()} in the trainer and {theirs[first].item()} in {peer} after the transfer "
        f"({dtype_name(mine.dtype)}; {len(differ)} of {mine.numel()} elements from element {start} on differ)",
        tensor=name,
    )
