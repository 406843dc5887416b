"""Our tables against the options that the installed launchers have."""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from clusterkit.jobfile import command
from clusterkit.jobfile.launcher_options import ACCELERATE, DEEPSPEED, LAUNCH, TORCHRUN


def options(package, file):
    """Options of a launcher's parser, and whether each takes a value; by its text alone."""
    spec = find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed")
    text = Path(spec.origin).with_name(file.partition("/")[0]).joinpath(file.partition("/")[2])
    found = {}
    for node in ast.walk(ast.parse(text.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            keys = {each.arg: ast.unparse(each.value) for each in node.keywords}
            flag = "store" in keys.get("action", "") or "check_env" in keys.get("action", "")
            for name in node.args:
                if isinstance(name, ast.Constant) and str(name.value).startswith("-"):
                    found[name.value[:2] + name.value[2:].replace("_", "-")] = not flag
    return found


@pytest.mark.parametrize(
    ("package", "file", "table"),
    [
        ("torch", "distributed/run.py", TORCHRUN),
        ("torch", "distributed/launch.py", LAUNCH),
        ("deepspeed", "launcher/runner.py", DEEPSPEED),
        ("accelerate", "commands/launch.py", ACCELERATE),
    ],
)
def test_installed_launcher_options_match_table_or_are_refused(package, file, table):
    there = options(package, file)
    assert there
    known = {*table.flags, *table.values, *table.short, "-h", "--help"}
    wrong = [name for name, takes in there.items() if takes and name in table.flags]
    wrong += [name for name, takes in there.items() if not takes and name in table.values]
    # torchrun's own actions take a value from the environment, and from the line.
    assert wrong == []
    for name in there.keys() - known:
        for words in ([name, "train.py"], [name, "x", "train.py"]):
            (used, *_), _ = command.options(table, words, package)
            assert used.meaning == f"!clusterkit does not know this option of {package}", name
