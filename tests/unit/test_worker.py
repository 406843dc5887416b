"""The agent's threads, which start again; and that no class of ours hides a name of its base."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import queue
import sys
import threading
from pathlib import Path

import pytest

from clusterkit.agent import limits
from clusterkit.agent.worker import Worker
from tests.agents import RUN, Nodes
from tests.unit.test_layers import MODULES, ORCHESTRATOR, nodes

WAIT = 60
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


@functools.cache
def class_texts(module: str) -> dict[str, ast.ClassDef]:
    """The classes that a module's text defines, by name; none if it is written in C."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None or not file.endswith(".py"):
        return {}
    every = ast.walk(ast.parse(Path(file).read_bytes()))
    return {node.name: node for node in every if isinstance(node, ast.ClassDef)}


@functools.cache
def own_names(cls: type) -> frozenset[str]:
    """The names that a class's own text gives to it and, by ``self``, to its instances."""
    text = class_texts(cls.__module__).get(cls.__name__)
    if text is None:
        return frozenset(vars(cls))
    found = {each.name for each in text.body if isinstance(each, FUNCTIONS)}
    for node in ast.walk(text):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    for each in text.body:
        targets = each.targets if isinstance(each, ast.Assign) else [getattr(each, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(name for name in found if not name.startswith("__"))


def hidden_names(cls: type) -> set[str]:
    """The names of classes that are not ours which a class hides: private ones, and those that are
    a method here and an attribute there, or the other way round."""
    ours = [
        each for each in cls.__mro__ if each.__module__.split(".")[0] in ("clusterkit", "tests")
    ]
    theirs = [each for each in cls.__mro__ if each not in ours and each is not object]
    mine = frozenset().union(*map(own_names, ours))
    found = set()
    for name in mine & frozenset().union(*map(own_names, theirs)):
        here, there = (
            callable(inspect.getattr_static(each, name, None)) for each in (cls, theirs[0])
        )
        if name.startswith("_") or here != there:
            found.add(name)
    return found


@functools.cache
def our_classes() -> frozenset[type]:
    """Of all modules but those that import torch."""
    modules = [importlib.import_module(name) for name in ORCHESTRATOR]
    return frozenset(
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ in ORCHESTRATOR
    )


def test_no_class_derives_from_thread() -> None:
    """Thread's private names differ from Python to Python."""
    assert Worker in our_classes()
    assert [each for each in our_classes() if issubclass(each, threading.Thread)] == []
    for name in MODULES:
        for node in nodes(name):
            bases = [ast.unparse(base) for base in getattr(node, "bases", ())]
            assert not {"Thread", "threading.Thread"} & set(bases), name


def test_no_class_hides_name_of_foreign_base_class() -> None:
    found = {each.__name__: hidden_names(each) for each in our_classes()}
    assert {name: hidden for name, hidden in found.items() if hidden} == {}


def test_hidden_names_finds_private_and_method_conflicts() -> None:
    class Watch(threading.Thread):
        def __init__(self) -> None:
            super().__init__()
            self._target = None  # private, of Thread

        def name(self) -> str:  # type: ignore[override]  # a method, and an attribute of Thread
            return ""

        def run(self) -> None:  # that is what it is for
            pass

    assert hidden_names(Watch) == {"_target", "name"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WORKER_PAUSE", 0.0)


def test_failed_worker_restarts_and_reports_each_error_once(
    quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: list[Exception] = [TypeError("one"), TypeError("one"), KeyError(2), OSError(3)]
    errors += [ValueError("not reported: too many")]

    def work() -> None:
        if errors:
            raise errors.pop(0)

    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    worker = Worker(work, "the watch", said.put)
    worker.start()
    worker.join(WAIT)
    assert not worker.is_alive()
    assert errors == []
    assert said.qsize() == limits.WORKER_REPORTS == 3
    first = said.get()
    assert first.startswith("TypeError: one (test_worker.py:")
    assert "): the watch failed on this node and is restarted; the ranks are not affected." in first
    assert [said.get().partition(" (")[0] for _ in range(2)] == ["KeyError: 2", "OSError: 3"]
    err = capsys.readouterr().err
    assert err.count("TypeError: one") == 1
    assert "too many" not in err


def test_worker_starts_only_once() -> None:
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()
    worker = Worker(lambda: calls.put(1), "it", print)
    for _ in range(2):
        worker.start()
        worker.join(WAIT)
    assert calls.qsize() == 1


BROKEN = """
failed, do = [], OWNER.NAME
def fail(self, *given):
    if not failed:
        failed.append(1)
        raise RuntimeError("broken by a test")
    return do(self, *given)
OWNER.NAME = fail
limits.WORKER_PAUSE = 0.0
"""


@pytest.mark.parametrize(
    ("module", "owner", "name", "what"),
    [
        ("watch", "Watch", "_receive", "detecting hangs and slow ranks"),
        ("usage", "Usage", "measure", "measuring CPU, memory and GPU usage"),
        ("client", "Client", "_connect", "the connection to node 0"),
        ("client", "Client", "_talk", "the connection to node 0"),
        ("coordinator", "Server", "_decide", "the coordination of all nodes"),
    ],
)
def test_run_survives_failed_agent_thread_and_remarks_on_error(
    tmp_path: Path, module: str, owner: str, name: str, what: str
) -> None:
    agents = Nodes(tmp_path)
    try:
        broken = f"from clusterkit.agent.{module} import {owner}\n{BROKEN}"
        broken = broken.replace("OWNER", owner).replace("NAME", name)
        agents.start(0, run=RUN.replace("sys.exit", f"{broken}\nsys.exit"), wait=0)
        agents.start(1, wait=0)
        agents.running(0, 1)
        agents.all_met(2)
        for node in range(2):
            agents.end(node, 0)
        assert [agents.agents[node].wait(WAIT) for node in range(2)] == [0, 0]
        (remark,) = agents.exit_of(0)["remarks"]
        assert remark.startswith("RuntimeError: broken by a test (<string>:")
        assert f"): {what} failed on this node and is restarted; " in remark
        assert remark in agents.log_of(0)
        assert agents.exit_of(1)["remarks"] == []
    finally:
        agents.close()
