"""Whether an engine holds what the trainer holds: digests, non-finite values, differences explained. Must not know transports."""

from weightlift.verify.digests import Algorithm, Probe, Probes, Scope, digests, span

__all__ = ["Algorithm", "Probe", "Probes", "Scope", "digests", "span"]
