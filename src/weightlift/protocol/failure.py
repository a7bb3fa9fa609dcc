"""Exceptions to frames and back, without losing class, place or cause.

Owns: `describe` (an exception as ErrorInfo) and `revive` (the same class on the other side, the foreign cause chained as text).
Must not know: which frame carries it.
"""

from __future__ import annotations

import traceback

from weightlift.errors import ProtocolError, RemoteCause, RemoteProtocolError, WeightliftError, error_class
from weightlift.protocol.messages import ErrorInfo

__all__ = ["describe", "revive"]

_MAX_TEXT = 20_000


def describe(error: BaseException, *, phase: str = "", peer: str = "") -> ErrorInfo:
    """An exception as data. A foreign exception keeps its own type name and message as the cause."""
    cause = error.__cause__ if isinstance(error, WeightliftError) else error
    if isinstance(error, WeightliftError):
        name, message, fields = type(error).__name__, error.message, error.fields()
    else:
        name, message, fields = "WeightliftError", f"{type(error).__name__}: {error}", {}
    cause_type, cause_message, text = "", "", ""
    if isinstance(cause, RemoteCause):
        cause_type, cause_message, text = cause.type_name, cause.message, cause.traceback
    elif cause is not None:
        cause_type, cause_message = type(cause).__name__, str(cause)
        text = "".join(traceback.format_exception(cause))
    return ErrorInfo(
        error=name,
        message=_sendable(message)[:_MAX_TEXT],
        phase=str(fields.get("phase", phase)),
        peer=str(fields.get("peer", peer)),
        tensor=_sendable(str(fields.get("tensor", ""))),
        bucket=int(fields.get("bucket", -1)),
        buckets=int(fields.get("buckets", -1)),
        remedy=_sendable(str(fields.get("remedy", ""))),
        cause_type=cause_type,
        cause_message=_sendable(cause_message)[:_MAX_TEXT],
        traceback=_sendable(text)[-_MAX_TEXT:],
    )


def _sendable(text: str) -> str:
    """Text that can be encoded: a file name that is no UTF-8 arrives as a lone surrogate, which cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


def revive(info: ErrorInfo, *, version: int, round: int, peer: str) -> WeightliftError:
    """The exception that the other side described, of the same class; a class this side does not know is a RemoteProtocolError."""
    cls = error_class(info.error)
    if cls is None or cls is ProtocolError:
        cls = RemoteProtocolError
    error = cls(
        info.message,
        version=version if version >= 0 else None,
        round=round if round > 0 else None,
        phase=info.phase or None,
        peer=info.peer or peer or None,
        bucket=info.bucket if info.bucket >= 0 else None,
        buckets=info.buckets if info.buckets >= 0 else None,
        tensor=info.tensor or None,
        remedy=info.remedy or None,
    )
    if info.cause_type:
        error.__cause__ = RemoteCause(info.cause_type, info.cause_message, info.traceback)
    return error
