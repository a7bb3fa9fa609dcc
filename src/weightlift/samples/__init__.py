"""The sample plane: prompts to the engines, samples back, every one with the version of the weights that made it.

Owns: the frames, the sockets between trainer and engines, the bound on requests in flight. Must not know: models,
tasks, weights.
"""

from weightlift.samples.messages import (
    EngineHello,
    FailureReply,
    FromEngine,
    FromTrainer,
    GenerateReply,
    GenerateRequest,
    MemoryReply,
    MemoryRequest,
    Prompt,
    Sample,
    SamplingParams,
    SaveReply,
    SaveRequest,
    ScoreReply,
    ScoreRequest,
    ShutdownRequest,
    SyncReply,
    SyncRequest,
)
from weightlift.samples.plane import SampleEndpoint, SamplePlane, remove_address

__all__ = [
    "SamplePlane",
    "SampleEndpoint",
    "remove_address",
    "Prompt",
    "Sample",
    "SamplingParams",
    "GenerateRequest",
    "ScoreRequest",
    "ScoreReply",
    "SyncRequest",
    "SaveRequest",
    "ShutdownRequest",
    "FromTrainer",
    "EngineHello",
    "GenerateReply",
    "SyncReply",
    "SaveReply",
    "MemoryRequest",
    "MemoryReply",
    "FailureReply",
    "FromEngine",
]
