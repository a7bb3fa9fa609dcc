"""The trainer's end of vLLM's own weight-transfer interface: `WeightTransferTrainerFactory` with our `TrainerInitInfo`.

Owns: vLLM's `WeightSource` as a source, the order of one round (start, update in the background, publish, finish). Must not know: how
the engine is reached: a `VLLMWeightSyncClient` does that. For a trainer that is built on weightlift, `Publisher` and
`vllm_control.py` are the shorter way, and the only one with bounded waits between trainer ranks.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Final, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from weightlift import Deadlines, Publisher, SyncReport
from weightlift.errors import ConfigError, WeightliftError
from weightlift.integrations.background import in_background
from weightlift.protocol.manifest import Manifest
from weightlift.tensors import entry_of

__all__ = ["WeightSourceAdapter", "WeightliftTrainerEngine", "WeightliftTrainerInitInfo"]

_GRACE_S: Final = 5.0


@dataclasses.dataclass
class WeightliftTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """How the trainer publishes.

    address: `weightlift.new_address()`. replicas: engine replicas that take part. timeout_s: for one round, and for the first contact.
    first_version: of the first `send_weights`; each one after it is one more.
    """

    backend: ClassVar[str] = "weightlift"
    address: str
    replica: str = "vllm"
    replicas: int = 1
    token: str = ""
    timeout_s: float = 300.0
    first_version: int = 0
    draft_policy: str = "refuse"
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)


class WeightSourceAdapter:
    """vLLM's WeightSource (`metadata()`, iteration) as a weightlift source: streamed, one full tensor at a time."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """From the source's metadata, which costs no gather."""
        made = Manifest(
            entry_of(meta.name, torch.empty(tuple(meta.shape), dtype=meta.dtype, device="meta")) for meta in self._source.metadata()
        )
        if self._manifest is None or self._manifest.digest != made.digest:
            self._manifest = made
        return self._manifest

    def stream(self) -> Iterator[torch.Tensor]:
        """The tensors, checked against the metadata: the two channels must agree."""
        names = [entry.name for entry in self.manifest().entries]
        found = 0
        for found, (name, tensor) in enumerate(self._source, start=1):
            if found > len(names) or name != names[found - 1]:
                raise ConfigError(f"the source yields {name} where its metadata has {names[found - 1 : found] or 'nothing'}")
            yield tensor.detach()
        if found != len(names):
            raise ConfigError(f"the source yields {found} tensors, its metadata has {len(names)}")


class WeightliftTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """One trainer rank. Rank 0 publishes; the others only take part in the source's gathers."""

    init_info_cls = WeightliftTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, is_sender: bool, info: WeightliftTrainerInitInfo) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._info = info
        self._next = info.first_version
        self._publisher: Publisher | None = None
        self.report: SyncReport | None = None
        """Of the last round, on the sender."""

    @classmethod
    def trainer_init(cls, init_info: WeightliftTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Open the publisher, and have the engine's workers subscribe."""
        if source is None:
            raise ConfigError("source must be a WeightSource, got None")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, info=init_info)
        if engine.is_sender:
            engine._open()
        return engine

    def _open(self) -> None:
        info = self._info
        publisher = Publisher(
            source=WeightSourceAdapter(self.source), address=info.address, token=info.token, deadlines=info.deadlines
        )
        try:
            self.client.init_weight_transfer_engine(
                {"address": info.address, "replica": info.replica, "token": info.token, "draft_policy": info.draft_policy}
            )
            publisher.wait_for_peers(info.replicas, timeout_s=info.timeout_s)
        except BaseException:
            publisher.close()
            raise
        self._publisher = publisher

    def send_weights(self) -> None:
        """One round. Raises the publisher's error, in bounded time; the engine is then TORN, or serves its old version.

        `finish_weight_update`, which stamps the version on vLLM's outputs, is only called after the commit.
        """
        if self._publisher is None:
            for _ in self.source:
                pass  # the sender cannot gather alone
            return
        version = self._next
        self.client.start_weight_update()
        update = in_background(self.client.update_weights, {"version": version, "timeout_s": self._info.timeout_s})
        try:
            self.report = self._publisher.publish(version)
        except WeightliftError as error:
            _note(update, error)
            raise
        update.result(self._info.timeout_s)
        self._next = version + 1
        self.client.finish_weight_update(weight_version=str(version))

    def shutdown(self) -> None:
        """Close the publisher."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


def _note(update: concurrent.futures.Future[Any], error: WeightliftError) -> None:
    """What the engine's side of a failed round said, if it says it soon."""
    try:
        update.result(_GRACE_S)
    except Exception as other:
        error.add_note(f"the engine's side of the round: {type(other).__name__}: {other}")
