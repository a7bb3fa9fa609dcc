"""ASGI middleware for `vllm serve`: `--middleware weightlift.integrations.vllm_guard.Guard`.

Owns: refusing to generate while the engine's weights are torn, and the version on every response. Must not know: vLLM, weights. It
learns all it knows from the control calls that pass through the same server, so it also knows when whoever made them is dead.

    a control call                                     what follows
    /collective_rpc weightlift_pull, all committed     SERVING that version
    the same, any worker TORN or no answer             TORN: generation is answered with 503 and a typed error
    /update_weights failed (the backend's way)         TORN
    /finish_weight_update with a version, done         SERVING that version

`x-weightlift-version` on a response names the version when the request came; a second one after a comma, if it was another when the
first byte left: the tokens are of both then (requests that were kept over a sync).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

__all__ = ["HEADER", "Guard"]

HEADER: Final = "x-weightlift-version"
_Scope: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App: TypeAlias = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

_GENERATES: Final = ("/v1/", "/inference/", "/generate", "/invocations")
_HARMLESS: Final = ("/v1/models",)
_CONTROL: Final = ("/collective_rpc", "/update_weights", "/finish_weight_update")


class Guard:
    """Wraps the server's application."""

    def __init__(self, app: _App) -> None:
        self._app = app
        self._version = "none"
        self._torn = ""

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """One request."""
        path = str(scope.get("path", "")) if scope.get("type") == "http" else ""
        if path in _CONTROL:
            await self._watch(path, scope, receive, send)
        elif path.startswith(_GENERATES) and path not in _HARMLESS:
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if self._torn:
            await _refuse(send, self._torn)
            return
        came = self._version

        async def stamped(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                versions = came if came == self._version else f"{came},{self._version}"
                message = {**message, "headers": [*message.get("headers", ()), (HEADER.encode(), versions.encode())]}
            await send(message)

        await self._app(scope, receive, stamped)

    async def _watch(self, path: str, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """A control call: look at what was asked and what was answered; change neither."""
        asked, answered, status = bytearray(), bytearray(), 500

        async def read() -> MutableMapping[str, Any]:
            message = await receive()
            asked.extend(message.get("body", b""))
            return message

        async def write(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            answered.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._learn(path, bytes(asked), status, bytes(answered))  # before the caller hears of it
            await send(message)

        try:
            await self._app(scope, read, write)
        except BaseException:
            self._learn(path, bytes(asked), 500, b"")
            raise

    def _learn(self, path: str, asked: bytes, status: int, answered: bytes) -> None:
        question, answer = _object(asked), _object(answered)
        if path == "/update_weights" and status >= 400:
            self._torn = f"a weight update failed ({status})"
        elif path == "/finish_weight_update" and status < 400 and question.get("weight_version") is not None:
            self._torn, self._version = "", str(question["weight_version"])
        elif path == "/collective_rpc" and question.get("method") == "weightlift_pull":
            self._learn_pull(answer.get("results") if status < 400 else None)

    def _learn_pull(self, results: Any) -> None:
        answers = [answer for answer in results or () if isinstance(answer, dict)]
        torn = [answer for answer in answers if answer.get("state") != "SERVING"]
        if not answers:
            self._torn = "a sync failed and the workers did not say what they hold"
        elif torn:
            error = torn[0].get("error") or {}
            self._torn = f"a sync failed: {error.get('kind', '')}: {error.get('message', '')}"
        elif len({answer.get("version") for answer in answers}) > 1:
            self._torn = "the workers hold different versions"
        else:
            version = answers[0].get("version", -1)
            self._torn, self._version = "", "none" if version == -1 else str(version)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body or b"{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


async def _refuse(send: _Send, why: str) -> None:
    error = {
        "message": f"this engine's weights are torn and it serves nothing until a full sync: {why}",
        "type": "TornWeights",
        "code": 503,
    }
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1"), (HEADER.encode(), b"torn")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
