"""Typed events and the SyncReport. Open to every room; knows none."""

from weightlift.observe.events import Event, JsonLines, Sink, emit
from weightlift.observe.report import PhaseSeconds, StopWatch, SyncReport

__all__ = ["Event", "JsonLines", "PhaseSeconds", "Sink", "StopWatch", "SyncReport", "emit"]
