"""Errors carry a message, a remedy and an exit code."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterkit import errors
from clusterkit.cluster import CLUSTER_TYPES
from clusterkit.errors import BadInput, ClusterkitError, PortTaken, RunNotFound, Unavailable
from clusterkit.jobfile import values
from clusterkit.spec import JobSpec


def test_error_text_shows_message_and_hint_on_own_line():
    assert str(ClusterkitError("it broke", hint="mend it")) == "it broke\n  hint: mend it"


def test_error_text_without_hint_is_message_alone():
    assert str(ClusterkitError("it broke")) == "it broke"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ClusterkitError, 125),
        (BadInput, 125),
        (errors.CapabilityError, 125),
        (RunNotFound, 125),
        (Unavailable, 125),
        (errors.RunFolderError, 125),
        (errors.SubmitFailed, 125),
        (errors.RunFailed, 1),
    ],
)
def test_error_classes_have_documented_exit_codes(kind, code):
    assert kind("x").exit_code == code


def test_errors_are_subclasses_of_matching_builtins():
    assert issubclass(BadInput, ValueError)
    assert issubclass(RunNotFound, LookupError)


def test_taken_port_error_names_address_and_remedy():
    error = PortTaken(29500, "10.0.0.1")
    assert error.message == "port 29500 on 10.0.0.1 is in use"
    assert "leave `port` out" in (error.hint or "")


def test_every_error_class_has_root_and_docstring():
    found = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    ]
    assert len(found) >= 8
    for kind in found:
        assert issubclass(kind, ClusterkitError)
        assert kind.__doc__


ROOT = Path(errors.__file__).parent
NO_KEYS = {
    "bandwidth.py", "errors.py", "backends/ssh/hosts.py", "backends/ssh/inventory.py",
}  # fmt: skip
"""Their errors are about no file's keys; of an inventory's, the caller says whose they are."""


def unattributed() -> Iterator[str]:
    """Errors whose message begins with a key, and that do not say whose key that is."""
    jobs = set(values.fields_of(JobSpec))
    keys = jobs.union(*(values.fields_of(kind) for kind in CLUSTER_TYPES.values())) - {"backend"}
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[0] in ("runtime", "estimate", "doctor") or str(name) in NO_KEYS:
            continue
        tree = ast.parse(path.read_text())
        attributed = {
            inner
            for block in ast.walk(tree)
            if isinstance(block, ast.With) and "error_key(" in ast.unparse(block.items[0])
            for inner in ast.walk(block)
        }
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "BadInput" and call.args:
                text = ast.unparse(call.args[0]).lstrip("f").strip("'\"")
                said = {keyword.arg for keyword in call.keywords} & {"job", "cluster"}
                begins = re.match(r"([a-z_]+)[:.\[ ]", text)
                if begins and begins[1] in keys and not said and call not in attributed:
                    yield f"{name}:{call.lineno}: {text}"


def test_error_beginning_with_key_states_its_source():
    assert list(unattributed()) == []


@pytest.mark.parametrize("kind", [BadInput, errors.CapabilityError])
def test_error_knows_its_key_and_source(kind):
    error = kind("batch.micro: 0", job=("batch", "micro"))
    assert (error.key, error.source) == (("batch", "micro"), "job")
    error = kind("port: 7", "8", cluster="port")
    assert (error.key, error.source, error.hint) == (("port",), "cluster", "8")
    assert kind("no key").key == ()
    with (
        pytest.raises(kind) as raised,
        errors.error_key("cluster", "hosts"),
        errors.error_key("job", "x"),
    ):
        raise error
    assert raised.value.key == ("port",)
    with pytest.raises(kind) as raised, errors.error_key("cluster", "hosts"):
        raise kind("two alike")
    assert (raised.value.key, raised.value.source) == (("hosts",), "cluster")
