"""shell.py is the only place that quotes: what it writes, a real sh reads back unchanged."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterkit import shell
from clusterkit.shell import Concat, Secret, Var

# What an argument of a process can hold: everything but NUL, and no half surrogates.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=30)
DUMP = "import sys; sys.stdout.buffer.write('\\0'.join(sys.argv[1:]).encode())"


def words_that_sh_reads(line: str, env: dict[str, str] | None = None) -> list[str]:
    script = f'set -- {line}\nfor word do printf "%s\\0" "$word"; done'
    done = subprocess.run(
        ["sh"], input=script.encode(), env=env or {}, capture_output=True, check=True
    )
    assert done.stderr == b""
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=60)
@given(st.lists(TEXT, min_size=1, max_size=8))
def test_joined_words_are_read_back_unchanged_by_sh(words):
    assert words_that_sh_reads(shell.join(words)) == words


@settings(max_examples=60)
@given(st.dictionaries(st.from_regex(r"[A-Z]X[A-Za-z0-9_]{0,8}", fullmatch=True), TEXT, max_size=5))
def test_exports_give_exact_values_in_sh(env):
    names = " ".join(env)
    script = (
        shell.exports(env) + f'for n in {names}; do eval "printf %s\\\\\\\\0 \\"\\$$n\\""; done'
    )
    done = subprocess.run(["sh"], input=script.encode(), env={}, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == list(env.values())


def test_exported_values_reach_child_process_unchanged(ugly_values):
    script = shell.exports(ugly_values) + shell.join(
        [sys.executable, "-S", "-E", "-c", "import os, json; print(json.dumps(dict(os.environ)))"]
    )
    done = subprocess.run(
        ["sh"], input=script.encode(), env={"PYTHONUTF8": "1"}, capture_output=True, check=True
    )
    seen = json.loads(done.stdout)
    assert {name: seen[name] for name in ugly_values} == ugly_values


def test_var_is_expanded_by_sh_without_word_splitting():
    line = shell.join(["a", Var("B"), Concat(("n=", Var("B"), ";x y"))])
    assert words_that_sh_reads(line, {"B": "two  words *"}) == [
        "a",
        "two  words *",
        "n=two  words *;x y",
    ]


def test_text_resembling_variable_is_not_expanded():
    assert words_that_sh_reads(shell.join(["$B", "${B}", "`B`"]), {"B": "no"}) == [
        "$B",
        "${B}",
        "`B`",
    ]


@pytest.mark.parametrize("name", ["", "1A", "A B", "A-B", "A=B", "é", "A\n", "$A", "A;B"])
def test_invalid_variable_name_is_refused(name):
    assert not shell.is_name(name)
    with pytest.raises(ValueError, match="not a shell variable"):
        Var(name)
    with pytest.raises(ValueError, match="cannot be an environment variable"):
        shell.exports({name: "x"})


@pytest.mark.parametrize("name", ["A", "_", "a1", "NCCL_DEBUG", "_1"])
def test_valid_variable_name_is_accepted(name):
    assert shell.is_name(name)


def test_exported_value_with_nul_is_refused():
    with pytest.raises(ValueError, match="cannot be an environment variable: A="):
        shell.exports({"A": "a\0b"})


def test_exports_keep_given_order():
    assert shell.exports({"B": "1", "A": "2"}) == "export B=1\nexport A=2\n"


def test_assignments_precede_quoted_command():
    assert shell.assignments({"A": "x y"}, ["run", "b c"]) == "A='x y' run 'b c'"
    assert shell.assignments({}, ["run"]) == "run"


def test_secret_is_masked_when_printed():
    secret = Secret("TOKEN", "hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]} {secret!s:>30}"
    assert str(secret) == "<secret TOKEN>"
    assert secret.reveal() == "hunter2"
