"""`phalanx run`: the command people type. Parses, launches, and says how it went.

On the screen: one line at the start, one per incident, one at the end, all on stderr; the workers' own
output is theirs. When the job fails, the report is the last thing there is. Exit codes: 0, the first
failing worker's code (128+n for a signal), 128+n when interrupted, 2 for bad usage, 1 for the rest.
"""

from __future__ import annotations

import os
import sys
import time

from phalanx.config import parse, worker_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from phalanx.agent.local import LocalElasticAgent
    from phalanx.agent.spec import RunResult
    from phalanx.config import RunConfig
    from phalanx.logs.specs import LogsSpecs
    from phalanx.membership.handler import RendezvousHandler
    from phalanx.observe.progress_line import Progress
    from phalanx.warm.helper_pool import HelperPool


def main(argv: Sequence[str]) -> int:
    """Run what the words ask for; the exit code."""
    _open_standard_descriptors()
    config = parse(argv, os.environ)
    for warning in config.warnings:
        say(f"warning: {warning}")
    if config.dry_run:
        return _show_plan(config)
    if config.detach:
        from phalanx.cli.detach import detach

        if not detach(config):
            return 0
    code = launch(config)
    _give_up_lost_streams()
    return code


def _show_plan(config: RunConfig) -> int:
    from phalanx.cli.dry_run import plan

    try:
        # Names of files may hold bytes that are no text; they go out as they came in.
        sys.stdout.buffer.write(os.fsencode(plan(config) + "\n"))
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
    """Where one is closed (`2>&-`), the next file or socket would become it, and be written into as such."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            os.set_inheritable(number, True)


def _give_up_lost_streams() -> None:
    """What could not be written is dropped: else Python tries again at exit, and exits with 120 over it."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # a terminal that was closed, a full disk
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)


def say(line: str) -> None:
    """One line of ours on stderr; a closed or full stderr is no reason to fail."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"phalanx: {line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def launch(config: RunConfig) -> int:
    """Start the agent, run it to the end, and tell."""
    from phalanx.warm.helper_pool import helper_pool_for

    if config.omp_num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(config.omp_num_threads)  # before helpers import anything
    # First of all, so that the helpers come up while the rest of the agent is still being imported.
    try:
        helpers = helper_pool_for(*worker_command(config), config.warm, config.preload, config.warmup)
    except (OSError, RuntimeError) as error:  # no descriptor, no process to be had; StartError says so itself
        why = error.strerror if isinstance(error, OSError) else error
        say(f"the helper processes cannot be started: {why}; see `ulimit -n` and `ulimit -u`")
        return 1
    helpers.say = say
    begin = time.time()
    from phalanx.cli.terminal import KeptModes
    from phalanx.errors import PhalanxError, SignalException
    from phalanx.workers.signals import SIGNALS_VARIABLE, SignalScope

    os.environ[SIGNALS_VARIABLE] = signals_of(config)
    agent: LocalElasticAgent | None = None
    try:
        # From here on, and not only within `agent.run`: process 1 of a container has no default action
        # for a signal, so that one which comes early would be lost there.
        with KeptModes(), SignalScope():
            specs = logs_specs(config)
            agent = make_agent(config, specs, helpers)
            _say_unless_quiet(config, _first_line(config, specs))
            result = agent.run()
    except SignalException as stop:
        verb = "preempted" if stop.sigval == config.preempt_signal else "stopped"
        _say_unless_quiet(config, f"{verb} by {stop.sigval.name}{_took(begin)}")
        return 128 + stop.sigval
    except PhalanxError as error:
        if isinstance(error, ValueError):
            raise  # bad usage
        if config.quiet or agent is None or agent.outcome is None:  # else it was said when it happened
            say(str(error))
        return 1
    finally:
        helpers.close()
        if agent is not None:
            agent.remove_empty_logs()
    if result.is_failed():
        return _tell_failure(config, agent, result, begin)
    _say_unless_quiet(config, _last_line(agent, begin))
    return 0


def signals_of(config: RunConfig) -> str:
    """The names of the signals that stop the workers; the announcement of a preemption is one of them."""
    names = config.signals_to_handle
    if config.preempt_signal is None:
        return names
    import signal

    return f"{names},{signal.Signals(config.preempt_signal).name}"


def _progress(config: RunConfig) -> Progress | None:
    """The progress line, where a person looks at a terminal."""
    if config.quiet or sys.stderr is None or not sys.stderr.isatty():
        return None
    from phalanx.observe.progress_line import on_terminal

    line = on_terminal(sys.stderr)
    if line is not None and config.max_nodes > 1:
        from phalanx.membership.cluster import CountdownLine

        return CountdownLine(sys.stderr)
    return line


def _say_everything_once() -> tuple[Callable[[str], None], Callable[[str], None]]:
    """For --verbose: every decision; what is only its reason again is not repeated."""
    last = ""

    def reason(line: str) -> None:
        nonlocal last
        last = line
        say(line)

    def note(line: str) -> None:
        if not last.endswith(line):
            say(line)

    return reason, note


def _silent(_line: str) -> None:
    """For --quiet."""


def _say_unless_quiet(config: RunConfig, line: str) -> None:
    if not config.quiet:
        say(line)


def make_agent(config: RunConfig, specs: LogsSpecs, helpers: HelperPool) -> LocalElasticAgent:
    """The agent that a command line asks for, with its logs where `specs` says."""
    from phalanx.agent.local import LocalElasticAgent
    from phalanx.agent.spec import AgentOptions, WorkerSpec
    from phalanx.core.restarts import RestartPolicy
    from phalanx.supervision.supervision import supervision_for

    program, args = worker_command(config)
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.local_world_size,
        rdzv_handler=_handler(config),
        entrypoint=program,
        args=args,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=config.master_addr if config.rdzv_backend == "static" else None,
        master_port=config.master_port if config.rdzv_backend == "static" else None,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=_numa(config),
        duplicate_stdout_filters=list(config.duplicate_stdout_filters) or None,
        duplicate_stderr_filters=list(config.duplicate_stderr_filters) or None,
        virtual_local_rank=config.virtual_local_rank,
    )
    policy = RestartPolicy(
        max_restarts=config.max_restarts,
        window=config.restart_window,
        no_restart_on=config.no_restart_on,
        readiness=config.startup_timeout is not None,  # then workers report when they are set up
    )
    note: Callable[[str], None] = _silent if config.quiet else say
    reason: Callable[[str], None] | None = None
    if config.verbose:
        reason, note = _say_everything_once()
    return LocalElasticAgent(
        spec,
        specs,
        start_method=config.start_method,
        log_line_prefix_template=_prefix(config),
        shutdown_timeout=config.shutdown_timeout,
        options=AgentOptions(
            restart_policy=policy,
            supervision=supervision_for(config),
            helpers=helpers,
            attach=config.attach,
            job_name=os.path.basename(config.script),
            note=note,
            reason=reason,
            progress=_progress(config),
        ),
    )


def logs_specs(config: RunConfig) -> LogsSpecs:
    """Where the output goes: our way, or a plug-in's (found by its entry point)."""
    from phalanx.logs.specs import DefaultLogsSpecs, Std

    kind: Any = DefaultLogsSpecs
    if config.logs_specs:
        from phalanx.plugins import load

        kind = load(config.logs_specs, "phalanx.logs_specs", "torchrun.logs_specs")
    try:
        made: LogsSpecs = kind(
            log_dir=config.log_dir,
            redirects=Std.from_str(config.redirects),
            tee=Std.from_str(config.tee),
            local_ranks_filter=set(config.local_ranks_filter) if config.local_ranks_filter else None,
        )
    except OSError as error:
        from phalanx.options import usage_error

        why = str(error.strerror or error).removeprefix(f"log_dir {os.path.abspath(config.log_dir or '')!r} ")
        raise usage_error(f"--log-dir {config.log_dir}: {why}") from None
    return made


def _handler(config: RunConfig) -> RendezvousHandler:
    if config.max_nodes == 1 and config.rdzv_backend in ("phalanx", "static"):
        from phalanx.membership.solo import SoloRendezvous

        return SoloRendezvous(config.run_id, config.rdzv_backend)
    from phalanx.membership.handler import RendezvousParameters
    from phalanx.membership.registry import get_rendezvous_handler

    settings: dict[str, Any] = dict(config.rdzv_conf)
    if config.rdzv_backend in ("phalanx", "etcd", "static"):
        for name in ("token_file", "tls_cert", "tls_key", "tls_ca", "store_grace"):
            if getattr(config, name) is not None:
                settings.setdefault(name, getattr(config, name))
    if config.rdzv_backend == "static" or config.node_rank_given:
        settings["rank"] = config.node_rank
    try:
        return get_rendezvous_handler(
            RendezvousParameters(
                config.rdzv_backend,
                config.rdzv_endpoint,
                config.run_id,
                config.min_nodes,
                config.max_nodes,
                config.local_addr,
                **settings,
            )
        )
    except ValueError as error:  # an address or a setting that only the backend can judge
        from phalanx.options import usage_error

        raise usage_error(str(error)) from None


def _numa(config: RunConfig) -> Any:
    if config.numa_binding is None:
        return None
    from phalanx.workers.numa import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(config.numa_binding))


def _prefix(config: RunConfig) -> str | None:
    """A line needs no rank in front of it where only one rank talks."""
    if config.log_line_prefix_template is not None:
        return config.log_line_prefix_template
    shown = config.local_ranks_filter or range(config.local_world_size)
    return "" if config.max_nodes == 1 and len(shown) == 1 else None


def _first_line(config: RunConfig, specs: LogsSpecs) -> str:
    workers = "1 worker" if config.local_world_size == 1 else f"{config.local_world_size} workers"
    omp = ", OMP_NUM_THREADS=1 each" if config.omp_num_threads is not None else ""
    script = os.path.basename(config.script.rstrip("/"))
    # Who did not name the place could not find the files.
    hidden = config.log_dir is None and not config.redirects == config.tee == "0"
    where = f", output in {specs.root_log_dir}" if hidden else ""
    return f"{script}: {workers}{omp} (run {config.run_id[:12]}){where}"


def _last_line(agent: LocalElasticAgent, begin: float) -> str:
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


def _tell_failure(config: RunConfig, agent: LocalElasticAgent, result: RunResult, begin: float) -> int:
    from phalanx.observe.report import diagnosis_of, format_report, report_json

    told = agent.job_failure  # every node of a job tells the same
    name = os.path.basename(config.script)
    if result.failures:
        everyone = {**result.failures, **result.stopped}
        kept = report_json(name, everyone, started_at=begin)
        if told is None:
            colour = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
            text = format_report(name, everyone, started_at=begin, colour=colour)
            told = text, diagnosis_of(everyone, begin).exit_code
    else:  # a hang, or the failure of another node: nobody here has failed
        told = told or (agent.supervision.report() if agent.supervision is not None else "", 1)
        reason = agent.outcome.message if agent.outcome is not None else ""
        kept = {"name": name, "exit_code": told[1], "started_at": begin, "reason": reason, "report": told[0]}
        kept.update(root_rank=None, failed=[], echoes=[], stopped=[], ranks=[])
    path = _keep_json(agent, kept)
    _write_report(told[0], f"The same as JSON: {path}\n" if path and config.log_dir else "")
    return told[1]


def _write_report(text: str, after: str = "") -> None:
    """The last thing on the screen."""
    if sys.stderr is None or not text:
        return
    from phalanx.observe.report import for_stream

    try:
        sys.stderr.write(for_stream(f"\n{text}\n", sys.stderr.encoding))
        sys.stderr.write(after)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def _keep_json(agent: LocalElasticAgent, report: dict[str, Any]) -> str | None:
    """The report beside the logs of the run; a full disk is no reason to lose the exit code."""
    directory = agent.run_dir
    if directory is None:
        return None
    import json

    if agent.supervision is not None and agent.supervision.incidents.findings:
        report = {**report, "watch": agent.supervision.incidents.findings}
    path = os.path.join(directory, "failure.json")
    try:
        with open(path, "w") as file:
            json.dump(report, file, indent=2)
    except OSError:
        return None
    return path
