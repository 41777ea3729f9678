"""Writes documents as text that kubectl reads: YAML, or JSON where PyYAML is not installed."""

from __future__ import annotations

import json
import re
from typing import Any

# Everything else is quoted: kubectl takes more texts for numbers and booleans (1e-4, y) than PyYAML does.
_PLAIN = re.compile(
    r"(?!(?i:y|yes|n|no|true|false|on|off|null)$)[A-Za-z/][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*"
)


def documents(found: list[dict[str, Any]]) -> str:
    """A stream of YAML documents; without PyYAML a List in JSON."""
    try:
        import yaml
    except ImportError:
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": found}, indent=2) + "\n"

    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})

    def text(into: Any, value: str) -> Any:
        style = None if _PLAIN.fullmatch(value) else '"'
        return into.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    yaml.add_representer(str, text, Dumper=dumper)
    written: str = yaml.dump_all(found, Dumper=dumper, sort_keys=False, width=1 << 30)
    return written
