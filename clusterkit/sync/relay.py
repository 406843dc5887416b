"""Which host sends the project to which: the submitter to the first, each that has it to others."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator, Mapping

WORTHWHILE_BYTES = 1 << 22
"""Fewer bytes are sent by the submitter, to all hosts at once."""
HOSTS = 4
"""So many hosts, or fewer, get all from the submitter."""
AT_ONCE = 2
"""Hosts that one host sends to at a time."""
Sender = tuple[str, int] | None
"""Address and port of a host that serves the folder; None: the submitter."""


class Relay(contextlib.AbstractContextManager["Relay"]):
    """The senders of one folder; safe to use from several threads.

    A host that has the folder serves it on a port of its own, to hosts that send ``token``, until
    the relay is closed.

    Args:
        addresses: the hosts' addresses for each other.
    """

    def __init__(self, addresses: Mapping[str, str]) -> None:
        self.token = secrets.token_hex(16)
        self._addresses = addresses
        self._free: list[tuple[str, int]] = []
        self._submitter_free = True
        self._hosts: set[tuple[str, int]] = set()  # that serve the folder
        self._changed = threading.Condition()
        self._serving = contextlib.ExitStack()

    def __exit__(self, *_: object) -> None:
        self._serving.close()

    def worthwhile(self, size: int) -> bool:
        """Return whether hosts pass so many bytes on to each other."""
        return size >= WORTHWHILE_BYTES

    @contextlib.contextmanager
    def sender(self, size: int) -> Iterator[Sender]:
        """Wait until a sender is free, and take it for sending a host ``size`` bytes.

        It is the submitter as long as no host serves the folder.
        """
        if not self.worthwhile(size):
            yield None
            return
        with self._changed:
            self._changed.wait_for(lambda: self._free or (self._submitter_free and not self._hosts))
            sender = self._free.pop() if self._free else None
            self._submitter_free &= sender is not None
        try:
            yield sender
        finally:
            with self._changed:
                if sender is None:
                    self._submitter_free = True
                elif sender in self._hosts:
                    self._free.append(sender)
                self._changed.notify_all()

    def drop(self, sender: Sender) -> None:
        """Use a sender no more, from which a host did not get all."""
        with self._changed:
            self._hosts -= {sender}
            self._free = [each for each in self._free if each != sender]
            self._changed.notify_all()

    def add(self, host: str, port: int, serving: contextlib.ExitStack) -> None:
        """Use a host, which serves the folder on this port as long as ``serving`` is open."""
        sender = (self._addresses[host], port)
        with self._changed:
            self._serving.push(serving)
            self._hosts.add(sender)
            self._free += [sender] * AT_ONCE
            self._changed.notify_all()
