"""A vLLM worker extension: `worker_extension_cls="weightlift.integrations.vllm_extension.WeightliftExtension"`.

Owns: the methods that `collective_rpc` finds on a worker, all with the prefix `weightlift_`. Must not know: how a sync works.
Arguments and answers are plain data: vLLM's HTTP server passes nothing else.
"""

from __future__ import annotations

from typing import Any

from weightlift.errors import WeightliftError
from weightlift.integrations.vllm_worker import WorkerSettings, WorkerSync

__all__ = ["WeightliftExtension"]


class WeightliftExtension:
    """Mixed into vLLM's worker class by vLLM. Every method answers with a dict (vllm_worker.Answer) and never blocks without an end."""

    def weightlift_connect(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Subscribe to a trainer; `settings` as of WorkerSettings."""
        sync = _sync_of(self)
        try:
            sync.connect(WorkerSettings(**settings))
        except WeightliftError as error:
            return sync.answer(error).to_dict()
        return sync.answer().to_dict()

    def weightlift_pull(self, timeout_s: float | str) -> dict[str, Any]:
        """Take part in one round, for at most so long."""
        return _sync_of(self).pull(float(timeout_s)).to_dict()

    def weightlift_state(self) -> dict[str, Any]:
        """What is served."""
        return _sync_of(self).answer().to_dict()

    def weightlift_discard(self) -> dict[str, Any]:
        """The weights are about to be given away (sleep level 2)."""
        sync = _sync_of(self)
        sync.discard()
        return sync.answer().to_dict()

    def weightlift_close(self) -> dict[str, Any]:
        """Leave the trainer's roster."""
        sync = _sync_of(self)
        sync.close()
        return sync.answer().to_dict()


def _sync_of(worker: Any) -> WorkerSync:
    """The worker's end; made at the first call, kept on the worker."""
    sync = vars(worker).get("_weightlift_sync")
    if sync is None:
        sync = worker._weightlift_sync = WorkerSync(worker)
    return sync  # type: ignore[no-any-return]
