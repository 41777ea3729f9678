"""The command line and the variables of a run: torchrun's, ours, and what is refused with which words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.torchrun import config_from_args
from phalanx.elastic.agent.elastic_launch import LaunchConfig
from phalanx.errors import UsageError
from phalanx.job import config as config_module
from phalanx.job.command_line import scan
from phalanx.job.config import (
    InformationRequested,
    JobSpec,
    from_launch_config,
    from_namespace,
    get_args_parser,
    parse,
)
from phalanx.job.options import OPTIONS
from phalanx.job.units import words as split_words
from tests.conftest import as_nobody, drop_privileges

PATH = {"PATH": os.environ.get("PATH", os.defpath)}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return str(path)


def ask(*argv: str, **environ: str) -> JobSpec:
    return parse(argv, {**PATH, **environ})


def is_alone(job: JobSpec) -> bool:
    """One node that meets no other: its run id is its own."""
    return job.cluster.run_id != "none"


def command(job: JobSpec) -> tuple[object, tuple[str, ...]]:
    return job.program.entrypoint, job.program.args


def refusal(*argv: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        ask(*argv, **environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- the same as torchrun -------------------------------------------------------------------------------


def torch_parser() -> Any:
    return pytest.importorskip("torch.distributed.run").get_args_parser()


def options_of(parser: Any) -> dict[str, Any]:
    return {action.dest: action for action in parser._actions}


def test_every_torchrun_option_has_the_same_names_default_and_choices() -> None:
    ours = options_of(get_args_parser({}))
    for dest, theirs in options_of(torch_parser()).items():
        mine = ours[dest]
        assert mine.option_strings == list(theirs.option_strings), dest
        assert mine.default == theirs.default, dest
        if dest == "print_completion":  # there, those of the installed shtab
            assert {"bash", "zsh", "tcsh"} <= {*mine.choices} & {*theirs.choices}
        else:
            assert (mine.choices or None) == (theirs.choices or None), dest
        assert mine.nargs == theirs.nargs, dest
        assert mine.const == theirs.const, dest


def test_every_torchrun_option_reads_the_same_variable(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    samples = {"int": "7", "duration": "7.5", "flag": "1", "list": "a,b"}
    names = {option.dest: samples.get(option.kind, "7") for option in OPTIONS}
    pretend = {f"PET_{dest.upper()}": value for dest, value in names.items()}
    for name, value in pretend.items():
        monkeypatch.setenv(name, value)
    theirs = vars(torch_parser().parse_args([script]))
    mine = vars(get_args_parser(pretend).parse_args([script]))
    assert {dest: mine[dest] for dest in theirs} == theirs


ARGVS = [
    ["s.py"],
    ["--nnodes", "2:4", "--nproc_per_node=3", "s.py", "--nnodes", "9", "-h", "--", "x"],
    ["--", "s.py", "--", "a"],
    ["--nproc-per-node", "2", "--", "--odd.py", "a"],
    ["-r3", "-t=1", "s.py"],
    ["-mt1", "mod", "-m"],
    ["-mr", "0:3,1:0", "mod"],
    ["--redirect", "3", "--no-pyth", "echo", "hi"],
    ["--role", "a b", "s.py"],
    ["--role=-x", "s.py"],
    ["--node-rank", "-1", "s.py"],
    ["--rdzv-conf=", "s.py"],
    ["--max-restarts", "1", "--max_restarts", "2", "s.py"],
    ["-"],
    ["-5", "s.py"],
    ["s.py", ""],
    ["--duplicate-stdout-filters", "a,,b,c", "s.py"],
]


@pytest.mark.parametrize("argv", ARGVS, ids=" ".join)
def test_words_are_split_as_torchrun_splits_them(argv: list[str]) -> None:
    theirs = torch_parser().parse_args(argv)
    found = scan(argv)
    assert (found.script, list(found.script_args)) == (theirs.training_script, theirs.training_script_args)
    defaults = torch_parser().parse_args(["s.py"])
    for dest, value in vars(theirs).items():
        if not dest.startswith("training") and value != getattr(defaults, dest):
            raw = found.values[dest]
            assert value in (raw, raw == "1", list(split_words(raw))) or value == float(raw)


# fmt: off
_WORDS = st.sampled_from([
    "--nnodes", "--nproc_per_node", "--standalone", "-m", "-r", "-r3", "-t=2", "-mt1", "--redirect",
    "--rdzv-conf=a=b", "--role=x", "--no-python", "2", "0", "s.py", "-1", "--grace", "5", "a=b", "-q",
])
# fmt: on


@given(st.lists(_WORDS, max_size=7))
def test_scanner_and_argparse_agree_on_any_words(argv: list[str]) -> None:
    parser = get_args_parser({})
    parser.error = lambda message: (_ for _ in ()).throw(ValueError(message))  # type: ignore[method-assign]
    argv = [*argv, "s.py"]
    try:
        theirs = parser.parse_args(argv)
    except ValueError:
        return  # where argparse refuses we may refuse later, when the value is checked
    found = scan(argv)
    assert (found.script, list(found.script_args)) == (theirs.training_script, theirs.training_script_args)


# --- sources and defaults -------------------------------------------------------------------------------


def test_defaults(script: str) -> None:
    run = ask(script, "--lr", "0.1")
    assert (run.workers.local_world_size, run.cluster.min_nodes, run.cluster.max_nodes, run.workers.role) == (
        1,
        1,
        1,
        "default",
    )
    assert (run.restarts.max_restarts, run.restarts.monitor_interval, run.restarts.shutdown_timeout) == (
        0,
        0.1,
        30.0,
    )
    assert (run.cluster.rdzv_backend, run.cluster.rdzv_endpoint, is_alone(run)) == (
        "phalanx",
        "localhost:0",
        True,
    )
    assert (run.output.redirects, run.output.tee, run.output.log_dir, run.output.local_ranks_filter) == (
        "0",
        "0",
        None,
        None,
    )
    assert (run.workers.omp_num_threads, run.workers.start_method, run.warnings) == (None, "spawn", ())
    assert command(run) == (sys.executable, (script, "--lr", "0.1"))


def test_argument_beats_variable_beats_default(script: str) -> None:
    assert ask("--nproc-per-node", "3", script, PET_NPROC_PER_NODE="2").workers.local_world_size == 3
    assert ask(script, PET_NPROC_PER_NODE="2").workers.local_world_size == 2
    assert ask(script, PET_NPROC_PER_NODE="").workers.local_world_size == 1
    assert ask(script, PHALANX_GRACE="4", PET_TEE="3").output.tee == "3"


def test_grace_has_two_names_and_an_argument_beats_any_variable(script: str) -> None:
    assert ask("--grace", "2.5", "--shutdown-timeout", "9", script).restarts.shutdown_timeout == 2.5
    assert ask("--shutdown-timeout", "9", script, PHALANX_GRACE="4").restarts.shutdown_timeout == 9
    assert ask("--grace", "0", script, PET_SHUTDOWN_TIMEOUT="9").restarts.shutdown_timeout == 0
    assert ask(script, PHALANX_GRACE="4", PET_SHUTDOWN_TIMEOUT="9").restarts.shutdown_timeout == 4
    assert (
        ask(script, PET_SHUTDOWN_TIMEOUT="9", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").restarts.shutdown_timeout
        == 9
    )
    assert ask(script, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="7").restarts.shutdown_timeout == 7


def test_what_nodes_know_each_other_by(script: str) -> None:
    plain = ask(script)
    assert plain.cluster.rdzv_conf == {}
    run = ask(
        *("--tls-cert", script, "--tls-ca", script, "--store-grace", "5", script),
        PHALANX_TOKEN_FILE=script,
        PHALANX_TLS_KEY=script,
        PHALANX_STORE_GRACE="7",
    )
    files = dict.fromkeys(("token_file", "tls_cert", "tls_key", "tls_ca"), script)
    assert run.cluster.rdzv_conf == {**files, "store_grace": 5.0}


def test_threads_are_limited_only_when_workers_share_and_nobody_chose(script: str) -> None:
    assert ask("--nproc-per-node", "2", script).workers.omp_num_threads == 1
    assert ask("--nproc-per-node", "2", script, OMP_NUM_THREADS="3").workers.omp_num_threads is None
    assert ask(script).workers.omp_num_threads is None


def test_script_arguments_are_never_touched(script: str) -> None:
    tail = ("--nnodes", "9", "-h", "--", "--help", "", "--nproc_per_node=x", "${local_rank}")
    run = ask("--tee", "3", script, *tail)
    assert run.program.args == (script, *tail)
    assert run.cluster.max_nodes == 1
    assert ask("--", script, *tail).program.args == (script, *tail)


def test_prefix_template_flag_beats_variable(script: str) -> None:
    name = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
    assert ask(script, **{name: "A"}).output.log_line_prefix_template == "A"
    both = {name: "A", "PET_LOG_LINE_PREFIX_TEMPLATE": "C"}
    assert ask(script, **both).output.log_line_prefix_template == "C"
    assert (
        ask("--log-line-prefix-template", "B", script, **{name: "A"}).output.log_line_prefix_template == "B"
    )


def test_our_own_options_give_way_when_shortened(script: str) -> None:
    """What is unique under torchrun stays unique here."""
    for short in ("--log-", "--log_"):
        assert ask(short, "logs", script).output.log_dir == "logs"
    with pytest.raises(InformationRequested):
        parse(["--he"], {})


def test_a_shortened_option_may_match_both_spellings_of_one(script: str) -> None:
    assert ask("--nproc", "2", script).workers.local_world_size == 2


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ((), ("phalanx", "localhost:0", True)),
        (("--nnodes", "1"), ("phalanx", "localhost:0", True)),
        (("--master-addr", "localhost"), ("phalanx", "localhost:0", True)),
        (("--standalone", "--rdzv-endpoint", "elsewhere:1"), ("phalanx", "localhost:0", True)),
        (("--rdzv-backend", "c10d"), ("c10d", "localhost:0", False)),
        (("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:5"), ("c10d", "h:5", False)),
        (("--master-port", "29777"), ("static", "127.0.0.1:29777", False)),
        (("--master-port", "0"), ("static", "127.0.0.1:0", False)),
        (("--rdzv-endpoint", "localhost:29888"), ("static", "localhost:29888", False)),
        (("--nnodes", "2"), ("static", "127.0.0.1:29500", False)),
        (("--nnodes", "2", "--master-addr", "fe80::1"), ("static", "[fe80::1]:29500", False)),
        (("--nnodes", "2", "--master-addr", "[::1]", "--master-port", "7"), ("static", "[::1]:7", False)),
        (("--nnodes", "1:4", "--rdzv-backend", "phalanx"), ("phalanx", "localhost:29400", False)),
    ],
)
def test_where_nodes_meet(script: str, argv: tuple[str, ...], expected: tuple[str, str, bool]) -> None:
    run = ask(*argv, script)
    assert (run.cluster.rdzv_backend, run.cluster.rdzv_endpoint, is_alone(run)) == expected


def test_run_id_is_unique_unless_given(script: str) -> None:
    assert ask(script).cluster.run_id != ask(script).cluster.run_id
    assert ask("--rdzv-id", "job7", script).cluster.run_id == "job7"
    assert ask("--nnodes", "2", script).cluster.run_id == "none"


def test_worker_commands(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    python = sys.executable
    assert command(ask("-m", "train", "a")) == (python, ("-m", "train", "a"))
    assert command(ask("-m", "json.tool")) == (python, ("-m", "json.tool"))
    assert command(ask("--no-python", "sh", "-c", "x")) == ("sh", ("-c", "x"))
    assert command(ask("--run-path", "--no-python", script, "a")) == (python, (script, "a"))
    assert command(ask(script, PYTHON_EXEC="sh")) == ("sh", (script,))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("")
    assert command(ask("package")) == (python, ("package",))


def test_lists_and_settings(script: str) -> None:
    run = ask(
        "--rdzv-conf", "a=1, b = x=y ,", "--local-ranks-filter", "0, 1", "--nproc-per-node", "2", script
    )
    assert run.cluster.rdzv_conf == {"a": "1", "b": "x=y"}
    for quoted in ("\"a=1,b='2'\"", "'a=1,b='2''"):
        assert ask("--rdzv-conf", quoted, script).cluster.rdzv_conf == {"a": "1", "b": "'2'"}
    old = ask("--rdzv-backend", "etcd-v2", "--rdzv-endpoint", "h:2379", script)
    assert old.cluster.rdzv_backend == "etcd"
    assert "speaks v3" in old.warnings[0]
    assert run.output.local_ranks_filter == {0, 1}
    assert ask("--duplicate-stdout-filters", "a,,b,c", script).output.duplicate_stdout_filters == ("a,b", "c")
    assert ask("--no-restart-on", "2,137,SIGABRT,-11", script).restarts.no_restart_on == {2, 137, 134, 139}
    named = ask("--no-restart-on", "ValueError, torch.OutOfMemoryError,socket.timeout", script)
    assert named.restarts.no_restart_on == {"ValueError", "OutOfMemoryError", "timeout"}
    assert named.restarts.hopeless == ask("--no-restart-on", "none", script).restarts.hopeless == frozenset()
    assert ask(script).restarts.hopeless == {2, "ImportError", "SyntaxError"}
    assert (
        ask("--no-restart-on", "none", script).restarts.no_restart_on
        == ask(script).restarts.no_restart_on
        == frozenset()
    )
    assert [ask("--backoff", text, script).restarts.backoff for text in ("2", "0", "0.1:60", "90")] == [
        (2, 30), (0, 30), (0.1, 60), (90, 90),
    ]  # fmt: skip
    assert (ask(script).restarts.backoff, ask("--restart-delay", "3", script).restarts.restart_delay) == (
        (0.5, 30),
        3,
    )


def test_namespace_gives_the_same_run(script: str) -> None:
    argv = [
        "--nproc-per-node",
        "2",
        "--tee",
        "3",
        "--duplicate-stderr-filters",
        "a,,b,c",
        "--rdzv-id",
        "j",
        script,
        "-h",
    ]
    environ = {**PATH, "PET_MAX_RESTARTS": "4", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}
    assert from_namespace(get_args_parser(environ).parse_args(argv), environ) == parse(argv, environ)


DESCRIBED = [
    ["--nproc-per-node", "2", "--max-restarts", "3", "--role", "trainer", "--rdzv-id", "j"],
    ["--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "5", "--rdzv-id", "j"],
    ["--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:5", "--rdzv-conf", "timeout=7"],
    ["--grace", "2.5", "--signals-to-handle", "SIGTERM,SIGUSR1", "--duplicate-stdout-filters", "a,b"],
    ["--numa-binding", "node", "--virtual-local-rank", "--start-method", "fork", "--tee", "3"],
]


@pytest.mark.parametrize("words", DESCRIBED, ids=" ".join)
def test_a_launch_config_gives_the_same_job(
    words: list[str], script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words → namespace → LaunchConfig → JobSpec is the JobSpec of the words, but for the screen's fields."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # else it is set, for this process
    words = [*words, "--log-dir", str(tmp_path / "logs"), script, "--lr", "${local_rank}"]
    namespace = get_args_parser({}).parse_args(words)
    config, program, args = config_from_args(namespace)
    made = from_launch_config(config, program, args)
    logs: dict[str, Any] = {"logs_specs": None, "log_dir": None, "redirects": "0", "tee": "0"}

    def without_own(job: JobSpec) -> JobSpec:
        return job.replace(
            program=job.program.replace(name=""),
            workers=job.workers.replace(omp_num_threads=None),
            cluster=job.cluster.replace(run_id="", rdzv_conf={}),
            restarts=job.restarts.replace(hopeless=frozenset(), patience=0.0, restart_always=True),
            output=job.output.replace(**logs),
        )

    wanted = from_namespace(namespace)
    assert made.cluster.rdzv_conf == {"timeout": 900, **wanted.cluster.rdzv_conf}
    assert without_own(made) == without_own(wanted)
    assert made.output.logs_specs is config.logs_specs


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node=0: at least one worker"),
        ({"nproc_per_node": 1.5}, "nproc_per_node=1.5: use a number"),
        ({"min_nodes": 0}, "min_nodes=0, max_nodes=1: at least one node"),
        ({"min_nodes": 3, "max_nodes": 2}, "min_nodes=3, max_nodes=2: the minimum is larger"),
        ({"max_nodes": 2, "rdzv_backend": "static"}, "static needs a fixed number; add rdzv_backend phalanx"),
        ({"max_restarts": -1}, "max_restarts=-1: must be 0 or more"),
        ({"max_restarts": "3"}, "max_restarts='3': not a whole number"),
        ({"monitor_interval": 0}, "monitor_interval=0: must be"),
        ({"monitor_interval": "1"}, "monitor_interval='1': not a number"),
        ({"start_method": "thread"}, "start_method='thread': choose one of spawn"),
        ({"role": "a/b"}, "role='a/b': a role is"),
        ({"run_id": "../x"}, "run_id='../x': a job id"),
        ({"rdzv_backend": "zoo"}, "rdzv_backend='zoo': no such backend"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd': needs rdzv_endpoint"),
        ({"rdzv_endpoint": "host:port"}, "rdzv_endpoint='host:port': write HOST:PORT"),
        ({"shutdown_timeout": float("inf")}, "shutdown_timeout=inf: must be 0 or more, and finite"),
        ({"event_log_handler": "nope"}, "event_log_handler='nope': no such handler"),
        ({"warm": "hot"}, "warm='hot': choose one of auto"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_launch_config_is_refused_by_the_same_rules(bad: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 1, "run_id": "j", **bad}
    with pytest.raises(UsageError) as caught:
        from_launch_config(LaunchConfig(**given), "true", [])
    assert words in str(caught.value)


def test_a_launch_config_reads_the_variables_that_torch_reads_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LaunchConfig(1, 1, 1, run_id="j")
    for name, value in {
        "PET_MAX_RESTARTS": "9",
        "PHALANX_QUIET": "1",
        "PHALANX_WARM": "off",
        "TORCHELASTIC_HEALTH_CHECK_PORT": "1234",
    }.items():
        monkeypatch.setenv(name, value)
    job = from_launch_config(config, "true", [])
    assert (job.restarts.max_restarts, job.output.quiet, job.workers.warm, job.watching.health_listen) == (
        3,
        False,
        "auto",
        "1234",
    )
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "here")
    with pytest.raises(UsageError, match="TORCHELASTIC_HEALTH_CHECK_PORT=here: not an address; write PORT"):
        from_launch_config(config, "true", [])


def test_a_backend_registered_from_python_is_known() -> None:
    from phalanx.cluster.registry import rendezvous_handler_registry

    rendezvous_handler_registry.register("of-this-test", lambda params: None)  # type: ignore[arg-type,return-value]
    try:
        config = LaunchConfig(1, 2, 1, run_id="j", rdzv_backend="of-this-test", rdzv_endpoint="file:///x")
        assert from_launch_config(config, "true", []).cluster.rdzv_endpoint == "file:///x"
    finally:
        del rendezvous_handler_registry._registry["of-this-test"]


def test_a_run_cannot_be_changed_only_copied(script: str) -> None:
    run = ask(script)
    with pytest.raises(AttributeError, match="replace"):
        run.workers.role = "other"
    assert run.workers.replace(role="other").role == "other"
    assert run.workers.role == "default"
    with pytest.raises(TypeError, match="rol"):
        run.workers.replace(rol="other")


def test_help_and_completion_stop_the_parse() -> None:
    for argv, what in (
        (["-h"], "help"),
        (["--nnodes", "x", "--help"], "help"),
        (["--print-completion", "zsh"], "completion"),
    ):
        with pytest.raises(InformationRequested) as caught:
            parse(argv, {})
        assert caught.value.what == what


# --- refused, with the value and what to do ---------------------------------------------------------------

REFUSED = [
    (["--nnodes", "4:2"], "--nnodes 4:2: the minimum is larger"),
    (["--nnodes", "0"], "--nnodes 0: at least one"),
    (["--nnodes", "1:2:3"], "--nnodes 1:2:3: use a number"),
    (["--nnodes", "two"], "--nnodes two:"),
    (["--nnodes", "2:4"], "static needs a fixed number"),
    (["--standalone", "--nnodes", "2"], "--standalone with --nnodes 2"),
    (["--nproc-per-node", "0"], "--nproc-per-node 0: at least one"),
    (["--nproc-per-node", "-2"], "--nproc-per-node -2: at least one"),
    (["--nproc-per-node", "many"], "--nproc-per-node many: use a number, auto"),
    (["--max-restarts", "-1"], "--max-restarts -1: must be 0 or more"),
    (["--max-restarts", "1.5"], "--max-restarts 1.5: not a whole number"),
    (["--monitor-interval", "0"], "--monitor-interval 0: must be"),
    (["--monitor-interval", "nan"], "--monitor-interval nan: not a duration"),
    (["--master-port", "70000"], "--master-port 70000: must be between 0 and 65535"),
    (["--node-rank", "-1"], "--node-rank -1: must be 0 or more"),
    (["--nnodes", "2", "--node-rank", "2"], "--node-rank 2: node ranks go from 0 to 1"),
    (["--rdzv-endpoint", "host:port"], "--rdzv-endpoint host:port: write HOST:PORT"),
    (["--rdzv-endpoint", "host:"], "--rdzv-endpoint host:: write HOST:PORT"),
    (["--rdzv-conf", "a"], "'a' is not key=value"),
    (
        ["--rdzv-conf", "join_timeout=soon"],
        "--rdzv-conf join_timeout=soon: join_timeout=soon: not a duration",
    ),
    (["--rdzv-backend", "etcd-v2"], "needs --rdzv-endpoint"),
    (["--rdzv-backend", "etcd"], "needs --rdzv-endpoint"),
    (["--rdzv-backend", "zoo"], "--rdzv-backend zoo: no such backend"),
    (["--rdzv-id", "../x"], "--rdzv-id ../x:"),
    (["--rdzv-id", "a\nb"], "--rdzv-id a"),
    (["--rdzv-id", ".x"], "--rdzv-id .x: a job id names directories"),
    (["--rdzv-id", "ü" * 65], "at most 128 bytes"),
    (["--event-log-handler", "nope"], "--event-log-handler nope: no such handler; use null, console"),
    (["--node-rank", "3", "--master-port", "29500"], "--node-rank 3: there is one node"),
    (["--role", "a/b"], "--role a/b:"),
    (["--role= "], "--role: a role is"),
    (["--start-method", "thread"], "--start-method thread: choose one of spawn"),
    (["--numa-binding", "near"], "--numa-binding near: choose one of node"),
    (["-r", "4"], "--redirects 4: use 0, 1, 2 or 3"),
    (["-t", "0:3,x"], "--tee 0:3,x: use"),
    (["--tee="], "--tee: use"),
    (["--local-ranks-filter", "a,b"], "--local-ranks-filter a,b: not a list of ranks; write 0,3-7"),
    (["--shutdown-timeout", "-1"], "--shutdown-timeout -1: must be 0 or more"),
    (["--grace", "inf"], "--grace inf: not a duration; write 30, 30s, 10m, 1h30m or 1d"),
    (["--restart-window", "0"], "--restart-window 0: must be"),
    (["--no-restart-on", "2,SIGFOO"], "'SIGFOO' is neither"),
    (["--no-restart-on", "0"], "'0' is neither"),
    (["--no-restart-on", "none,2"], "'none' is neither"),
    (["--no-restart-on", "Value Error"], "'Value Error' is neither"),
    (["--backoff", "soon"], "--backoff soon: write a duration, or FIRST:LONGEST"),
    (["--backoff", "-1"], "--backoff -1: must be between 0 and"),
    (["--backoff", "nan"], "--backoff nan: write a duration"),
    (["--backoff", "5:1"], "--backoff 5:1: the first delay is larger"),
    (["--restart-delay", "-1"], "--restart-delay -1: must be between 0 and"),
    (["--logs-specs", "nope"], "--logs-specs nope: no such plug-in"),
    (["--attach", "1"], "--attach 1: there is only rank 0"),
    (["--attach", "0", "--detach"], "--attach 0 and --detach"),
    (["-q", "--verbose"], "--quiet and --verbose"),
    (["-m", "--no-python"], "--module and --no-python"),
    (["--standalone=1"], "--standalone takes no value"),
    (["--role", "--tee", "3"], "--role needs a value, but '--tee' follows"),
    (["--nproc-per-nod3", "2"], "did you mean --nproc-per-node?"),
    (["--nproc_per_nodes", "2"], "did you mean --nproc-per-node?"),
    (["--num_processes", "2"], "did you mean --nproc-per-node?"),
    (["-n", "2"], "did you mean --nproc-per-node?"),
    (["--lr", "2"], "--lr: no such option"),
    (["-x"], "-x: no such option"),
    (["--log", "d"], "--log could be --log-dir"),
    (["--token-file", "/no/where"], "--token-file /no/where: no such file"),
    (["--tls-cert", "/no/where"], "--tls-cert /no/where: no such file"),
    (["--tls-key", "/dev/null"], "--tls-key /dev/null: a key without its certificate"),
    (["--store-grace", "-1"], "--store-grace -1: must be 0 or more"),
    (["--print-completion", "ksh"], "--print-completion ksh:"),
]


@pytest.mark.parametrize(("argv", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_bad_input_is_refused_in_one_line_that_names_the_value(
    script: str, argv: list[str], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*argv, script], PATH)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("PET_NNODES", "4:2", "the minimum is larger"),
        ("PET_NPROC_PER_NODE", "lots", "use a number"),
        ("PET_MAX_RESTARTS", "x", "not a whole number"),
        ("PET_STANDALONE", "maybe", "use 1 or 0"),
        ("PET_START_METHOD", "thread", "choose one of"),
        ("PET_MASTER_PORT", "70000", "must be between"),
        ("PHALANX_GRACE", "-3", "must be 0 or more"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon", "number of seconds"),
        ("PYTHON_EXEC", "/no/such/python", "no such program"),
    ],
)
def test_a_bad_variable_is_named(script: str, name: str, value: str, words: str) -> None:
    message = refusal(script, **{name: value})
    assert message.startswith(f"{name}={value}: ")
    assert words in message


def test_no_gpu_is_said_with_what_hides_it(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.devices.nvidia_gpus", lambda root: [])
    monkeypatch.setattr("phalanx.devices._amd_gpus", lambda root: 0)
    assert "no GPU is visible here (CUDA_VISIBLE_DEVICES='')" in refusal(
        "--nproc-per-node", "gpu", script, CUDA_VISIBLE_DEVICES=""
    )


def test_scripts_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("")
    (tmp_path / "folder").mkdir()
    assert "no script given" in refusal()
    assert "no script given (3 is the value of --tee)" in refusal("--tee", "3")
    assert f"absent.py: no such script in {tmp_path};" in refusal("absent.py")
    with as_nobody() as folder:
        (folder / "locked" / "below").mkdir(parents=True)
        (folder / "locked").chmod(0o600)
        drop_privileges()
        for path in (folder / "locked" / "x.py", folder / "locked" / "below" / "x.py"):
            advice = f"this user may not enter the directory {folder}/locked; check its permissions"
            assert refusal(str(path)) == f"{path}: {advice}"
    assert refusal("/nowhere/absent.py") == "/nowhere/absent.py: no such script; check the path"
    assert refusal("").startswith("'': no such script")
    assert "did you mean here.py?" in refusal("here")
    assert "--no-python" in refusal("sh")
    assert "folder: a directory without __main__.py" in refusal("folder")
    assert "not found on PATH" in refusal("--no-python", "no-such-program-anywhere")
    assert "not an executable file" in refusal("--no-python", "./here.py")
    assert "write ./here.py" in refusal("--no-python", "here.py")
    assert "drop -m" in refusal("-m", "here.py")
    assert "no module 'absent_module'" in refusal("-m", "absent_module.train")


def test_a_directory_that_is_gone(tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    for words in ([script], ["absent.py"], ["-m", "train"], ["--no-python", "true"]):
        assert "the current directory has been deleted" in refusal(*words)


def test_unreadable_script() -> None:
    with as_nobody() as folder:
        script = folder / "train.py"
        script.write_text("")
        script.chmod(0)
        refusal("--no-such-option")  # loads what a refusal needs
        drop_privileges()
        assert "cannot be read" in refusal(str(script))


def test_log_dir_that_is_a_file(script: str) -> None:
    assert "is a file" in refusal("--log-dir", script, script)


def test_doubtful_input_is_a_warning_not_an_end(script: str) -> None:
    run = ask("--signals-to-handle", "SIGTERM,SIGFOO", "-r", "5:3", "--local-ranks-filter", "9", script)
    assert len(run.warnings) == 3
    assert "SIGFOO" in run.warnings[0]
    assert run.restarts.signals_to_handle == "SIGTERM"  # nobody after us has to warn of it again


def test_signals_that_cannot_be_meant_are_said_once_each(script: str) -> None:
    run = ask("--signals-to-handle", " SIGKILL,TERM,,SIGUSR1", script)
    assert run.restarts.signals_to_handle == "SIGUSR1"
    killing, short = run.warnings
    assert killing.endswith("SIGKILL: cannot be handled, ignored")
    assert short.endswith("TERM: no such signal, ignored (did you mean SIGTERM?)")


def test_a_module_to_preload_that_is_not_there_is_said(script: str) -> None:
    (warning,) = ask("--preload", "json,no_such_module_anywhere", script).warnings
    assert "no module 'no_such_module_anywhere'" in warning


def test_a_static_endpoint_is_where_the_workers_meet(script: str) -> None:
    run = ask("--rdzv-endpoint", "[::1]:29531", script)
    assert (run.cluster.master_addr, run.cluster.master_port, is_alone(run)) == ("::1", 29531, False)
    run = ask("--nnodes", "2", "--master-addr", "node0", script)
    assert (run.cluster.master_addr, run.cluster.master_port) == ("node0", 29500)
    assert "put an IPv6 address in brackets" in refusal("--rdzv-endpoint", "fe80::1", script)


def test_a_flag_here_overrules_a_variable_that_says_the_opposite(script: str) -> None:
    run = ask("--verbose", script, PHALANX_QUIET="1")
    assert (run.output.quiet, run.output.verbose) == (False, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--log-format", "xml"], "--log-format xml: choose one of text, json"),
        (["--log-rotate", "big"], "--log-rotate big: write SIZE or SIZE:PARTS, as in 100M or 1G:5"),
        (["--log-rotate", "10X"], "write SIZE or SIZE:PARTS"),
        (["--log-rotate", "10M:x"], "write SIZE or SIZE:PARTS"),
        (["--log-rotate", "infM"], "write SIZE or SIZE:PARTS"),
        (["--log-rotate", "10"], "--log-rotate 10: a part has at least 4K"),
        (["--log-rotate", "1M:0"], "--log-rotate 1M:0: keep at least one part"),
        (
            ["--log-retention", "a week"],
            "--log-retention a week: not a duration; write 30, 30s, 10m, 1h30m or 1d, or forever",
        ),
        (["--termination-log", "/"], "--termination-log /: is a directory; name a file"),
        (["--termination-log", "/no/such/file"], "there is no /no/such"),
        (["--expect", "("], "--expect (: not a regular expression"),
        (["--expect", "x"], "--expect x: add --expect-every TIME, --expect-finite, or both"),
        (["--expect-every", "300s"], "--expect-every 300s: needs a pattern; add --expect REGEX"),
        (["--expect-finite"], "--expect-finite: needs a pattern"),
        (["--expect", "x", "--expect-every", "soon"], "--expect-every soon: not a duration"),
        (["--notify", "ftp://user:SECRET@host"], "--notify ftp://...: only http and https are known"),
        (["--notify", "https:///SECRET"], "--notify https://...: the URL names no host"),
        (["--notify", "@/no/such/file"], "--notify @/no/such/file: cannot be read: No such file"),
        (
            ["--metrics"],
            "--metrics: served at the health address, and there is none; add --health-listen PORT",
        ),
    ],
)
def test_options_for_machines_that_are_refused(script: str, words: list[str], message: str) -> None:
    said = refusal(*words, script)
    assert message in said
    assert "SECRET" not in said


def test_options_for_machines(script: str, tmp_path: Path) -> None:
    plain = ask(script)
    assert (plain.output.log_format, plain.output.log_rotate, plain.output.log_retention) == (
        "text",
        None,
        7 * 86400,
    )
    assert (plain.watching.expect, plain.watching.notify, plain.watching.metrics, plain.watching.otel) == (
        "",
        "",
        False,
        False,
    )
    assert plain.output.termination_log == ""
    secret = tmp_path / "hook"
    secret.write_text("https://hooks.example/SECRET\n")
    run = ask(
        "--log-rotate", "1.5MiB:3", "-r", "3", "--log-retention", "forever", "--notify", f"@{secret}",
        "--expect", r"loss: (\S+)", "--expect-every", "5m", script, PHALANX_LOG_FORMAT="json",
    )  # fmt: skip
    assert (run.output.log_format, run.output.log_rotate, run.output.log_retention) == (
        "json",
        (3 << 19, 3),
        None,
    )
    assert (run.watching.expect_every, run.watching.expect_finite, run.output.redirects, run.output.tee) == (
        300.0,
        False,
        "3",
        "0",
    )
    assert run.watching.notify == "https://hooks.example/SECRET"
    assert run.warnings == ()
    # Output that goes straight to the terminal cannot be searched.
    run = ask("--expect", "x", "--expect-finite", "--log-rotate", "4K", script)
    assert (run.output.tee, run.output.log_rotate, run.warnings) == ("3", (4096, None), ())
    (warning,) = ask("--log-rotate", "4K", script).warnings
    assert "no output goes to files" in warning


def test_import_stays_cheap() -> None:
    """The launcher's start is measured in milliseconds: none of the costly modules may creep in."""
    costly = "argparse dataclasses typing re inspect enum logging signal subprocess json asyncio"
    code = (
        "import sys; before = set(sys.modules); import phalanx.job.config as c\n"
        f"c.parse(['--standalone', '--nproc-per-node', '2', {config_module.__file__!r}], {{}})\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert not set(costly.split()) & set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "environ", "threads"),
    [
        ("--nproc-per-node 2", {}, 1),  # as torchrun
        ("", {}, None),
        ("--nproc-per-node 2", {"OMP_NUM_THREADS": "5"}, None),
        ("--nproc-per-node 2 --omp auto", {}, 4),
        ("--nproc-per-node 3 --omp auto", {}, 2),
        ("--nproc-per-node 20 --omp auto", {}, 1),
        ("--omp auto", {}, 8),
        ("--omp 3", {}, 3),
        ("--omp auto", {"OMP_NUM_THREADS": "5"}, 8),  # an argument overrides a variable
        ("", {"OMP_NUM_THREADS": "5", "PHALANX_OMP": "auto"}, None),
        ("", {"PHALANX_OMP": "auto"}, 8),
    ],
)
def test_threads_of_each_worker(
    words: str, environ: dict[str, str], threads: int | None, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.devices.usable_cpus", lambda: 8)
    assert ask(*words.split(), script, **environ).workers.omp_num_threads == threads


def test_threads_that_are_none(script: str) -> None:
    assert refusal("--omp", "many", script) == "--omp many: use auto or a number of threads"
    assert refusal("--omp", "0", script).startswith("--omp 0: ")
