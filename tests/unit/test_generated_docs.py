"""The pages say what the code says: generated parts, verbs, functions, variables, tests, links."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest

from clusterkit import api, backends, errors
from clusterkit.backends import node_status
from clusterkit.cli import VERBS
from clusterkit.jobfile.values import fields_of
from clusterkit.output import diagnose
from clusterkit.spec import JobSpec
from tests import generated_docs, troubleshooting

ROOT = generated_docs.ROOT
PAGES = generated_docs.documents()
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_VARIABLE = re.compile(r"\bCLUSTERKIT_[A-Z_]*[A-Z]\b")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the pages that a test may spoil."""
    for page in PAGES:
        target = tmp_path / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, target)
    return tmp_path


def page(name: str) -> str:
    return (ROOT / name).read_text()


# ---------------------------------------------------------------- generated parts


def test_generated_parts_match_code() -> None:
    assert generated_docs.stale() == []


def test_job_keys_in_docs_match_job_spec() -> None:
    """The tables are generated; an error that a page shows is not."""
    text = page("docs/job-file.md")
    table = text.partition("generated: job-keys")[2].partition("/generated")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(fields_of(JobSpec))
    assert re.findall(r"^ hint: allowed: (.*)$", text, re.MULTILINE) == [
        ", ".join(fields_of(JobSpec))
    ]


def test_every_generated_part_appears_in_one_page() -> None:
    named = re.findall(r"<!-- generated: ([\w-]+) -->", "".join(map(Path.read_text, PAGES)))
    assert sorted(named) == sorted(generated_docs.PARTS)


def test_check_names_stale_page_and_changes_nothing(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generated_docs.main(["--check"], copy) == 0
    spoilt = copy / "docs" / "job-file.md"
    text = spoilt.read_text().replace("Samples per optimizer step", "Samples per fortnight")
    spoilt.write_text(text)
    assert generated_docs.main(["--check"], copy) == 1
    assert capsys.readouterr().err == "docs/job-file.md is stale: make docs writes it anew\n"
    assert spoilt.read_text() == text


def test_stale_page_is_rewritten(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = copy / "docs" / "jobs.md"
    spoilt.write_text(spoilt.read_text().replace("[`zero1`]", "[`zeroth`]"))
    assert generated_docs.main([], copy) == 0
    assert capsys.readouterr().out == "docs/jobs.md\n"
    assert spoilt.read_text() == page("docs/jobs.md")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("<!-- generated: nonsense -->\n<!-- /generated -->", "nothing generates 'nonsense'"),
        ("<!-- generated: jobs -->\n| a table |", "without its other half"),
        ("| a table |\n<!-- /generated -->", "without its other half"),
    ],
)
def test_invalid_marker_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        generated_docs.renewed(text, "page.md")


@pytest.mark.parametrize("columns", ["20", "400"])
def test_generated_help_does_not_depend_on_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    expected = generated_docs.verbs()
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert generated_docs.verbs() == expected
    assert max(map(len, expected.splitlines())) <= generated_docs.WIDTH


def test_generated_flags_do_not_depend_on_run_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = generated_docs.gpt_flags()
    monkeypatch.setenv("CLUSTERKIT_GLOBAL_BATCH", "12345")
    assert generated_docs.gpt_flags() == expected
    assert "12345" not in expected


# ---------------------------------------------------------------- nothing is left out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_section_in_cli_page(verb: str) -> None:
    assert f"\n## clusterkit {verb}\n" in page("docs/cli.md")


@pytest.mark.parametrize("name", backends.NAMES)
def test_every_backend_is_in_architecture_table(name: str) -> None:
    assert f"\n| `{name}` | " in page("docs/architecture.md")


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, member in inspect.getmembers(api, inspect.isfunction)
        if member.__module__ in (api.__name__, "clusterkit.lifecycle.launch")
        and not name.startswith("_")
    ],
)
def test_every_api_function_is_documented(name: str) -> None:
    assert f"`api.{name}(" in page("docs/python-api.md")


@pytest.mark.parametrize("name", [name for name in vars(api.Run) if not name.startswith("_")])
def test_every_run_member_is_documented(name: str) -> None:
    assert re.search(rf"`run\.{name}\b", page("docs/python-api.md"))


def test_every_environment_variable_is_documented() -> None:
    sources = [*ROOT.glob("clusterkit/**/*.py"), *ROOT.glob("jobs/**/*")]
    used = {name for path in sources if path.is_file() for name in _names(path)}
    documented = set(_VARIABLE.findall(page("docs/cli.md") + page("docs/programs.md")))
    assert used == documented


def _names(path: Path) -> list[str]:
    return _VARIABLE.findall(path.read_text()) if path.suffix in (".py", ".yaml") else []


def test_every_exit_code_is_documented() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    documented = re.findall(r"^\| (\d+) \|", page("docs/cli.md"), re.MULTILINE)
    assert codes | {0} == set(map(int, documented))


def test_every_cited_test_exists() -> None:
    cited = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", "".join(map(Path.read_text, PAGES)))
    assert len(cited) > 10
    missing = [
        f"{file}::{name}"
        for file, name in cited
        if not (ROOT / file).exists() or (name and f"def {name}(" not in page(file))
    ]
    assert missing == []


# ---------------------------------------------------------------- troubleshooting


def test_every_failure_hint_is_in_troubleshooting_page() -> None:
    hints = {hint for _, hint in diagnose._HINTS} | set(node_status._HINTS.values())
    hints |= {hint for _, hint in diagnose._SIGNALS.values() if hint} | {diagnose._MORE_MEMORY}
    assert hints - {failure.hint for failure, _ in troubleshooting.RANKS} == set()


def test_every_platform_message_is_in_code() -> None:
    texts = troubleshooting.literals()
    messages = (entry.message for entry in troubleshooting.PLATFORMS)
    words = {part.strip() for message in messages for part in message.split(troubleshooting.GAP)}
    assert {part for part in words if part not in texts} == set()


# ---------------------------------------------------------------- links


def broken_links(path: Path) -> list[str]:
    """Links of a page to files, or to headings of pages, that are not there."""
    broken = []
    for target in _LINK.findall(_FENCED.sub("", path.read_text())):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in headings(file)):
            broken.append(target)
    return broken


def headings(path: Path) -> set[str]:
    """The headings of a page, as GitHub makes anchors of them."""
    found = re.findall(r"^#+ (.+)$", _FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_resolves(path: Path) -> None:
    assert broken_links(path) == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.name)
def test_pictures_are_small_and_fetch_nothing(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 150_000
    assert re.findall(r"@font-face|@import|<script|<image|url\(\s*['\"]?http|href=", text) == []


def test_broken_link_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(
        "# Two words\n[here](#two-words) [a](gone.md) [b](page.md#gone) [c](https://example.org)\n"
        "```\n[d](in-a-listing.md)\n```\n"
    )
    assert broken_links(path) == ["gone.md", "page.md#gone"]
