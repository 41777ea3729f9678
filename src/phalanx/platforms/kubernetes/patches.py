"""Patches for the documents of a manifest: strategic merge patches by kind, or one JSON patch.

A strategic merge patch is part of a document: its `kind` says which documents it changes, and the kind `Pod`
stands for the pod template in whichever kind of job. Maps are merged, null removes a field, and the lists
below are merged item by item, by the key that Kubernetes uses; every other list replaces the one that is
there. `$patch: delete` removes an item, `$patch: replace` replaces a map. A JSON patch (RFC 6902) is a list
of operations on the Job, JobSet or TrainJob.
"""

from __future__ import annotations

import json
from typing import Any

from phalanx.errors import UsageError

_MERGED_BY = {
    "containers": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("containerPort", "port"),  # of a container, of a Service
    "replicatedJobs": ("name",),
    "topologySpreadConstraints": ("topologyKey",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}
_DIRECTIVE = "$patch"
NEEDED = "pip install 'phalanx[k8s]'"


def load(path: str) -> list[Any]:
    """The patches of a file, JSON or YAML; UsageError if it has none."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--patch {path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        found = [json.loads(text)]
    except ValueError:
        found = _load_yaml(path, text)
    if not found or not all(isinstance(one, (dict, list)) for one in found):
        raise UsageError(f"--patch {path}: write part of a document, or a list of JSON patch operations")
    return found


def _load_yaml(path: str, text: str) -> list[Any]:
    try:
        import yaml
    except ImportError:
        raise UsageError(f"--patch {path}: write JSON, or install PyYAML: {NEEDED}") from None
    try:
        return [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise UsageError(f"--patch {path}: {line}") from None


def patched(documents: list[dict[str, Any]], patch: Any) -> list[dict[str, Any]]:
    """The documents with one patch; ValueError says why it does not fit."""
    if isinstance(patch, list):
        return [*documents[:-1], _with_operations(documents[-1], patch)]
    kind, fields = patch.get("kind"), {k: v for k, v in patch.items() if k not in ("kind", "apiVersion")}
    kinds = [one["kind"] for one in documents]
    if kind == "Pod":
        return [_with_pod(one, fields) for one in documents]
    if kind not in kinds:
        raise ValueError(f"kind {kind}: choose one of {', '.join(['Pod', *kinds])}")
    return [merged(one, fields) if one["kind"] == kind else one for one in documents]


def _with_operations(document: dict[str, Any], operations: list[Any]) -> dict[str, Any]:
    try:
        import jsonpatch
    except ImportError:
        raise ValueError(f"a JSON patch needs the package jsonpatch: {NEEDED}") from None
    try:
        found = jsonpatch.apply_patch(document, operations)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError, AttributeError) as error:
        raise ValueError(str(error) or type(error).__name__) from None
    if not isinstance(found, dict):
        raise ValueError("the document is removed")
    return found


def _with_pod(document: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The document with every pod template in it changed."""
    if isinstance(document.get("spec"), dict) and "containers" in document["spec"]:
        found: dict[str, Any] = merged(document, fields)
        return found
    return {
        name: _with_pod(part, fields)
        if isinstance(part, dict)
        else [_with_pod(one, fields) for one in part]
        if name == "replicatedJobs"
        else part
        for name, part in document.items()
    }


def merged(base: Any, change: Any, name: str = "") -> Any:
    """`base` with a strategic merge patch; `name`: of the field that both are."""
    if isinstance(change, dict):
        fields = {key: value for key, value in change.items() if key != _DIRECTIVE}
        if not isinstance(base, dict) or change.get(_DIRECTIVE) == "replace":
            base = {}
        found = {**base, **{key: merged(base.get(key), value, key) for key, value in fields.items()}}
        return {key: value for key, value in found.items() if fields.get(key, value) is not None}
    if isinstance(change, list) and isinstance(base, list) and name in _MERGED_BY:
        return _merged_items(base, change, name)
    return change


def _merged_items(base: list[Any], change: list[Any], name: str) -> list[Any]:
    found = list(base)
    for item in change:
        keys = [key for key in _MERGED_BY[name] if isinstance(item, dict) and key in item]
        if not keys:
            raise ValueError(f"{name}: an item has no {' or '.join(_MERGED_BY[name])}")
        key = keys[0]
        place = next((n for n, one in enumerate(found) if one.get(key) == item[key]), len(found))
        old = found[place] if place < len(found) else {}
        found[place : place + 1] = [] if item.get(_DIRECTIVE) == "delete" else [merged(old, item)]
    return found
