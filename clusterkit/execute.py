"""Carries a plan out, step by step, and has every step recorded."""

from __future__ import annotations

import itertools
import secrets as tokens
import threading
from collections.abc import Callable, Mapping

from clusterkit import shell
from clusterkit.agent import PEER_TOKEN
from clusterkit.errors import ClusterkitError, SubmitFailed
from clusterkit.plan import Plan, Step
from clusterkit.shell import Secret
from clusterkit.transport import Put, Transport, fan_out, in_order

Record = Callable[[Step, str], None]
"""Told of each step and how it went."""


def write_files(plan: Plan, transport: Transport) -> None:
    """The plan's files, on every host of the plan.

    Raises:
        ClusterkitError: a host does not take them; the message names it.
    """
    files = [Put(file.path, file.content(), file.mode) for file in plan.files]
    in_order(fan_out(everyone(plan), lambda host: transport.put_all(host, files)))


def everyone(plan: Plan) -> tuple[str, ...]:
    """The hosts of a plan, each once."""
    return tuple(dict.fromkeys((*plan.hosts, *(step.host for step in plan.steps))))


def run_steps(
    plan: Plan,
    transport: Transport,
    *,
    attempt: int = 1,
    secrets: Mapping[str, Secret] | None = None,
    record: Record = lambda step, outcome: None,
) -> None:
    """The plan's commands, in order; starts that follow each other, on all hosts at once.

    The attempt's number is all that a restart adds, and a new token by which its nodes know each
    other where they do.

    Raises:
        SubmitFailed: a command could not be started or did not exit with 0; the message
            holds the command, its exit status and its stderr.
    """
    lock = threading.Lock()
    values = {PEER_TOKEN: Secret(PEER_TOKEN, tokens.token_hex(16)), **(secrets or {})}

    def carry_out(step: Step) -> None:
        env = {**step.env, "CLUSTERKIT_ATTEMPT": str(attempt)}
        if step.kind == "start":
            # From its first moment on it is found as one of the run's (`agent.processes_of`).
            env["CLUSTERKIT_RUN_DIR"] = plan.run_dir
        try:
            env |= {name: values[name].reveal() for name in step.secrets}
            outcome = _carry_out(step, transport, env)
        except ClusterkitError as error:
            outcome = error.message
            raise
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            with lock:
                record(step, outcome)

    for kind, group in itertools.groupby(plan.steps, lambda step: step.kind):
        steps = list(group)
        hosts = list(dict.fromkeys(step.host for step in steps))
        if kind == "run" or len(hosts) == 1:
            for step in steps:
                carry_out(step)
            continue

        def on(host: str, steps: list[Step] = steps) -> None:
            for step in steps:
                if step.host == host:
                    carry_out(step)

        in_order(fan_out(hosts, on))


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
