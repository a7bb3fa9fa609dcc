"""Storages as bytes: what offload and sleep move.

Owns: reading a storage as bytes, a copy of it on the host. Must not know: who moves what, or when.
"""

from __future__ import annotations

import torch

__all__ = ["storage_bytes", "to_host"]


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """A copy of a storage on the host: pinned, and only queued, where it comes from a device."""
    pinned = storage.device.type == "cuda"  # pin_memory raises where there is no GPU
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    return host.copy_(storage_bytes(storage), non_blocking=pinned)
