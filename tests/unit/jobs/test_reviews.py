"""Reviews as people really have them: other separators, other encodings, gaps, quotes."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.jobs.conftest import ROOT

SENTIMENT = str(ROOT / "jobs" / "sentiment")


@pytest.fixture
def reviews(program) -> ModuleType:
    return program("reviews")


@pytest.fixture
def file(tmp_path: Path):
    def write(data: str | bytes) -> Path:
        path = tmp_path / "some reviews.csv"
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    return write


HEAD = "label,review\n"


@pytest.mark.parametrize(
    ("text", "texts", "labels", "dropped"),
    [
        ('1,good\n0,"bad, really"\n', ["good", "bad, really"], [1, 0], 0),
        ('1,"he said ""good"""\n0,bad\n', ['he said "good"', "bad"], [1, 0], 0),
        ('1,"two\nlines"\n0,bad\n', ["two\nlines", "bad"], [1, 0], 0),
        ("1,good\n\n0,bad\n,\n1,\n,lonely\n", ["good", "bad"], [1, 0], 4),
        ("1,good\n0,bad\n1,NaN\nnan,fine\n1,null\n1,   \n", ["good", "bad"], [1, 0], 4),
        ("1.0,good\n0.0,bad\n", ["good", "bad"], [1, 0], 0),
        (" 1 ,  good \n0,bad\n1\n", ["good", "bad"], [1, 0], 1),
        ("1,good\r\n0,bad\r\n", ["good", "bad"], [1, 0], 0),
        ("2,so so\n1,good\n0,差\n", ["so so", "good", "差"], [2, 1, 0], 0),
        ("1,nan bread was good\n0,bad", ["nan bread was good", "bad"], [1, 0], 0),
    ],
)
def test_read_reviews_parses_quotes_gaps_and_labels(
    reviews, file, text, texts, labels, dropped
) -> None:
    found = reviews.read_reviews(file(HEAD + text))
    assert (found.texts, found.labels, found.dropped) == (texts, labels, dropped)
    assert found.classes == max(labels) + 1


def test_read_reviews_accepts_extra_columns_in_any_order(reviews, file) -> None:
    found = reviews.read_reviews(file("id, Review ,stars,LABEL\n7,good,5,1\n8,bad,1,0\n"))
    assert (found.texts, found.labels) == (["good", "bad"], [1, 0])


def test_read_reviews_accepts_named_separator_and_encoding(reviews, file) -> None:
    german = file("label;review\n1;gut, sehr\n0;schlecht\n")
    assert reviews.read_reviews(german, separator=";").texts == ["gut, sehr", "schlecht"]
    chinese = file("label,review\n1,很好\n0,很差\n".encode("gbk"))
    assert reviews.read_reviews(chinese, encoding="gbk").texts == ["很好", "很差"]


def test_read_reviews_ignores_byte_order_mark(reviews, file) -> None:
    marked = file("\ufefflabel,review\n1,good\n0,bad\n")
    assert reviews.read_reviews(marked).texts == ["good", "bad"]


@pytest.mark.parametrize(
    ("data", "message", "hint"),
    [
        ("", "it has no header", "label,review"),
        ("\n1,good\n", "it has no header", "label,review"),
        ("text,stars\ngood,5\n", "no column 'label'; the columns are text, stars", "first line"),
        ("label,text\n1,good\n", "no column 'review'", "first line"),
        ("1,good\n0,bad\n", "no column 'label'; the columns are 1, good", "first line"),
        ("label;review\n1;good\n", "separated by ;, not by ','", "--separator ;"),
        ("label\treview\n1\tgood\n", "separated by tab, not by ','", "--separator tab"),
        ("label|review\n1|good\n", "separated by |", "--separator |"),
        ("label,review\n1,很好\n".encode("gbk"), "is not utf-8", "--encoding gbk"),
        ("label,review\n1,好\n".encode("utf-16"), "is not utf-8", "utf-16"),
        (HEAD, "it holds no row", None),
        (HEAD + "1,\n,\n", "it holds no row", None),
        (HEAD + "1,good\npositive,fine\n", ":3: the label 'positive' is not a whole", "0, 1, 2"),
        (HEAD + "1,good\n0.5,fine\n", ":3: the label '0.5' is not a whole number", "0, 1, 2"),
        (HEAD + "inf,good\n", ":2: the label 'inf' is not a whole number", "0, 1, 2"),
        (HEAD + "-1,good\n", ":2: the label -1 is below 0", "count from 0"),
        (HEAD + "1,good\n2,fine\n", "no row has the label 0", "without gaps"),
        (HEAD + "0,bad\n1000000000000,fine\n", "no row has the label 1,", "without gaps"),
        (HEAD + "0,bad\n0,worse\n", "every label is 0", None),
        (HEAD + "1,good, very\n", ":2: 3 columns instead of 2", "in quotes"),
        (HEAD + '1,"never closed\n0,bad\n', "not CSV: unexpected end", None),
        (HEAD + '1,"good" ones\n', ":2: not CSV:", None),
        (HEAD + "1," + "x" * 200_000 + "\n", "not CSV: field larger", None),
    ],
)
def test_read_reviews_refuses_bad_file_with_message_and_hint(
    reviews, file, data, message, hint
) -> None:
    path = file(data)
    with pytest.raises(reviews.BadInput) as caught:
        reviews.read_reviews(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert hint is None or hint in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": "klingon"}, "--encoding klingon: Python knows none"),
        ({"separator": ";"}, "separated by ,, not by ';'"),
    ],
)
def test_read_reviews_names_wrong_encoding_or_separator(reviews, file, options, message) -> None:
    with pytest.raises(reviews.BadInput, match=message):
        reviews.read_reviews(file(HEAD + "1,good\n"), **options)


def test_read_reviews_names_missing_file_and_directory(reviews, tmp_path) -> None:
    with pytest.raises(reviews.BadInput, match=r"nowhere\.csv: No such file"):
        reviews.read_reviews(tmp_path / "nowhere.csv")
    with pytest.raises(reviews.BadInput, match="Is a directory"):
        reviews.read_reviews(tmp_path)


@pytest.mark.parametrize("text", ["", ",,", '"', "\n"])
def test_separator_flag_accepts_one_character_or_tab(reviews, text) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        reviews._separator(text)
    assert [reviews._separator(word) for word in ("tab", "\\t", "\t", ";")] == ["\t"] * 3 + [";"]


@given(st.integers(2, 500), st.floats(0.01, 0.99), st.integers(0, 2**40))
def test_split_is_reproducible_partition_for_given_seed(count, fraction, seed) -> None:
    sys.path.insert(0, SENTIMENT)
    try:
        from reviews import BadInput, split  # every rank does this by itself
    finally:
        sys.path.remove(SENTIMENT)
    if not 0 < round(count * fraction) < count:
        with pytest.raises(BadInput, match=r"--validation .* leaves nothing to"):
            split(count, fraction, seed)
        return
    training, validation = split(count, fraction, seed)
    assert sorted(training + validation) == list(range(count))
    assert len(validation) == round(count * fraction)
    assert split(count, fraction, seed) == (training, validation)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 2.0])
def test_split_refuses_fraction_that_leaves_part_empty(reviews, fraction) -> None:
    with pytest.raises(reviews.BadInput, match="--validation"):
        reviews.split(100, fraction, 0)


# ---------------------------------------------------------------- the data set that is shipped


def test_shipped_reviews_match_output_of_make_reviews(
    reviews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make_reviews.py", str(tmp_path / "reviews.csv")])
    runpy.run_path(str(ROOT / "jobs" / "data" / "make_reviews.py"), run_name="__main__")
    assert (tmp_path / "reviews.csv").read_bytes() == reviews.SHIPPED.read_bytes()


def test_shipped_reviews_are_unique_balanced_and_quoted(reviews) -> None:
    found = reviews.read_reviews(reviews.SHIPPED)
    assert (len(found.texts), found.dropped, found.classes) == (2400, 5, 2)
    assert len(set(found.texts)) == 2400  # so none can be in both parts of a split
    assert 1100 < sum(found.labels) < 1300
    assert any('"' in text for text in found.texts)
    assert any("," in text for text in found.texts)
