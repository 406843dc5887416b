"""Requests, credentials and certificates of an API server; logs."""

import base64
import json
import re
import socket
import ssl
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

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
from clusterkit.backends.kubernetes.connect import Connection, connect
from clusterkit.backends.kubernetes.pod import Pod
from clusterkit.backends.kubernetes.pod_log import LogWriter
from clusterkit.errors import BadInput, Unavailable
from clusterkit.run.folder import RunFolder


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
