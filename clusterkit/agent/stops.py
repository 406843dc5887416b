"""Which ranks of a node were stopped (SIGSTOP)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from clusterkit.agent import limits
from clusterkit.agent.processes import is_stopped
from clusterkit.agent.protocol import Document


class Stops:
    """Says which ranks were stopped, and which of those go on.

    Args:
        say: takes a line for the node's log.
        here: whether ranks are processes of this host.
    """

    def __init__(self, say: Callable[[str], None], *, here: bool) -> None:
        self.look_at = 0.0
        self._say, self._here = say, here
        self._stopped: set[int] = set()  # ranks that are, or were when they were last there

    def look(self, ranks: Iterable[Document], *, ending: bool) -> None:
        """Log what has changed. ``ending``: ranks are being killed, which run for a moment."""
        self.look_at = time.monotonic() + limits.LOOK_SECONDS
        for rank in ranks if self._here else ():
            stopped, number = is_stopped(rank), rank["rank"]
            if stopped and number not in self._stopped:
                self._stopped.add(number)
                self._say(f"rank {number} was stopped (SIGSTOP)")
            elif stopped is False and number in self._stopped and not ending:
                self._stopped.remove(number)
                self._say(f"rank {number} goes on")

    def causes(self) -> list[str]:
        """What the node may have failed of."""
        return [f"rank {number} was stopped (SIGSTOP)" for number in sorted(self._stopped)]

    def clear(self) -> None:
        """Other ranks have the numbers from now on."""
        self._stopped.clear()
