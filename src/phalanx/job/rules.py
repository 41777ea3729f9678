"""The rules between options, and the machine: subject by subject.

The table (job/options.py) says what one option accepts. A function here makes a section of the job from the
raw `Sources`: it decides what several options decide together, looks at the machine (files, PATH, devices,
installed plug-ins) and raises `UsageError`; it changes nothing. Anything costly is looked up only when the
request names it: a plain command line must stay cheap.
"""

from __future__ import annotations

import os
import sys

from phalanx.job.command_line import usage_error
from phalanx.job.environment import (
    DEFAULT_SIGNALS,
    LINE_PREFIX,
    OMP_THREADS,
    PYTHON_EXEC,
    STATIC_PORT,
    STORE_PORT,
)
from phalanx.job.environment import shutdown_timeout as default_grace
from phalanx.job.options import Cluster, KeptState, Output, Program, Restarts, Terminal, Watching, Workers
from phalanx.job.units import duration, signal_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from phalanx.job.config import Sources
    from phalanx.job.host_names import HostSlots

# What the built-in backends know of --rdzv-conf; the last line is torch's and has no effect here.
_CONF = frozenset(
    (
        "all_nodes", "is_host", "join_timeout", "journal", "keep_alive_interval", "keep_alive_max_attempt",
        "last_call_timeout", "linger", "name", "quarantine", "quarantine_dir", "quarantine_hook", "rank",
        "return_timeout", "settle", "store_grace", "timeout", "token_file", "tls_ca", "tls_cert", "tls_key",
        "ttl",
        "cacert", "cert", "key", "password", "password_file", "protocol", "user",
        "cas_backoff_max_seconds", "close_timeout", "read_timeout", "use_libuv",
    )
)  # fmt: skip
_DURATIONS = frozenset(
    (
        "cas_backoff_max_seconds", "join_timeout", "keep_alive_interval", "last_call_timeout", "linger",
        "return_timeout", "settle", "store_grace", "timeout", "ttl",
    )
)  # fmt: skip
_HOPELESS = frozenset[int | str]({2, "ImportError", "SyntaxError"})
"""What a retry does not change: wrong arguments (argparse exits with 2), missing modules, broken scripts."""
_PATIENCE = 8.0
_EVENT_HANDLERS = ("null", "console", "file")
ETCD_V2 = "rendezvous backend etcd-v2: etcd has removed its v2 API; using etcd, which speaks v3"
_BACKENDS = ("static", "phalanx", "c10d", "etcd")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def entrypoint(given: Callable[..., Any] | str | None, args: Sequence[Any]) -> Program:
    """What each worker runs, when it is given from Python."""
    if not given or not (isinstance(given, str) or callable(given)):
        raise usage_error(f"entrypoint={given!r}: give a function or the name of a program")
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise usage_error(f"args={args!r}: give the arguments as a tuple")
    return Program(entrypoint=given, args=tuple(args), name="")


def program(v: Sources, script: str, script_args: tuple[str, ...]) -> Program:
    """What each worker runs, found and runnable.

    Python runs without -u: the bootstrap makes the output line-buffered, which costs one write per line
    instead of one per fragment.
    """
    _check_directory()
    module, no_python, run_path = v.flag("module"), v.flag("no_python"), v.flag("run_path")
    python = _interpreter(v)
    if python != sys.executable and not _is_program(python, v.environ):
        raise usage_error(
            f"{PYTHON_EXEC}={python}: no such program, or not executable; unset it or correct the path"
        )
    if module and no_python:
        raise usage_error(
            f"{v.label('module')} and {v.label('no_python')}: only Python runs modules; drop one of the two"
        )
    if module and run_path:
        raise usage_error(
            f"{v.label('module')} and {v.label('run_path')}: one takes a module, the other a file; drop one"
        )
    words: tuple[str, ...] = (script, *script_args)
    if module:
        _check_module(v, script, python)
        command, words = python, ("-m", *words)
    elif no_python and not run_path:
        _check_binary(script, v.environ)
        command, words = script, script_args
    else:
        _check_file(script, v.environ)
        command = sys.executable if run_path else python
    if not (no_python or run_path or PYTHON_EXEC in v.environ):
        _note_environment(v, "." if module else os.path.dirname(script))
    return Program(entrypoint=command, args=words, name=os.path.basename(script.rstrip("/")))


def _interpreter(v: Sources) -> str:
    return v.environ.get(PYTHON_EXEC, "") or sys.executable


def _note_environment(v: Sources, folder: str) -> None:
    from phalanx.job.program import other_environment

    if (other := other_environment(v.environ, folder)) is not None:
        name, python = other
        v.warnings.append(
            f"workers run {sys.executable}, not the Python of {name} ({python}); to use that one, "
            "install phalanx into it, and run it from there"
        )


def _check_directory() -> None:
    """Workers start in the current directory, and relative paths count from there."""
    try:
        os.getcwd()
    except OSError:
        raise usage_error("the current directory has been deleted; cd to one that exists") from None


def _check_binary(program: str, environ: Mapping[str, str]) -> None:
    if _is_program(program, environ):
        return
    if os.path.exists(program):
        what = "not an executable file; chmod +x it" if "/" in program else f"not on PATH; write ./{program}"
    else:
        what = "no such file" if "/" in program else "not found on PATH"
    raise usage_error(f"{program}: {what} (with --no-python the script must be a program of its own)")


def _check_file(script: str, environ: Mapping[str, str]) -> None:
    if os.path.isdir(script):
        if not os.path.isfile(os.path.join(script, "__main__.py")):
            raise usage_error(f"{script}: a directory without __main__.py; name the script to run")
    elif not os.path.exists(script):
        _check_reachable(script)
        hint, where = "give the path from here, or an absolute one", f"script in {os.getcwd()}"
        if os.path.isfile(script + ".py"):
            hint = f"did you mean {script}.py?"
        elif _is_program(script, environ):
            hint = "for a program add --no-python, for a module -m"
        elif os.path.isabs(script):
            hint, where = "check the path", "script"
        raise usage_error(f"{script or repr(script)}: no such {where}; {hint}")
    elif not os.access(script, os.R_OK):
        raise usage_error(f"{script}: cannot be read by this user; check its permissions")


def _check_reachable(script: str) -> None:
    """A directory on the way that this user may not enter hides whether the script exists."""
    try:
        os.stat(script)
    except PermissionError:
        folder = os.path.dirname(os.path.abspath(script))
        while folder != "/" and not os.access(os.path.dirname(folder), os.X_OK):
            folder = os.path.dirname(folder)
        raise usage_error(
            f"{script}: this user may not enter the directory {folder}; check its permissions"
        ) from None
    except (OSError, ValueError):
        pass  # it does not exist


def _check_module(v: Sources, name: str, python: str) -> None:
    if "/" in name or (name.endswith(".py") and os.path.isfile(name)):
        raise usage_error(
            f"{v.label('module')} {name}: looks like a file; drop -m, or write its dotted module name"
        )
    if python != sys.executable:
        return  # another interpreter has its own modules
    if not _is_module(name):
        top = name.partition(".")[0]
        raise usage_error(
            f"{v.label('module')} {name}: no module {top!r} here or on the Python path; check the name"
        )


def _is_module(name: str) -> bool:
    """Whether this interpreter finds a module's package, on its path or in the current directory."""
    top = name.partition(".")[0]
    places = (None, [os.getcwd()])
    return any(finder.find_spec(top, path) is not None for finder in sys.meta_path for path in places)


def _is_program(name: str, environ: Mapping[str, str]) -> bool:
    from phalanx.errors import StartError
    from phalanx.job.program import find_program

    try:
        return bool(find_program(name, environ))
    except StartError:
        return False


def workers(v: Sources) -> Workers:
    """How many workers there are, what they are called, and how they start."""
    count, role = _local_world_size(v), v.value("role")
    # An empty one is allowed: TorchX passes it for a role without a name.
    if role.isspace() or not role.isprintable() or "/" in role or len(role) > 128:
        raise v.bad("role", "a role is a printable name of at most 128 characters without '/'")
    warm = v.value("warm")
    return v.fill(
        Workers,
        local_world_size=count,
        role=role,
        omp_num_threads=_omp_threads(v, count),
        numa_options=_numa(v),
        preload=_preload(v),
        warmup=_warm_up(v, warm),
        warm_for=_warm_for(v, warm),
    )


def _local_world_size(v: Sources) -> int:
    asked = v.text("nproc_per_node").strip()
    try:
        count = int(asked)
    except ValueError:
        from phalanx.devices import resolve_nproc

        try:
            count = resolve_nproc(asked, v.environ, one_each=v.flag("virtual_local_rank"))
        except ValueError:
            raise v.bad("nproc_per_node", "use a number, auto, gpu, xpu or cpu") from None
    if count == 0 and asked in ("gpu", "xpu"):
        hidden = [f"{n}={v.environ[n]!r}" for n in _HIDING if n in v.environ]
        why = f" ({', '.join(hidden)})" if hidden else ""
        raise v.bad(
            "nproc_per_node", f"no {asked.upper()} is visible here{why}; give a number, or use auto or cpu"
        )
    if count < 1:
        raise v.bad("nproc_per_node", "at least one worker is needed")
    return count


def _omp_threads(v: Sources, count: int) -> int | None:
    """Threads of each worker; None: OMP_NUM_THREADS is left alone, as the user has set it, or has not."""
    asked = v.text("omp").strip()
    if OMP_THREADS in v.environ and "omp" not in v.arguments:
        return None
    if asked == "auto":
        from phalanx.devices import usable_cpus

        return max(1, usable_cpus() // count)
    if asked:
        if not (asked.isascii() and asked.isdigit() and int(asked) > 0):
            raise v.bad("omp", "use auto or a number of threads")
        return int(asked)
    return 1 if count > 1 else None


def _numa(v: Sources) -> Any:
    mode = v.value("numa_binding")
    if not mode:
        return None
    from phalanx.job.numa import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(mode))


def _preload(v: Sources) -> tuple[str, ...]:
    names: tuple[str, ...] = v.value("preload")
    for name in names:
        if not name.replace(".", "_").isidentifier():
            raise v.bad("preload", f"{name} is not a module name")
        if _interpreter(v) == sys.executable and not _is_module(name):
            v.warnings.append(f"{v.label('preload')}: no module {name!r} on the Python path, left out")
    return names


def _warm_up(v: Sources, mode: str) -> str:
    text: str = v.value("warmup")
    module, colon, function = text.partition(":")
    if text and not (colon and function.isidentifier() and module.replace(".", "_").isidentifier()):
        raise v.bad("warmup", "write module:function")
    if text and mode != "standby":
        raise v.bad("warmup", "only standby workers run it; add --warm standby")
    return text


def _warm_for(v: Sources, mode: str) -> float:
    seconds: float = v.value("warm_for")
    if seconds and mode == "off" and "warm_for" in v.arguments:
        raise v.bad("warm_for", "there is nothing to keep with --warm off")
    return 0.0 if mode == "off" else seconds


def cluster(v: Sources) -> Cluster:
    """How many nodes there are and where they meet."""
    low, colon, high = v.text("nnodes").partition(":")
    try:
        least, most = int(low), int(high if colon else low)
    except ValueError:
        raise v.bad("nnodes", "use a number, or MIN:MAX") from None
    if least < 1:
        raise v.bad("nnodes", "at least one node is needed")
    if most < least:
        raise v.bad("nnodes", "the minimum is larger than the maximum")
    if v.flag("standalone"):
        if least > 1:
            raise usage_error(
                f"{v.label('standalone')} with {v.label('nnodes')}: standalone is one node; drop one"
            )
        most = 1
    meeting = _rendezvous(v, least, most)
    return v.fill(Cluster, min_nodes=least, max_nodes=most, **meeting, **_hosts(v))


def host_list(v: Sources) -> tuple[HostSlots, ...]:
    """The hosts of --hosts or --hostfile; none: neither is given."""
    if not (v.given("hosts") or v.given("hostfile")):
        return ()
    from phalanx.job.host_names import parse_host_file, parse_hosts

    if v.given("hosts") and v.given("hostfile"):
        raise usage_error(f"{v.label('hosts')} and {v.label('hostfile')}: both name the hosts; drop one")
    dest = "hosts" if v.given("hosts") else "hostfile"
    try:
        if dest == "hosts":
            return tuple(parse_hosts(v.text(dest)))
        with open(v.text(dest), encoding="utf-8", errors="replace") as file:
            return tuple(parse_host_file(file.read(1 << 20)))
    except OSError as error:
        raise v.bad(dest, error.strerror or "cannot be read") from None
    except ValueError as error:
        raise v.bad(dest, str(error)) from None


def _hosts(v: Sources) -> dict[str, Any]:
    """Where agents are started from here, and how."""
    found = host_list(v)
    for dest in ("standalone", "node_rank", "master_addr", "master_port", "detach", "attach"):
        if found and dest in v.arguments:
            raise v.bad(dest, "not with --hosts, which starts every node by itself; drop one")
    backend = v.arguments.get("rdzv_backend", "phalanx")
    if found and backend not in ("phalanx", "c10d"):
        raise v.bad("rdzv_backend", "--hosts starts a store of its own; use phalanx or leave it out")
    if not v.text("ssh").split():
        raise v.bad("ssh", "name the ssh command")
    given = v.arguments.get("rdzv_endpoint", "") if found else ""
    return {"hosts": found, "hosts_endpoint": given}


def trust_files(v: Sources) -> dict[str, Any]:
    """What authenticates the nodes: the files exist and are readable; the store checks their contents."""
    settings: dict[str, Any] = {}
    for dest in ("token_file", "tls_cert", "tls_key", "tls_ca"):
        path = v.text(dest)
        if path and not os.access(path, os.R_OK):
            raise v.bad(dest, "cannot be read by this user" if os.path.exists(path) else "no such file")
        if path:
            settings[dest] = path
    if "tls_key" in settings and "tls_cert" not in settings:
        raise v.bad("tls_key", f"a key without its certificate; add {v.name('tls_cert')} FILE")
    for dest in ("store_grace", "quarantine"):
        if v.given(dest):
            settings[dest] = v.value(dest)
    if folder := v.text("quarantine_dir"):
        if not os.path.isdir(folder):
            raise v.bad("quarantine_dir", "not a directory; make one that all nodes share")
        settings["quarantine_dir"] = os.path.abspath(folder)
    if hook := v.text("quarantine_hook"):
        settings["quarantine_hook"] = hook
    return settings


def _rendezvous(v: Sources, least: int, most: int) -> dict[str, Any]:
    backend, endpoint, addr = v.text("rdzv_backend"), v.text("rdzv_endpoint"), v.text("master_addr")
    port, rank = v.value("master_port"), v.value("node_rank")
    trust = trust_files(v)
    alone = v.flag("standalone")
    if alone or (most == 1 and backend == "static" and not endpoint and port is None):
        alone, backend, endpoint = True, "phalanx", "localhost:0"
    elif backend == "static":
        if least != most:
            instead = f"{v.name('rdzv_backend')} phalanx {v.name('rdzv_endpoint')} HOST:PORT"
            raise v.bad("nnodes", f"static needs a fixed number; add {instead}")
        if rank >= most:
            there = (
                f"node ranks go from 0 to {most - 1} with {most} nodes" if most > 1 else "there is one node"
            )
            raise v.bad("node_rank", there)
        host = f"[{addr}]" if addr.count(":") > 1 and not addr.startswith("[") else addr
        endpoint = endpoint or f"{host}:{STATIC_PORT if port is None else port}"
    elif backend in ("phalanx", "c10d"):
        if not endpoint and most > 1:
            where = v.name("rdzv_endpoint")
            v.warnings.append(f"no {where}: using localhost, so only nodes on this machine can meet")
        endpoint = endpoint or (f"localhost:{STORE_PORT}" if most > 1 else "localhost:0")
    else:
        if backend == "etcd-v2":
            v.warnings.append(ETCD_V2)
            backend = "etcd"
        _check_backend(v, backend, endpoint)
    if backend in _BACKENDS:
        _check_endpoint(v, endpoint)
    conf = v.settings()
    if backend in _BACKENDS:
        for key in conf.keys() - _CONF:
            v.warnings.append(f"--rdzv-conf {key}={conf[key]}: not known to the backend {backend}, ignored")
        for key in conf.keys() & _DURATIONS:
            try:
                duration(str(conf[key]))
            except ValueError as error:
                raise v.bad("rdzv_conf", f"{key}={conf[key]}: {error}") from None
        conf = {**trust, **conf}
    if backend == "static" or v.given("node_rank"):
        conf["rank"] = rank
    static = backend == "static"  # the nodes meet where the workers meet
    addr_port = _host_and_port(v, endpoint) if static else (None, None)
    return {
        "rdzv_backend": backend,
        "rdzv_endpoint": endpoint,
        "rdzv_conf": conf,
        "run_id": _run_id(v, alone),
        "master_addr": addr_port[0],
        "master_port": addr_port[1],
    }


def _run_id(v: Sources, alone: bool) -> str:
    if alone and not v.given("rdzv_id"):
        return os.urandom(6).hex()
    run_id = v.text("rdzv_id")
    if not run_id.isprintable() or "/" in run_id or run_id[:1] in ("", ".") or len(run_id.encode()) > 128:
        raise v.bad(
            "rdzv_id",
            "a job id names directories and keys: at most 128 bytes, printable, no '/', no '.' in front",
        )
    return run_id


def _check_backend(v: Sources, backend: str, endpoint: str) -> None:
    if backend == "etcd":
        if not endpoint:
            raise v.bad("rdzv_backend", f"needs {v.name('rdzv_endpoint')} HOST:PORT of the etcd server")
        return
    from phalanx.plugins import HANDLERS, names

    known = names(HANDLERS)
    if backend not in known:
        there = (*_BACKENDS, *sorted(known - {*_BACKENDS, "etcd-v2"}))
        raise v.bad("rdzv_backend", f"no such backend; known are {', '.join(there)}")


def _check_endpoint(v: Sources, endpoint: str) -> None:
    """Refuse what cannot be a port; only the network can tell more about an address."""
    tail = endpoint.rpartition("]")[2]
    port = tail.partition(":")[2] if tail.count(":") == 1 else ""
    if tail.endswith(":") or (port and not (port.isdigit() and int(port) <= 65535)):
        where = "rdzv_endpoint" if v.given("rdzv_endpoint") else "master_addr"
        raise v.bad(where, "write HOST:PORT, with a port between 0 and 65535")


def _host_and_port(v: Sources, endpoint: str) -> tuple[str, int]:
    """MASTER_ADDR and MASTER_PORT of a static rendezvous."""
    from phalanx.job.address import parse_rendezvous_endpoint

    try:
        return parse_rendezvous_endpoint(endpoint, STATIC_PORT)
    except ValueError as error:
        where = "rdzv_endpoint" if v.given("rdzv_endpoint") else "master_addr"
        raise v.bad(where, str(error)) from None


def restarts(v: Sources, watching: Watching) -> Restarts:
    """When to try again, and how to stop."""
    signals = _signals(v)
    if watching.preempt_signal is not None:
        import signal

        signals += f",{signal.Signals(watching.preempt_signal).name}"
    return v.fill(
        Restarts,
        hopeless=frozenset[int | str]() if v.given("no_restart_on") else _HOPELESS,
        patience=_PATIENCE,
        shutdown_timeout=_grace(v),
        signals_to_handle=signals,
    )


def _signals(v: Sources) -> str:
    """The names that can be handled; the others are dropped with a warning."""
    names = v.text("signals_to_handle")
    if names == DEFAULT_SIGNALS:
        return names
    wanted = [name for name in map(str.strip, names.split(",")) if name]
    known = [name for name in wanted if _is_signal(name) and name not in ("SIGKILL", "SIGSTOP")]
    for name in wanted:
        if name not in known:
            why = "cannot be handled" if _is_signal(name) else "no such signal"
            meant = f" (did you mean SIG{name}?)" if _is_signal(f"SIG{name}") else ""
            v.warnings.append(f"{v.label('signals_to_handle')}: {name}: {why}, ignored{meant}")
    return ",".join(known)


def _is_signal(name: str) -> bool:
    return name.startswith("SIG") and signal_number(name) is not None


def _grace(v: Sources) -> float:
    """--grace, --shutdown-timeout, then their variables in that order: an argument overrides any variable."""
    grace, other = v.value("grace"), v.value("shutdown_timeout")
    if grace is not None and ("grace" in v.arguments or "shutdown_timeout" not in v.arguments):
        return float(grace)
    if other is not None:
        return float(other)
    try:
        return default_grace(v.environ)
    except ValueError as error:
        raise usage_error(str(error)) from None


def output(v: Sources, workers: Workers, cluster: Cluster, watching: Watching) -> Output:
    """Where the workers' output goes."""
    count = workers.local_world_size
    prefix = v.value("log_line_prefix_template") or v.environ.get(LINE_PREFIX) or None
    log_dir = v.value("log_dir") or None
    if log_dir not in (None, os.devnull) and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise v.bad("log_dir", "is a file; name a directory")
    redirects, tee = _streams(v, "redirects", count), _streams(v, "tee", count)
    specs = v.arguments.get("logs_specs") or None
    if isinstance(specs, str):
        from phalanx.plugins import LOGS_SPECS, names

        installed = names(LOGS_SPECS)
        if specs not in installed:
            there = ", ".join(sorted(installed)) or "none"
            raise v.bad("logs_specs", f"no such plug-in; installed are: {there}")
    no_files = redirects == tee == "0"
    if (
        v.value("log_rotate") is not None
        and no_files
        and not watching.silence_timeout
        and not watching.expect
    ):
        v.warnings.append(f"{v.label('log_rotate')}: no output goes to files; add -r 3 or -t 3")
    if no_files and (
        watching.silence_timeout is not None or watching.expect or watching.dashboard is not None
    ):
        tee = "3"  # output that goes straight to the terminal cannot be observed
        if count == cluster.max_nodes == 1 and not prefix:
            prefix = ""  # nothing else is to change for it
    quiet, verbose = v.flag("quiet"), v.flag("verbose")
    if quiet and verbose:
        # A flag on this command line overrides a variable set for all of them.
        if ("quiet" in v.arguments) == ("verbose" in v.arguments):
            raise usage_error(f"{v.label('quiet')} and {v.label('verbose')}: choose one")
        quiet, verbose = "quiet" in v.arguments, "verbose" in v.arguments
    return v.fill(
        Output,
        log_dir=log_dir,
        redirects=redirects,
        tee=tee,
        local_ranks_filter=_ranks(v, "local_ranks_filter", count),
        ranks_filter=_ranks(v, "ranks_filter", count * cluster.max_nodes, specs),
        log_line_prefix_template=prefix,
        logs_specs=specs,
        event_log_handler=_event_handler(v),
        termination_log=_termination_log(v),
        quiet=quiet,
        verbose=verbose,
    )


def _termination_log(v: Sources) -> str:
    path = v.text("termination_log")
    if path:
        path = os.path.abspath(path)
        if os.path.isdir(path):
            raise v.bad("termination_log", "is a directory; name a file")
        where = path if os.path.exists(path) else os.path.dirname(path)
        if not os.access(where, os.W_OK):
            what = "cannot be written by this user" if os.path.exists(where) else f"there is no {where}"
            raise v.bad("termination_log", what)
    return path


def _event_handler(v: Sources) -> str:
    name = v.text("event_log_handler")
    if name not in _EVENT_HANDLERS:
        from phalanx.plugins import EVENT_HANDLERS, names

        if name not in names(EVENT_HANDLERS):
            there = ", ".join((*_EVENT_HANDLERS, f"or a plug-in (entry point in {EVENT_HANDLERS[0]})"))
            raise v.bad("event_log_handler", f"no such handler; use {there}")
    return name


def _streams(v: Sources, dest: str, count: int) -> str:
    value: str = v.value(dest)
    for pair in value.split(",") if ":" in value else ():
        rank = pair.partition(":")[0]
        if int(rank) >= count:
            v.warnings.append(f"{v.label(dest)}: there is no local rank {rank} (of {count})")
    return value


def _ranks(v: Sources, dest: str, count: int, plugin: object = None) -> frozenset[int] | None:
    ranks: frozenset[int] | None = v.value(dest)
    if ranks is None:
        return None
    if plugin is not None:
        raise v.bad(dest, f"a plug-in of {v.name('logs_specs')} decides what is shown; drop one of the two")
    if not ranks & frozenset(range(count)):
        v.warnings.append(f"{v.label(dest)}: none of these ranks exists (of {count}): nothing will show")
    return ranks


def watching(v: Sources, cluster: Cluster) -> Watching:
    """What counts as a hang and what follows from it; who watches from outside."""
    found = v.fill(Watching, notify=_notify(v), metrics=_metrics(v), otel=_otel(v), dashboard=_dashboard(v))
    times = (
        found.heartbeat_timeout, found.silence_timeout, found.startup_timeout, found.partial_exit_timeout,
        found.hang_timeout,
    )  # fmt: skip
    if v.given("on_hang") and all(time is None for time in times) and not found.expect:
        v.warnings.append(f"{v.label('on_hang')}: only matters for worker.expires(), as no timeout is given")
    if found.straggler_policy == "replace" and cluster.rdzv_backend == "static":
        v.warnings.append(
            f"{v.label('straggler_policy')}: a static job has no spares; slow hosts are reported"
        )
    _check_expectations(v, found)
    return found


def _dashboard(v: Sources) -> tuple[str, int] | None:
    where: tuple[str, int] | None = v.value("dashboard")
    if where is not None:
        from phalanx.plugins import MISSING, installed

        if not installed("dashboard"):
            raise v.bad("dashboard", MISSING["dashboard"])
    return where


def _check_expectations(v: Sources, found: Watching) -> None:
    if not found.expect:
        for dest, given in (("expect_every", found.expect_every), ("expect_finite", found.expect_finite)):
            if given:
                raise v.bad(dest, f"needs a pattern; add {v.name('expect')} REGEX")
        return
    import re

    try:
        re.compile(found.expect)
    except (re.error, RecursionError, OverflowError) as error:
        raise v.bad("expect", f"not a regular expression: {error}") from None
    if found.expect_every is None and not found.expect_finite:
        raise v.bad("expect", f"add {v.name('expect_every')} TIME, {v.name('expect_finite')}, or both")


def _notify(v: Sources) -> str:
    target = v.text("notify").strip()
    if target.startswith("@"):  # a file, so that no secret is in a command line
        try:
            with open(target[1:], encoding="utf-8") as file:
                target = file.read(65536).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise v.bad("notify", f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if not target:
            raise v.bad("notify", "the file is empty; write a command or a URL into it")
    scheme, mark, rest = target.partition("://")
    if mark and scheme.isalnum() and " " not in target:
        # The value is not repeated: it may hold a password or a token.
        if scheme not in ("http", "https"):
            raise usage_error(f"{v.name('notify')} {scheme}://...: only http and https are known")
        if not rest.partition("/")[0].rpartition("@")[2]:
            raise usage_error(f"{v.name('notify')} {scheme}://...: the URL names no host")
    return target


def _metrics(v: Sources) -> bool:
    asked = v.flag("metrics")
    if asked and not v.text("health_listen"):
        if "metrics" not in v.arguments:
            return False  # a variable for all jobs, and this one has no port
        raise v.bad(
            "metrics", f"served at the health address, and there is none; add {v.name('health_listen')} PORT"
        )
    if asked:
        from phalanx.plugins import MISSING, installed

        if not installed("metrics"):
            v.warnings.append(f"{v.label('metrics')}: {MISSING['metrics']}")
    return asked


def _otel(v: Sources) -> bool:
    asked = v.flag("otel")
    if asked:
        from phalanx.plugins import MISSING, installed

        if not installed("otel"):
            v.warnings.append(f"{v.label('otel')}: {MISSING['otel']}")
    return asked


def kept_state(v: Sources) -> KeptState:
    """What becomes of the state that workers keep."""
    if v.text("keep_spill") and not v.given("rdzv_id"):
        raise v.bad("keep_spill", "name the job with --rdzv-id, so that its next launch finds the state")
    # A requeued job has another run ID, and finds what the last attempt left all the same.
    taken = v.around is not None and "rdzv_id" in v.around.settings
    return v.fill(KeptState, keep_id=v.around.lasting_id if v.around is not None and taken else "")


def terminal(v: Sources, workers: Workers, cluster: Cluster) -> Terminal:
    """What the launcher itself does with the terminal."""
    found, count = v.fill(Terminal), workers.local_world_size
    if found.attach is not None and found.detach:
        raise usage_error(
            f"{v.label('attach')} and --detach: a detached job has no terminal to read from; drop one"
        )
    if found.attach is not None and cluster.max_nodes == 1 and found.attach >= count:
        raise v.bad("attach", f"ranks go from 0 to {count - 1} here" if count > 1 else "there is only rank 0")
    return found
