"""A docker engine, through the ``docker`` command of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from clusterkit.transport import Completed, Transport

HOST = "localhost"
CDI_KIND = "nvidia.com/gpu"
"""As `nvidia-ctk cdi generate` names GPUs: this, =, the index that nvidia-smi shows."""
ENGINE_SECONDS = 60.0


@dataclass(frozen=True)
class Docker:
    """The ``docker`` command for the engine at a socket; None: for docker's own default."""

    socket: str | None
    transport: Transport

    @property
    def command(self) -> tuple[str, ...]:
        return ("docker", "--host", self.socket) if self.socket else ("docker",)

    def run(self, *arguments: str, seconds: float = ENGINE_SECONDS) -> Completed:
        """Run ``docker`` with these arguments. Raises what `Transport.run` does."""
        return self.transport.run(HOST, [*self.command, *arguments], timeout=seconds)


def error_line(done: Completed) -> str:
    """Return the last line that a failed docker command printed, without its advice on --help."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    lines = [line for line in lines if line.strip() and "--help'" not in line]
    error = lines[-1] if lines else f"exit code {done.exit_code}"
    return " ".join(error.removeprefix("docker: ").split())
