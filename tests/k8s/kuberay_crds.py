"""KubeRay's own definitions of RayService and RayJob, condensed: fields and types, strict, no prose.

The operator's files are 2.4 MB, nearly all of it the documentation of Kubernetes' pod template, again and
again. ``kuberay_crds.json`` holds what a check needs of them. After a new release of the operator::

    python -m tests.k8s.kuberay_crds FOLDER > tests/k8s/kuberay_crds.json

with a FOLDER of the operator's ``ray.io_rayservices.yaml`` and ``ray.io_rayjobs.yaml``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import yaml

CONDENSED = Path(__file__).with_suffix(".json")
KINDS = ("RayService", "RayJob")
_SHARED_FROM = 120  # characters of a definition from which on a reference is shorter
# Keywords of Kubernetes that JSON Schema does not know, after ``strict`` has used them.
_NOT_JSON_SCHEMA = ("x-kubernetes-", "description", "format")


def validator(kind: str) -> jsonschema.Draft202012Validator:
    """The definition of a kind, by the condensed file."""
    text = json.loads(CONDENSED.read_text(encoding="utf-8"))
    return jsonschema.Draft202012Validator({"$ref": f"#/kinds/{kind}"} | text)


def condense(folder: Path) -> dict[str, Any]:
    """What ``kuberay_crds.json`` holds: ``{"kinds": {kind: schema}, "$defs": {name: schema}}``."""
    shared: dict[str, str] = {}
    kinds = {kind: _share(strict(_definition(folder, kind)), shared) for kind in KINDS}
    return {"kinds": kinds, "$defs": {name: json.loads(text) for text, name in shared.items()}}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema, refusing what it does not list, as ``kubectl`` with strict validation does."""
    made = {key: value for key, value in schema.items() if not key.startswith(_NOT_JSON_SCHEMA)}
    if "properties" in made:
        made["properties"] = {name: strict(field) for name, field in made["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(made.get(key), dict):
            made[key] = strict(made[key])
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if "properties" in made and "additionalProperties" not in made and not is_open:
        made["additionalProperties"] = False
    return made


def _definition(folder: Path, kind: str) -> dict[str, Any]:
    text = (folder / f"ray.io_{kind.lower()}s.yaml").read_text(encoding="utf-8")
    versions = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]["versions"]
    schema: dict[str, Any] = next(v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == "v1")
    return schema


def _share(schema: Any, shared: dict[str, str]) -> Any:
    """The schema with a reference for each larger part; ``shared`` gets the parts, by their text."""
    if isinstance(schema, list):
        return [_share(item, shared) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _share(value, shared) for key, value in schema.items()}
    text = json.dumps(made, sort_keys=True)
    if made.get("type") not in ("object", "array") or len(text) < _SHARED_FROM:
        return made
    return {"$ref": f"#/$defs/{shared.setdefault(text, str(len(shared)))}"}


if __name__ == "__main__":
    json.dump(condense(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
    print()
