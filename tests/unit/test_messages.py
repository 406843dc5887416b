"""Messages begin with the field's own term and say one thing: by the source of all of them."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import clusterkit
from clusterkit import errors
from clusterkit.backends.compose.containers import Container
from clusterkit.backends.kubernetes import pod_status
from clusterkit.backends.slurm.queue import Job
from clusterkit.output import diagnose as diagnosis
from clusterkit.run.status import NodeStatus, RankExit, State

ROOT = Path(clusterkit.__file__).parent
ERRORS = {
    name
    for name, each in inspect.getmembers(errors, inspect.isclass)
    if issubclass(each, errors.ClusterkitError)
}
PRIVATE = re.compile(
    r"\b(stands? still|ha(s|ve) not come to|mends?|is none of|nobody|somebody|knows? no|thinks"
    r"|(is|are) wanted|wants|to be had|for want of|taken up|for ever|may not look"
    r"|(?<!there )is no(?! longer))\b"
)
"""Words that are no term of Kubernetes, PyTorch, Slurm, OpenSSH or the kernel."""
NAMES = r"CLUSTERKIT_|HTTP \{\}: |Slurm|Unauthorized: "
"""With which an error may begin, besides a key, a path, an option or a plain word."""
TERM = re.compile(
    r"exit code \d+|no exit code: |SIG\w+: |signal \d+: |OOMKilled: |\w+(\.\w+)*(Error|Exception): "
)
"""What a cause begins with: an exit code, a signal, an exception, Kubernetes' name of a kill."""


def text_of(node: ast.AST) -> str | None:
    """Return a string, with ``{}`` for the values in it; None: it is not one."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None else left + (right or "{}")
    return None


@functools.cache
def raised() -> list[tuple[str, str]]:
    """Return the place and the message of each error of `clusterkit.errors` that is made."""
    made = {
        path: [node for node in ast.walk(ast.parse(path.read_text()))
               if isinstance(node, ast.ClassDef) or (isinstance(node, ast.Call) and node.args)]
        for path in sorted(ROOT.rglob("*.py"))
    }  # fmt: skip
    subclasses = set(ERRORS)
    for _ in range(3):  # subclasses of subclasses
        subclasses |= {
            node.name
            for nodes in made.values()
            for node in nodes
            if isinstance(node, ast.ClassDef)
            and any(getattr(base, "id", "") in subclasses for base in node.bases)
        }
    found = set()
    for path, nodes in made.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in subclasses and (text := text_of(node.args[0])):
                found.add((f"{path.relative_to(ROOT)}:{node.lineno}", text))
    return sorted(found)


def test_search_finds_over_300_error_messages() -> None:
    assert len(raised()) > 300


@pytest.mark.parametrize(
    ("problem", "found"),
    [
        ("ends with a full stop", lambda text: text.rstrip().endswith((".", "!"))),
        ("is two sentences", lambda text: re.search(r"[a-z]{2}\. [A-Z]", text)),
        ("begins with a capital", lambda text: re.match(rf"(?!{NAMES})[A-Z]", text)),
        ("has words that are no term of the field", PRIVATE.search),
    ],
)  # fmt: skip
def test_no_error_message_has_style_problem(problem: str, found: Callable[[str], object]) -> None:
    assert [f"{place}: {text}" for place, text in raised() if found(text)] == [], problem


def test_no_message_in_any_module_has_words_outside_field_terms() -> None:
    """Also reasons, notes, findings and hints: each string that is not documentation."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] in ("jobs", "runtime"):
            continue
        tree = ast.parse(path.read_text())
        documentation = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
        } | {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
             for part in node.values}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in documentation:
                text = text_of(node) or ""
                if not text.startswith("#!") and PRIVATE.search(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text[:100]}")
    assert found == []


@pytest.mark.parametrize("rank", [0, None])
@pytest.mark.parametrize("oom_kills", [0, 1])
@pytest.mark.parametrize("code", [1, 127, 137, 139, -9, -11, -15, -10, -signal.SIGRTMIN - 1, -100])
def test_failure_cause_begins_with_exit_code_signal_or_exception(
    code: int, oom_kills: int, rank: int | None
) -> None:
    node = NodeStatus(
        node=0, host="h0", state=State.FAILED, exit_code=code if code > 0 else 128 - code
    )
    ends = [] if rank is None else [RankExit(0, rank, code, 1.0)]
    failure = diagnosis.diagnose([node], [], rank_exits=ends, oom_kills=oom_kills)
    assert TERM.match(failure.cause), failure.cause
    assert not failure.cause.endswith(".")


def test_failure_cause_without_evidence_begins_with_term() -> None:
    assert TERM.match(diagnosis.diagnose([], []).cause)


@pytest.mark.parametrize("exit_code", [1, 137, 143])
@pytest.mark.parametrize("oom", [False, True])
def test_container_failure_begins_with_term(exit_code: int, oom: bool) -> None:
    assert TERM.match(Container(state="exited", exit_code=exit_code, oom=oom).failure())


def test_reasons_of_kubernetes_and_slurm_begin_with_their_own_term() -> None:
    assert pod_status.NOT_READY.startswith("NotReady: ")
    for state in ("TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "SOMETHING_NEW"):
        assert Job(id=7, slurm_state=state).ending.startswith(f"{state}: ")
    for reason in ("Priority", "Resources", "QOSMaxCpuPerUserLimit", "SomethingNew"):
        job = Job(id=7, slurm_state="PENDING", reason=reason)
        assert re.match(rf"{reason}(: | \(job 7\)\Z)", job.waiting)
