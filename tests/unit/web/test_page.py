"""The page: its parts as they are shipped."""

import base64
import hashlib
import re
from pathlib import Path

from clusterkit import web
from clusterkit.web import page

FOLDER = Path(web.__file__).parent
UPLOT = FOLDER / "vendor" / "uplot"


def test_page_files_stay_below_100_kb():
    assert (
        sum(path.stat().st_size for path in FOLDER.glob("page.*") if path.suffix != ".py") < 100_000
    )


def test_chart_library_matches_checksums_of_source_note():
    told = dict(re.findall(r"\| `([\w.]+)` \| `([0-9a-f]{64})`", (UPLOT / "SOURCE.md").read_text()))
    there = [path for path in UPLOT.iterdir() if path.name != "SOURCE.md"]
    assert told == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in there}


def test_page_script_inserts_no_markup():
    program = "".join(path.read_text() for path in FOLDER.rglob("*.js"))
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc",
        program,
    )
    assert "style=" not in (FOLDER / "page.html").read_text()
    assert not re.findall(r"\son\w+=", (FOLDER / "page.html").read_text())


def test_content_security_policy_hashes_script_and_style():
    body = page.render().decode()
    for kind in ("script", "style"):
        text = re.search(f"<{kind}>(.*?)</{kind}>", body, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in page.policy()


def test_embedded_data_cannot_close_script_element():
    body = page.render({"a": "</script><script>alert(1)</script><!--"}).decode()
    assert body.count("</script>") == 2
    assert body.count("<!--") == page.render().decode().count("<!--")
