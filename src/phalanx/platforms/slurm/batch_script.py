"""The sbatch script of `phalanx slurm submit`: pure text, made to be read and edited.

One agent for each node, and one for each spare. Slurm must not end the job because an agent has failed
(`--kill-on-bad-exit=0`, `--wait=0`), nor because a node is lost if the job can go on without it
(`--no-kill`): the agents decide. The notice before the time limit goes to the batch step alone
(`--signal=B:`), which passes it on as the preemption signal. That is SIGTERM, which Slurm itself sends to
jobs that it preempts.
"""

from __future__ import annotations

import shlex

from phalanx.core.record import Record
from phalanx.job.time_budgets import NOTICE_LEFT, SRUN_END
from phalanx.platforms.slurm.requeue import PREEMPT_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

NOTICE_SIGNAL = "USR2"


class BatchJob(Record):
    """What to submit; `sbatch`: further options of sbatch, as (name, value), value None for a flag."""

    nodes: int
    script: str
    script_args: tuple[str, ...] = ()
    run_words: tuple[str, ...] = ()  # options of `phalanx run`
    spares: int = 0
    missing: int = 0  # agents that the job can do without
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
        **({"no-kill": None} if _outlives_nodes(job) else {}),
        "requeue" if job.requeues else "no-requeue": None,
        "signal": f"B:{NOTICE_SIGNAL}@{job.notice}",
    }
    options |= given
    lines = ["#!/bin/bash", f"# Written by: {_one_line(written_by)}"]
    lines += [
        f"#SBATCH --{name}" + (f"={value}" if value is not None else "") for name, value in options.items()
    ]
    per_task = f" --cpus-per-task={given['cpus-per-task']}" if given.get("cpus-per-task") else ""
    srun = "srun --kill-on-bad-exit=0 --wait=0" + " --no-kill" * _outlives_nodes(job)
    run = [*_run_words(job), job.script, *job.script_args]
    lines += [
        "",
        f"phalanx=({shlex.join(job.phalanx)})",
        "# The batch step passes the notice on, and requeues the job if its end says that this may help.",
        "# It ends the job when more agents than `--missing` refuse their command line.",
        f'exec "${{phalanx[@]}}" slurm batch --requeues {job.requeues} --missing {job.missing} '
        f"--wait {_grace(job) + SRUN_END} -- \\",
        f"    {srun} --cpu-bind=none{per_task} \\",
        f'    "${{phalanx[@]}}" run {shlex.join(run)}',
    ]
    return "\n".join(lines) + "\n"


def _outlives_nodes(job: BatchJob) -> bool:
    """Whether the job may go on when a node is lost: it has spares, or a number of nodes of its own."""
    given = [word.partition("=")[0].replace("_", "-") for word in job.run_words]
    return job.spares > 0 or "--nnodes" in given


def _run_words(job: BatchJob) -> list[str]:
    """The options of `phalanx run`; what the user gave comes last and wins."""
    words: list[str] = []
    if job.spares:
        words += ["--nnodes", str(job.nodes)]
    given = ["--preempt-signal", PREEMPT_SIGNAL.name, "--grace", str(_grace(job))]
    return [*words, *given, *job.run_words]


def _grace(job: BatchJob) -> int:
    """Seconds that workers have to save their state."""
    return max(job.notice - NOTICE_LEFT, job.notice // 2)


def _one_line(words: Sequence[str]) -> str:
    return shlex.join(words).replace("\n", " ")
