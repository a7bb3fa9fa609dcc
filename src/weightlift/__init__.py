"""weightlift: weight synchronisation for RL post-training of LLMs. A sync is a transaction.

A trainer process holds a `Publisher`, every engine worker a `Subscriber`; both get the address from `new_address()`.
"""

import logging

from weightlift.api import Publisher, State, Subscriber
from weightlift.config import Deadlines, ShmConfig
from weightlift.errors import (
    ConfigError,
    LoaderError,
    ManifestError,
    PeerLost,
    ProtocolError,
    SourceError,
    TornWeights,
    TransferTimeout,
    TransportError,
    WeightliftError,
)
from weightlift.observe.report import PhaseSeconds, SyncReport
from weightlift.transports.curve import CurveKeys
from weightlift.transports.endpoint import new_address
from weightlift.transports.registry import available, explain

__all__ = [
    "Publisher",
    "Subscriber",
    "SyncReport",
    "PhaseSeconds",
    "State",
    "Deadlines",
    "ShmConfig",
    "CurveKeys",
    "new_address",
    "available",
    "explain",
    "WeightliftError",
    "ConfigError",
    "ManifestError",
    "ProtocolError",
    "TransportError",
    "TransferTimeout",
    "PeerLost",
    "SourceError",
    "LoaderError",
    "TornWeights",
    "__version__",
]

logging.getLogger("weightlift").addHandler(logging.NullHandler())

__version__ = "0.1.0.dev0"
