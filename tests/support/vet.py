"""What helpers in the background do while a job runs: find out which modules of a script suit a fork."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.conftest import HUNG

VET = """
import os, sys
from phalanx.warm.import_cache import ImportCache
from phalanx.zygote.spawner import Spawner
learned = ImportCache(["script", sys.argv[1]], os.environ)
lines = learned.all_lines()
helpers = Spawner("python", preload=lines)
while helpers.importing:
    helpers.events()
learned.judge(lines, helpers.log)
learned.save()
for line in helpers.log.in_words():
    print(line)
helpers.close()
"""


def vet(script: Path | str, env: Mapping[str, str]) -> None:
    """Try everything that was learned about a script, and keep the verdict."""
    subprocess.run(
        [sys.executable, "-c", VET, str(script)],
        env=dict(env),
        timeout=2 * HUNG,
        check=True,
        stdout=subprocess.DEVNULL,
    )
