"""Carries out a plan: writes its files and runs its steps, each of which is recorded."""

from __future__ import annotations

import itertools
import secrets as tokens
import threading
from collections.abc import Callable, Iterable, Mapping

from clusterkit import shell
from clusterkit.agent import PEER_TOKEN
from clusterkit.errors import BadInput, ClusterkitError, SubmitFailed
from clusterkit.plan import Plan, Step
from clusterkit.shell import Secret
from clusterkit.transport import Put, Transport, fan_out, in_order

Record = Callable[[Step, str], None]
"""Called with each step and its outcome."""
CarryOut = Callable[[Step, Transport, Mapping[str, str]], str]
"""Carries out a step with an environment, and returns its outcome."""


def write_files(plan: Plan, transport: Transport) -> None:
    """Write the plan's files on every host of the plan.

    Raises:
        ClusterkitError: a host does not accept them; the message names it.
    """
    files = [Put(file.path, file.content(), file.mode) for file in plan.files]
    in_order(fan_out(all_hosts(plan), lambda host: transport.put_all(host, files)))


_CLAIM = """\
umask 077; mkdir -p "$1" && cd "$1" || exit
# Not the shell's own printf, which calls a full disk an I/O error (dash).
env printf '%s\\n' "$2" >".owner.$3" || { rm -f ".owner.$3"; cd / && rmdir "$1"; exit 1; }
ln ".owner.$3" owner 2>/dev/null || (set -C; cat ".owner.$3" >owner) 2>/dev/null
rm -f ".owner.$3"
if [ -e attempts ] || [ "$(cat owner)" != "$2" ]; then cat owner; exit 9; fi"""
"""Makes a file that one run alone can make, also where many hosts see one folder (NFS)."""


def claim(plan: Plan, transport: Transport, owner: str) -> None:
    """Make the run's folder on its hosts, and record there whose run it is.

    Args:
        owner: user, machine and folder of the run that is being submitted.

    Raises:
        BadInput: another run of this id has been there.
        SubmitFailed: the folder cannot be made.
    """

    def claim_on(host: str) -> None:
        argv = ("sh", "-c", _CLAIM, "sh", plan.run_dir, owner, tokens.token_hex(8))
        done = transport.run(host, argv, timeout=120)
        if done.exit_code == 9:
            known = f", of {found}" if (found := done.stdout.strip()) else ""
            raise BadInput(
                f"host {host}: there is a run {plan.run_id} already{known}",
                hint=f"choose another run id; `clusterkit rm {plan.run_id}` there removes that run",
            )
        if done.exit_code:
            raise SubmitFailed(
                f"host {host}: cannot make {plan.run_dir}: {done.error}",
                hint="make room there, or choose another `workdir` that this user may write to",
            )

    in_order(fan_out(all_hosts(plan), claim_on))


def all_hosts(plan: Plan) -> tuple[str, ...]:
    """Return the hosts of a plan, each once."""
    return tuple(dict.fromkeys((*plan.hosts, *(step.host for step in plan.steps))))


def carry_out_command(step: Step, transport: Transport, env: Mapping[str, str]) -> str:
    """Run a step's command on its host. Raises as `run_steps`."""
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


def run_steps(
    plan: Plan,
    transport: Transport,
    *,
    attempt: int = 1,
    secrets: Mapping[str, Secret] | None = None,
    record: Record | None = None,
    carry_out_one: CarryOut = carry_out_command,
) -> None:
    """Carry out the plan's steps in order; consecutive starts run on all hosts in parallel.

    A restart adds only the attempt's number, and a new token with which its nodes connect.

    Raises:
        SubmitFailed: a command could not be started or did not exit with 0; the message
            contains the command, its exit status and its stderr.
    """
    lock = threading.Lock()
    values = {PEER_TOKEN: Secret(PEER_TOKEN, tokens.token_hex(16)), **(secrets or {})}

    def carry_out(step: Step) -> None:
        env = {**step.env, "CLUSTERKIT_ATTEMPT": str(attempt)}
        if step.kind == "start":
            # From its start, `agent.processes_of` finds it as a process of the run.
            env["CLUSTERKIT_RUN_DIR"] = plan.run_dir
        try:
            env |= {name: values[name].reveal() for name in step.secrets}
            outcome = carry_out_one(step, transport, env)
        except ClusterkitError as error:
            outcome = error.message
            raise
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            with lock:
                if record is not None:
                    record(step, outcome)

    def carry_out_all(steps: Iterable[Step]) -> None:
        for step in steps:
            carry_out(step)

    def carry_out_by_host(steps: Iterable[Step]) -> None:
        by_host: dict[str, list[Step]] = {}
        for step in steps:
            by_host.setdefault(step.host, []).append(step)
        in_order(fan_out(list(by_host), lambda host: carry_out_all(by_host[host])))

    for kind, steps in itertools.groupby(plan.steps, lambda step: step.kind):
        (carry_out_by_host if kind == "start" else carry_out_all)(steps)
