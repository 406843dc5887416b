"""Carries a plan out, step by step, and has every step recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clusterkit import shell
from clusterkit.errors import SubmitFailed
from clusterkit.plan import Plan, Step
from clusterkit.shell import Secret
from clusterkit.transport import Transport

Record = Callable[[Step, str], None]
"""Told of each step and how it went."""


def write_files(plan: Plan, transport: Transport) -> None:
    """The plan's files, on every host that has a step."""
    for host in dict.fromkeys(step.host for step in plan.steps):
        for file in plan.files:
            transport.put(host, file.path, file.content(), file.mode)


def run_steps(
    plan: Plan,
    transport: Transport,
    *,
    attempt: int = 1,
    secrets: Mapping[str, Secret] | None = None,
    record: Record = lambda step, outcome: None,
) -> None:
    """The plan's commands, in order. The attempt's number is all that a restart adds.

    Raises:
        SubmitFailed: a command could not be started or did not exit with 0; the message
            holds the command, its exit status and its stderr.
    """
    for step in plan.steps:
        env = {**step.env, "CLUSTERKIT_ATTEMPT": str(attempt)}
        env |= {name: (secrets or {})[name].reveal() for name in step.secrets}
        try:
            outcome = _carry_out(step, transport, env)
        except SubmitFailed as error:
            record(step, error.message)
            raise
        record(step, outcome)


def _carry_out(step: Step, transport: Transport, env: Mapping[str, str]) -> str:
    if step.kind == "start":
        transport.start(step.host, step.argv, env=env)
        return "started"
    done = transport.run(step.host, step.argv, env=env)
    if done.exit_code:
        raise SubmitFailed(
            f"{shell.join(step.argv)} on {step.host} exited with {done.exit_code}: "
            f"{done.stderr.strip() or done.stdout.strip() or 'no output'}"
        )
    return "exit 0"
