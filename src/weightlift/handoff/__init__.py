"""Trainer and engine hand device memory to each other: order, offload, barrier, sleep, ledger. docs/handoff.md has the picture."""

from weightlift.handoff.barrier import Barrier
from weightlift.handoff.ledger import CudaMeter, Ledger, Meter, Reading, SimulatedDevice
from weightlift.handoff.offload import FSDP1Offload, FSDP2Offload, ModuleOffload, Offload, ShardSnapshot, offload_for
from weightlift.handoff.phases import STEP_LAW, StepEvent, StepOrder, StepStage
from weightlift.handoff.sleep import EngineMemory, ModuleMemory, Sleeper, SleepLevel
from weightlift.handoff.step import ColocatedStep, EngineControl

__all__ = [
    "STEP_LAW",
    "Barrier",
    "ColocatedStep",
    "CudaMeter",
    "EngineControl",
    "EngineMemory",
    "FSDP1Offload",
    "FSDP2Offload",
    "Ledger",
    "Meter",
    "ModuleMemory",
    "ModuleOffload",
    "Offload",
    "Reading",
    "ShardSnapshot",
    "SimulatedDevice",
    "SleepLevel",
    "Sleeper",
    "StepEvent",
    "StepOrder",
    "StepStage",
    "offload_for",
]
