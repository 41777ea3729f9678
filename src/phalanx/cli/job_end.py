"""The end of a job, as the command reports it: on the screen, beside the logs, and to whoever started it.

What the outcome and the exit code are is decided in `core.job_outcome`.
"""

from __future__ import annotations

import os
import sys
import time

from phalanx.core import job_outcome
from phalanx.errors import SignalException
from phalanx.job.environment import allows_colour, has_error_file, outcomes_directory
from phalanx.log import is_json, write_stderr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from phalanx.agent.agent import Agent
    from phalanx.agent.workers.result import RunResult
    from phalanx.cli.run import Launched
    from phalanx.core.job_outcome import JobOutcome
    from phalanx.job.options import JobSpec


class JobEnd:
    """Reports the end of one run. What runs beside the agent for it is closed here as well."""

    def __init__(self, job: JobSpec, run: Launched, say: Callable[[str], None]) -> None:
        self._job, self._run, self._say = job, run, say

    def conclude(self, error: BaseException | None, raises: bool) -> int:
        """The exit code of a run that an `error` has ended, or its result. `raises`: an exception instead."""
        agent, result = self._run.agent, self._run.result
        if error is None:
            assert agent is not None
            assert result is not None
            agent.run_logs.clean_up(not result.is_failed())
            code = self._failed(agent, result, raises) if result.is_failed() else self._went_well(agent)
        else:
            try:
                code = self._ended_by(error, raises)
            finally:
                if agent is not None:
                    agent.run_logs.clean_up(False)
        self._leave_outcome(code)
        return code

    # -- the outcomes -------------------------------------------------------------------------------

    def _ended_by(self, error: BaseException, raises: bool) -> int:
        """By a signal, by an error of ours, or by one that whoever called the command shows."""
        outcome = job_outcome.of_error(error, self._job.watching.preempt_signal or 0, self._took())
        agent = self._run.agent
        if job_outcome.is_foreign(error):
            self._reach(outcome)
            self._leave_outcome(outcome.code)
            raise error
        if isinstance(error, SignalException):
            self._say_unless_quiet(outcome.why)
            self._sum_up(outcome)
            self._reach(outcome)
            if raises:
                raise error
            return outcome.code
        _tell_parent(outcome)
        self._reach(outcome)
        if raises:
            raise error
        # Otherwise it was reported when it happened.
        if self._job.output.quiet or agent is None or agent.outcome is None:
            self._say(outcome.why)
        if agent is not None:
            self._keep_reason(agent, error, outcome)
        self._sum_up(outcome, outcome.why)
        return outcome.code

    def _failed(self, agent: Agent, result: RunResult, raises: bool) -> int:
        """The workers failed, or those of another node, or they hang: the report comes last on the screen."""
        outcome, path = self._failure_report(agent, result)
        self._sum_up(outcome)
        _tell_parent(outcome, result)
        self._reach(outcome)
        if raises:
            from phalanx.elastic.agent.elastic_launch import failure_of

            raise failure_of(self._job.program.name, result, agent)
        after = f"The same as JSON: {path}\n" if path and self._job.output.log_dir else ""
        if sys.stderr is not None and outcome.why:
            from phalanx.observe.report import for_stream

            write_stderr(for_stream(f"\n{outcome.why}\n", sys.stderr.encoding) + after, styled=True)
        return outcome.code

    def _went_well(self, agent: Agent) -> int:
        """All workers succeeded, or this node left, or came when the job was over."""
        outcome = job_outcome.of_run(agent.outcome, agent.attempt, took=self._took())
        self._say_unless_quiet(outcome.why)
        self._sum_up(outcome)
        self._reach(outcome)
        return outcome.code

    # -- where it is reported -----------------------------------------------------------------------

    def _reach(self, outcome: JobOutcome) -> None:
        """The job is over: for the page, the termination log and the notifier."""
        code = outcome.code
        if not (code or self._run.notifier is not None or self._run.dashboard is not None):
            return
        from phalanx.observe import termination_log

        why = termination_log.bare(outcome.why)
        if self._run.dashboard is not None:
            self._run.dashboard.finish(outcome.word, code, why)
        if code:
            termination_log.write(self._job.output.termination_log, why)
        if self._run.notifier is not None and self._speaks_for_the_job():
            headline = why.partition("\n")[0]
            self._run.notifier.send("end", headline, outcome=outcome.word, exit_code=code, reason=why)

    def _leave_outcome(self, code: int) -> None:
        """For a batch script that decides over a requeue: how this node ended."""
        directory = outcomes_directory()
        if directory:
            from phalanx.platforms.outcomes import AgentOutcome, write_outcome

            name = self._job.node_name
            finish = self._run.agent.outcome if self._run.agent is not None else None
            word, reason = (str(finish.outcome), finish.message) if finish is not None else ("", "")
            out = self._run.agent.nodes.place().get("quarantine", []) if self._run.agent is not None else []
            hosts = tuple(str(one["host"]) for one in out)
            outcome = AgentOutcome(name, word, code, reason, hosts)
            write_outcome(directory, outcome, f"{name}.{os.getpid()}")
            if self._job.scheduler == "Slurm":
                from phalanx.job.environment import variables
                from phalanx.platforms.slurm.job_end import stand_in

                stand_in(directory, outcome, variables(), self._say)

    def _speaks_for_the_job(self) -> bool:
        """Of a job of several nodes, node 0 tells of its end, and a node that never had a place in it."""
        return self._run.agent is None or not self._run.agent.get_worker_group().group_rank

    def _sum_up(self, outcome: JobOutcome, why: str = "") -> None:
        """The goodput line, where it means something, and the same as JSON beside the logs that are kept."""
        agent = self._run.agent
        if agent is None or not (agent.history.is_known or why):
            return
        from phalanx.job.environment import variables
        from phalanx.observe import run_registry, run_summary

        summary = run_summary.conclude(agent, self._run.begin, outcome.word.lower(), outcome.code, why)
        if agent.history.is_known and run_summary.tells(agent):
            self._say_unless_quiet(summary["line"])
        run_summary.keep(summary)
        if why or agent.was_quiet or os.path.isdir(summary["logs"]):
            run_registry.note(variables(), run_summary.in_short(summary))

    def _failure_report(self, agent: Agent, result: RunResult) -> tuple[JobOutcome, str | None]:
        """The outcome with the report as its text, and the file that has it as JSON."""
        from phalanx.observe.report import diagnosis_of, format_report, report_json

        name, everyone, own, hang = self._job.program.name, {**result.failures, **result.stopped}, None, ""
        kept: dict[str, Any] = {}
        if result.failures:
            kept = report_json(name, everyone, started_at=self._run.begin)
            if agent.nodes.job_failure is None:
                colour = sys.stderr is not None and sys.stderr.isatty() and allows_colour() and not is_json()
                text = format_report(name, everyone, started_at=self._run.begin, colour=colour)
                own = text, diagnosis_of(everyone, self._run.begin).exit_code
        else:  # a hang, or the failure of another node: no worker here has failed
            hang = agent.supervision.report()
        failure = job_outcome.failure_of(agent.nodes.job_failure, own, hang, agent.outcome)
        outcome = job_outcome.of_run(agent.outcome, agent.attempt, failure)
        if not kept:
            reason = agent.outcome.message if agent.outcome is not None else ""
            kept = _without_ranks(name, outcome, self._run.begin, reason)
        kept["exit_code"] = outcome.code  # the job's
        return outcome, _keep_json(agent, kept)

    def _keep_reason(self, agent: Agent, error: BaseException, outcome: JobOutcome) -> None:
        """The same for what ended this node beside its workers, or before there were any."""
        kept = _without_ranks(agent.record.job_name, outcome, self._run.begin, outcome.why)
        verdict = getattr(error, "verdict", None)
        if verdict is not None:
            kept["check"] = verdict.as_dict()
        if agent.run_dir is None:
            agent.run_logs.make()
        _keep_json(agent, kept)

    def _took(self) -> str:
        from phalanx.observe.duration import duration

        return f" after {duration(time.time() - self._run.begin)}"

    def _say_unless_quiet(self, line: str) -> None:
        if not self._job.output.quiet:
            self._say(line)

    def close(self) -> None:
        """Wait, not for long, until what is under way is done."""
        if self._run.train_status is not None:
            finish = self._run.agent.outcome if self._run.agent is not None else None
            self._run.train_status.close(finish is not None and str(finish.outcome) == "SUCCEEDED")
        if self._run.dashboard is not None:
            self._run.dashboard.close()
        for outbox in self._run.outboxes:
            outbox.close()
        if self._job.output.log_rotate is not None:
            from phalanx.agent.logs.rotation import wait_for_rotation

            wait_for_rotation()


def _without_ranks(name: str, outcome: JobOutcome, begin: float, reason: str) -> dict[str, Any]:
    """A report as JSON of a failure that no worker here has caused."""
    kept = {"name": name, "exit_code": outcome.code, "started_at": begin, "reason": reason}
    nobody: dict[str, Any] = {"root_rank": None, "failed": [], "echoes": [], "stopped": [], "ranks": []}
    return {**kept, "report": outcome.why, **nobody}


def _tell_parent(outcome: JobOutcome, result: RunResult | None = None) -> None:
    """The root cause in the error file of this process itself, if whatever started it asked for one."""
    if not has_error_file():
        return
    from phalanx.worker.recorder import record_root_cause

    if result is None or not result.failures:
        record_root_cause(outcome.why, outcome.code)
    else:
        from phalanx.observe.report import root_cause

        record_root_cause(root_cause(result.failures)[1], outcome.code)


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
