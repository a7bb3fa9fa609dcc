"""Makes docs/protocol.md from protocol/session.py and the frames of protocol/messages.py, and the table in docs/handoff.md.

`python scripts/make_docs.py` writes, `--check` compares and exits 1 on drift.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import msgspec

from weightlift.handoff.phases import STEP_LAW, StepEvent, StepStage
from weightlift.protocol import messages
from weightlift.protocol.session import (
    PEER_LAW,
    PHASE_OF_PEER_STAGE,
    PHASE_OF_STAGE,
    SUBSCRIBER_LAW,
    Effect,
    Event,
    PeerEvent,
    PeerStage,
    Stage,
)

TARGET = pathlib.Path(__file__).resolve().parent.parent / "docs" / "protocol.md"
HANDOFF = TARGET.with_name("handoff.md")
_BEGIN, _END = "<!-- made by `make docs` from handoff/phases.py -->\n", "<!-- end of the tables -->\n"

HEAD = """# The protocol

This page is made by `make docs` from the tables in `src/weightlift/protocol/session.py`; `make check` fails when they differ. The
tables are the law: a transition that is not in them is illegal, raises, and changes nothing. `tests/unit/test_session_law.py` walks
every cell, and `weightlift.testing.search` visits every state that one publisher, two subscribers and all faults can reach.

One round publishes one version: `ANNOUNCE -> PREPARE -> TRANSFER -> RELEASE -> COMMIT`.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_subscriber(), *_peer(), *_frames()]) + "\n"


def _subscriber() -> Iterator[str]:
    yield "## A subscriber\n"
    yield "What is served changes in two ways only: COMMIT/DONE moves the version, and leaving a touched stage makes the engine TORN.\n"
    yield "| stage | phase | what it means |\n|---|---|---|"
    for stage in Stage:
        yield f"| {stage.name} | {PHASE_OF_STAGE[stage]} | {stage.value} |"
    yield "\n| event | what happened |\n|---|---|"
    for event in Event:
        yield f"| {event.name} | {event.value} |"
    yield "\n| stage | " + " | ".join(event.name for event in Event) + " |"
    yield "|---" * (len(Event) + 1) + "|"
    for stage in Stage:
        yield f"| **{stage.name}** | " + " | ".join(_cell(SUBSCRIBER_LAW[stage].get(event)) for event in Event) + " |"
    yield "\n```mermaid\nstateDiagram-v2\n    [*] --> IDLE"
    for stage in Stage:
        for event, (target, effect) in SUBSCRIBER_LAW[stage].items():
            if effect is not Effect.TEAR and not (target is Stage.IDLE and effect is Effect.KEEP):
                note = f" / {effect.value}" if effect is Effect.ADVANCE else ""
                yield f"    {stage.name} --> {target.name}: {event.name}{note}"
    for stage in Stage:
        outcome = SUBSCRIBER_LAW[stage].get(Event.FAIL)
        if outcome is not None:
            yield f"    {stage.name} --> IDLE: ABORT, FAIL, LOST, EXPIRED / {outcome[1].value}"
    yield "```\n"


def _cell(outcome: tuple[Stage, Effect] | None) -> str:
    if outcome is None:
        return ""
    stage, effect = outcome
    return stage.name if effect is Effect.KEEP else f"{stage.name}, {effect.value}"


def _peer() -> Iterator[str]:
    yield "## A peer, as the publisher sees it\n"
    yield "| stage | phase | what it means |\n|---|---|---|"
    for stage in PeerStage:
        yield f"| {stage.name} | {PHASE_OF_PEER_STAGE[stage]} | {stage.value} |"
    yield "\n| event | what happened |\n|---|---|"
    for event in PeerEvent:
        yield f"| {event.name} | {event.value} |"
    yield "\n| stage | " + " | ".join(event.name for event in PeerEvent) + " |"
    yield "|---" * (len(PeerEvent) + 1) + "|"
    for stage in PeerStage:
        cells = (PEER_LAW[stage].get(event) for event in PeerEvent)
        yield f"| **{stage.name}** | " + " | ".join("" if target is None else target.name for target in cells) + " |"
    yield ""


def _frames() -> Iterator[str]:
    yield f"## Frames\n\nMessagePack, protocol version {messages.PROTOCOL_VERSION}. Every frame has `kind`, `round` and `version`.\n"
    yield "| frame | from | fields | meaning |\n|---|---|---|---|"
    for frame in messages.Frame.__subclasses__():
        fields = ", ".join(f.name for f in msgspec.structs.fields(frame) if f.name not in ("round", "version"))
        subscriber, publisher = frame in messages.FromSubscriber.__args__, frame in messages.FromPublisher.__args__
        who = "both" if subscriber and publisher else "subscriber" if subscriber else "publisher"
        meaning = " ".join((frame.__doc__ or "").split())
        yield f"| {frame.__name__} | {who} | {fields} | {meaning} |"


def handoff() -> str:
    """docs/handoff.md with the table of handoff/phases.py between its marks."""
    before, mark, rest = HANDOFF.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return before + mark + "\n" + "\n".join(_step()) + "\n" + end + after


def _step() -> Iterator[str]:
    yield "| stage | what it means | what is possible |\n|---|---|---|"
    for stage in StepStage:
        moves = ", ".join(f"{event.name} → {after.name}" for event, after in STEP_LAW[stage].items())
        yield f"| {stage.name} | {stage.value} | {moves} |"
    yield "\n| event | who, and what |\n|---|---|"
    for event in StepEvent:
        yield f"| {event.name} | {event.value} |"


def main() -> int:
    """Write or check."""
    pages = {TARGET: document(), HANDOFF: handoff()}
    if "--check" in sys.argv[1:]:
        wrong = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
        for path in wrong:
            print(f"{path} differs from the tables: run `make docs`", file=sys.stderr)
        return 1 if wrong else 0
    for path, text in pages.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
