"""The playbook's files, and templates filled in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).parents[3]
ANSIBLE = CHECKOUT / "ansible"


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def role(name: str, *parts: str) -> Path:
    return ANSIBLE.joinpath("roles", name, *parts)


def defaults(name: str) -> dict[str, Any]:
    found: dict[str, Any] = load(role(name, "defaults", "main.yml"))
    return found


def tasks(path: Path) -> Iterator[dict[str, Any]]:
    """The tasks of a file, those within blocks too."""

    def flat(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for task in found:
            yield task
            for part in ("block", "rescue", "always"):
                yield from flat(task.get(part, []))

    yield from flat(load(path) or [])


def filled_in(
    name: str, names: list[str], hosts: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Variables of a role as Ansible fills them in on hosts with these `facts` and variables."""
    with tempfile.TemporaryDirectory(prefix="cku") as folder:
        # At the place of site.yml, whose folder roles know.
        (Path(folder) / "ansible").mkdir()
        for link in ("docker", "constraints.txt"):
            (Path(folder) / link).symlink_to(CHECKOUT / link)
        facts = {key: f"{{{{ facts.{key} }}}}" for each in hosts.values() for key in each["facts"]}
        wanted = f"{{{{ dict({names} | zip({names} | map('extract', vars))) }}}}"
        everyone = "{{ dict(groups.all | zip(hostvars.values() | map(attribute='found'))) }}"
        tasks = [
            {"set_fact": {"cacheable": True, "given": True} | facts},
            {"set_fact": {"found": wanted}},
            {"copy": {"dest": f"{folder}/found.json", "content": everyone}, "run_once": True},
        ]
        play = {"hosts": "all", "gather_facts": False, "tasks": tasks}
        (Path(folder) / "ansible/play.yml").write_text(json.dumps([play]))
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        inventory = {"all": {"hosts": hosts, "vars": defaults(name) | local}}
        (Path(folder) / "hosts.json").write_text(json.dumps(inventory))
        argv = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "hosts.json"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ANSIBLE_")}
        environment |= {"ANSIBLE_HOME": folder + "/home", "LC_ALL": "C.UTF-8"}
        done = subprocess.run(
            [*argv, "ansible/play.yml"], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, dict[str, Any]] = json.loads(Path(folder, "found.json").read_text())
        return found
