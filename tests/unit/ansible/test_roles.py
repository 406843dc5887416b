"""The playbook as text: roles whole, variables known."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, TemplateError, nodes

from clusterkit.backends.ssh.inventory import read_hosts
from tests.unit.ansible.playbook import ANSIBLE, CHECKOUT, defaults, filled_in, load, role, tasks

ROLES = sorted(path.name for path in (ANSIBLE / "roles").iterdir())
EXPRESSIONS = ("when", "that", "changed_when", "failed_when")
GIVEN = {
    "clusterkit_address",
    "clusterkit_cluster",
    "clusterkit_python",
    "cluster_packages",
    "cluster_source",
    "cluster_source_key",
    "cluster_source_name",
    "dict",
    "groups",
    "hostvars",
    "inventory_dir",
    "inventory_hostname",
    "item",
    "lookup",
    "omit",
    "playbook_dir",
}
"""What inventories, callers of packages.yml and source.yml and Ansible give, beside ansible_*."""


def files(name: str) -> list[Path]:
    """The tasks and handlers of a role."""
    return sorted(role(name).glob("tasks/*.yml")) + sorted(role(name).glob("handlers/*.yml"))


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in a document, with the key it stands under."""
    if isinstance(value, dict):
        for inner, below in value.items():
            yield from strings(below, inner)
    elif isinstance(value, list):
        for below in value:
            yield from strings(below, key)
    elif isinstance(value, str):
        yield key, value


def variables(text: str) -> set[str]:
    """The variables that a template reads."""
    # Ansible takes a backslash in a string for itself.
    names = list(Environment().parse(text.replace("\\", "\\\\")).find_all(nodes.Name))
    return {n.name for n in names if n.ctx == "load"} - {n.name for n in names if n.ctx == "store"}


@functools.cache
def used(name: str) -> set[str]:
    """The variables that a role reads, in its tasks, handlers, templates and defaults."""
    found: set[str] = set()
    for path in [*files(name), role(name, "defaults", "main.yml")]:
        for key, text in strings(load(path)):
            found |= variables("{{ " + text + " }}" if key in EXPRESSIONS else text)
    for path in role(name).glob("templates/*"):
        found |= variables(path.read_text())
    return found


def made(name: str) -> set[str]:
    """The variables that a role's own tasks set."""
    found: set[str] = set()
    for path in files(name):
        for step in tasks(path):
            found |= {step["register"]} if "register" in step else set()
            found |= set(step.get("vars", {})) | set(step.get("ansible.builtin.set_fact", {}))
    return found


@pytest.mark.parametrize("name", ROLES)
def test_every_role_has_tasks_and_description_but_no_readme(name: str) -> None:
    assert role(name, "tasks", "main.yml").is_file()
    about = load(role(name, "meta", "argument_specs.yml"))["argument_specs"]["main"]
    assert about["short_description"].endswith(".")
    assert not list(role(name).glob("README*"))
    assert all(key.startswith(f"{name}_") for key in defaults(name))


@pytest.mark.parametrize("name", ROLES)
def test_every_role_default_is_commented_and_used(name: str) -> None:
    text = role(name, "defaults", "main.yml").read_text().removeprefix("---\n")
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        assert paragraph.startswith("# "), paragraph
    everywhere = set().union(*(used(other) for other in ROLES))
    # site.yml reads the group before any role is there.
    assert set(defaults(name)) - {"cluster_group"} <= everywhere


@pytest.mark.parametrize("name", ROLES)
def test_every_role_default_matches_declared_type(name: str) -> None:
    types = load(role(name, "meta", "argument_specs.yml"))["argument_specs"]["main"]["options"]
    python = {"str": str, "int": int, "bool": bool, "float": float, "list": list, "dict": dict}
    assert list(types) == list(defaults(name))
    for key, value in defaults(name).items():
        # What is a template has its type only when it is filled in.
        if not (isinstance(value, str) and "{{" in value):
            assert type(value) is python[types[key]["type"]], key


@pytest.mark.parametrize("name", ROLES)
def test_every_role_variable_has_default_or_is_set_by_task(name: str) -> None:
    shared = set(defaults("cluster")) | made("cluster")
    known = GIVEN | shared | set(defaults(name)) | made(name)
    unknown = {v for v in used(name) - known if not v.startswith("ansible_")}
    assert unknown == set()


def test_playbook_runs_every_role_under_tag_with_role_name() -> None:
    listed = [entry for play in load(ANSIBLE / "site.yml") for entry in play.get("roles", [])]
    assert sorted(entry["role"] for entry in listed) == ROLES
    for entry in listed:
        tag = "always" if entry["role"] == "cluster" else entry["role"]
        assert tag in entry["tags"]
    # What is written last and what is run last, as the documentation says.
    assert [entry["role"] for entry in listed][-2:] == ["known_hosts", "preflight"]


def test_playbook_installs_driver_then_docker_then_container_toolkit() -> None:
    order = [
        entry["role"] for play in load(ANSIBLE / "site.yml") for entry in play.get("roles", [])
    ]
    assert order.index("nvidia_driver") < order.index("docker")
    assert order.index("docker") < order.index("nvidia_container_toolkit")


@pytest.mark.parametrize("name", ROLES)
def test_roles_use_only_ansible_core_modules_and_name_every_task(name: str) -> None:
    words = {"name", "when", "vars", "loop", "loop_control", "register", "changed_when", "notify"}
    words |= {"failed_when", "check_mode", "delegate_to", "connection", "become", "run_once"}
    words |= {"environment", "no_log", "block", "rescue", "always"}
    for path in files(name):
        for step in tasks(path):
            assert step["name"][0].isupper()
            modules = set(step) - words
            if "block" in step:
                assert modules == set()
            else:
                (module,) = modules
                assert module.startswith("ansible.builtin."), (path, module)


@pytest.mark.parametrize("name", ROLES)
def test_roles_touch_services_only_under_systemd(name: str) -> None:
    for path in files(name):
        for step in tasks(path):
            if "ansible.builtin.systemd_service" in step:
                assert "cluster_systemd" in step.get("when", ""), (path, step["name"])


def test_ansible_files_name_no_package_registry() -> None:
    for path in ANSIBLE.rglob("*"):
        if path.is_file():
            assert not re.search(r"https?://|ftp://", path.read_text()), path


def test_lab_file_sets_only_role_defaults() -> None:
    known = set().union(*(defaults(name) for name in ROLES))
    assert set(load(ANSIBLE / "lab.yml")) <= known


def test_read_hosts_parses_example_inventory() -> None:
    hosts = read_hosts(ANSIBLE / "inventory.yaml", "nodes")
    assert [(h.name, h.address, h.user, h.slots) for h in hosts] == [
        ("node-a", "192.0.2.11", "ubuntu", 8),
        ("node-b", "192.0.2.12", "ubuntu", 8),
    ]
    assert {h.python for h in hosts} == {"/opt/clusterkit/venv/bin/python"}
    # The file that the role known_hosts writes: beside the inventory.
    assert {h.known_hosts for h in hosts} == {str(ANSIBLE / "known_hosts")}
    assert defaults("known_hosts")["known_hosts_controller"] == "{{ inventory_dir }}/known_hosts"


def test_python_env_packages_are_pinned_in_constraints() -> None:
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (CHECKOUT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    host = filled_in(
        "python_env", ["python_env_torch", "python_env_packages"], {"h": {"facts": {}}}
    )["h"]
    assert host["python_env_torch"] == ["torch"]
    names = {name.lower() for name in host["python_env_packages"]}
    assert names <= pinned
    # What pyproject.toml says, from there.
    assert {"accelerate", "deepspeed", "transformers", "msgspec"} <= names
    assert not names & {"torch", "setuptools", "clusterkit"}


@pytest.mark.parametrize("path", sorted(ANSIBLE.rglob("*.j2")), ids=lambda path: path.name)
def test_templates_parse_and_name_clusterkit_role_as_writer(path: Path) -> None:
    text = path.read_text()
    try:
        Environment().parse(text)
    except TemplateError as error:
        pytest.fail(f"{path}: {error}")
    # hosts.j2 fills a block that has markers of its own.
    assert path.name == "hosts.j2" or text.startswith("# Written by clusterkit's role ")
