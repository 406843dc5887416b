"""JSON schema of job and cluster files, for editors, with the documentation of every key."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

import msgspec

from clusterkit.cluster import CLUSTER_TYPES, Entry
from clusterkit.jobfile.yaml_file import VERBATIM
from clusterkit.spec import SCHEMA, JobSpec, Spec


def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return each key of a struct and its documentation: the docstring under the field."""
    keys = {field.name: field.encode_name for field in msgspec.structs.fields(struct)}
    written = [inspect.getsource(each) for each in struct.__mro__ if issubclass(each, Spec)]
    return {
        keys[field.target.id]: " ".join(str(below.value.value).split())
        for definition in ast.parse("".join(written)).body
        if isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of job files; that of cluster files is under ``$defs/clusters``."""
    kinds = list(CLUSTER_TYPES.values())
    (job, *_), definitions = msgspec.json.schema_components(
        [JobSpec, *kinds], ref_template="#/$defs/{name}"
    )
    # `name` defaults to the name of the file.
    required = definitions["JobSpec"].pop("required", [])
    assert required == ["name"]
    definitions["JobSpec"] |= SCHEMA
    definitions["JobSpec"]["properties"]["deepspeed"]["anyOf"].append({"type": "string"})
    for struct in {*Spec.__subclasses__(), *kinds} - {Entry}:
        for key, meaning in meanings(struct).items():
            definitions[struct.__name__]["properties"][key]["description"] = meaning
    for name in ("JobSpec", *(kind.__name__ for kind in kinds)):
        for key, schema in definitions[name]["properties"].items():
            if key in VERBATIM:
                _take_scalars(schema)
            # A key without a value means the same as no key.
            if "anyOf" in schema:
                schema["anyOf"].append({"type": "null"})
            elif "enum" in schema:
                schema["enum"].append(None)
            else:
                schema["type"] = [schema["type"], "null"]
    definitions["clusters"] = {
        "type": "object",
        "description": "clusters.yaml: names and entries",
        "additionalProperties": {"anyOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds]},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "clusterkit job file",
        **job,
        "$defs": definitions,
    }


def _take_scalars(schema: dict[str, Any]) -> None:
    """Allow every scalar below a key of `VERBATIM`, where the loader reads it as text."""
    for below in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(below, dict):
            below["type"] = ["string", "number", "boolean", "null"]
    for alternative in schema.get("anyOf", ()):
        _take_scalars(alternative)
