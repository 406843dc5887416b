"""The API server as a small server of HTTP plays it: what is sent, and what its answers become."""

import base64
import json
import re
import socket
import ssl
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from clusterkit.backends.kubernetes import api_server
from clusterkit.backends.kubernetes.api_server import (
    Conflict,
    Context,
    Forbidden,
    KubeTransport,
    NotFound,
    Refusal,
    Server,
    Unreachable,
)
from clusterkit.backends.kubernetes.apply import (
    Creation,
    all_objects,
    creation_steps,
)
from clusterkit.backends.kubernetes.connect import Connection, connect
from clusterkit.backends.kubernetes.pod import Pod
from clusterkit.backends.kubernetes.pod_log import LogWriter
from clusterkit.errors import BadInput, SubmitFailed, Unavailable
from clusterkit.plan import KubernetesNative, PlanFile
from clusterkit.run.folder import OWNS_CLUSTER_OBJECTS, RunFolder


class Answers(ThreadingHTTPServer):
    """Takes every object and keeps what was asked."""

    request_queue_size = 64  # all come at once

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        self.answers = {}
        self.together = self.retry_after = None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def _answer(self):
        if self.server.together is not None:
            self.server.together.wait(30)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        self.server.asked.append((self.command, self.path, body, dict(self.headers)))
        status, answer = self.server.answers.get(
            self.path.partition("?")[0], (200, {"metadata": {"name": "n", "uid": "the-uid"}})
        )
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
            status, answer = answer
        if status == 200 and body and "apply-patch" in self.headers["Content-Type"]:
            sent = yaml.safe_load(body)
            answer = sent | {"metadata": sent["metadata"] | {"uid": "the-uid"}}
        data = json.dumps(answer).encode()
        self.send_response(status)
        if status == 429 and self.server.retry_after:
            self.send_header("Retry-After", self.server.retry_after)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PATCH = do_DELETE = do_POST = _answer


@pytest.fixture
def server():
    found = Answers()
    yield found
    found.shutdown()
    found.server_close()


@pytest.fixture
def config(server, tmp_path):
    document = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [
            {"name": "k", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "users": [{"name": "u", "user": {"token": "t0ken"}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
    }  # fmt: skip
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(document))
    return str(file)


@pytest.fixture
def transport():
    found = KubeTransport()
    yield found
    found.close()


@pytest.fixture
def applied(transport, config):
    """Carry out the steps that create the objects of a folder."""
    native = KubernetesNative(
        kubeconfig=config, context="c", namespace="ns", name="r-1", flavor="job", watched=False
    )

    def run(files, **secrets):
        attempt = secrets.pop("attempt", "1")
        plan = SimpleNamespace(native=native, run_id="r-1", files=files, trees=[])
        creation = Creation(plan, transport)
        for step in creation_steps(all_objects(plan), "ns", tuple(secrets)):
            creation(step, transport, {"CLUSTERKIT_ATTEMPT": attempt, **secrets})

    return run


class File(PlanFile):
    """One that is not text."""

    def content(self):
        return b"\xff\0"


def folder(tmp_path, *objects, ours=True):
    main = {
        "resources": ["manifests.yaml"],
        "configMapGenerator": [{"name": "r-1", "files": ["a.sh", "b.bin"]}],
        "generatorOptions": {"labels": {"clusterkit/run": "r-1", "clusterkit/attempt": "1"}},
    }
    run = tmp_path / "run"
    run.mkdir()
    if ours:
        (run / OWNS_CLUSTER_OBJECTS).touch()
    texts = {
        "a.sh": "echo 🚀 \u2028 $(HOME)\n", "kustomization.yaml": yaml.safe_dump(main),
        "manifests.yaml": yaml.safe_dump_all(objects),
    }  # fmt: skip
    files = [PlanFile(f"{run}/files/{name}", text=text) for name, text in texts.items()]
    return [*files, File(f"{run}/files/b.bin")]


JOB = {
    "apiVersion": "batch/v1", "kind": "Job",
    "metadata": {"name": "r-1", "labels": {"clusterkit/attempt": "1"}},
    "spec": {"template": {"metadata": {"labels": {"clusterkit/attempt": "1"}}}},
}  # fmt: skip


def test_apply_sends_configmap_then_job_and_sets_owner_reference(server, applied, tmp_path):
    applied(folder(tmp_path, JOB))
    first, second, third = server.asked
    assert first[:2] == (
        "PATCH",
        "/api/v1/namespaces/ns/configmaps/r-1?fieldManager=clusterkit&force=true"
        "&fieldValidation=Strict",
    )
    sent = yaml.safe_load(first[2])
    assert sent["data"] == {"a.sh": "echo 🚀 \u2028 $(HOME)\n"}
    assert base64.b64decode(sent["binaryData"]["b.bin"]) == b"\xff\0"
    assert second[1].startswith("/apis/batch/v1/namespaces/ns/jobs/r-1?")
    assert yaml.safe_load(second[2]) == JOB
    assert third[1] == "/api/v1/namespaces/ns/configmaps/r-1"
    assert json.loads(third[2])["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "r-1", "uid": "the-uid"}
    ]
    headers = {name.lower(): value for name, value in first[3].items()}
    assert headers["authorization"] == "Bearer t0ken"


def _body(asked):
    return yaml.safe_load(asked[2])


def test_apply_creates_run_job_last_as_owner_of_all_objects(server, applied, tmp_path):
    watcher = {**JOB, "metadata": {"name": "r-1-watch"}}
    applied(folder(tmp_path, watcher, JOB))
    names = [asked[1].partition("?")[0].rpartition("/")[2] for asked in server.asked]
    assert (sorted(names[:2]), names[2]) == (["r-1", "r-1-watch"], "r-1")
    assert (sorted(names[3:]), len(names)) == (["r-1", "r-1-watch"], 5)
    assert _body(server.asked[2])["kind"] == "Job"
    for asked in server.asked[3:]:
        (owner,) = _body(asked)["metadata"]["ownerReferences"]
        assert owner["name"] == "r-1"


def test_apply_retries_every_request_while_api_server_is_unreachable(
    server, applied, tmp_path, monkeypatch
):
    """Whether a run of this id is there was asked once: the run was FAILED."""
    real, away = KubeTransport.request, set()

    def request(self, to, method, path, *more):
        if (method, path) not in away:
            away.add((method, path))
            raise Unreachable("refused")
        return real(self, to, method, path, *more)

    monkeypatch.setattr(KubeTransport, "request", request)
    monkeypatch.setattr("clusterkit.backends.kubernetes.apply.time.sleep", lambda _: None)
    for place in ("api/v1/namespaces/ns/configmaps", "apis/batch/v1/namespaces/ns/jobs"):
        missing, there = (404, {"reason": "NotFound", "message": "no"}), (200, {})
        server.answers[f"/{place}/r-1"] = (200, [missing, there])
    applied(folder(tmp_path, JOB, ours=False))
    assert [method for method, *_ in server.asked] == ["GET", "GET", "PATCH", "PATCH", "PATCH"]
    assert len(away) == 5


def test_apply_takes_secrets_and_attempt_from_environment(server, applied, tmp_path):
    files = folder(tmp_path, JOB)
    applied(files, attempt="3", TOKEN="s3cret\n🚀")
    sent = {found["kind"]: found for found in map(_body, server.asked[:3])}
    secret, config, job = (sent[kind] for kind in ("Secret", "ConfigMap", "Job"))
    assert (secret["kind"], secret["stringData"]) == ("Secret", {"TOKEN": "s3cret\n🚀"})
    for each in (secret, config, job):
        assert each["metadata"]["labels"]["clusterkit/attempt"] == "3"
    assert job["spec"]["template"]["metadata"]["labels"] == {"clusterkit/attempt": "3"}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [
        "config", OWNS_CLUSTER_OBJECTS
    ]  # fmt: skip


def test_apply_retries_trainjob_until_trainer_knows_runtime(server, applied, tmp_path):
    train = JOB | {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    path = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ns/trainjobs/r-1"
    refusal = {"reason": "Forbidden", "message": "trainingRuntime must be created before"}
    server.answers[path] = (200, [(403, refusal), (200, {})])
    applied(folder(tmp_path, train))
    assert [asked[1].partition("?")[0] for asked in server.asked].count(path) == 2


def test_apply_fails_with_api_server_message(server, applied, tmp_path):
    words = 'pods is forbidden: violates PodSecurity "restricted:latest"'
    server.answers["/apis/batch/v1/namespaces/ns/jobs/r-1"] = (
        403, {"reason": "Forbidden", "message": words},
    )  # fmt: skip
    with pytest.raises(SubmitFailed) as error:
        applied(folder(tmp_path, JOB))
    assert error.value.message == f"Error from server (Forbidden): {words}"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/api/v1/namespaces/ns/configmaps/r-1", "ConfigMap"),
     ("/apis/batch/v1/namespaces/ns/jobs/r-1", "Job")],
)  # fmt: skip
def test_apply_refuses_run_id_of_existing_foreign_object(server, applied, tmp_path, path, kind):
    for place in ("configmaps", "jobs"):
        found = path.rpartition("/")[0].rpartition("/")[2] == place
        root = "/api/v1" if place == "configmaps" else "/apis/batch/v1"
        there = {"labels": {"clusterkit/user": "ann"}, "creationTimestamp": "2026-11-22T04:00:00Z"}
        missing = (404, {"reason": "NotFound", "message": "no"})
        server.answers[f"{root}/namespaces/ns/{place}/r-1"] = (
            (200, {"metadata": there}) if found else missing
        )
    words = f"another run has this id: {kind} r-1 in namespace ns, made by ann at 2026-11-"
    files = folder(tmp_path, JOB, ours=False)
    for _ in range(2):
        with pytest.raises(BadInput, match=words) as error:
            applied(files)
    assert "another --run-id" in error.value.hint
    assert {asked[0] for asked in server.asked} == {"GET"}


def test_apply_repeats_after_failed_creation_of_own_objects(server, applied, tmp_path):
    files = folder(tmp_path, JOB, ours=False)
    paths = ("/api/v1/namespaces/ns/configmaps/r-1", "/apis/batch/v1/namespaces/ns/jobs/r-1")
    for path in paths:
        server.answers[path] = (404, {"reason": "NotFound", "message": "no"})
    # Nothing is there, and the job cannot be made either.
    with pytest.raises(SubmitFailed):
        applied(files)
    server.answers.clear()
    applied(files)


@pytest.fixture
def api(config, transport):
    return Server(Context(config, "c"), "ns", transport)


@pytest.mark.parametrize(
    ("status", "answer", "kind", "reason", "said"),
    [
        (404, {"reason": "NotFound", "message": "no x"}, NotFound, "NotFound", "no x"),
        (409, {"reason": "Conflict", "message": "changed"}, Conflict, "Conflict", "changed"),
        (403, {"reason": "Forbidden", "message": "no"}, Forbidden, "Forbidden", "no"),
        (422, {"reason": "Invalid", "message": "spec"}, Refusal, "Invalid", "spec"),
        (429, {"reason": "TooManyRequests", "message": "x"}, Refusal, "TooManyRequests", "x"),
        (500, {"a": "b"}, Refusal, "500", ""),
        (502, ["not", "an", "object"], Refusal, "502", '["not", "an", "object"]'),
    ],
)
def test_request_raises_exception_with_server_reason(
    status, answer, kind, reason, said, server, api
):
    server.answers["/x"] = (status, [(status, answer)])
    for ask in (lambda: api.get("/x"), lambda: api.post("/x", {})):
        with pytest.raises(Refusal) as error:
            ask()
        assert (type(error.value), error.value.reason, error.value.detail) == (kind, reason, said)
    assert [asked[0] for asked in server.asked] == ["GET", "POST"]


def test_find_returns_none_and_delete_accepts_missing_object(server, api):
    server.answers["/x"] = (404, {"reason": "NotFound", "message": "no x"})
    assert api.find("/x") is None
    api.delete("/x?a=b")
    assert server.asked[-1][:2] == ("DELETE", "/x?a=b&propagationPolicy=Background")
    assert api.get("/y")


def test_40_concurrent_requests_log_no_warning(server, api, caplog):
    """urllib3 does of connections beyond those that it keeps."""
    server.together = threading.Barrier(40)
    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(api.get, ["/x"] * 40))
    assert caplog.records == []


def test_request_retries_too_many_requests_answer(server, api):
    """Its fairness queues answer so, before they look at the request; kubectl asks again, too."""
    busy = (429, {"reason": "TooManyRequests", "message": "x"})
    server.retry_after = "0"
    server.answers["/x"] = (200, [busy, busy, (200, {"a": 1})])
    assert api.patch("/x", {}, "application/merge-patch+json") == {"a": 1}
    server.answers["/x"] = busy
    with pytest.raises(Refusal, match="TooManyRequests"):
        api.get("/x")
    assert len(server.asked) == 3 + 5


def rewritten(file, **changes):
    """The kubeconfig with other keys of its cluster or its user."""
    document = yaml.safe_load(Path(file).read_text())
    cluster = document["clusters"][0]["cluster"] | changes.get("cluster", {})
    document["clusters"][0]["cluster"] = {k: v for k, v in cluster.items() if v is not None}
    document["users"][0]["user"] = changes.get("user", document["users"][0]["user"])
    Path(file).write_text(yaml.safe_dump(document))
    return file


def test_request_uses_kubeconfig_proxy_unless_no_proxy_matches(
    server, config, transport, monkeypatch
):
    proxy = f"http://127.0.0.1:{server.server_port}"
    rewritten(config, cluster={"server": "http://k8s.invalid:6443", "proxy-url": proxy})
    assert transport.request(Context(config, "c"), "GET", "/x")
    assert [asked[1] for asked in server.asked] == ["http://k8s.invalid:6443/x"]
    monkeypatch.setenv("no_proxy", "example.com,.invalid")
    with pytest.raises(Unreachable, match=r"k8s\.invalid:6443 does not answer"):
        KubeTransport().request(Context(config, "c"), "GET", "/x")
    assert len(server.asked) == 1


def test_exec_plugin_runs_again_when_token_has_expired(server, config, transport, tmp_path):
    plugin, count = tmp_path / "plugin", tmp_path / "count"
    plugin.write_text(
        f'#!/bin/sh\necho x >>{count}\nprintf \'{{"apiVersion": "client.authentication.k8s.io/v1", '
        '"kind": "ExecCredential", "status": {"expirationTimestamp": "2020-01-01T00:00:00Z", '
        f'"token": "token-%s"}}}}\' "$(grep -c x {count})"\n'
    )
    plugin.chmod(0o755)
    version = "client.authentication.k8s.io/v1"
    user = {"exec": {"apiVersion": version, "command": str(plugin), "interactiveMode": "Never"}}
    rewritten(config, user=user)
    for _ in range(2):
        transport.request(Context(config, "c"), "GET", "/x")
    assert [asked[3]["Authorization"] for asked in server.asked] == [
        "Bearer token-2", "Bearer token-3"
    ]  # fmt: skip


@pytest.fixture
def tls(server, tmp_path):
    """The server's certificate, which names it k8s.internal."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "k")]), datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("k8s.internal")])
    file = tmp_path / "server.pem"
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    certificate = signed.public_bytes(Encoding.PEM)
    file.write_bytes(
        certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return base64.b64encode(certificate).decode()


@pytest.mark.parametrize(
    ("cluster", "refusal"),
    [
        ({"tls-server-name": "k8s.internal"}, None),
        ({}, "certificate"),
        ({"certificate-authority-data": None, "tls-server-name": "k8s.internal"}, "certificate"),
    ],
    ids=["by-its-name", "another-name", "another-authority"],
)
def test_server_certificate_is_verified_by_kubeconfig(
    server, config, transport, tls, cluster, refusal
):
    address = f"https://127.0.0.1:{server.server_port}"
    rewritten(config, cluster={"server": address, "certificate-authority-data": tls, **cluster})
    if refusal is None:
        assert transport.request(Context(config, "c"), "GET", "/x")
    else:
        with pytest.raises(Unreachable, match=refusal):
            transport.request(Context(config, "c"), "GET", "/x")


def test_code_uses_only_public_names_of_kubernetes_client():
    """Its request classes changed twice within five releases; what reads kubeconfigs did not."""
    folder = Path(api_server.__file__).parent
    sources = {path.name: path.read_text() for path in folder.glob("*.py")}
    for internal in ("param_serialize", "pool_manager", "rest_client", "ApiClient", "call_api"):
        assert [name for name, text in sources.items() if internal in text] == []
    assert not any(
        re.search(r"\bconfig\.\w*\._|\bclient\.\w*\._", each) for each in sources.values()
    )


def test_rejected_credentials_raise_unavailable(server, api):
    server.answers["/x"] = (401, {"reason": "Unauthorized", "message": "Unauthorized"})
    with pytest.raises(Unavailable, match="does not accept your credentials"):
        api.get("/x")


def test_replaced_kubeconfig_token_is_read_again_after_401(server, api, config, monkeypatch):
    refused = (401, {"reason": "Unauthorized", "message": "Unauthorized"})
    server.answers["/x"] = (200, [refused, (200, {"a": 1}), refused, refused, (200, {"a": 1})])
    assert api.get("/y")
    file = Path(config)
    file.write_text(file.read_text().replace("t0ken", "newer"))
    assert api.get("/x") == {"a": 1}
    headers = [{k.lower(): v for k, v in asked[3].items()} for asked in server.asked]
    assert [each["authorization"] for each in headers] == [
        "Bearer t0ken", "Bearer t0ken", "Bearer newer",
    ]  # fmt: skip
    # Not at each request: an exec plugin may ask somebody.
    with pytest.raises(Unavailable, match="does not accept your credentials"):
        api.get("/x")
    monkeypatch.setattr(api_server, "RENEW_SECONDS", 0.0)
    api._transport._renew_at.clear()
    assert api.get("/x") == {"a": 1}
    # A file that is just being written changes nothing.
    file.write_text("{")
    server.answers["/x"] = refused
    with pytest.raises(Unavailable, match="does not accept your credentials"):
        api.get("/x")
    assert api.get("/y")


def test_connection_is_rebuilt_once_after_expired_client_certificate(
    tmp_path, with_keys, monkeypatch
):
    """It is refused in the handshake once it has expired."""
    asked = []
    plain = api_server.connect
    monkeypatch.setattr(api_server, "connect", lambda *to: asked.append(to) or plain(*to))

    def refused(*_):
        raise ssl.SSLError("tlsv13 alert certificate expired")

    monkeypatch.setattr(Connection, "send", refused)
    transport = KubeTransport()
    with pytest.raises(Unreachable, match="certificate expired"):
        transport.request(Context(with_keys, "c"), "GET", "/x")
    assert len(asked) == 2
    transport.close()


def test_connections_enable_tcp_keepalive(api, monkeypatch):
    made, real = [], socket.socket.setsockopt
    monkeypatch.setattr(
        socket.socket, "setsockopt", lambda self, *of: made.append(of) or real(self, *of)
    )
    api.get("/x")
    assert {(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)} <= set(made)  # fmt: skip


def test_request_to_unreachable_server_names_address(server, api):
    server.shutdown()
    server.server_close()
    with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:\d+ does not answer: .*refused"):
        api.get("/x")


def test_transport_runs_commands_on_local_machine(transport):
    assert transport.run("localhost", ["echo", "here"]).stdout == "here\n"


@pytest.mark.parametrize(
    ("text", "context", "words"),
    [
        (None, None, r"kubeconfig: there is no .*/config"),
        ("{broken: [", None, r"kubeconfig: .*config cannot be read: "),
        ("{}", None, r"kubeconfig: .*config"),
        ("just text", None, r"kubeconfig: .*config"),
        (
            '{"contexts": [], "current-context": "a"}',
            "other",
            r"context: .* no context 'other'|kube",
        ),
    ],
    ids=["missing", "broken", "empty", "text", "no-context"],
)
def test_unusable_kubeconfig_is_refused(text, context, words, tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text)
    with pytest.raises(BadInput, match=words):
        connect(str(file), context)


@pytest.fixture
def with_keys(tmp_path):
    """A kubeconfig whose user has a certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ada")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
        .sign(key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    user = {
        "client-certificate-data": base64.b64encode(certificate).decode(),
        "client-key-data": base64.b64encode(secret).decode(),
    }
    file = tmp_path / "config"
    file.write_text(json.dumps({
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": user}], "current-context": "c",
    }))  # fmt: skip
    return str(file)


def test_concurrent_connects_leave_no_key_on_disk(with_keys, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with ThreadPoolExecutor(8) as pool:
        clients = list(pool.map(lambda _: connect(with_keys, None), range(24)))
    assert all(each.host == "https://127.0.0.1:1" for each in clients)
    assert list(folder.iterdir()) == []


# ---------------------------------------------------------------- logs


def test_log_writer_resumes_without_repeating_lines(tmp_path):
    ours = [f"2026-11-22T04:00:0{n}.000000Z 0 line {n}" for n in range(6)]
    cri = [f"2026-11-22T04:00:0{n}.123456789Z {line}\n".encode() for n, line in enumerate(ours)]
    with lines_of(tmp_path) as first:
        assert first.since is None
        first.feed(b"".join(cri[:4]) + cri[4][:30])
    with lines_of(tmp_path) as again:
        assert again.since == "2026-11-22T04:00:03Z"
        again.feed(b"".join(cri[3:]))
    assert log_in(tmp_path).splitlines() == ours


def test_log_writer_drops_repeated_line_with_later_server_timestamp(tmp_path):
    ours = ["2026-11-22T04:00:00.999000Z 0 first", "2026-11-22T04:00:01.100000Z 0 second"]
    cri = b"".join(f"2026-11-22T04:00:01.2Z {line}\n".encode() for line in ours)
    for _ in range(2):
        with lines_of(tmp_path) as lines:
            lines.feed(cri)
    assert log_in(tmp_path).splitlines() == ours


def lines_of(folder):
    return LogWriter(RunFolder(folder), Pod(name="p", uid="u", node=0, phase="Running"))


def log_in(folder):
    return (folder / "attempts" / "1" / "node-0" / "log").read_text()


def test_log_writer_keeps_equal_lines_of_same_second(tmp_path):
    line = b"2026-11-22T04:00:00.5Z 2026-11-22T04:00:00.500000Z 0 same\n"
    with lines_of(tmp_path) as lines:
        lines.feed(line)
    with lines_of(tmp_path) as lines:
        lines.feed(line + line)
    assert log_in(tmp_path).count("same") == 2


def test_log_writer_stamps_foreign_line_with_server_time_and_no_rank(tmp_path):
    with lines_of(tmp_path) as lines:
        lines.feed(b"2026-11-22T04:00:00.123456789Z sh: not found\n")
        lines.feed(b"2026-11-22T04:00:00.5Z no newline")
        whole = "2026-11-22T04:00:00.123456Z - sh: not found\n"
        assert log_in(tmp_path) == whole
        lines.end()
    assert log_in(tmp_path) == whole + "2026-11-22T04:00:00.500000Z - no newline\n"
