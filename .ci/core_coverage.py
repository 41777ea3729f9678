"""Fail if any module of the core is covered by less than 95 %; reads the data of the last run with --cov."""

from __future__ import annotations

import json
import subprocess
import sys

LEAST = 95.0
command = [sys.executable, "-m", "coverage", "json", "--quiet", "--include", "*/phalanx/core/*", "-o", "-"]
report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
covered = {name: file["summary"]["percent_covered"] for name, file in report["files"].items()}
low = {name: share for name, share in covered.items() if share < LEAST}
for name, share in sorted(low.items()):
    print(f"{name}: {share:.1f} % covered, at least {LEAST:g} % needed")
print(f"core: {len(covered)} modules, the lowest {min(covered.values()):.1f} % covered")
sys.exit(bool(low) or not covered)
