"""Who is connected to a publisher: the handshake, names, replicas.

Owns: the table of live peers, and the rules of joining it. Must not know: rounds, transports' memory.
A peer that joins while a round runs takes part from the next one on. A replica is addressed once all its ranks are there.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import NamedTuple

from weightlift.errors import ConfigError, RemoteProtocolError, WeightliftError
from weightlift.protocol.failure import describe
from weightlift.protocol.messages import PROTOCOL_VERSION, Frame, Hello, PeerId, Rejected, Welcome
from weightlift.protocol.round import Member

__all__ = ["Connected", "Joined", "Roster"]


class Connected(NamedTuple):
    """A live peer. `key` is its connection."""

    key: bytes
    hello: Hello


class Joined(NamedTuple):
    """The outcome of a Hello: the answer, the error if it was refused, and the older connection that it replaces."""

    answer: Frame
    error: WeightliftError | None
    replaced: Connected | None


class Roster:
    """The live peers of one publisher process.

    Args:
        welcome: what accepted peers are answered. token: shared secret; "" for none.
        alive: whether the process behind a connection still lives.
    """

    def __init__(self, welcome: Welcome, *, token: str, alive: Callable[[Connected], bool]) -> None:
        self._welcome = welcome
        self._token = token
        self._alive = alive
        self._peers: dict[PeerId, Connected] = {}
        self._names: dict[bytes, PeerId] = {}

    def hello(self, key: bytes, hello: Hello) -> Joined:
        """Take a peer in, or say why not."""
        try:
            self._check(hello)
        except WeightliftError as error:
            return Joined(Rejected(round=0, version=-1, error=describe(error)), error, None)
        name = PeerId(hello.peer)
        replaced = self._peers.get(name)
        if replaced is not None:
            self._names.pop(replaced.key, None)
        self._peers[name] = Connected(key, hello)
        self._names[key] = name
        return Joined(self._welcome, None, replaced)

    def _check(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise RemoteProtocolError(
                f"peer {hello.peer} speaks protocol {hello.protocol}, this publisher speaks {PROTOCOL_VERSION}",
                remedy="install the same weightlift on both sides.",
            )
        if not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            raise RemoteProtocolError("the peer did not show the token of this run", remedy="pass token=... on both sides.")
        if hello.run_id != self._welcome.run_id:
            raise RemoteProtocolError(
                f"peer {hello.peer} belongs to run {hello.run_id}, this is run {self._welcome.run_id}",
                remedy="give both sides the same address.",
            )
        if not 0 <= hello.rank < hello.size or not hello.peer or not hello.replica:
            raise ConfigError(f"peer {hello.peer!r} says rank {hello.rank} of {hello.size}, replica {hello.replica!r}")
        old = self._peers.get(PeerId(hello.peer))
        if old is not None and old.hello.incarnation != hello.incarnation and self._alive(old):
            raise ConfigError(
                f"the name {hello.peer!r} is taken by a live process ({old.hello.pid})",
                remedy="give every subscriber a name of its own.",
            )

    def remove(self, key: bytes) -> Connected | None:
        """Forget a connection."""
        name = self._names.pop(key, None)
        return None if name is None else self._peers.pop(name)

    def name_of(self, key: bytes) -> PeerId | None:
        """Who speaks on a connection."""
        return self._names.get(key)

    def key_of(self, peer: PeerId) -> bytes | None:
        """The connection of a peer."""
        connected = self._peers.get(peer)
        return None if connected is None else connected.key

    def connected(self) -> list[Connected]:
        """All live peers."""
        return list(self._peers.values())

    def complete(self) -> list[Connected]:
        """The peers of replicas that have all their ranks, one process each."""
        groups: dict[str, list[Connected]] = {}
        for connected in self._peers.values():
            groups.setdefault(connected.hello.replica, []).append(connected)
        whole = []
        for ranks in groups.values():
            sizes = {c.hello.size for c in ranks}
            if sizes == {len(ranks)} and {c.hello.rank for c in ranks} == set(range(len(ranks))):
                whole += ranks
        return whole

    def members(self) -> list[Member]:
        """The peers that a round that starts now addresses."""
        return [Member(PeerId(c.hello.peer), c.hello.replica, c.hello.serves, c.hello.torn) for c in self.complete()]

    def serve(self, peer: PeerId, *, version: int, torn: bool) -> None:
        """Note what a peer serves after a round."""
        connected = self._peers.get(peer)
        if connected is not None:
            hello = connected.hello
            changed = {f: getattr(hello, f) for f in hello.__struct_fields__} | {"serves": version, "torn": torn}
            self._peers[peer] = connected._replace(hello=Hello(**changed))
