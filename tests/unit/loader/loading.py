"""What tests of the loader share."""

from clusterkit.jobfile.loader import (
    read_cluster,
)
from clusterkit.jobfile.yaml_file import parse_yaml


def load_cluster(name, path=None):
    return read_cluster(name, path).cluster


def data(text: str):
    return parse_yaml(text, "x.yaml").data
