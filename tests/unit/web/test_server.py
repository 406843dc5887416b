"""The server of `clusterkit web`, asked through real sockets: who is answered, and with what."""

import contextlib
import http.client
import json
import re
import socket
import threading
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from clusterkit.errors import Unavailable
from clusterkit.run.folder import RunFolder
from clusterkit.run.status import NodeStatus, RunStatus, State
from clusterkit.web import page, prometheus
from clusterkit.web import server as servers
from clusterkit.web.server import Server

pytestmark = pytest.mark.usefixtures("no_gpus")
STAMP = "2026-11-21T20:11:58.12345"
HOSTILE = '<script>alert("x")</script></script><img src=x onerror=alert(1)>'
LOG = (
    f"{STAMP}0Z - launcher talk\n"
    f"{STAMP}1Z 0 {HOSTILE}\n"
    f'{STAMP}2Z 0 @clusterkit {{"event": "metrics", "step": 1, "loss": 2.5, '
    '"tokens_per_second": 1000.0}\n'
    f"{STAMP}3Z 1 \x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2Jgone\x07\n"
    f'{STAMP}4Z 0 @clusterkit {{"event": "metrics", "step": 2, "loss": 1.25}}\n'
)


def status(run, state=State.RUNNING, **fields):
    return RunStatus(
        run=run.id, job="demo", cluster="local", backend="local", state=state,
        nodes=(NodeStatus(node=0, host="localhost", state=state, hang=fields.pop("hang", None)),),
        started_at=100.0, **fields,
    )  # fmt: skip


@pytest.fixture
def run(unstarted_run, by_hand):
    """A run of two ranks that goes on."""
    run = unstarted_run("launcher: forkserver\ngpus_per_node: 2\n")
    by_hand(run).node(log=LOG)
    RunFolder(run.path).write_json("state.json", status(run))
    return run


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Answer:
    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    @property
    def json(self):
        return json.loads(self.body)


def ask(server, path, method="GET", *, token="", host=None, **headers):
    """Ask as a program would that has the token, unless ``token`` is another."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name in [host] if isinstance(host, str) else host or ["127.0.0.1"]:
        connection.putheader("Host", name)
    if token is not None:
        connection.putheader("Authorization", f"Bearer {token or server.token}")
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    try:
        return Answer(connection.getresponse())
    finally:
        connection.close()


# ---------------------------------------------------------------- who is answered

EVERY_PATH = [
    ("GET", "/"), ("GET", "/metrics"), ("GET", "/report.html"), ("GET", "/api/runs"),
    ("GET", "/api/news"), ("GET", "/api/runs/demo"), ("GET", "/api/runs/demo/log"),
    ("GET", "/api/runs/demo/line"), ("GET", "/api/runs/demo/series"),
    ("GET", "/api/runs/demo/plan"), ("POST", "/api/runs/demo/cancel"), ("GET", "/nothing"),
]  # fmt: skip


def test_every_route_is_in_every_path_list():
    assert {
        (method, pattern.pattern.replace(servers._RUN, "/api/runs/demo"))
        for method, pattern, _ in servers._ROUTES
    } == {*EVERY_PATH} - {("GET", "/nothing")}


def test_request_without_token_gets_only_empty_page(server):
    assert ask(server, "/", token=None).body == page.render()
    for method, path in EVERY_PATH:
        if (method, path) == ("GET", "/"):
            continue
        for token in (None, "wrong", "ä", server.token[:-1], server.token + "x"):
            answer = ask(server, path, method, token=token)
            assert answer.status == 401, (path, token)
            assert "token" in answer.json["error"]


def test_server_accepts_token_in_url_or_header(server):
    assert server.url.endswith(f"/?token={server.token}")
    assert ask(server, f"/api/runs?token={server.token}", token=None).status == 200
    assert ask(server, "/api/runs").status == 200
    assert len(server.token) > 40


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "a b", "[::1",
             "::1:x", "127.0.0.1.evil.example", ["127.0.0.1", "evil.example"]],
)  # fmt: skip
def test_server_refuses_foreign_host_header(server, host):
    for method, path in EVERY_PATH:
        assert ask(server, path, method, host=host).status == 403


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1:99", "LOCALHOST:1", "[::1]:8000", "10.0.0.7"]
)
def test_server_accepts_localhost_and_ip_host_headers(server, host):
    assert ask(server, "/api/runs", host=host).status == 200


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "https://127.0.0.1"},
     {"Origin": "http://127.0.0.1:1"}, {"Sec_Fetch_Site": "cross-site"},
     {"Sec_Fetch_Site": "same-site"}],
)  # fmt: skip
def test_server_refuses_cross_origin_request_with_token(server, headers):
    for method, path in EVERY_PATH:
        answer = ask(server, path, method, **headers)
        assert answer.status == 403
        assert answer.json["error"] == "cross-origin request refused"
        assert "Access-Control-Allow-Origin" not in answer.headers


def test_server_accepts_same_origin_request(server):
    own = {"Origin": "http://127.0.0.1", "Sec_Fetch_Site": "same-origin"}
    assert ask(server, "/api/runs", **own).status == 200


def test_cancel_requires_post_and_token_in_header(server, run, monkeypatch):
    cancelled = []
    monkeypatch.setattr(
        "clusterkit.lifecycle.control.cancel",
        lambda folder: cancelled.append(folder.run_id) or status_of_cancelled(folder.run_id),
    )
    path = f"/api/runs/{run.id}/cancel"
    assert ask(server, path, "GET").status == 405
    assert ask(server, f"{path}?token={server.token}", "POST", token=None).status == 401
    assert cancelled == []
    answer = ask(server, path, "POST")
    assert (answer.status, answer.json["state"], cancelled) == (200, "CANCELLED", [run.id])


def status_of_cancelled(run):
    return RunStatus(run=run, job="", cluster="", backend="", state=State.CANCELLED)


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/api/runs/..",
             "/api/runs/../../etc/passwd", "/api/runs/%2e%2e/plan", "/api/runs/{run}/../plan",
             "/api/runs/{run}/plan%00", "/api/runs/{run}/run.json", "/api/runs/{run}%2fplan",
             "/page.js", "/api/runs/", "/api/runs/last", "/api/runs/nothing", "/api/runs/d",
             "http://evil.example/api/runs", "/api/runs/{run}\\plan"],
)  # fmt: skip
def test_server_answers_404_to_file_and_traversal_paths(server, run, path):
    answer = ask(server, path.format(run=run.id))
    assert answer.status == 404
    assert b"root:" not in answer.body


@pytest.mark.parametrize(
    ("path", "status"),
    [("log?node=../../../../etc", 400), ("log?attempt=1e9", 400), ("series?from=x", 400),
     ("log?node=-1", 200), ("log?node=99999", 200), ("line?at=-5", 200), ("log?before=-1", 200),
     ("log?after=99999999", 200), ("series?points=-4&name=loss", 200)],
)  # fmt: skip
def test_query_accepts_out_of_range_numbers_and_refuses_other_text(server, run, path, status):
    answer = ask(server, f"/api/runs/{run.id}/{path}")
    assert answer.status == status
    assert "Traceback" not in answer.body.decode()


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X"])
def test_server_refuses_other_http_methods(server, method):
    assert ask(server, "/api/runs", method).status in (405, 501)


def test_server_refuses_chunked_oversized_or_negative_body(server):
    assert ask(server, "/api/runs", "GET", Content_Length="70000").status == 400
    assert ask(server, "/api/runs", "POST", Transfer_Encoding="chunked").status == 400
    assert ask(server, "/api/runs", "POST", Content_Length="-1").status == 400


def test_every_response_carries_security_headers(server):
    for path, token in [("/", ""), ("/api/runs", ""), ("/", None), ("/nothing", "")]:
        headers = ask(server, path, token=token).headers
        assert headers["Content-Security-Policy"].startswith(
            "default-src 'none'; script-src 'sha256-"
        )
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert "Set-Cookie" not in headers


def test_server_listens_on_loopback_by_default(server):
    assert server.server_address[0] == "127.0.0.1"


def test_server_reports_address_in_use_or_unavailable(server):
    with pytest.raises(
        Unavailable, match=r"--host 127\.0\.0\.1 --port \d+: Address already in use"
    ):
        Server("127.0.0.1", server.server_address[1])
    with pytest.raises(Unavailable, match=r"--host 192\.0\.2\.1"):
        Server("192.0.2.1", 0)


@pytest.fixture
def held(server):
    """As many connections as the server serves, each with what it has sent."""
    port = server.server_address[1]
    with contextlib.ExitStack() as stack:

        def hold(request):
            found = []
            for _ in range(servers._CONNECTIONS):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
                one.sendall(request)
                found.append(one)
            return found

        yield hold


def test_server_limits_connections_with_token(server, held):
    request = f"GET /api/runs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.token}"
    for one in held(f"{request}\r\n\r\n".encode()):
        assert one.recv(12) == b"HTTP/1.1 200"
    with socket.create_connection(server.server_address, 60) as one:
        assert one.recv(1) == b""


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_unauthenticated_connections_do_not_block_token_holder(server, held, sent, monkeypatch):
    monkeypatch.setattr(servers, "_UNKNOWN_SECONDS", 600.0)
    first, *_ = held(sent)
    assert ask(server, "/api/runs").status == 200
    with contextlib.suppress(ConnectionResetError):
        assert first.recv(1) == b""


def test_connection_without_token_is_closed_after_timeout(server, monkeypatch):
    monkeypatch.setattr(servers, "_UNKNOWN_SECONDS", 0.0)
    with socket.create_connection(server.server_address, 60) as one:
        one.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(1) == b""


@pytest.mark.parametrize(
    "path",
    ["http://[x/", "http://localhost/api/runs", "*"]
    + [f"/api/runs/{{run}}/{rest}" for rest in (
        "line?at=99999999999999999999", "line?at=-99999999999999999999", "log?before=1" + "0" * 30,
        "log?node=9" + "0" * 5000, "series?from=nan", "series?to=inf", "series?points=x")],
)  # fmt: skip
def test_server_refuses_malformed_paths_and_numbers(server, run, path, capfd):
    for token in (None, ""):
        answer = ask(server, path.format(run=run.id), token=token)
        refused = 401 if token is None else 400
        assert answer.status == (refused if "{run}" in path else 404), answer.json
    assert "Traceback" not in capfd.readouterr().err


# ---------------------------------------------------------------- with what


def test_page_is_one_self_contained_document(server):
    body = ask(server, "/").body.decode()
    assert len(body) < 100_000 + 60_000  # the chart library has 60,000
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", body)
    assert "/* script */" not in body


def test_run_document_lists_state_metrics_and_ranks(server, run):
    document = ask(server, f"/api/runs/{run.id}").json
    assert (document["state"], document["step"], document["final"]) == ("RUNNING", 2, False)
    assert document["metrics"][0] == {"name": "loss", "last": 1.25}
    assert [(rank["rank"], rank["last"]) for rank in document["ranks"]] == [
        (None, "launcher talk"), (0, HOSTILE), (1, "red gone\\x07"),
    ]  # fmt: skip
    assert document["documents"]["job"]["gpus_per_node"] == 2
    assert ask(server, "/api/runs").json[0]["run"] == run.id
    assert f"plan {run.id}" in ask(server, f"/api/runs/{run.id}/plan").json["text"]


def test_run_document_names_missing_and_waiting_ranks_of_hang(server, run):
    hang = "rank 1 has not entered all_reduce #7, which rank 0 waits in; rank 1 is at a.py:3 in f()"
    RunFolder(run.path).write_json("state.json", status(run, hang=hang))
    told = ask(server, f"/api/runs/{run.id}").json
    assert told["standstill"] == {"text": hang, "missing": [1], "waiting": [0]}
    assert told["notes"] == []


def test_series_are_limited_to_step_range(server, run):
    path = f"/api/runs/{run.id}/series?name=loss&name=other"
    assert ask(server, path).json["series"] == {"loss": [[1, 2], [2.5, 1.25]]}
    assert ask(server, f"{path}&from=2").json["series"] == {"loss": [[1, 2], [2.5, 1.25]]}
    assert ask(server, f"{path}&to=0").json["series"] == {"loss": [[1], [2.5]]}


def test_log_endpoint_returns_plain_text_lines_and_filters(server, run):
    lines = ask(server, f"/api/runs/{run.id}/log").json["lines"]
    assert [line["text"] for line in lines] == [
        "launcher talk", HOSTILE, "step 1  loss 2.5  tokens_per_second 1000", "red gone\\x07",
        "step 2  loss 1.25",
    ]  # fmt: skip
    path = f"/api/runs/{run.id}/log?rank=1&search={quote('RED')}"
    assert [line["rank"] for line in ask(server, path).json["lines"]] == [1]


def test_news_counts_changes_of_run_list_and_runs(server, run, by_hand):
    path = f"/api/news?run={run.id}&run=gone-1"
    first = ask(server, path).json
    assert first["of"]["gone-1"] is None
    assert ask(server, path).json == first
    with (run.path / "attempts" / "1" / "node-0" / "log").open("a") as log:
        log.write(f'{STAMP}5Z 0 @clusterkit {{"event": "metrics", "step": 3, "loss": 1}}\n')
    then = ask(server, path).json
    assert then["of"][run.id]["metrics"] == first["of"][run.id]["metrics"] + 1
    assert then["of"][run.id].get("status") == first["of"][run.id].get("status")
    assert then["runs"] == first["runs"]
    RunFolder(run.path).write_json("state.json", status(run, State.SUCCEEDED))
    ask(server, "/api/runs")
    assert ask(server, path).json["runs"] == first["runs"] + 1


def test_news_response_has_content_length(server, run):
    # A browser opens six to a host: as many pages may be open and each must still be answered.
    answer = ask(server, f"/api/news?run={run.id}")
    assert int(answer.headers["Content-Length"]) == len(answer.body)


def test_report_embeds_all_data_of_page(server, run):
    answer = ask(server, f"/report.html?run={run.id}")
    assert answer.headers["Content-Disposition"] == f'attachment; filename="{run.id}.html"'
    body = answer.body.decode()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', body, re.DOTALL)[
        1
    ]
    answers = json.loads(data)["answers"]
    assert answers["/api/runs"][0]["run"] == run.id
    assert answers[f"/api/runs/{run.id}/series"]["series"]["loss"] == [[1, 2], [2.5, 1.25]]
    assert answers[f"/api/runs/{run.id}/log"]["0"][1]["text"] == HOSTILE
    # As written, nothing of it is markup; and the page in it asks nobody.
    assert "<" not in data
    assert server.token not in body
    assert "connect-src 'none'" in body


def test_report_of_unknown_run_is_refused(server):
    assert ask(server, "/report.html?run=nothing").status == 404
    assert ask(server, "/report.html").status == 404


def test_metrics_endpoint_exposes_active_runs(server, run):
    answer = ask(server, "/metrics")
    assert answer.headers["Content-Type"] == prometheus.CONTENT_TYPE
    found = {
        (sample.name, sample.labels.get("state")): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    assert found["clusterkit_metric_loss", None] == 1.25
    assert found["clusterkit_metric_step", None] == 2
    assert found["clusterkit_run_state", "RUNNING"] == 1
    assert found["clusterkit_run_state", "FAILED"] == 0
