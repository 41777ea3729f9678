"""`phalanx run`: what the user sees of a job.

One line at the start, one per incident and one at the end, all on stderr; stdout belongs to the workers.
When the job fails, the report comes last. What it returns is in core/exit_codes.py.
"""

from __future__ import annotations

import os
import sys
import time

from phalanx.job.config import parse
from phalanx.log import is_json, use_frame, write_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phalanx.agent.agent import Agent
    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.warm.helper_pool import HelperPool
    from phalanx.agent.workers.result import RunResult
    from phalanx.job.options import JobSpec
    from phalanx.observe.notifier import Notifier
    from phalanx.observe.progress_line import Progress
    from phalanx.observe.trace_sender import TraceSender
    from phalanx.observe.train_status import TrainStatus
    from phalanx.web.dashboard_process import DashboardProcess


def main(argv: Sequence[str]) -> int:
    """Run what a command line asks for; the exit code."""
    _open_standard_descriptors()
    try:
        job = parse(argv)
    except ValueError as error:
        _refuse(argv, error)
        raise
    if os.getpid() == 1:
        from phalanx.cli.init_process import stay_behind

        stay_behind()
    if job.cluster.hosts and not job.terminal.dry_run:
        from phalanx.cli.terminal import KeptModes
        from phalanx.platforms.ssh.starter import start

        for warning in job.warnings:
            say(f"warning: {warning}")
        with KeptModes():  # a question of ssh that is interrupted leaves the terminal without echo
            return start(job, argv, say)
    return execute(job)


def _use_format(name: str, host: str) -> None:
    """Write lines of our own as `text` or as `json` from now on."""
    frame = None
    if name == "json":
        from phalanx.observe.json_lines import JsonLines

        frame = JsonLines(host, None, "phalanx")
    use_frame(frame)


def _refuse(argv: Sequence[str], error: ValueError) -> None:
    """A command line is wrong: its message goes where that of a job that fails would go."""
    from phalanx.job.command_line import peek
    from phalanx.job.environment import outcomes_directory, variables
    from phalanx.observe import termination_log

    _use_format(peek(argv, "log_format", variables()), os.uname().nodename)
    termination_log.write(peek(argv, "termination_log", variables()), f"phalanx run: {error}")
    directory = outcomes_directory()
    if directory:
        from phalanx.core.exit_codes import USAGE
        from phalanx.platforms.outcomes import AgentOutcome, write_outcome

        name = variables().get("SLURMD_NODENAME") or os.uname().nodename
        write_outcome(directory, AgentOutcome(name, "", USAGE, str(error)), f"{name}.{os.getpid()}")


def execute(job: JobSpec, raises: bool = False) -> int:
    """Run a job from the terminal; the exit code. `raises`: for a caller in Python, a failure is raised."""
    _use_format(job.output.log_format, job.node_name)
    for warning in job.warnings:
        say(f"warning: {warning}")
    if job.terminal.dry_run:
        return _show_plan(job)
    if job.terminal.detach:
        from phalanx.cli.detach import detach

        if not detach(job):
            return 0
    code = launch(job, raises)
    _give_up_lost_streams()
    return code


def _show_plan(job: JobSpec) -> int:
    from phalanx.cli.dry_run import plan

    try:
        # File names may hold bytes that are not text; they are written as they were read.
        sys.stdout.buffer.write(os.fsencode(plan(job) + "\n"))
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # `| head`
    except (OSError, AttributeError) as error:  # a full disk; `>&-`
        say(f"the plan cannot be written to stdout: {getattr(error, 'strerror', 'it is closed')}")
        _give_up_lost_streams()
        return 1
    _give_up_lost_streams()
    return 0


def _open_standard_descriptors() -> None:
    """Open those that are closed (`2>&-`): the next file or socket would take their number and output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)


def _give_up_lost_streams() -> None:
    """Drop what cannot be written: Python would try again at exit, and exit with 120."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # a terminal that was closed, a full disk
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


def say(line: str) -> None:
    """One line of the launcher on stderr."""
    write_stderr(f"phalanx: {line}\n")


class Launched:
    """One launch, as far as it has come: everything that its end is reported from."""

    def __init__(self, notifier: Notifier | None = None, traces: TraceSender | None = None) -> None:
        self.begin = time.time()
        self.notifier = notifier
        self.outboxes = tuple(one for one in (notifier, traces) if one is not None)
        self.dashboard: DashboardProcess | None = None
        self.train_status: TrainStatus | None = None
        self.agent: Agent | None = None
        self.result: RunResult | None = None

    def register(self) -> None:
        """The workers have been running for a while: make it known to `phalanx status` and `phalanx logs`."""
        if self.agent is not None:
            from phalanx.job.environment import variables
            from phalanx.observe import run_registry, run_summary

            run_registry.note(variables(), run_summary.describe(self.agent, self.begin))


def launch(job: JobSpec, raises: bool = False) -> int:
    """Start the agent, run it to the end, and report; `raises`: what went wrong, instead of an exit code."""
    from phalanx.agent.job import export_environment, make_helpers, make_notifier, make_traces

    export_environment(job)
    run = Launched()
    failed: BaseException | None = None
    try:
        # First of all, so that the helpers come up while the rest of the agent is still being imported.
        helpers = make_helpers(job)
    except (OSError, RuntimeError) as error:  # too many descriptors or processes
        from phalanx.errors import StartError

        why = error.strerror if isinstance(error, OSError) else error
        failed = StartError(f"the helper processes cannot be started: {why}; see `ulimit -n` and `ulimit -u`")
        return _conclude(job, run, failed, raises)
    assert helpers is not None, "a program always has helpers"
    helpers.say = say
    run = Launched(make_notifier(job), make_traces(job))
    try:
        _run_agent(job, helpers, run)
    except BaseException as error:  # noqa: BLE001 - raised again, unless it is an outcome of the table
        failed = error
    finally:
        helpers.close()
    return _conclude(job, run, failed, raises)


def _conclude(job: JobSpec, run: Launched, error: BaseException | None, raises: bool) -> int:
    from phalanx.cli.job_end import JobEnd

    end = JobEnd(job, run, say)
    try:
        return end.conclude(error, raises)
    finally:
        end.close()


def _run_agent(job: JobSpec, helpers: HelperPool, run: Launched) -> None:
    """Make the agent and run it to its end."""
    from phalanx.agent.job import make_agent, make_dashboard, make_logs, make_train_status
    from phalanx.agent.warm.spawner import require_files
    from phalanx.agent.workers.signals import SignalScope, signals_to_handle, stray_signals
    from phalanx.cli.terminal import KeptModes

    require_files(job.workers.local_world_size)  # halfway, not even an import would work
    # From here on, not only within `agent.run`: process 1 of a container has no default action for
    # signals, so an early one would be lost.
    handled = signals_to_handle(job.restarts.signals_to_handle)
    strays = stray_signals(handled)
    note, reason = _voices(job)
    with KeptModes(), SignalScope([*handled, *strays]):
        run.dashboard = make_dashboard(job, say)
        logs = make_logs(job)
        run.agent = agent = make_agent(
            job,
            helpers=helpers,
            logs=logs,
            note=note,
            reason=reason,
            progress=_progress(job),
            stray_signals=tuple(strays),
            dashboard=run.dashboard,
            subscribers=run.outboxes,
        )
        run.train_status = make_train_status(agent)
        if not job.output.quiet:
            say(_first_line(job, logs))
        agent.on_quiet = run.register
        run.result = agent.run()


def _progress(job: JobSpec) -> Progress | None:
    """The progress line, on a terminal that no worker reads."""
    if (
        job.output.quiet
        or job.terminal.attach is not None
        or sys.stderr is None
        or not sys.stderr.isatty()
        or is_json()
    ):
        return None
    from phalanx.observe.progress_line import on_terminal

    line = on_terminal(sys.stderr)
    if line is not None and job.cluster.max_nodes > 1:
        from phalanx.cluster.elastic_nodes import CountdownLine

        return CountdownLine(sys.stderr)
    return line


def _voices(job: JobSpec) -> tuple[Callable[[str], None], Callable[[str], None] | None]:
    """What to do with one line per incident, and with every decision (--verbose)."""
    if job.output.quiet:
        return (lambda _line: None), None
    if not job.output.verbose:
        return say, None
    last = ""

    def reason(line: str) -> None:
        nonlocal last
        last = line
        say(line)

    def note(line: str) -> None:
        if not last.endswith(line):  # else it repeats the reason
            say(line)

    return note, reason


def _first_line(job: JobSpec, logs: LogsSpecs) -> str:
    workers = "1 worker" if job.workers.local_world_size == 1 else f"{job.workers.local_world_size} workers"
    threads = job.workers.omp_num_threads
    omp = f", OMP_NUM_THREADS={threads} each" if threads is not None else ""
    # A temporary directory is named; a given one is known.
    hidden = job.output.log_dir is None and not job.output.redirects == job.output.tee == "0"
    where = f", output in {logs.root_log_dir}" if hidden else ""
    return f"{job.program.name}: {workers}{omp} (run {job.cluster.run_id[:12]}){where}{_taken(job)}"


def _taken(job: JobSpec) -> str:
    words = " ".join(f"{option} {value}" for option, value, _ in job.taken)
    return f"; taken from {job.scheduler}: {words}" if words else ""
