"""The page of `clusterkit web` in a real browser: what it shows, its keys, what it must not do."""

import http.server
import json
import threading
import time

import pytest

from clusterkit import api
from clusterkit.run.folder import Event, RunFolder
from clusterkit.run.status import Failure, NodeStatus, RunStatus, State
from tests import browser

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(browser.found() is None, reason="no chromium: apt-get install chromium"),
    pytest.mark.usefixtures("no_gpus"),
]
STAMP = "2026-11-21T20:11:58.12345"
HOSTILE = (
    "<script>document.title = 'owned'</script><img src=x onerror=alert(1)></span></script>",
    "\x1b[31mred\x1b[0m \x1b]0;owned\x07 \x1b[2J\u202egnp.exe",
    "<b>" + "x" * (1 << 20),
)
SIZES = [(1600, 1000), (800, 900), (390, 844)]
HANG = "rank 1 has not entered all_reduce #7, which ranks 0, 2 and 3 wait in; rank 1 is at a.py:3"


def metrics(step, loss):
    event = {"event": "metrics", "step": step, "loss": loss, "tokens_per_second": 1000.0 + step}
    return f"{STAMP}1Z 0 @clusterkit {json.dumps(event)}\n"


@pytest.fixture
def own_home(clusterkit_home):
    """The one that the facts of these runs name."""
    return clusterkit_home


@pytest.fixture
def make(unstarted_run, by_hand):
    """Runs of two nodes and four ranks, made by hand."""

    def run(name, micro, state=State.RUNNING, hang=None, started_at=1.7e9, **fields):
        batch = f"batch: {{micro: {micro}, global: 64}}\n"
        made = unstarted_run(
            f"launcher: forkserver\ngpus_per_node: 2\n{batch}", nodes=2, run_id=name
        )
        log = "".join(metrics(step, 5 / step) for step in range(1, 2001))
        log += "".join(f"{STAMP}2Z {rank} {text}\n" for rank, text in enumerate(HOSTILE[:2]))
        by_hand(made).node(0, log=f"{log}{STAMP}3Z 1 {HOSTILE[2]}\n{STAMP}3Z 0 the last line\n")
        by_hand(made).node(1, log=f"{STAMP}3Z 2 of node one\n")
        folder = RunFolder(made.path)
        nodes = tuple(
            NodeStatus(node=node, host=f"host{node}", state=state, hang=hang if node == 0 else None)
            for node in range(2)
        )
        folder.write_json("state.json", RunStatus(
            run=made.id, job=name, cluster="local", backend="local", state=state, nodes=nodes,
            started_at=started_at, **fields,
        ))  # fmt: skip
        folder.append("events.jsonl", Event(at=1.7e9, attempt=1, text="port 29500 is taken"))
        return made

    return run


@pytest.fixture
def runs(make):
    return [make("first", 4, hang=HANG), make("second", 8, State.SUCCEEDED)]


@pytest.fixture
def server(runs):
    with api.web(runs) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def page(tmp_path):
    with browser.browser(tmp_path / "profile") as page:
        yield page


TEXTS = "[...document.querySelectorAll('.line .text')].map((one) => one.textContent)"
DRAWN = "document.querySelectorAll('.chart canvas').length === 2"


def panel(page, key, name, holds):
    page.press(key)
    page.until(f"!document.getElementById('{name}').hidden && {holds}")


def walk(page, tmp_path, name):
    """Every panel, by its key; nothing hangs over the edge, and a picture of each."""
    page.until(DRAWN)
    for key, panel_name, holds in [
        ("1", "curves", DRAWN),
        ("2", "ranks", "document.querySelectorAll('#ranks tr.missing').length === 1"),
        ("3", "events", "document.getElementById('events').textContent.includes('is taken')"),
        ("4", "log", "document.getElementById('lines').textContent.includes('the last line')"),
        ("5", "config", "document.querySelectorAll('#keys tr').length > 3"),
        ("6", "plan", "document.getElementById('plantext').textContent.startsWith('plan ')"),
    ]:
        panel(page, key, panel_name, holds)
        assert page.value("document.documentElement.scrollWidth <= innerWidth"), panel_name
        page.picture(tmp_path / f"{name}-{panel_name}.png")
    page.press("1")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_panel_fits_three_widths_without_browser_errors(server, page, tmp_path, dark):
    for width, height in SIZES:
        page.size(width, height, dark=dark)
        page.open("about:blank")
        page.open(server.url)
        walk(page, tmp_path, f"{width}-{dark}")
        ground = page.value("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(20, 23, 28)") is dark
    assert page.complaints == []


def test_hostile_program_output_is_shown_as_text(server, page):
    page.open(server.url)
    page.until(DRAWN)
    panel(page, "4", "log", "document.querySelectorAll('.line').length > 3")
    texts = page.value(
        "[...document.querySelectorAll('.line .text')].map((one) => one.textContent)"
    )
    assert HOSTILE[0] in texts
    assert r"red  \u202egnp.exe" in texts
    assert any(text.startswith("<b>xxx") and len(text) < 5000 for text in texts)
    page.value("document.querySelector('.line button').click()")
    page.until(f"{TEXTS}.some((text) => text.length === {len(HOSTILE[2])})")
    assert page.value("document.querySelectorAll('main script, main img, main b b').length") == 0
    assert "owned" not in page.value("document.title")
    assert page.complaints == []


def test_page_shows_new_metrics_and_log_lines_without_reload(server, page, runs):
    page.open(server.url)
    page.until(DRAWN)
    with (runs[0].path / "attempts" / "1" / "node-0" / "log").open("a") as log:
        log.write(metrics(4321, 0.5) + f"{STAMP}4Z 0 news of rank 0\n")
    page.until("document.getElementById('summary').textContent.includes('4,321')")
    panel(
        page, "4", "log", "document.getElementById('lines').textContent.includes('news of rank 0')"
    )
    with (runs[0].path / "attempts" / "1" / "node-0" / "log").open("a") as log:
        log.write(f"{STAMP}5Z 0 more news\n")
    page.until("document.getElementById('lines').textContent.includes('more news')")
    assert page.value(TEXTS).count("news of rank 0") == 1
    assert page.complaints == []


def write_metrics(run, step):
    with (run.path / "attempts" / "1" / "node-0" / "log").open("a") as log:
        log.write(metrics(step, 0.5))


def shows(text, place="summary"):
    return f"document.getElementById('{place}').textContent.includes({json.dumps(text)})"


def test_seven_windows_of_one_browser_all_get_updates(server, page, runs):
    windows = [page, *(page.window() for _ in range(6))]
    for each in windows:
        each.open(server.url)
    for each in windows:
        each.until(DRAWN)
    write_metrics(runs[0], 4321)
    for each in windows:
        each.until(shows("4,321"))
        assert each.value("document.hidden") is False
        assert each.complaints == []


def test_page_without_updates_shows_their_age(server, page, monkeypatch):
    page.open(server.url)
    page.until(DRAWN)
    assert page.value("document.getElementById('age').textContent") == ""
    asked, answers, news = threading.Event(), threading.Event(), server.site.news

    def late(names):
        asked.set()
        answers.wait(60)
        return news(names)

    monkeypatch.setattr(server.site, "news", late)
    assert asked.wait(60)
    page.value("(() => { const now = Date.now; Date.now = () => now() + 90000; })()")
    page.until("/^not updated for 1 min 3\\d s$/.test(document.getElementById('age').textContent)")
    answers.set()
    page.until("document.getElementById('age').textContent === ''")


LAST_LINE = "document.querySelector('.line:last-child').getBoundingClientRect()"
CAUSE = "ValueError: " + "a long sentence about what is wrong " * 30


@pytest.mark.parametrize("size", [(1280, 800), (800, 600), (400, 800)], ids=str)
def test_log_panel_shows_newest_line_below_long_notes(server, page, make, size):
    page.size(*size)
    made = make("noted", 4, hang=HANG, remark="a remark " * 40)
    page.open(f"{server.url.partition('#')[0]}#{made.id}/log")
    page.until(f"{shows('a remark')} && {LAST_LINE}.bottom <= innerHeight && {LAST_LINE}.height")


@pytest.mark.parametrize("rank", [2, 3])
def test_failed_run_opens_on_log_of_rank_that_failed_first(server, page, make, rank):
    failure = Failure(node=1, rank=rank, exit_code=1, cause=CAUSE, traceback="T\n" * 80)
    made = make("broken", 4, State.FAILED, failure=failure, finished_at=1.7e9 + 100)
    page.open(f"{server.url.partition('#')[0]}#{made.id}")
    page.until(f"{shows('Failed first')} && {TEXTS}.join() === 'of node one'")
    # Rank 3 has printed nothing: then it is the log of its node.
    assert page.value("document.getElementById('rank').value") == ("2" if rank == 2 else "")
    assert page.value(f"{LAST_LINE}.bottom <= innerHeight")
    page.press("j")
    page.until(DRAWN)
    page.press("2")
    page.press("k")
    page.until(f"{shows('Failed first')} && !document.getElementById('ranks').hidden")


def test_ranks_panel_shows_usage_table_and_links_to_rank_log(server, page, runs):
    usage = {"0": [1.26, 3 << 30, 97, 512 << 20]}
    folder = runs[0].path / "attempts" / "1" / "node-0"
    folder.joinpath("usage.json").write_text(json.dumps(usage))
    page.open(f"{server.url.partition('#')[0]}#{runs[0].id}/ranks")
    cells = "[...document.querySelectorAll('#ranks {}')].map((cell) => cell.textContent)"
    page.until("document.querySelectorAll('#ranks tr').length === 7")
    head = ["Rank", "State", "Step", "s/step", "Quiet", "CPUs", "Memory", "GPU", "GPU memory"]
    assert page.value(cells.format("thead th")) == [*head, "Last line"]
    rank0 = page.value(cells.format("tr:nth-child(2) td"))
    assert rank0[:4] == ["0", "WAITS", "2,000", ""]
    assert rank0[5:] == ["1.3", "3.0 GiB", "97 %", "512 MiB", "the last line"]
    page.value("document.querySelector('#ranks tr:nth-child(3) button').click()")
    page.until(f"{TEXTS}.length === 2 && document.getElementById('rank').value === '1'")


@pytest.mark.parametrize(
    ("hang", "state", "title"),
    [
        (HANG, State.RUNNING, "Who waits for whom: "),
        ("no rank has printed for 600 s", State.RUNNING, "Hang: "),
        (HANG, State.CANCELLED, None),
    ],
)
def test_ranks_panel_reports_hang_only_while_run_is_running(server, page, make, hang, state, title):
    made = make("hangs", 4, state, hang=hang)
    page.open(f"{server.url.partition('#')[0]}#{made.id}/ranks")
    page.until("document.querySelectorAll('#ranks tr').length > 4")
    titles = page.value(
        "[...document.querySelectorAll('[role=alert] b')].map((b) => b.textContent)"
    )
    assert titles == ([title] if title else [])
    waiting = page.value("document.querySelectorAll('#ranks tr.waiting').length")
    assert waiting == (3 if title == "Who waits for whom: " else 0)


def test_run_list_shows_iso_dates_and_omits_current_year(server, page, make):
    now = time.time()
    make("today", 4, started_at=now)
    page.open(server.url)
    page.until(shows("today", "runs"))
    text = page.value("document.getElementById('runs').textContent")
    assert time.strftime("local %m-%d %H:%M:%S", time.localtime(now)) in text
    assert time.strftime("local %Y-%m-%d %H:%M:%S", time.localtime(1.7e9)) in text


def test_tabs_and_run_list_fit_400_pixels(server, page):
    page.size(400, 800)
    page.open(server.url)
    page.until(DRAWN)
    boxes = page.value(
        "[...document.querySelectorAll('[role=tab], #runs button')].map((each) => {"
        " const { top, right, height } = each.getBoundingClientRect(); "
        " return [top, right, height]; })"
    )
    tabs, listed = boxes[2:], boxes[:2]
    assert len({top for top, _, _ in tabs}) == 1
    assert all(right <= 400 and height >= 32 for _, right, height in boxes)
    assert all(top < 250 for top, _, _ in listed)
    assert page.value("document.getElementById('charts').getBoundingClientRect().top < 600")


def test_keyboard_shortcuts_reach_runs_panels_search_and_help(server, page, runs):
    page.open(server.url)
    page.until(DRAWN)
    # Quickly, one after the other: each key is of the run that the one before it chose.
    for quick, run in (("j4", runs[0]), ("k1", runs[1])):
        page.value(
            f"[...'{quick}'].forEach((key) => document.body.dispatchEvent("
            "new KeyboardEvent('keydown', {key, bubbles: true})))"
        )
        panel_name = {"4": "log", "1": "curves"}[quick[1]]
        page.until(
            f"document.getElementById('title').textContent === {json.dumps(run.id)}"
            f" && !document.getElementById('{panel_name}').hidden"
        )
    page.press("/")
    page.until("document.activeElement.id === 'search'")
    page.call("Input.insertText", text="LAST")
    page.until(f"{TEXTS}.join() === 'the last line'")
    assert page.value("document.querySelector('mark').textContent") == "last"
    page.press("Escape")
    page.until("document.activeElement.id !== 'search'")
    before = page.value("document.documentElement.dataset.theme")
    page.press("t")
    assert page.value("document.documentElement.dataset.theme") != before
    page.press("?")
    page.until("document.getElementById('dialog').open")
    page.press("Escape")
    page.until("!document.getElementById('dialog').open")
    panel(page, "5", "config", "true")
    page.value(f"document.getElementById('other').value = {json.dumps(runs[0].id)}")
    page.value("document.getElementById('other').dispatchEvent(new Event('change'))")
    page.until("document.getElementById('keys').textContent.includes('job.batch.micro84')")
    assert page.complaints == []


def test_report_file_shows_every_panel_without_server_or_requests(runs, page, tmp_path):
    report = api.report(runs, tmp_path / "report.html")
    page.open(report.as_uri())
    walk(page, tmp_path, "report")
    panel(page, "4", "log", "document.querySelectorAll('.line').length > 3")
    assert page.value("document.getElementById('lines').textContent").count(HOSTILE[0]) == 1
    assert page.value("performance.getEntriesByType('resource').length") == 0
    assert page.complaints == []


def test_other_origin_can_neither_read_api_nor_embed_page(server, page):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<title>other</title>")

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        page.open(f"http://127.0.0.1:{other.server_address[1]}/")
        page.until("document.title === 'other'")
        place = server.url.partition("/?")[0]
        for asked in (
            f"fetch('{place}/api/runs?token={server.token}')",
            f"fetch('{place}/api/runs', {{headers: {{Authorization: 'Bearer {server.token}'}}}})",
        ):
            assert page.value(f"{asked}.then(() => 'read', () => 'refused')") == "refused"
        # Nor can it show the page in a frame of its own.
        page.value(
            "new Promise((done) => { const frame = document.createElement('iframe');"
            f" frame.onload = done; frame.src = '{server.url}'; document.body.append(frame); }})"
        )
        assert any("frame" in complaint.lower() for complaint in page.complaints)
        other.shutdown()
        thread.join()
