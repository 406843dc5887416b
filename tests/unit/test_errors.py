"""Errors carry a message, a remedy and an exit code."""

import inspect

import pytest

from clusterkit import errors
from clusterkit.errors import BadInput, ClusterkitError, PortTaken, RunNotFound, Unavailable


def test_an_error_reads_as_its_message_and_its_hint_on_a_line_of_its_own():
    assert str(ClusterkitError("it broke", hint="mend it")) == "it broke\n  hint: mend it"


def test_an_error_without_a_hint_reads_as_its_message_alone():
    assert str(ClusterkitError("it broke")) == "it broke"


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ClusterkitError, 1),
        (BadInput, 2),
        (errors.CapabilityError, 2),
        (RunNotFound, 2),
        (Unavailable, 3),
        (errors.RunFolderError, 1),
        (errors.SubmitFailed, 1),
        (errors.RunFailed, 1),
    ],
)
def test_exit_codes_are_the_documented_ones(kind, code):
    assert kind("x").exit_code == code


def test_errors_are_also_the_builtin_ones_that_a_notebook_would_catch():
    assert issubclass(BadInput, ValueError)
    assert issubclass(RunNotFound, LookupError)


def test_a_taken_port_is_named_with_its_address_and_the_remedy():
    error = PortTaken(29500, "10.0.0.1")
    assert error.message == "port 29500 on 10.0.0.1 is in use"
    assert "leave `port` out" in (error.hint or "")


def test_every_error_class_has_a_root_and_a_docstring():
    found = [
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if kind.__module__ == errors.__name__
    ]
    assert len(found) >= 8
    for kind in found:
        assert issubclass(kind, ClusterkitError)
        assert kind.__doc__
