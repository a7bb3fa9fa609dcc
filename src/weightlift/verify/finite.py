"""The check for NaN and infinity. Owns: finding the first one and naming it. Must not know: who asks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch

from weightlift.errors import NonFiniteTensor
from weightlift.protocol.manifest import Manifest
from weightlift.verify.digests import CHUNK_ELEMENTS, Probe

__all__ = ["check_finite", "check_finite_tensor"]


def check_finite(manifest: Manifest, tensors: Sequence[torch.Tensor]) -> None:
    """NonFiniteTensor for the first tensor, in manifest order, that is not finite. `tensors`: one for every entry that is no alias."""
    sent = (entry.name for entry in manifest.entries if not entry.alias_of)
    for name, tensor in zip(sent, tensors, strict=True):
        check_finite_tensor(name, tensor)


def check_finite_tensor(name: str, tensor: torch.Tensor) -> None:
    """NonFiniteTensor, with index and value of the first element that is not finite. Integers always are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    probe = Probe(tensor, tensor.dtype)
    # Piece by piece: a mask of a whole embedding would cost half of it again.
    for start in range(0, probe.count, CHUNK_ELEMENTS):
        run = probe.elements(start, min(start + CHUNK_ELEMENTS, probe.count))
        finite = _finite(run)
        if bool(finite.all()):
            continue
        first = int(torch.logical_not(finite).nonzero()[0])
        index = [int(i) for i in numpy.unravel_index(start + first, tuple(tensor.shape))] if tensor.shape else ""
        raise NonFiniteTensor(f"{name}{index} is {run[first].item()}", tensor=name)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    # float8 has no isfinite of its own; every value of it survives in float32.
    return torch.isfinite(tensor.float() if tensor.dtype.itemsize == 1 else tensor)
