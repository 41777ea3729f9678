"""Questions and requests to Slurm's controller, by its commands."""

from __future__ import annotations

import subprocess
import tempfile

from phalanx.job.slurm_host_list import format_host_list
from phalanx.platforms.slurm.requeue import lost_nodes, read_job

TYPE_CHECKING = False
if TYPE_CHECKING:
    from phalanx.platforms.slurm.requeue import SlurmJob

_PATIENCE = 60.0
_SOON = 0.3  # seconds; the controller gives up after five, and the end of a step may take three


def request(*words: str) -> str:
    """Run a command of Slurm; what went wrong, or empty."""
    return _run(*words)[1]


def leave_request(*words: str) -> str | None:
    """Start a command of Slurm that the controller may carry out only after this process has ended.

    What went wrong, or empty; None: no answer at once. The command is then left to itself."""
    null = subprocess.DEVNULL
    try:
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(words, stdin=null, stdout=null, stderr=errors)
            code = child.wait(_SOON)
            errors.seek(0)
            return (errors.read().strip() or f"exit code {code}") if code else ""
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return f"{words[0]}: {error}"


def show_job(job: str) -> SlurmJob:
    """The job as Slurm has it now; without a state where Slurm does not answer."""
    return read_job(_run("scontrol", "show", "job", "-o", job)[0])


def find_lost(nodes: list[str]) -> tuple[str, ...]:
    """Those of the nodes that Slurm has lost."""
    return lost_nodes(_run("scontrol", "show", "node", "-o", format_host_list(nodes))[0]) if nodes else ()


def _run(*words: str) -> tuple[str, str]:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{words[0]}: {error}"
    return done.stdout, (done.stderr.strip() or f"exit code {done.returncode}") if done.returncode else ""
