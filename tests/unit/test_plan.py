"""A plan is data: it prints as text and as JSON, and comes back from JSON the same."""

import msgspec
import pytest

from clusterkit.plan import (
    ComposeNative,
    KubernetesNative,
    Note,
    Plan,
    PlanFile,
    Step,
)
from tests.conftest import noted


def plan(**fields):
    return Plan(
        **(
            {
                "run_id": "demo-1",
                "run_dir": "/home/u/runs/demo-1",
                "backend": "local",
                "summary": "one node",
                "nodes": 1,
                "world_size": 1,
            }
            | fields
        )
    )


WHOLE = plan(
    notes=(Note("port", "29501", "free when probed"), Note("", "be patient", "")),
    files=(
        PlanFile("/home/u/runs/demo-1/files/a b.sh", text="#!/bin/sh\necho 'ü'\n", mode=0o755),
        PlanFile("/home/u/runs/demo-1/files/agent.pyz", resource="agent.pyz"),
    ),
    steps=(
        Step(kind="run", host="h1", argv=("mkdir", "a b")),
        Step(kind="start", host="h1", node=0, argv=("sh", "x"), env={"A": "b c"}, secrets=("T",)),
    ),
    topology={"nodes": 1, "min_nodes": 1},
)


def test_plan_round_trips_through_json():
    assert msgspec.json.decode(WHOLE.to_json(), type=Plan) == WHOLE
    assert msgspec.json.decode(WHOLE.to_json(), type=Plan).to_json() == WHOLE.to_json()


@pytest.mark.parametrize(
    "native",
    [
        None,
        ComposeNative("unix:///run/docker.sock"),
        KubernetesNative(
            kubeconfig=None, context="c", namespace="n", name="demo-1", flavor="job", watched=True
        ),
    ],
)
def test_plan_with_native_backend_data_round_trips_through_json(native):
    whole = msgspec.structs.replace(WHOLE, native=native, device="cuda")
    assert msgspec.json.decode(whole.to_json(), type=Plan) == whole


def test_plan_json_without_newer_fields_is_read():
    document = msgspec.json.decode(WHOLE.to_json())
    del document["native"], document["device"]
    assert msgspec.json.decode(msgspec.json.encode(document), type=Plan) == WHOLE


def test_plan_json_does_not_depend_on_key_order():
    other = msgspec.structs.replace(WHOLE, topology={"min_nodes": 1, "nodes": 1})
    assert other.to_json() == WHOLE.to_json()


def test_incomplete_plan_json_is_refused():
    with pytest.raises(msgspec.ValidationError, match="missing required field"):
        msgspec.json.decode(b"{}", type=Plan)


def test_plan_text_shows_notes_files_and_steps():
    assert WHOLE.to_text() == (
        "plan demo-1: one node\n\n"
        "  port=29501 (free when probed)\n"
        "  be patient\n"
        "\nfile /home/u/runs/demo-1/files/a b.sh (mode 0755)\n"
        "  | #!/bin/sh\n"
        "  | echo 'ü'\n"
        "\nfile /home/u/runs/demo-1/files/agent.pyz (mode 0644)\n"
        "  | clusterkit's own agent.pyz, copied as installed\n"
        "\nsteps\n"
        "  1 run on h1: mkdir 'a b'\n"
        "  2 start on h1 node 0: T=<secret> A='b c' sh x\n"
    )


@pytest.mark.parametrize("between", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\r"])
def test_plan_text_keeps_unusual_line_separators_of_file(between):
    shown = plan(files=(PlanFile("/f", text=f"a{between}b\n"),)).to_text()
    assert f"  | a{between}b\n" in shown


def test_plan_file_content_is_utf8_text_or_packaged_resource():
    assert WHOLE.files[0].content() == "#!/bin/sh\necho 'ü'\n".encode()
    assert b"def stop(" in WHOLE.files[1].content()


def test_plan_note_is_found_by_name():
    assert noted(WHOLE, "port") == "29501"
    assert noted(WHOLE, "nothing") is None
