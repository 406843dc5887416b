"""SSH hosts out of containers: `make docker-lab HOSTS=2`, or python docker/lab.py up --hosts 2.

Writes .docker-lab/: inventory.yaml for clusterkit and Ansible, a key, known_hosts. `down` removes
the containers, their network and that folder. No root is needed, only an engine.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from common import ROOT, Problem, default_image, docker, require_engine, require_image, told

FILE = ROOT / "docker" / "lab.yaml"
FOLDER = ROOT / ".docker-lab"
PYTHON = "/opt/venv/bin/python"
ADDRESS = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("verb", choices=("up", "down"))
    parser.add_argument("--hosts", type=int, default=2, metavar="N")
    parser.add_argument("--image", help="default: clusterkit:gpu or clusterkit:cpu")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: .docker-lab")
    parser.add_argument("--project", default="clusterkit-lab", help="name of the compose project")
    options = parser.parse_args()
    require_engine(compose=True)
    if options.verb == "down":
        down(options.folder, options.project)
        return 0
    options.folder = options.folder.absolute()
    if not 1 <= options.hosts <= 64:
        raise Problem(f"--hosts {options.hosts}: a lab has 1 to 64 hosts", "--hosts 2")
    image = options.image or default_image()
    require_image(image)
    up(options.folder, options.project, image, options.hosts)
    return 0


def up(folder: Path, project: str, image: str, hosts: int) -> None:
    """Start the hosts, wait until their sshd answers, write down how to reach them."""
    folder.mkdir(parents=True, exist_ok=True)
    key = folder / "id_ed25519"
    if not key.exists():
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", project, "-f", str(key)]
        subprocess.run(words, check=True)
    public = key.with_suffix(".pub").read_text().strip()
    os.environ |= {"CLUSTERKIT_LAB_KEY": public, "CLUSTERKIT_IMAGE": image}
    docker(*_compose(project), "up", "--detach", "--wait", "--scale", f"host={hosts}")
    inventory: dict[str, object] = {}
    known = []
    for index in range(1, hosts + 1):
        name = f"{project}-host-{index}"
        address = docker(*_compose(project), "port", "--index", str(index), "host", "2222").strip()
        port = int(address.rpartition(":")[2])
        host_key = docker("exec", name, "cat", "/tmp/sshd-0/host_key.pub").split()
        # For mpirun, which goes from the first host to the others.
        save = "umask 077; cat >/root/.ssh/id_ed25519"
        docker("exec", "--interactive", name, "sh", "-c", save, stdin=key.read_text())
        known.append(f"[127.0.0.1]:{port} {host_key[0]} {host_key[1]}\n")
        # The others do not reach it where you do. Its name is one that they know.
        found = docker("inspect", "--format", ADDRESS, name).strip()
        inventory[name] = {"ansible_port": port, "clusterkit_address": found}
    (folder / "known_hosts").write_text("".join(known))
    # Quoted for ssh, which splits the value at spaces, and for whoever splits the options.
    known_hosts = shlex.quote(f'UserKnownHostsFile="{folder}/known_hosts"')
    shared = {
        "ansible_host": "127.0.0.1",
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(key),
        "ansible_ssh_common_args": f"-o {known_hosts}",
        "ansible_python_interpreter": PYTHON,
        "clusterkit_python": PYTHON,
    }
    # JSON is YAML, and needs no library.
    document = {"nodes": {"hosts": inventory, "vars": shared}}
    (folder / "inventory.yaml").write_text(json.dumps(document, indent=2) + "\n")
    print(f"{hosts} hosts in {folder / 'inventory.yaml'}; clusterkit doctor --cluster docker-lab")


def down(folder: Path, project: str) -> None:
    """Remove containers, network and folder; may be repeated."""
    os.environ.setdefault("CLUSTERKIT_LAB_KEY", "none")
    docker(*_compose(project), "down", "--timeout", "2")
    if (folder / "inventory.yaml").exists() or folder == FOLDER:
        shutil.rmtree(folder, ignore_errors=True)


def _compose(project: str) -> tuple[str, ...]:
    return ("compose", "--project-name", project, "--file", str(FILE))


if __name__ == "__main__":
    sys.exit(told(main))
