"""`phalanx slurm submit|status`: jobs for Slurm, written, submitted, and looked at.

`phalanx slurm batch` is what the script of a submitted job runs; it is not for people.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phalanx.cli.parser import Parser
from phalanx.errors import StoreAuthError, UsageError
from phalanx.job.command_line import usage_error
from phalanx.job.environment import variables
from phalanx.log import printable, write_stderr
from phalanx.platforms.slurm.batch_script import BatchJob, batch_script, name_of
from phalanx.platforms.slurm.job_record import JobRecord, all_records, forget_old, records_directory
from phalanx.python_command import python_command

# Options of sbatch that submit knows, with their values; any other one goes through --sbatch.
_SBATCH = {
    "-t --time": "TIME", "-p --partition": "NAME", "-A --account": "NAME", "-J --job-name": "NAME",
    "-a --array": "LIST", "-o --output": "FILE", "-c --cpus-per-task": "N", "-C --constraint": "LIST",
    "-w --nodelist": "HOSTS", "-x --exclude": "HOSTS", "--gpus-per-node": "N", "--gres": "LIST",
    "--mem": "SIZE", "--qos": "NAME", "--dependency": "LIST", "--reservation": "NAME", "--begin": "TIME",
    "--mail-type": "LIST",
}  # fmt: skip
DESCRIPTION = """\
submit writes an sbatch script that runs SCRIPT on NODES nodes, and submits it.
Those without a text are sbatch's. Every other option is one of `phalanx run`,
with its long name: --max-restarts 3.

status shows the jobs that were submitted: their state, attempts and nodes.
"""


def main(argv: Sequence[str]) -> int:
    """Submit, show, or be the batch step."""
    words = list(argv)
    if words[:1] == ["batch"]:
        return _batch(words[1:])
    parser = make_parser()
    if words[:1] == ["status"]:
        _, run, rest = parser.parse_job(words)
        if run or len(rest) > 1:
            raise usage_error("write: phalanx slurm status [JOB]")
        return status(rest[0] if rest else "")
    if words[:1] == ["submit"]:
        return submit(words[1:])
    parser.parse_args(words[:1])  # prints the help, or refuses
    return 0


def make_parser() -> Parser:
    """The options."""
    parser = Parser("slurm", DESCRIPTION)
    parser.usage = (
        "phalanx slurm submit -N NODES [options] SCRIPT [arguments of the script]\n"
        "       phalanx slurm status [JOB]"
    )
    parser.add_argument("action", choices=("submit", "status"), metavar="submit|status")
    parser.add_value("-N --nodes", "int", "nodes that run workers", least=1)
    parser.add_value("--spares", "int", "nodes that wait and replace lost ones [0]", default=0)
    parser.add_value(
        "--requeues",
        "int",
        "go back into the queue at most K times: after a preemption, the notice before the time limit, and "
        "failures of the infrastructure; never after exit code 93 [10]",
        default=10,
        metavar="K",
    )
    about = "how long before the time limit workers are told [2m]"
    parser.add_value("--notice", "duration", about, least=1, default=120.0)
    parser.add_flag("--print", "print the script, and submit nothing")
    sbatch: dict[str, Any] = {"dest": "sbatch", "action": "append", "default": []}
    about = "any other option of sbatch, as in --sbatch=--nice=10"
    parser.add_value("--sbatch", _sbatch, about, metavar="OPTION", **sbatch)
    alone: dict[str, Any] = {"nargs": "?", "const": ("exclusive", None), "metavar": "WHOSE"}
    parser.add_value("--exclusive", _named("exclusive"), "", **alone, **sbatch)
    for flags, metavar in _SBATCH.items():
        name = flags.rpartition("--")[2]
        parser.add_value(flags, _named(name), "", metavar=metavar, **sbatch)
    return parser


def _sbatch(text: str) -> tuple[str, str | None]:
    name, sign, value = text.lstrip("-").partition("=")
    return _named(name)(value) if sign else (_one_line(name), None)


def _named(name: str) -> Callable[[str], tuple[str, str | None]]:
    return lambda text: (_one_line(name), _one_line(text))


def _one_line(text: str) -> str:
    if "\n" in text:
        raise ValueError("a line break would end the line of the script")
    return text


def _say(line: str) -> None:
    write_stderr(f"phalanx slurm: {line}\n")


# ---- submit ------------------------------------------------------------------------------------------


def submit(words: Sequence[str]) -> int:
    """Write the script, and give it to sbatch."""
    job, only_print = parse_submit(words)
    job = _check(job)
    text = batch_script(job, ["phalanx", "slurm", "submit", *words])
    if only_print:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise usage_error("no sbatch on PATH; run this on a login node of a Slurm cluster, or add --print")
    _make_token(job)
    done = subprocess.run(
        ["sbatch", "--parsable"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        env=_clean(variables()),
    )
    if done.returncode:
        _say(f"sbatch: {done.stderr.strip() or f'exit code {done.returncode}'}")
        return 1
    number = done.stdout.strip().partition(";")[0]
    directory = records_directory(variables())
    try:
        forget_old(directory)
        about = {"name": dict(job.sbatch).get("job-name") or name_of(job), "nodes": job.nodes}
        about |= {"spares": job.spares, "command": shlex.join([job.script, *job.script_args])}
        JobRecord(directory, number).describe({**about, "submitted": time.time(), "directory": os.getcwd()})
    except OSError as error:
        _say(f"no record of the job: {error.strerror}")
    print(printable(f"job {number} is submitted; `phalanx slurm status {number}` shows it"))
    return 0


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the variables of an allocation that this shell may be in: sbatch takes them for options."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return {n: v for n, v in environ.items() if n in kept or not n.startswith(("SLURM_", "SLURMD_"))}


def parse_submit(words: Sequence[str]) -> tuple[BatchJob, bool]:
    """The job that the words describe, and whether to print it only."""
    options, run, rest = make_parser().parse_job(["submit", *words])
    if not rest:
        raise usage_error("no script given; write: phalanx slurm submit -N NODES [options] script.py …")
    if options.nodes is None:
        raise usage_error("-N NODES is missing: how many nodes run workers?")
    job = BatchJob(
        nodes=options.nodes,
        spares=options.spares,
        requeues=options.requeues,
        notice=int(options.notice),
        script=rest[0],
        script_args=tuple(rest[1:]),
        run_words=tuple(run),
        sbatch=tuple(options.sbatch),
        phalanx=tuple(python_command("phalanx")),
    )
    return job, options.print


def _check(job: BatchJob) -> BatchJob:
    """The job with the number of agents that it can do without.

    What `phalanx run` would refuse on the nodes is refused here, as far as this machine can tell."""
    from phalanx.job.config import parse

    words, skip = [], False
    for word in job.run_words:
        name = word.partition("=")[0].replace("_", "-")
        if skip:
            skip = False
        elif name == "--nproc-per-node":  # this machine may have no GPU
            skip = "=" not in word
        else:
            words.append(word)
    step = {"JOB_ID": "1", "STEP_ID": "0", "STEP_NUM_TASKS": str(job.nodes), "PROCID": "0"}
    step |= {"STEP_NODELIST": "localhost", "STEP_TASKS_PER_NODE": "1"}
    environ = {**_clean(variables()), **{f"SLURM_{name}": value for name, value in step.items()}}
    least = parse([*words, job.script, *job.script_args], environ).cluster.min_nodes
    return job.replace(missing=max(0, job.nodes + job.spares - least))


def _make_token(job: BatchJob) -> None:
    """The agents read it from the user's home, which the nodes share; it is made here, before they start."""
    if job.nodes + job.spares == 1:
        return
    from phalanx.store.net.token import find_token

    try:
        find_token()
    except StoreAuthError as error:
        raise UsageError(str(error)) from None


# ---- status ------------------------------------------------------------------------------------------


def status(wanted: str) -> int:
    """The jobs that were submitted, with their attempts."""
    queue = _queue()
    shown = []
    for record in all_records(records_directory(variables())):
        if wanted and record.key != wanted and not record.key.startswith(f"{wanted}_"):
            continue
        lines = _lines(record, queue)
        if lines:
            shown.append("\n".join(lines))
    if not shown:
        _say(f"no job {wanted} is known" if wanted else "no job is known; phalanx slurm submit makes one")
        return 1
    print("\n".join(shown))
    return 0


def _lines(record: JobRecord, queue: Mapping[str, Mapping[str, str]]) -> list[str]:
    about, attempts = record.description(), record.attempts()
    now = queue.get(record.key, {})
    if not about and not attempts and not now:
        return []
    last = attempts[-1] if attempts else {}
    state = now.get("state") or ("ended" if last and not last.get("again") else "unknown to the queue")
    what = about.get("command") or now.get("name", "")
    lines = [f"{record.key}  {state}  {what}"]
    if now:
        where = now["nodes"] if now["nodes"] else now["reason"]
        lines.append(f"    {now['state'].lower()} for {now['elapsed']} of {now['limit']}, on {where}")
    for one in attempts:
        number, code, reason = one.get("attempt"), one.get("code"), one.get("reason", "")
        lines.append(f"    attempt {number}: exit code {code}; {reason}{_excluded(one)}")
    return lines


def _excluded(attempt: Mapping[str, Any]) -> str:
    names = attempt.get("exclude")
    if not isinstance(names, list) or not names:
        return ""
    return f"; without {printable(' '.join(map(str, names)))} from then on"


def _queue() -> dict[str, dict[str, str]]:
    """This user's jobs as squeue has them; empty where there is no Slurm."""
    names = ("job", "state", "elapsed", "limit", "nodes", "reason", "name")
    try:
        done = subprocess.run(
            ["squeue", "--me", "--noheader", "--array", "--format", "%i|%T|%M|%l|%N|%R|%j"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=_clean(variables()),
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [printable(line).split("|", len(names) - 1) for line in done.stdout.splitlines()]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)}


# ---- the batch step ----------------------------------------------------------------------------------


def _batch(words: list[str]) -> int:
    from phalanx.platforms.slurm.batch_step import run_batch

    numbers = words[1:6:2]
    as_written = words[0:8:2] == ["--requeues", "--missing", "--wait", "--"] and len(words) > 7
    if not as_written or not all(number.isdecimal() for number in numbers):
        raise usage_error("slurm batch is run by the script that `phalanx slurm submit` writes")
    if not variables().get("SLURM_JOB_ID"):
        raise usage_error("slurm batch: not in a job of Slurm; submit the script with sbatch")
    most, missing, wait = map(int, numbers)
    return run_batch(words[7:], most, missing, wait, _say)
