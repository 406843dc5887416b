"""What tests of the command line share."""

from clusterkit.run.status import NodeStatus, RunStatus, State

STAMP = "2026-11-21T20:11:58.12345"
LOG = (
    f"{STAMP}0Z - launcher talk\n"
    f"{STAMP}1Z 0 hello\n"
    f'{STAMP}2Z 0 @clusterkit {{"event": "metrics", "step": 1, "loss": 2.5, '
    '"tokens_per_second": 1000.0, "step_seconds": 0.5}\n'
    f"{STAMP}3Z 1 from rank one\n"
    f'{STAMP}4Z 0 @clusterkit {{"event": "metrics", "step": 2, "loss": 1.25, '
    '"tokens_per_second": 2000.0, "step_seconds": 0.25}\n'
    f"{STAMP}5Z 0 cut o"
)
ANSWERS = ("ls", "status", "logs", "metrics", "cancel")
"""Verbs that answer a question."""


def final(run_id, state=State.SUCCEEDED, code=0, **fields):
    return RunStatus(
        run=run_id, job="demo", cluster="local", backend="local", state=state, exit_code=code,
        nodes=(NodeStatus(node=0, host="localhost", state=state, exit_code=code),),
        started_at=100.0, finished_at=160.0, **fields,
    )  # fmt: skip
