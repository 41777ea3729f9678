"""The sbatch script of `phalanx slurm submit`: pure text, made to be read and edited.

One agent for each node, and one for each spare. Slurm must not end the job because a node is lost
(`--no-kill`) or an agent has failed (`--kill-on-bad-exit=0`, `--wait=0`): the agents decide. The notice
before the time limit goes to the batch step alone (`--signal=B:`), which passes it on as the preemption
signal; it is USR2, because NCCL handles USR1.
"""

from __future__ import annotations

import shlex

from phalanx.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

NOTICE_SIGNAL = "USR2"
_WAIT = 30  # seconds beyond the grace period
_SAVED = 20  # seconds of the notice that are left for everything but the workers' own saving


class BatchJob(Record):
    """What to submit; `sbatch`: further options of sbatch, as (name, value), value None for a flag."""

    nodes: int
    script: str
    script_args: tuple[str, ...] = ()
    run_words: tuple[str, ...] = ()  # options of `phalanx run`
    spares: int = 0
    requeues: int = 10
    notice: int = 120
    sbatch: tuple[tuple[str, str | None], ...] = ()
    phalanx: tuple[str, ...] = ("phalanx",)


def name_of(job: BatchJob) -> str:
    """The job's name, where none is given."""
    base = job.script.rstrip("/").rpartition("/")[2]
    return base.removesuffix(".py") or "phalanx"


def batch_script(job: BatchJob, written_by: Sequence[str]) -> str:
    """The whole script."""
    given = dict(job.sbatch)
    file = "%x-%A_%a.out" if "array" in given else "%x-%j.out"
    options: dict[str, str | None] = {
        "job-name": name_of(job),
        "nodes": str(job.nodes + job.spares),
        "ntasks-per-node": "1",
        "output": file,
        "open-mode": "append",
        "no-kill": None,
        "requeue" if job.requeues else "no-requeue": None,
        "signal": f"B:{NOTICE_SIGNAL}@{job.notice}",
    }
    options |= given
    lines = ["#!/bin/bash", f"# Written by: {_one_line(written_by)}"]
    lines += [
        f"#SBATCH --{name}" + (f"={value}" if value is not None else "") for name, value in options.items()
    ]
    per_task = f" --cpus-per-task={given['cpus-per-task']}" if given.get("cpus-per-task") else ""
    phalanx = shlex.join(job.phalanx)
    run = [*_run_words(job), job.script, *job.script_args]
    lines += [
        "",
        "# The batch step passes the notice on, and requeues the job if its end says that this may help.",
        f"exec {phalanx} slurm batch --requeues {job.requeues} --wait {_grace(job) + _WAIT} -- \\",
        f"    srun --kill-on-bad-exit=0 --wait=0 --no-kill --cpu-bind=none{per_task} \\",
        f"    {phalanx} run {shlex.join(run)}",
    ]
    return "\n".join(lines) + "\n"


def _run_words(job: BatchJob) -> list[str]:
    """The options of `phalanx run`; what the user gave comes last and wins."""
    words: list[str] = []
    if job.spares:
        words += ["--nnodes", str(job.nodes)]
    given = ["--preempt-signal", f"SIG{NOTICE_SIGNAL}", "--grace", str(_grace(job))]
    return [*words, *given, *job.run_words]


def _grace(job: BatchJob) -> int:
    """Seconds that workers have to save their state."""
    return max(job.notice - _SAVED, job.notice // 2)


def _one_line(words: Sequence[str]) -> str:
    return shlex.join(words).replace("\n", " ")
