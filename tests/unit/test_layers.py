"""The shape of the house: who imports whom, and what only some may do."""

import ast
import functools
import graphlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from clusterkit import backends

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clusterkit"

LAYERS = """
agent errors
files shell
spec batch
cluster rendezvous
hosts jobfile
plan transport
program execute run
estimate convert bench output sync
assemble doctor
backends
lifecycle
ui
web
api
cli
__main__
""".strip().splitlines()
"""Packages, and modules at the top, each imports only from the lines above its own."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
ORCHESTRATOR = [name for name in MODULES if not name.startswith("clusterkit.runtime")]


def part(name: str) -> str:
    """The package of a module, or the module at the top."""
    return name.split(".")[1] if "." in name else ""


@functools.cache
def nodes(name: str) -> list[ast.AST]:
    """Of a module's text, the module itself first."""
    return list(ast.walk(ast.parse(MODULES[name].read_text())))


@functools.cache
def imports(name: str) -> frozenset[str]:
    """Every module that a module imports, anywhere in its text, lazily or not."""
    found = set()
    for node in nodes(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.add(below if below in MODULES else str(node.module))
    return frozenset(found)


def test_packages_import_only_from_lower_layers():
    layer = {name: number for number, line in enumerate(LAYERS) for name in line.split()}
    assert layer.keys() == {part(name) for name in ORCHESTRATOR} - {""}
    for name in ORCHESTRATOR:
        if name == "clusterkit":
            continue  # its names are imported when they are used
        for other in imports(name) & MODULES.keys():
            if part(other) not in ("", part(name)):
                assert layer[part(other)] < layer[part(name)], f"{name} imports {other}"


def test_module_imports_form_no_cycle():
    graphlib.TopologicalSorter(
        {name: imports(name) & MODULES.keys() - {name, "clusterkit"} for name in MODULES}
    ).prepare()


def test_package_top_level_holds_at_most_14_modules():
    tops = {name for name, path in MODULES.items() if path.parent == PACKAGE}
    assert len(tops - {"clusterkit", "clusterkit.__main__"}) <= 14


def test_backend_modules_are_imported_only_by_same_backend():
    """The registry names them, and imports what is asked for."""
    for name in ORCHESTRATOR:
        own = name.split(".")[2:3]
        for other in imports(name):
            of = re.match(r"clusterkit\.backends\.(local|ssh|compose|kubernetes|slurm)\b", other)
            assert of is None or of[1] in own, f"{name} imports {other}"


def test_only_runtime_imports_torch_deepspeed_transformers_or_numpy():
    heavy = {"torch", "deepspeed", "transformers", "numpy"}
    for name in ORCHESTRATOR:
        assert not {other.split(".")[0] for other in imports(name)} & heavy, name


def test_runtime_imports_only_errors_from_orchestrator():
    """It runs inside the ranks, where neither a cluster nor a command line is."""
    for name in set(MODULES) - set(ORCHESTRATOR):
        ours = {other for other in imports(name) if other.startswith("clusterkit.")}
        outside = {other for other in ours if not other.startswith("clusterkit.runtime")}
        assert outside <= {"clusterkit.errors"}, name


LONG = {
    "clusterkit.runtime.bandwidth": "one file, which ranks run",
}
"""Modules of over 500 lines, with the reason."""


def test_modules_stay_below_line_limits():
    lines = {name: path.read_text().count("\n") for name, path in MODULES.items()}
    assert {name for name, count in lines.items() if count > 500} == LONG.keys()
    agent = {name: count for name, count in lines.items() if name.startswith("clusterkit.agent.")}
    assert {name for name, count in agent.items() if count > 300} == set()
    backends = {name: count for name, count in lines.items() if name.endswith(".backend")}
    assert len(backends) == 5
    assert {name for name, count in backends.items() if count > 250} == set()


AGENT = {name for name in MODULES if name.startswith("clusterkit.agent")}
SENT = {
    f"clusterkit.{name}"
    for name in ("hosts.host_probe", "sync.receiver", "backends.kubernetes.lost_pods")
}


def test_agent_and_modules_sent_to_nodes_import_only_standard_library():
    for name in AGENT | SENT:
        found = imports(name) - (AGENT if name in AGENT else set())
        assert {module.split(".")[0] for module in found} <= sys.stdlib_module_names, name


def test_no_module_outside_backends_branches_on_backend():
    """No ``if backend == "slurm"``: what differs between backends lives in their modules."""
    for name in ORCHESTRATOR:
        if part(name) != "backends":
            for node in nodes(name):
                assert not asks_for_a_backend(node), f"{MODULES[name]}:{node.lineno}"


def asks_for_a_backend(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        parts = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
        words = {part.value for part in parts if isinstance(part, ast.Constant)}
        about = {part.attr for part in parts if isinstance(part, ast.Attribute)}
        about |= {part.id for part in parts if isinstance(part, ast.Name)}
        return bool(words & set(backends.NAMES)) and "backend" in about
    if isinstance(node, ast.Match):
        parts = [part for case in node.cases for part in ast.walk(case.pattern)]
        words = {part.value for part in parts if isinstance(part, ast.Constant)}
        return bool(words & set(backends.NAMES))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
        return re.search(r"\w+Backend\b", ast.unparse(node.args[1])) is not None
    return False


def test_only_shell_module_uses_shlex_shell_true_or_os_system():
    for name in ORCHESTRATOR:
        if name != "clusterkit.shell":
            text = MODULES[name].read_text()
            assert "shlex" not in imports(name), name
            assert "shell=True" not in text, name
            assert "os.system(" not in text, name


def test_every_module_has_docstring():
    for name in MODULES:
        assert ast.get_docstring(nodes(name)[0]), name


def test_no_code_mentions_pkill_or_killall():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "jobs").rglob("*.py")]:
        assert not re.search(r"\b(pkill|killall)\b", path.read_text()), path


# ---------------------------------------------------------------- documents

DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobs/**/*.md")]
    if ".venv" not in path.parts
)
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)[^)\n]*\)|!\[[^\]\n]*\]\(([^)\s]+)[^)\n]*\)")


def test_limits_module_assigns_each_limit_once():
    tree = ast.parse((PACKAGE / "agent" / "limits.py").read_text())
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def anchors(path: Path) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document_links_lead_to_existing_files_and_anchors(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{path}: {target}"


def test_checked_documents_include_readme():
    assert ROOT / "README.md" in DOCUMENTS
