"""Who sends the project to which host: the submitter to the first, each that has it to others."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Mapping

WORTHWHILE_BYTES = 1 << 22
"""Less than this the submitter sends to every host at once."""
HOSTS = 4
"""So many or fewer get it from the submitter."""
AT_ONCE = 2
"""Hosts that one host sends to at a time."""
Sender = tuple[str, int] | None
"""Address and port of a host that serves; None: the submitter."""


class Relay(contextlib.AbstractContextManager["Relay"]):
    """The senders of one folder; safe to use from several threads.

    A host that has the folder serves it on a port of its own, to who shows ``token``, until the
    relay is closed.

    Args:
        addresses: the hosts' addresses for each other.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self.token = secrets.token_hex(16)
        self._addresses = addresses
        self._free: list[tuple[str, int]] = []
        self._here = True  # whether the submitter is free
        self._hosts: set[tuple[str, int]] = set()  # that serve
        self._changed = threading.Condition()
        self._serving = contextlib.ExitStack()

    def __exit__(self, *_: object) -> None:
        self._serving.close()

    def worthwhile(self, size: int) -> bool:
        """Whether so many bytes are passed on."""
        return size >= WORTHWHILE_BYTES

    @contextlib.contextmanager
    def sender(self, size: int) -> Iterator[Sender]:
        """Who sends a host ``size`` bytes; waits until somebody is free.

        The submitter does as long as no host serves.
        """
        if not self.worthwhile(size):
            yield None
            return
        with self._changed:
            self._changed.wait_for(lambda: self._free or (self._here and not self._hosts))
            sender = self._free.pop() if self._free else None
            self._here = self._here and sender is not None
        try:
            yield sender
        finally:
            with self._changed:
                if sender is None:
                    self._here = True
                elif sender in self._hosts:
                    self._free.append(sender)
                self._changed.notify_all()

    def drop(self, sender: Sender) -> None:
        """A host did not get all from it: nobody else is sent there."""
        with self._changed:
            self._hosts -= {sender}
            self._free = [each for each in self._free if each != sender]
            self._changed.notify_all()

    def add(self, host: str, port: int, serving: contextlib.ExitStack) -> None:
        """A host serves the folder on this port, as long as ``serving`` is open."""
        sender = (self._addresses[host], port)
        with self._changed:
            self._serving.push(serving)
            self._hosts.add(sender)
            self._free += [sender] * AT_ONCE
            self._changed.notify_all()
