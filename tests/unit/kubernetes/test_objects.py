"""Names, values that Kubernetes would expand."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from clusterkit.backends.kubernetes.objects import as_yaml, literal, object_name, quantity
from clusterkit.errors import BadInput

SCALARS = (
    st.text(st.characters(exclude_categories=("Cs",)))
    | st.integers(-(2**31), 2**31)
    | st.booleans()
    | st.sampled_from(
        ["yes", "no", "1e3", "0x1", "~", "null", "8Gi", "--", "-", "a: b", ".5", ".inf", "#", "1_0"]
    )
)
# YAML takes a key of 1,024 characters at most, escapes counted (\u plus four digits each).
KEYS = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=80)


@given(
    st.recursive(
        SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8
    )
)
def test_as_yaml_round_trips_any_value(value):
    assert yaml.safe_load(as_yaml({"value": value})) == {"value": value}
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("run_id", "name"),
    [
        ("ddp-1122041103-pn8s", "ddp-1122041103-pn8s"),
        ("3d-1122041103-pn8s", "ck-3d-1122041103-pn8s-2e4f0d"),
        ("x" * 63, None),
        ("a" * 46, "a" * 46),
    ],
)
def test_object_name_is_valid_service_name(run_id, name):
    found = object_name(run_id)
    assert len(f"{found}-node-0-12345") <= 63
    assert found[0].isalpha()
    assert found == object_name(run_id)
    if name is not None and not name.startswith("ck-"):
        assert found == name
    else:
        assert found.startswith("ck-")
        assert found != object_name(run_id[:-1] + "z")


def test_literal_survives_kubernetes_variable_expansion():
    # expansion.Expand of k8s.io/kubernetes: `$$` is a dollar, `$(NAME)` a variable.
    def expanded(text):
        return text.replace("$$", "\0").replace("$(HOME)", "/root").replace("\0", "$")

    for text in ("$(HOME)", "$$(HOME)", "a$b", "$", "$$", "${X} $(id) `id`", ""):
        assert expanded(literal(text)) == text


@pytest.mark.parametrize("good", ["1", "500m", "16Gi", "0.5", "8G", "1Ti"])
def test_quantity_accepts_kubernetes_amounts(good):
    assert quantity("memory", good) == good


@pytest.mark.parametrize("bad", ["", "16 Gi", "16GB", "lots", "-1", "1e3e", "Gi", "1gi"])
def test_quantity_refuses_bad_amount_with_key(bad):
    with pytest.raises(BadInput, match=r"\Amemory: "):
        quantity("memory", bad)
