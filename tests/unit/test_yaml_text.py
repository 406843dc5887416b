"""YAML as it is written: what a reader gets back, shared parts."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.jobfile.yaml_text import Shared, documents, merged
from tests.conftest import UGLY

SCALARS = (
    st.text(st.characters(exclude_categories=("Cs",)))
    | st.integers(-(2**31), 2**31)
    | st.booleans()
    | st.none()
    | st.sampled_from(
        ["yes", "no", "1e3", "0x1", "~", "null", "8Gi", "--", "-", "a: b", ".5", ".inf", "#", "1_0"]
    )
)
# YAML takes a key of 1,024 characters at most, escapes counted (\u plus four digits each).
KEYS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=80)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=4)


@given(DOCUMENTS)
def test_yaml_documents_survive_round_trip(document):
    assert list(yaml.safe_load_all(documents([document, {"a": 1}]))) == [document, {"a": 1}]


@pytest.mark.parametrize("value", UGLY.values())
def test_yaml_keeps_any_text_value(value):
    document = {"list": [value], "map": {"key": value}, "deep": [{"a": value, "b": 1}]}
    assert yaml.safe_load(documents([document])) == document


def test_yaml_head_is_comment_above_first_document():
    assert documents([{"a": 1}], "head\n\nmore") == "# head\n#\n# more\na: 1\n"


@pytest.mark.parametrize("text", ["1e3", "0o17", "1", "on", "y", "~", "", "1:30", "<<", "=", ".5"])
def test_yaml_quotes_strings_other_readers_misread(text):
    # PyYAML reads YAML 1.1, compose and Kubernetes read 1.2 and some of 1.1.
    assert documents([{"key": text}]) == f'key: "{text}"\n'


def test_yaml_writes_multi_line_text_as_block():
    assert documents([{"script": "one\n  two\n"}]) == "script: |\n  one\n    two\n"


def test_yaml_writes_short_list_inline_and_long_list_as_block():
    assert documents([{"verbs": ["get", "list"], "empty": []}]) == "verbs: [get, list]\nempty: []\n"
    assert documents([{"args": ["a" * 50, "b" * 50]}]).count("\n  - ") == 2


def test_yaml_writes_shared_part_once():
    shared = Shared("common", {"k": None, "m": 1.5})
    text = documents([{"x-common": shared, "a": merged(shared, {"m": 2}), "b": merged(shared, {})}])
    assert text == (
        "x-common: &common\n  k: null\n  m: 1.5\na:\n  <<: *common\n  m: 2\nb:\n  <<: *common\n"
    )
    assert yaml.safe_load(text)["a"] == {"k": None, "m": 2}
