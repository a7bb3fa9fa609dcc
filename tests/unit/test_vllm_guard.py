"""integrations/vllm_guard.py without vLLM: what it learns from control calls, what it refuses, what it stamps."""

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from weightlift.integrations.vllm_guard import HEADER, Guard

Message = MutableMapping[str, Any]


class Server:
    """A guard around a server of one line. replies: path -> (status, body); `during` is called while it works on a request."""

    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, bytes]] = {}
        self.during: Any = None
        self.crash = False
        self.seen: list[tuple[str, bytes]] = []
        self.guard = Guard(self._app)

    async def _app(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.seen.append((scope["path"], body))
        if self.crash:
            raise ConnectionResetError
        if self.during is not None:
            during, self.during = self.during, None
            await during()
        status, answer = self.replies.get(scope["path"], (200, b"{}"))
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        for index in range(0, len(answer), 7):  # in parts, as a stream
            await send({"type": "http.response.body", "body": answer[index : index + 7], "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def request(self, path: str, body: bytes = b"{}") -> tuple[int, dict[str, str], bytes]:
        parts = [body[: len(body) // 2], body[len(body) // 2 :]]
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: Message) -> None:
            sent.append(message)

        await self.guard({"type": "http", "path": path}, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])

    def ask(self, path: str, body: bytes = b"{}") -> tuple[int, dict[str, str], bytes]:
        return asyncio.run(self.request(path, body))

    async def pulled(self, *answers: Any, status: int = 200) -> None:
        self.replies["/collective_rpc"] = (status, json.dumps({"results": list(answers)}).encode())
        await self.request("/collective_rpc", json.dumps({"method": "weightlift_pull", "args": [5.0]}).encode())

    def pull(self, *answers: Any, status: int = 200) -> None:
        asyncio.run(self.pulled(*answers, status=status))

    def state(self) -> tuple[int, str]:
        status, headers, _ = self.ask("/v1/completions")
        return status, headers[HEADER]


def said(version: int, state: str = "SERVING") -> dict[str, Any]:
    error = None if state == "SERVING" else {"kind": "PeerLost", "message": "the trainer is gone"}
    return {"version": version, "state": state, "error": error}


def test_before_the_first_sync_it_says_so() -> None:
    assert Server().state() == (200, "none")


def test_a_committed_version_is_stamped_and_bodies_pass_unchanged() -> None:
    server = Server()
    server.pull(said(4), said(4))
    server.replies["/v1/completions"] = (200, b'{"choices": [1, 2, 3]}')
    status, headers, body = server.ask("/v1/completions", b'{"prompt": [1, 2]}')
    assert (status, headers[HEADER], body) == (200, "4", b'{"choices": [1, 2, 3]}')
    assert server.seen[-1] == ("/v1/completions", b'{"prompt": [1, 2]}')


@pytest.mark.parametrize(
    ("answers", "status", "text"),
    [
        ([said(4, "TORN"), said(4)], 200, "PeerLost: the trainer is gone"),
        ([said(4), said(5)], 200, "different versions"),
        ([], 200, "did not say"),
        ([said(4)], 500, "did not say"),
        ([None], 200, "did not say"),
    ],
    ids=["one torn", "two versions", "no worker", "an error", "nonsense"],
)
def test_a_torn_engine_answers_503_until_a_full_sync(answers: list[Any], status: int, text: str) -> None:
    server = Server()
    server.pull(said(3))
    server.pull(*answers, status=status)
    seen = len(server.seen)
    for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate", "/invocations"):
        code, headers, body = server.ask(path)
        assert (code, headers[HEADER]) == (503, "torn")
        error = json.loads(body)["error"]
        assert error["type"] == "TornWeights"
        assert text in error["message"]
    assert len(server.seen) == seen, "none of them reached the engine"
    assert server.ask("/v1/models")[0] == 200
    assert server.ask("/health")[0] == 200
    server.pull(said(9))
    assert server.state() == (200, "9")


def test_a_refused_sync_goes_on_with_the_old_version() -> None:
    server = Server()
    server.pull(said(3))
    server.pull({**said(3), "error": {"kind": "ShapeMismatch", "message": "w"}})
    assert server.state() == (200, "3")


def test_a_request_that_lived_through_a_sync_is_stamped_with_both() -> None:
    server = Server()
    server.pull(said(1))
    server.during = lambda: server.pulled(said(2))
    assert server.ask("/v1/completions")[1][HEADER] == "1,2"
    assert server.state() == (200, "2")


def test_a_control_call_that_dies_on_the_way_is_torn() -> None:
    server = Server()
    server.pull(said(1))
    server.crash = True
    with pytest.raises(ConnectionResetError):
        server.pull(said(2))
    server.crash = False
    assert server.state() == (503, "torn")


def test_other_remote_calls_and_other_protocols_change_nothing() -> None:
    server = Server()
    server.pull(said(1))
    server.ask("/collective_rpc", b'{"method": "weightlift_state"}')
    server.ask("/collective_rpc", b"not json")
    server.ask("/collective_rpc", b"[1]")
    asyncio.run(server.guard({"type": "websocket", "path": "/v1/realtime"}, None, None))  # type: ignore[arg-type]
    assert server.state() == (200, "1")


def test_the_calls_of_the_backend_are_understood() -> None:
    server = Server()
    server.ask("/finish_weight_update", b'{"weight_version": 5}')
    assert server.state() == (200, "5")
    server.replies["/update_weights"] = (500, b"")
    server.ask("/update_weights")
    assert server.state() == (503, "torn")
    server.replies["/finish_weight_update"] = (500, b"")
    server.ask("/finish_weight_update", b'{"weight_version": 6}')
    assert server.state() == (503, "torn")
    server.replies["/finish_weight_update"] = (200, b"{}")
    server.ask("/finish_weight_update", b'{"weight_version": 6}')
    assert server.state() == (200, "6")
