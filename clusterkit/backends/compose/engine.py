"""A docker engine, through the ``docker`` command of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.transport import Completed, Transport

HOST = "localhost"
ENGINE_SECONDS = 60.0


@dataclass(frozen=True)
class Docker:
    """``docker`` for one engine; without a socket, for the one that it would choose itself."""

    socket: str | None
    transport: Transport

    @property
    def tool(self) -> tuple[str, ...]:
        return ("docker", "--host", self.socket) if self.socket else ("docker",)

    def run(self, *words: str, seconds: float = ENGINE_SECONDS) -> Completed:
        """As `Transport.run`."""
        return self.transport.run(HOST, [*self.tool, *words], timeout=seconds)


def last_words(done: Completed) -> str:
    """What a docker command said last, without its advice."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    words = [line for line in lines if line.strip() and "--help'" not in line]
    said = words[-1] if words else f"exit code {done.exit_code}"
    return " ".join(said.removeprefix("docker: ").split())
