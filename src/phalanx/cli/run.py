"""`phalanx run`: what the user sees of a job.

One line at the start, one per incident and one at the end, all on stderr; stdout belongs to the workers.
When the job fails, the report comes last. What it returns is in core/exit_codes.py.
"""

from __future__ import annotations

import os
import sys
import time

from phalanx.job.config import parse
from phalanx.job.environment import allows_colour, has_error_file, outcomes_directory
from phalanx.log import is_json, use_frame, write_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx.agent.agent import Agent
    from phalanx.agent.logs.specs import LogsSpecs
    from phalanx.agent.spec import RunResult
    from phalanx.agent.warm.helper_pool import HelperPool
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
    from phalanx.job.environment import variables
    from phalanx.observe import termination_log

    _use_format(peek(argv, "log_format", variables()), os.uname().nodename)
    termination_log.write(peek(argv, "termination_log", variables()), f"phalanx run: {error}")


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


def launch(job: JobSpec, raises: bool = False) -> int:
    """Start the agent, run it to the end, and report; `raises`: what went wrong, instead of an exit code."""
    from phalanx.agent.job import export_environment, make_helpers, make_notifier, make_traces

    export_environment(job)
    # First of all, so that the helpers come up while the rest of the agent is still being imported.
    try:
        helpers = make_helpers(job)
    except (OSError, RuntimeError) as error:  # too many descriptors or processes
        from phalanx.core.exit_codes import UNFIT_NODE

        why = error.strerror if isinstance(error, OSError) else error
        line = f"the helper processes cannot be started: {why}; see `ulimit -n` and `ulimit -u`"
        failed = JobEnd(job)
        failed.reach("FAILED", UNFIT_NODE, line)
        if raises:
            raise
        say(line)
        return failed.leave_outcome(UNFIT_NODE)
    assert helpers is not None, "a program always has helpers"
    helpers.say = say
    end = JobEnd(job, make_notifier(job), make_traces(job))
    try:
        return end.leave_outcome(_run_agent(job, helpers, end, raises))
    except BaseException as error:
        from phalanx.errors import UsageError

        usage = isinstance(error, UsageError)
        end.reach("FAILED", 2 if usage else 1, str(error) if usage else f"{type(error).__name__}: {error}")
        raise
    finally:
        end.close()


def _run_agent(job: JobSpec, helpers: HelperPool, end: JobEnd, raises: bool) -> int:
    from phalanx.agent.job import make_agent, make_dashboard, make_logs, make_train_status
    from phalanx.agent.warm.spawner import require_files
    from phalanx.agent.workers.signals import SignalScope, signals_to_handle, stray_signals
    from phalanx.cli.terminal import KeptModes
    from phalanx.errors import PhalanxError, SignalException

    begin = time.time()
    agent: Agent | None = None
    result: RunResult | None = None
    note, reason = _voices(job)
    try:
        require_files(job.workers.local_world_size)  # halfway, not even an import would work
        # From here on, not only within `agent.run`: process 1 of a container has no default action for
        # signals, so an early one would be lost.
        handled = signals_to_handle(job.restarts.signals_to_handle)
        strays = stray_signals(handled)
        with KeptModes(), SignalScope([*handled, *strays]):
            end.dashboard = make_dashboard(job, say)
            logs = make_logs(job)
            agent = make_agent(
                job,
                helpers=helpers,
                logs=logs,
                note=note,
                reason=reason,
                progress=_progress(job),
                stray_signals=tuple(strays),
                dashboard=end.dashboard,
                subscribers=end.outboxes,
            )
            end.agent = agent
            end.train_status = make_train_status(agent)
            _say_unless_quiet(job, _first_line(job, logs))
            agent.on_quiet = lambda: _register(agent, begin)
            result = agent.run()
    except SignalException as stop:
        verb = "preempted" if stop.sigval == job.watching.preempt_signal else "stopped"
        line = f"{verb} by {stop.sigval.name}{_took(begin)}"
        _say_unless_quiet(job, line)
        _sum_up(job, agent, begin, "stopped", 128 + stop.sigval)
        end.reach("STOPPED", 128 + stop.sigval, line)
        if raises:
            raise
        return 128 + stop.sigval
    except PhalanxError as error:
        if isinstance(error, ValueError):
            raise  # bad usage
        from phalanx.core.exit_codes import of_error

        code = of_error(error)
        _tell_parent(str(error), code)
        end.reach("FAILED", code, str(error))
        if raises:
            raise
        if (
            job.output.quiet or agent is None or agent.outcome is None
        ):  # else it was reported when it happened
            say(str(error))
        if agent is not None:
            _keep_reason(agent, error, code, begin)
        _sum_up(job, agent, begin, "failed", code, str(error))
        return code
    finally:
        helpers.close()
        if agent is not None:
            agent.run_logs.clean_up(result is not None and not result.is_failed())
    if result.is_failed():
        report, code, path = _failure_report(job, agent, result, begin)
        _sum_up(job, agent, begin, "failed", code)
        _tell_parent(report, code, result)
        end.reach("FAILED", code, report)
        if raises:
            from phalanx.elastic.agent.elastic_launch import failure_of

            raise failure_of(job.program.name, result, agent)
        _write_report(report, f"The same as JSON: {path}\n" if path and job.output.log_dir else "")
        return code
    line = _last_line(agent, begin)
    _say_unless_quiet(job, line)
    left = agent.outcome is not None and agent.outcome.outcome in ("CLOSED", "LEFT")
    _sum_up(job, agent, begin, "left" if left else "succeeded", 0)
    end.reach("LEFT" if left else "SUCCEEDED", 0, line)
    return 0


class JobEnd:
    """Where the end of a job is told beside the screen: termination log, notifier, batch script."""

    def __init__(
        self, job: JobSpec, notifier: Notifier | None = None, traces: TraceSender | None = None
    ) -> None:
        self._job = job
        self.notifier = notifier
        self.outboxes = tuple(one for one in (notifier, traces) if one is not None)
        self.dashboard: DashboardProcess | None = None
        self.train_status: TrainStatus | None = None
        self.agent: Agent | None = None
        self._reached = False

    def reach(self, outcome: str, code: int, why: str) -> None:
        """The job is over; the first call counts."""
        if self._reached or not (code or self.notifier is not None or self.dashboard is not None):
            return
        self._reached = True
        from phalanx.observe import termination_log

        why = termination_log.bare(why)
        if self.dashboard is not None:
            self.dashboard.finish(outcome, code, why)
        if code:
            termination_log.write(self._job.output.termination_log, why)
        if self.notifier is not None and self._speaks_for_the_job():
            headline = why.partition("\n")[0]
            self.notifier.send("end", headline, outcome=outcome, exit_code=code, reason=why)

    def leave_outcome(self, code: int) -> int:
        """For a batch script that decides over a requeue: how this node ended; returns the code."""
        directory = outcomes_directory()
        if directory:
            from phalanx.platforms.outcomes import AgentOutcome, write_outcome

            name = self._job.node_name
            finish = self.agent.outcome if self.agent is not None else None
            word, reason = (str(finish.outcome), finish.message) if finish is not None else ("", "")
            out = self.agent.nodes.place().get("quarantine", []) if self.agent is not None else []
            hosts = tuple(str(one["host"]) for one in out)
            outcome = AgentOutcome(name, word, code, reason, hosts)
            write_outcome(directory, outcome, f"{name}.{os.getpid()}")
            if self._job.scheduler == "Slurm":
                from phalanx.job.environment import variables
                from phalanx.platforms.slurm.job_end import stand_in

                stand_in(directory, outcome, variables(), say)
        return code

    def _speaks_for_the_job(self) -> bool:
        """Of a job of several nodes, node 0 tells of its end, and a node that never had a place in it."""
        return self.agent is None or not self.agent.get_worker_group().group_rank

    def close(self) -> None:
        """Wait, not for long, until what is under way is done."""
        if self.train_status is not None:
            finish = self.agent.outcome if self.agent is not None else None
            self.train_status.close(finish is not None and str(finish.outcome) == "SUCCEEDED")
        if self.dashboard is not None:
            self.dashboard.close()
        for outbox in self.outboxes:
            outbox.close()
        if self._job.output.log_rotate is not None:
            from phalanx.agent.logs.rotation import wait_for_rotation

            wait_for_rotation()


def _register(agent: Agent | None, begin: float) -> None:
    """The workers have been running for a while: make the run known to `phalanx list` and `phalanx logs`."""
    if agent is not None:
        from phalanx.job.environment import variables
        from phalanx.observe import run_registry, run_summary

        run_registry.note(variables(), run_summary.describe(agent, begin))


def _sum_up(job: JobSpec, agent: Agent | None, begin: float, outcome: str, code: int, why: str = "") -> None:
    """The goodput line, where it means something, and the same as JSON beside the logs that are kept."""
    if agent is None or not (agent.history.is_known or why):
        return
    from phalanx.job.environment import variables
    from phalanx.observe import run_registry, run_summary

    summary = run_summary.conclude(agent, begin, outcome, code, why)
    if agent.history.is_known and run_summary.tells(agent):
        _say_unless_quiet(job, summary["line"])
    run_summary.keep(summary)
    if why or agent.was_quiet or os.path.isdir(summary["logs"]):
        run_registry.note(variables(), run_summary.in_short(summary))


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


def _say_unless_quiet(job: JobSpec, line: str) -> None:
    if not job.output.quiet:
        say(line)


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


def _last_line(agent: Agent, begin: float) -> str:
    finish = agent.outcome
    if finish is not None and finish.outcome in ("CLOSED", "LEFT"):  # the job goes on, or was over before
        return f"{finish.message}{_took(begin)}"
    restarts = agent.attempt
    after = f", {restarts} restart{'s' * (restarts != 1)}" if restarts else ""
    but = finish.message.removeprefix("all workers succeeded") if finish is not None else ""
    return f"all workers succeeded{_took(begin)}{after}{but}"


def _took(begin: float) -> str:
    from phalanx.observe.duration import duration

    return f" after {duration(time.time() - begin)}"


def _failure_report(
    job: JobSpec, agent: Agent, result: RunResult, begin: float
) -> tuple[str, int, str | None]:
    """The report as text, the exit code, and the file that has the report as JSON."""
    from phalanx.observe.report import diagnosis_of, format_report, report_json

    report = agent.nodes.job_failure  # every node of a job reports the same
    name = job.program.name
    if result.failures:
        everyone = {**result.failures, **result.stopped}
        kept = report_json(name, everyone, started_at=begin)
        if report is None:
            colour = sys.stderr is not None and sys.stderr.isatty() and allows_colour() and not is_json()
            text = format_report(name, everyone, started_at=begin, colour=colour)
            report = text, diagnosis_of(everyone, begin).exit_code
    else:  # a hang, or the failure of another node: no worker here has failed
        own = agent.supervision.report() if agent.supervision is not None else ""
        report = report or (own, agent.outcome.code if agent.outcome is not None else 1)
        reason = agent.outcome.message if agent.outcome is not None else ""
        text, code = report
        kept = {"name": name, "exit_code": code, "started_at": begin, "reason": reason, "report": text}
        kept.update(root_rank=None, failed=[], echoes=[], stopped=[], ranks=[])
    return *report, _keep_json(agent, kept)


def _keep_reason(agent: Agent, error: Exception, code: int, begin: float) -> None:
    """The same for what ended this node beside its workers, or before there were any."""
    kept = {"name": agent.record.job_name, "exit_code": code, "started_at": begin}
    kept.update(
        reason=str(error), report=str(error), root_rank=None, failed=[], echoes=[], stopped=[], ranks=[]
    )
    verdict = getattr(error, "verdict", None)
    if verdict is not None:
        kept["check"] = verdict.as_dict()
    if agent.run_dir is None:
        agent.run_logs.make()
    _keep_json(agent, kept)


def _tell_parent(text: str, code: int, result: RunResult | None = None) -> None:
    """The root cause in the error file of this process itself, if whatever started it asked for one."""
    if not has_error_file():
        return
    from phalanx.worker.recorder import record_root_cause

    if result is None or not result.failures:
        record_root_cause(text, code)
    else:
        from phalanx.observe.report import root_cause

        record_root_cause(root_cause(result.failures)[1], code)


def _write_report(text: str, after: str = "") -> None:
    """The last thing on the screen."""
    if sys.stderr is None or not text:
        return
    from phalanx.observe.report import for_stream

    write_stderr(for_stream(f"\n{text}\n", sys.stderr.encoding) + after, styled=True)


def _keep_json(agent: Agent, report: dict[str, Any]) -> str | None:
    """The report beside the logs of the run; a full disk must not cost the exit code."""
    directory = agent.run_dir
    if directory is None:
        return None
    import json

    if agent.supervision is not None and agent.supervision.incidents.findings:
        report = {**report, "watch": agent.supervision.incidents.findings}
    if agent.history.is_known:
        from phalanx.observe.run_summary import ledger

        report = {**report, "goodput": ledger(agent)}
    from phalanx.observe.log_layout import FAILURE

    path = os.path.join(directory, FAILURE)
    try:
        with open(path, "w") as file:
            json.dump(report, file, indent=2)
    except OSError:
        return None
    return path
