"""The shape of the house: who imports whom, and what only some may do."""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from clusterkit import backends

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "clusterkit"

LAYERS = """
agent.protocol agent.limits
agent.clock agent.files
agent.processes agent.signals agent.archive agent.connections agent.membership
agent.node_log agent.report agent.coordinator agent.peer
agent.eager agent.preload agent.rank agent.program agent.standby agent.forkserver
agent.server
agent.warm
agent.streams agent.client agent.spawn agent.fork
agent.launcher
agent.node
agent.__main__ agent
errors
files status marks deepspeed_table host_probe receiver
shell transport logs yaml_text estimate.mesh estimate.presets
mirror tracebacks yaml_file
spec diagnose
cluster command
batch rendezvous loader schema
plan request catalogue deepspeed_config
program runs
warm
deepspeed_probe estimate.units estimate.setup estimate.published
estimate.memory
estimate.models estimate.advice
estimate.jobs
estimate
project
assemble execute slow_links
bandwidth
doctor.driver doctor.meeting doctor.base
doctor.check doctor.report
doctor.bundle
doctor.checks.packages
doctor.checks.*
doctor.checks
doctor.hosts
doctor
backends.base
backends backends.nodes backends.ports backends.placing backends.probing
backends.local backends.ssh backends.compose backends.kubernetes
backends.ssh.config backends.ssh.filters backends.ssh.variables backends.compose.compose_file
backends.compose.engine
backends.kubernetes.text backends.kubernetes.watcher backends.kubernetes.connect
backends.kubernetes.nodes
backends.ssh.inventory backends.ssh.known_hosts
backends.ssh.connection
backends.ssh.transport
backends.*.probe backends.ssh.observe
backends.*.place
backends.compose.containers backends.kubernetes.pods
backends.kubernetes.flavors backends.kubernetes.judge
backends.kubernetes.apply backends.kubernetes.rights
backends.kubernetes.client backends.kubernetes.entry
backends.kubernetes.server
backends.kubernetes.remote_runs backends.kubernetes.records
backends.kubernetes.probe
doctor.kubernetes.base
doctor.kubernetes.checks.*
doctor.kubernetes.checks
doctor.kubernetes
backends.kubernetes.observe backends.kubernetes.guard
backends.kubernetes.run_files backends.kubernetes.pod_log
backends.kubernetes.place backends.kubernetes.monitor
backends.kubernetes.lease
backends.kubernetes.remove
backends.*.backend
supervise
run_state
run
launch
ui ui.words
ui.plots
api
ui.follow ui.sending
cli cli.common
cli.following
cli.*
__main__
""".strip().splitlines()
"""From the ground up; a module imports only from layers below its own."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
ORCHESTRATOR = [name for name in MODULES if not name.startswith("clusterkit.runtime")]


def layer(name: str) -> int | None:
    """The number of the line that names a module, by a pattern only if none names it whole."""
    if name == "clusterkit":
        return -1
    short = name.removeprefix("clusterkit.")
    fits = [
        (pattern != short, number)
        for number, patterns in enumerate(LAYERS)
        for pattern in patterns.split()
        if fnmatch(short, pattern)
    ]
    return min(fits)[1] if fits else None


def imports(name: str) -> set[str]:
    """Every module that a module imports, anywhere in its text, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                found.add(below if below in MODULES else str(node.module))
    return found


@pytest.mark.parametrize("name", ORCHESTRATOR)
def test_every_module_has_a_layer_and_imports_only_from_below_it(name):
    own = layer(name)
    assert own is not None, f"give {name} a place in LAYERS"
    for other in imports(name):
        if other.split(".")[0] == "clusterkit":
            below = layer(other)
            assert below is not None, f"{name} imports {other}, which has no layer"
            assert below < own, f"{name} imports {other}, which is not below it"


def test_every_layer_is_of_modules_that_exist():
    named = {f"clusterkit.{name}" for line in LAYERS for name in line.split() if "*" not in name}
    assert named <= set(MODULES)


@pytest.mark.parametrize("name", ORCHESTRATOR)
def test_what_serves_one_backend_is_used_by_that_one_alone(name):
    """But by its doctor; the registry names them, and imports what is asked for."""
    own = name.split(".")[2:3]
    for other in imports(name):
        of = re.match(r"clusterkit\.backends\.(local|ssh|compose|kubernetes)\b", other)
        assert of is None or of[1] in own, f"{name} imports {other}"


@pytest.mark.parametrize("name", ORCHESTRATOR)
def test_only_the_runtime_imports_torch(name):
    heavy = {"torch", "deepspeed", "transformers", "numpy"}
    assert not {other.split(".")[0] for other in imports(name)} & heavy


@pytest.mark.parametrize("name", [n for n in MODULES if n not in ORCHESTRATOR])
def test_the_runtime_needs_little_of_the_orchestrator(name):
    """It runs inside the ranks, where neither a cluster nor a command line is."""
    ours = {other for other in imports(name) if other.startswith("clusterkit.")}
    outside = {other for other in ours if not other.startswith("clusterkit.runtime")}
    assert outside <= {"clusterkit.errors"}


AGENT = {name for name in MODULES if name.startswith("clusterkit.agent")}
SENT = {f"clusterkit.{name}" for name in ("host_probe", "receiver", "backends.kubernetes.watcher")}


@pytest.mark.parametrize("name", sorted(AGENT | SENT))
def test_what_is_sent_to_a_node_imports_the_standard_library_alone(name):
    import sys

    found = imports(name) - (AGENT if name in AGENT else set())
    assert {module.split(".")[0] for module in found} <= sys.stdlib_module_names


@pytest.mark.parametrize("name", [n for n in ORCHESTRATOR if not n.startswith("clusterkit.back")])
def test_no_backend_is_asked_for_by_name_outside_backends(name):
    """No ``if backend == "slurm"``: what differs between backends lives in their modules."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
            words = {
                part.value
                for side in compared
                for part in ast.walk(side)
                if isinstance(part, ast.Constant)
            }
            about = {
                part.attr if isinstance(part, ast.Attribute) else part.id
                for side in compared
                for part in ast.walk(side)
                if isinstance(part, ast.Attribute | ast.Name)
            }
            named = words & set(backends.NAMES)
            assert not (named and "backend" in about), f"{MODULES[name]}:{node.lineno}"
        if isinstance(node, ast.Match):
            patterns = {
                part.value for case in node.cases for part in ast.walk(case.pattern)
                if isinstance(part, ast.Constant)
            }  # fmt: skip
            assert not patterns & set(backends.NAMES), f"{MODULES[name]}:{node.lineno}"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            classes = ast.unparse(node.args[1])
            assert not re.search(r"\w+Backend\b", classes), f"{MODULES[name]}:{node.lineno}"


@pytest.mark.parametrize("name", [n for n in ORCHESTRATOR if n != "clusterkit.shell"])
def test_only_shell_py_quotes_for_a_shell(name):
    assert "shlex" not in imports(name)
    text = MODULES[name].read_text()
    assert "shell=True" not in text
    assert "os.system(" not in text


@pytest.mark.parametrize("name", MODULES)
def test_every_module_says_what_it_is_for(name):
    assert ast.get_docstring(ast.parse(MODULES[name].read_text()))


def test_nothing_is_killed_by_name():
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "jobs").rglob("*.py")]:
        assert not re.search(r"\b(pkill|killall)\b", path.read_text()), path


# ---------------------------------------------------------------- documents

DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobs/**/*.md")]
    if ".venv" not in path.parts
)
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)[^)\n]*\)|!\[[^\]\n]*\]\(([^)\s]+)[^)\n]*\)")


def anchors(path: Path) -> set[str]:
    """Anchors as GitHub makes them from headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(path):
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


def test_there_is_a_document_to_check():
    assert ROOT / "README.md" in DOCUMENTS
