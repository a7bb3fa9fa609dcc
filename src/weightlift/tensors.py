"""torch's side of the vocabulary: dtypes by wire name, and views of pieces.

Owns: the mapping between protocol dtype names and torch dtypes, how a `Piece` becomes a view of a tensor or of a bucket, and
`Witnessed`, which stands for a tensor that is whole only for a moment.
Must not know: models, transports, who sends. Used by sources, loaders and transports alike, so that both ends cut in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

import torch

from weightlift.errors import ConfigError
from weightlift.protocol.manifest import ITEM_BYTES, Entry, canonical_dtype
from weightlift.protocol.plan import Piece

__all__ = ["Witnessed", "bucket_view", "dtype_name", "entry_of", "shape_of_piece", "tensor_view", "torch_dtype"]

_TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: dtype for name in ITEM_BYTES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_NAMES: Final[dict[torch.dtype, str]] = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a torch dtype; ConfigError for one that cannot travel (quantised, sub-byte)."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ConfigError(f"dtype must be one of {', '.join(_TORCH_DTYPES)}, got {dtype}") from None


def torch_dtype(name: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a wire name ("float32", "torch.float32", "fp32", or a torch dtype)."""
    if isinstance(name, torch.dtype):
        return name
    try:
        return _TORCH_DTYPES[canonical_dtype(name)]
    except KeyError:
        raise ConfigError(f"this torch ({torch.__version__}) has no dtype {name}") from None


def entry_of(name: str, tensor: torch.Tensor, *, dtype: torch.dtype | None = None, alias_of: str = "") -> Entry:
    """A manifest entry for a tensor that will be sent as `dtype` (default: its own)."""
    return Entry(name, dtype_name(dtype or tensor.dtype), tuple(tensor.shape), alias_of)


def tensor_view(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece of a tensor, as a view with the tensor's strides."""
    if piece.whole:
        return tensor
    for index in piece.prefix:
        tensor = tensor[index]
    return tensor[piece.start : piece.stop]


@functools.lru_cache(maxsize=65536)
def shape_of_piece(shape: tuple[int, ...], depth: int, rows: int, whole: bool) -> tuple[int, ...]:
    """The shape of a piece: of `rows` rows along axis `depth`."""
    return shape if whole else (rows, *shape[depth + 1 :])


def bucket_view(memory: torch.Tensor, entry: Entry, piece: Piece) -> torch.Tensor:
    """The piece inside a bucket: a contiguous view of `memory` (uint8, 1-D) with the entry's dtype and the piece's shape."""
    flat = memory[piece.offset : piece.offset + piece.nbytes].view(_TORCH_DTYPES[entry.dtype])
    return flat.view(shape_of_piece(entry.shape, len(piece.prefix), piece.stop - piece.start, piece.whole))


class Witnessed:
    """Stands for a tensor that an engine holds in another form than it was sent (repacked, quantised, cut): it cannot be looked at
    after the transfer, so it is shown on its way in, whole, in the sent dtype and shape, right before the engine takes it.

    dtype: as sent. see: who wants to look in this round; None if nobody does.
    """

    __slots__ = ("dtype", "see")

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.see: Callable[[torch.Tensor], None] | None = None

    def show(self, tensor: torch.Tensor) -> None:
        """Called once a round, when the tensor is complete."""
        if self.see is not None:
            self.see(tensor)
