"""What sources of sharded modules share: a manifest from the structure, a stream from the gatherer.

Owns: `ShardedSource`, `Named` and the cutting of a model into layer groups. Must not know: which wrapper shards, how bytes move.
fsdp1.py and fsdp2.py say what a rank holds; this file makes groups of it, and looks again when the module has changed.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch

from weightlift.errors import SourceError, WeightliftError
from weightlift.modules import ModuleTensors
from weightlift.protocol.manifest import Entry, Manifest
from weightlift.sources.gather import Gatherer, LayerGroup, Output, Plain, Shard
from weightlift.sources.group import TrainerGroup
from weightlift.sources.module import DtypePolicy, dtype_of
from weightlift.tensors import dtype_name

__all__ = ["Layer", "Named", "ShardedSource", "runs"]

_MOST_GROUP_BYTES: Final = 1 << 29
"""A layer group is cut when it has grown beyond this, so that a model that is wrapped as a whole does not become whole on one rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """One name on the wire, and where its elements come from: a place in a shard, or a plain tensor.

    start, stride: of its elements in the shard, for flat ones; stride None for contiguous.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard | None
    plain: Callable[[], torch.Tensor] | None = None
    start: int = 0
    stride: tuple[int, ...] | None = None
    alias_of: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Names that belong together: what one wrapper shards."""

    names: tuple[Named, ...]
    divisible: bool
    """Whether it may be gathered in parts; a flat tensor may not."""


class ShardedSource(abc.ABC):
    """Base of the sources of sharded modules.

    Args:
        module: the wrapped model. group: the ranks that hold it; default: all of the default process group, the first one sends.
        dtype: see DtypePolicy. The cast happens on each rank before its part is sent.
        max_group_bytes: bound on what is gathered at once; one tensor may be larger.

    Every rank makes the source, and calls Publisher.publish. Nothing of the module is changed; FSDP2 modules that are whole at the
    time are resharded, as FSDP does by itself after a backward pass.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        group: TrainerGroup | None = None,
        dtype: DtypePolicy = None,
        max_group_bytes: int = _MOST_GROUP_BYTES,
    ) -> None:
        self.module = module
        self.group: TrainerGroup = TrainerGroup() if group is None else group
        self._dtype = dtype_of(dtype)
        self._max_group_bytes = max_group_bytes
        self._held = ModuleTensors(module)
        self._manifest: Manifest | None = None
        self._gatherer: Gatherer | None = None
        self._seen: object = None
        self._exporting = False
        self._exports = 0

    # --- what the subclasses say ------------------------------------------------------------------------------------------------

    def _settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Bring the module into its resting, sharded state."""

    @abc.abstractmethod
    def _layers(self) -> Sequence[Layer]:
        """What this rank holds, in the order of the manifest; the same names in the same order on every rank."""

    @abc.abstractmethod
    def _device(self) -> torch.device:
        """Where parts are sent from and full tensors are put together."""

    def _structure(self) -> object:
        """Compared with `==`: changes whenever `_layers` would."""
        return None

    # --- Source -----------------------------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """The manifest; made anew only when the structure has changed."""
        self._settle()
        structure = self._structure()
        if self._manifest is None or not self._held.same_objects() or structure != self._seen:
            self._look()
            self._seen = structure
        assert self._manifest is not None, "set by the look"
        return self._manifest

    def _look(self) -> None:
        self._held.look()
        layers = self._layers()
        names = [named for layer in layers for named in layer.names]
        manifest = Manifest(Entry(n.name, dtype_name(n.dtype), n.shape, n.alias_of) for n in names)
        self._manifest = self._manifest if manifest == self._manifest else manifest
        self._gatherer = Gatherer(
            self.group.fabric,
            [_layer_group(part) for layer in layers for part in self._parts(layer)],
            self.group.receivers,
            device=self._device(),
            cause=self._cause,
            why=self._why,
        )

    def _parts(self, layer: Layer) -> Iterator[Sequence[Named]]:
        """The layer in parts of at most `max_group_bytes`, aliases left out."""
        part: list[Named] = []
        nbytes = 0
        for named in layer.names:
            if named.alias_of:
                continue
            size = 0 if named.shard is None else _bytes(named)
            if part and layer.divisible and nbytes + size > self._max_group_bytes:
                yield part
                part, nbytes = [], 0
            part.append(named)
            nbytes += size
        if part:
            yield part

    def sends(self) -> Mapping[int, bytes]:
        """See GroupSource."""
        return {} if self._gatherer is None else self._gatherer.sends

    def expects(self) -> Mapping[int, bytes]:
        """See GroupSource."""
        return {} if self._gatherer is None else self._gatherer.expects

    def _cause(self, error: WeightliftError) -> None:
        if not self._exporting:
            self.group.current.cause(error)

    def _why(self, rank: int) -> WeightliftError:
        if self._exporting:
            return SourceError(f"rank {rank} of the trainer failed in the export; it raises why", peer=f"trainer rank {rank}")
        return self.group.current.why(rank)

    def stream(self) -> Iterator[torch.Tensor]:
        """Full tensors where this rank sends; on the others nothing, but part in every gather."""
        gatherer = self._gatherer
        assert gatherer is not None, "manifest() comes before stream()"
        step, timeout_s = self.group.current.gather(gatherer.steps)
        yield from gatherer.stream(step, timeout_s)

    def export(self, timeout_s: float = 60.0) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors where this rank receives, none on the others, outside of a publish: for a checkpoint, or to look.

        All ranks walk it to its end, at the same time. A tensor is valid until the next one is asked for.
        """
        manifest = self.manifest()
        assert self._gatherer is not None, "made with the manifest"
        self._exporting, self._exports = True, self._exports + 1
        names = [entry.name for entry in manifest.entries if not entry.alias_of]
        try:
            with self.group.fabric.alive():
                yield from zip(names, self._gatherer.stream(f"export/{self._exports}", timeout_s), strict=False)
        finally:
            self._exporting = False
            self.group.fabric.forget(f"export/{self._exports}", self._gatherer.steps)

    @property
    def largest_group_bytes(self) -> int:
        """Bytes of the largest layer group, whole."""
        return 0 if self._gatherer is None else self._gatherer.largest_group_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes that the last stream held on this rank above its resident shards, at most."""
        return 0 if self._gatherer is None else self._gatherer.peak_bytes


def _bytes(named: Named) -> int:
    return math.prod(named.shape) * named.dtype.itemsize


def _layer_group(part: Sequence[Named]) -> LayerGroup:
    shards: list[Shard] = []
    outputs: list[Output | Plain] = []
    numbers: dict[int, int] = {}
    for named in part:
        if named.shard is None:
            assert named.plain is not None, "a name without a shard is a plain tensor"
            outputs.append(Plain(named.plain))
            continue
        number = numbers.setdefault(id(named.shard), len(shards))
        if number == len(shards):
            shards.append(named.shard)
        outputs.append(Output(number, named.start, named.shape, named.stride))
    return LayerGroup(tuple(shards), tuple(outputs))


def runs(names: Sequence[tuple[object, Named]]) -> Iterator[Layer]:
    """Layers out of names in module order: neighbours with the same key."""
    for _, same in itertools.groupby(names, key=lambda pair: id(pair[0])):
        yield Layer(tuple(named for _, named in same), divisible=True)
