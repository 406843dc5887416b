"""What a run of pods is made of: its manifests and its files, which `kubectl apply` sends. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from clusterkit.assemble import Assembly, Placement
from clusterkit.backends.kubernetes.apply import KUSTOMIZATION
from clusterkit.backends.kubernetes.flavors import FLAVORS
from clusterkit.backends.kubernetes.guard import PROGRAM, RULES, guard, rules_of, rules_text
from clusterkit.backends.kubernetes.pods import MANAGER, PROJECT, Shape
from clusterkit.backends.kubernetes.remote_runs import RECORD, Record
from clusterkit.backends.kubernetes.server import HOST, flags
from clusterkit.backends.kubernetes.text import Object
from clusterkit.plan import KubernetesNative, PlanFile, Step
from clusterkit.shell import quote
from clusterkit.yaml_text import documents

MANIFESTS = "manifests.yaml"
NAME_SECONDS = 120
"""How long a pod waits for the name of another to resolve."""
_PET = (
    "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_MAX_RESTARTS", "PET_NNODES", "PET_NODE_RANK",
    "PET_NPROC_PER_NODE", "PET_RDZV_BACKEND", "PET_RDZV_CONF", "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID", "PET_STANDALONE",
)  # fmt: skip
"""Variables of the operators that torchrun would take for its own options."""


@dataclass(frozen=True, kw_only=True)
class KubernetesPlacement(Placement):
    """Nodes that are the pods of one job.

    Attributes:
        shape: what the manifests are made of, but for the secrets.
        native: as the plan has it.
        record: for `clusterkit attach` from another machine.
        local: the run's folder on this machine.
        own_program: the program, where it lies in clusterkit's own package.
    """

    shape: Shape
    native: KubernetesNative
    record: Record
    local: str
    own_program: str | None

    def files(self, assembly: Assembly) -> tuple[PlanFile, ...]:
        shape, native = self.shape, self.native
        shape = dataclasses.replace(shape, secrets=assembly.secrets)
        flavor = FLAVORS[native.flavor]
        objects = flavor.render(shape)
        mpi = self.starter == "mpirun"
        waits = shape.nodes > 1 and self.forked is None
        files = [self._file(posixpath.basename(each.path), each) for each in assembly.files]
        script = _pod_script(
            self.names if mpi else self.names[:1] if waits else (),
            assembly.command,
            needed=self.job.started_by != "forkserver",
            unpack=shape.unpack,
        )
        files.append(self._file("pod.sh", PlanFile("", text=script, mode=0o755)))
        if native.watched:
            rules = rules_of(shape, flavor, objects, self.job, self.launchers)
            objects = [*guard(shape, flavor, objects, self.places.python), *objects]
            program = PlanFile("", resource="backends/kubernetes/watcher.py")
            files.append(self._file(PROGRAM, program))
            files.append(self._file(RULES, PlanFile("", text=rules_text(rules))))
        if (own := self.own_program) is not None:
            files.append(self._file(posixpath.basename(own), PlanFile("", resource=own)))
        files.append(self._file(RECORD, PlanFile("", text=self.record.text())))
        head = f"run {self.endpoint.run_id}: {self.topology}\n"
        head += "by hand: kubectl apply --server-side --kustomize ."
        names = [posixpath.basename(file.path) for file in files]
        return (
            *files,
            self._file(MANIFESTS, PlanFile("", text=documents(objects, head))),
            self._file(KUSTOMIZATION, PlanFile("", text=documents([_kustomization(shape, names)]))),
        )

    def _file(self, name: str, file: PlanFile) -> PlanFile:
        """A pod's file, where it is kept on this machine."""
        return msgspec.structs.replace(file, path=posixpath.join(self.local, "files", name))

    def steps(self, assembly: Assembly) -> tuple[Step, ...]:
        files, native = posixpath.join(self.local, "files"), self.native
        # Makes one file of the working tree's copy.
        pack = (
            "tar", "--create", "--gzip", "--file", posixpath.join(files, PROJECT),
            "--directory", posixpath.join(files, "project"), ".",
        )  # fmt: skip
        apply = (
            "kubectl", *flags(native.kubeconfig, native.context, native.namespace), "apply",
            "--server-side", "--field-manager", MANAGER, "--kustomize", files,
        )  # fmt: skip
        packing = [Step(kind="run", host=HOST, argv=pack)] if self.shape.copied else []
        return (*packing, Step(kind="run", host=HOST, argv=apply, secrets=assembly.secrets))


def _pod_script(names: Sequence[str], command: Sequence[str], *, needed: bool, unpack: str) -> str:
    """What a pod starts with.

    Args:
        names: of other pods, to wait for; the fork server does that itself, after its imports.
        needed: a launcher cannot do without; a program may, and the other pod may have ended.
        unpack: lines that unpack the project.
    """
    seconds = NAME_SECONDS if needed else NAME_SECONDS // 10
    message = f"the name $1 did not resolve within {seconds} s"
    if needed:
        give_up = f'            echo "{message}" | tee /dev/termination-log\n            exit 69\n'
    else:
        give_up = f'            echo "{message}; going on without it"\n            return\n'
    waits = "".join(f"await {quote(name)}\n" for name in names)
    function = (
        "await() {\n"
        "    tries=0\n"
        '    until getent hosts "$1" >/dev/null; do\n'
        "        tries=$((tries + 1))\n"
        '        if [ "$tries" = 25 ]; then echo "waiting for the name $1 to resolve"; fi\n'
        f'        if [ "$tries" = {seconds * 5} ]; then\n{give_up}        fi\n'
        "        sleep 0.2\n"
        "    done\n"
        "}\n"
    )
    waiting = ", waits until the others can\n# be found by name" if names else ""
    return (
        "#!/bin/sh\n"
        f"# what a pod runs: forgets what the operator tells torchrun{waiting}, becomes the node\n"
        "trap 'exit 143' TERM\n"
        f"unset {' '.join(_PET)}\n"
        f"{unpack}{function + waits if names else ''}"
        f"exec {' '.join(quote(word) for word in command)}\n"
    )


def _kustomization(shape: Shape, files: list[str]) -> Object:
    maps = [{"name": shape.name, "files": files}]
    if shape.copied:
        maps.append({"name": shape.code, "files": [PROJECT]})
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": shape.namespace,
        "resources": [MANIFESTS],
        "configMapGenerator": maps,
        "generatorOptions": {"disableNameSuffixHash": True, "labels": dict(shape.labels)},
    }
