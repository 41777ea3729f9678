"""What makes a description of a job valid, subject by subject.

Each public function takes the raw `Sources` and returns the fields of `JobSpec` that it is responsible for,
or raises `UsageError`. They look at the machine (files, PATH, devices, installed plug-ins) but change
nothing. Anything costly is looked up only when the request names it: a plain command line must stay cheap.
"""

from __future__ import annotations

import os
import sys

from phalanx.devices import resolve_nproc
from phalanx.job.environment import DEFAULT_SIGNALS, OMP_THREADS, PYTHON_EXEC, STATIC_PORT, STORE_PORT
from phalanx.job.environment import shutdown_timeout as default_grace
from phalanx.job.options import truth, usage_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
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
        "close_timeout", "read_timeout", "use_libuv",
    )
)  # fmt: skip
_HOPELESS = frozenset[int | str]({2, "ImportError", "SyntaxError"})
"""What a retry does not change: wrong arguments (argparse exits with 2), missing modules, broken scripts."""
_DAY = 86400.0
_LONGEST_BACKOFF = 30.0
_PATIENCE = 8.0
_BACKENDS = ("static", "phalanx", "c10d", "etcd")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def entrypoint(given: Callable[..., Any] | str | None, args: Sequence[Any]) -> dict[str, Any]:
    """What each worker runs, when it is given from Python."""
    if not given or not (isinstance(given, str) or callable(given)):
        raise usage_error(f"entrypoint={given!r}: give a function or the name of a program")
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise usage_error(f"args={args!r}: give the arguments as a tuple")
    return {"entrypoint": given, "args": tuple(args), "name": ""}


def program(v: Sources, script: str, script_args: tuple[str, ...]) -> dict[str, Any]:
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
    return {"entrypoint": command, "args": words, "name": os.path.basename(script.rstrip("/"))}


def _interpreter(v: Sources) -> str:
    return v.environ.get(PYTHON_EXEC, "") or sys.executable


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


def workers(v: Sources) -> dict[str, Any]:
    """How many workers there are and what they are called."""
    asked, virtual = v.text("nproc_per_node").strip(), v.flag("virtual_local_rank")
    try:
        count = resolve_nproc(asked, v.environ, one_each=virtual)
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
    role = v.text("role")
    # An empty one is allowed: TorchX passes it for a role without a name.
    if role.isspace() or not role.isprintable() or "/" in role or len(role) > 128:
        raise v.bad("role", "a role is a printable name of at most 128 characters without '/'")
    return {
        "local_world_size": count,
        "virtual_local_rank": virtual,
        "role": role,
        "omp_num_threads": _omp_threads(v, count),
        "numa_options": _numa(v),
        "start_method": v.text("start_method"),
    }


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
    mode = v.text("numa_binding")
    if not mode:
        return None
    from phalanx.job.numa import AffinityMode, NumaOptions

    return NumaOptions(AffinityMode(mode))


def nodes(v: Sources) -> dict[str, Any]:
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
    return {"min_nodes": least, "max_nodes": most, **_rendezvous(v, least, most)}


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


def hosts(v: Sources) -> dict[str, Any]:
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
    return {"hosts": found, "hosts_endpoint": given, "ssh": v.text("ssh")}


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
    grace = v.number("store_grace", 0)
    if v.given("store_grace"):
        settings["store_grace"] = grace
    if v.given("quarantine"):
        settings["quarantine"] = _quarantine(v)
    if folder := v.text("quarantine_dir"):
        if not os.path.isdir(folder):
            raise v.bad("quarantine_dir", "not a directory; make one that all nodes share")
        settings["quarantine_dir"] = os.path.abspath(folder)
    if hook := v.text("quarantine_hook"):
        settings["quarantine_hook"] = hook
    return settings


def _quarantine(v: Sources) -> str:
    from phalanx.core.rounds.quarantine import parse_policy

    try:
        parse_policy(v.text("quarantine"))
    except ValueError as error:
        raise v.bad("quarantine", str(error)) from None
    return v.text("quarantine")


def _rendezvous(v: Sources, least: int, most: int) -> dict[str, Any]:
    backend, endpoint, addr = v.text("rdzv_backend"), v.text("rdzv_endpoint"), v.text("master_addr")
    port, rank = v.integer("master_port", 0, 65535), v.integer("node_rank", 0) or 0
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
        backend = "phalanx"
        if not endpoint and most > 1:
            where = v.name("rdzv_endpoint")
            v.warnings.append(f"no {where}: using localhost, so only nodes on this machine can meet")
        endpoint = endpoint or (f"localhost:{STORE_PORT}" if most > 1 else "localhost:0")
    else:
        if backend == "etcd-v2":
            from phalanx.cluster.registry import ETCD_V2

            v.warnings.append(ETCD_V2)
            backend = "etcd"
        _check_backend(v, backend, endpoint)
    if backend in _BACKENDS:
        _check_endpoint(v, endpoint)
    conf = v.settings()
    if backend in _BACKENDS:
        for key in conf.keys() - _CONF:
            v.warnings.append(f"--rdzv-conf {key}={conf[key]}: not known to the backend {backend}, ignored")
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
        "local_addr": v.text("local_addr") or None,
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
    from phalanx.cluster.registry import rendezvous_handler_registry

    known = _plugins("torchrun.handlers", "phalanx.handlers") | rendezvous_handler_registry._registry.keys()
    if backend not in known:
        names = (*_BACKENDS, *sorted(known - {*_BACKENDS, "etcd-v2"}))
        raise v.bad("rdzv_backend", f"no such backend; known are {', '.join(names)}")


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


def _plugins(*groups: str) -> set[str]:
    """Names installed packages offer for an extension point (a slow search: only for names not built in)."""
    from importlib.metadata import entry_points

    return {entry.name for group in groups for entry in entry_points(group=group)}


def restarts(v: Sources) -> dict[str, Any]:
    """When to try again, and how to stop."""
    return {
        "max_restarts": v.integer("max_restarts", 0),
        "restart_window": v.number("restart_window", 0.001),
        "no_restart_on": frozenset(_final_failures(v)),
        "hopeless": frozenset() if v.given("no_restart_on") else _HOPELESS,
        "restart_delay": v.number("restart_delay", 0, _DAY),
        "backoff": _backoff(v),
        "patience": _PATIENCE,
        "reenter_timeout": v.number("reenter_timeout", 0, _DAY),
        "shutdown_timeout": _grace(v),
        "signals_to_handle": _signals(v),
        "monitor_interval": v.number("monitor_interval", 0.001),
    }


def _signals(v: Sources) -> str:
    """The names that can be handled; the others are dropped with a warning."""
    names = v.text("signals_to_handle")
    if names == DEFAULT_SIGNALS:
        return names
    wanted = [name for name in map(str.strip, names.split(",")) if name]
    known = [name for name in wanted if _signal_number(name) and name not in ("SIGKILL", "SIGSTOP")]
    for name in wanted:
        if name not in known:
            why = "cannot be handled" if _signal_number(name) else "no such signal"
            meant = f" (did you mean SIG{name}?)" if _signal_number(f"SIG{name}") else ""
            v.warnings.append(f"{v.label('signals_to_handle')}: {name}: {why}, ignored{meant}")
    return ",".join(known)


def _grace(v: Sources) -> float:
    """--grace, --shutdown-timeout, then their variables in that order: an argument overrides any variable."""
    grace, other = v.number("grace", 0), v.integer("shutdown_timeout", 0)
    if grace is not None and ("grace" in v.arguments or "shutdown_timeout" not in v.arguments):
        return float(grace)
    if other is not None:
        return float(other)
    try:
        return default_grace(v.environ)
    except ValueError as error:
        raise usage_error(str(error)) from None


def _backoff(v: Sources) -> tuple[float, float]:
    """The first delay and the longest."""
    first, colon, longest = v.text("backoff").partition(":")
    try:
        least, most = float(first), float(longest) if colon else _LONGEST_BACKOFF
    except ValueError:
        raise v.bad("backoff", "use a number of seconds, or FIRST:LONGEST, as in 0.5:30") from None
    if not 0 <= least <= _DAY or not 0 <= most <= _DAY:  # false for nan as well
        raise v.bad("backoff", f"must be between 0 and {_DAY:g} seconds")
    if colon and most < least:
        raise v.bad("backoff", "the first delay is larger than the longest")
    return least, max(least, most)


def _final_failures(v: Sources) -> Iterable[int | str]:
    words = [part.strip() for part in v.text("no_restart_on").split(",")]
    if words == ["none"]:
        return
    for word in filter(None, words):
        name = word.rpartition(".")[2]
        if name.isidentifier() and (name[0].isupper() or "." in word) and not word.startswith("SIG"):
            yield name
            continue
        number = _signal_number(word)
        if number is None and word.removeprefix("-").isdigit():
            number = -int(word) if word.startswith("-") else 0
            if not number and 1 <= int(word) <= 255:
                yield int(word)
                continue
        if not number or number > 64:
            what = f"{word!r} is neither an exit code (1 to 255), a signal nor an exception"
            raise v.bad("no_restart_on", what)
        yield 128 + number


def _signal_number(name: str) -> int | None:
    import signal

    found = getattr(signal, name, None) if name.startswith("SIG") else None
    return int(found) if isinstance(found, signal.Signals) else None


def output(v: Sources, known: Mapping[str, Any]) -> dict[str, Any]:
    """Where the workers' output goes."""
    count = known["local_world_size"]
    log_dir = v.text("log_dir") or None
    if log_dir is not None and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise v.bad("log_dir", "is a file; name a directory")
    for dest in ("redirects", "tee"):
        _check_std(v, dest, count)
    specs = v.arguments.get("logs_specs") or None
    if isinstance(specs, str):
        installed = _plugins("torchrun.logs_specs", "phalanx.logs_specs")
        if specs not in installed:
            names = ", ".join(sorted(installed)) or "none"
            raise v.bad("logs_specs", f"no such plug-in; installed are: {names}")
    return {
        "log_dir": log_dir,
        "redirects": v.text("redirects"),
        "tee": v.text("tee"),
        "local_ranks_filter": _ranks(v, "local_ranks_filter", count),
        "ranks_filter": _ranks(v, "ranks_filter", count * known["max_nodes"], specs),
        "log_line_prefix_template": v.text("log_line_prefix_template") or None,
        "duplicate_stdout_filters": v.words("duplicate_stdout_filters"),
        "duplicate_stderr_filters": v.words("duplicate_stderr_filters"),
        "logs_specs": specs,
        "event_log_handler": _event_handler(v),
        "log_format": v.text("log_format"),
        "log_rotate": _log_rotate(v, v.text("redirects") == v.text("tee") == "0"),
        "keep_logs": _keep_logs(v),
        "termination_log": _termination_log(v),
    }


def _log_rotate(v: Sources, no_files: bool) -> tuple[int, int | None] | None:
    """SIZE[:KEEP]; sizes in units of 1024."""
    raw = v.text("log_rotate").strip()
    if raw in ("", "off"):
        return None
    size, colon, keep = raw.partition(":")
    number = size.rstrip("KMGTkmgtiB")
    unit = size[len(number) :].lower().removesuffix("b").removesuffix("i")
    factor = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}.get(unit)
    try:
        bytes_ = int(float(number) * (factor or float("nan")))
        kept = int(keep) if colon else None
    except (ValueError, OverflowError):
        raise v.bad("log_rotate", "write SIZE or SIZE:KEEP, as in 100M or 1G:5") from None
    if not 4096 <= bytes_ <= 1 << 50:
        raise v.bad("log_rotate", "a part has at least 4K")
    if kept is not None and kept < 1:
        raise v.bad("log_rotate", "keep at least one part, or leave out the number to keep all")
    if no_files and not v.text("silence_timeout") and not v.text("expect"):
        v.warnings.append(f"{v.label('log_rotate')}: no output goes to files; add -r 3 or -t 3")
    return bytes_, kept


def _keep_logs(v: Sources) -> float | None:
    if v.text("keep_logs").strip().lower() == "forever":
        return None
    return _time(v, "keep_logs", 3650 * _DAY, "write a time, as in 12h or 7d, or forever")


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
    if name != "null":
        from phalanx.observe.events import PLUG_INS, choose, destinations

        try:
            choose(name)
        except ValueError:
            there = ", ".join((*destinations(), f"or a plug-in (entry point in {PLUG_INS})"))
            raise v.bad("event_log_handler", f"no such handler; use {there}") from None
    return name


def _check_std(v: Sources, dest: str, count: int) -> None:
    value = v.text(dest)
    if value in ("0", "1", "2", "3"):
        return
    for pair in value.split(","):
        rank, colon, stream = pair.partition(":")
        if not (colon and rank.isdigit() and rank.isascii() and stream in ("0", "1", "2", "3")):
            raise v.bad(dest, "use 0, 1, 2 or 3, or RANK:N,RANK:N with those numbers")
        if int(rank) >= count:
            v.warnings.append(f"{v.label(dest)}: there is no local rank {rank} (of {count})")


def _ranks(v: Sources, dest: str, count: int, plugin: object = None) -> frozenset[int] | None:
    raw = v.text(dest)
    if not raw:
        return None
    if plugin is not None:
        raise v.bad(dest, f"a plug-in of {v.name('logs_specs')} decides what is shown; drop one of the two")
    try:
        ranks = frozenset(int(part) for part in raw.split(","))
    except ValueError:
        ranks = frozenset((-1,))
    if min(ranks) < 0:
        kind = "local ranks" if dest.startswith("local") else "ranks"
        raise v.bad(dest, f"write {kind} between commas, as in 0,1,2")
    if not ranks & frozenset(range(count)):
        v.warnings.append(f"{v.label(dest)}: none of these ranks exists (of {count}): nothing will show")
    return ranks


def supervision(v: Sources, known: Mapping[str, Any]) -> dict[str, Any]:
    """What counts as a hang and what follows from it; health and preemption."""
    names = (
        "heartbeat_timeout",
        "silence_timeout",
        "startup_timeout",
        "partial_exit_timeout",
        "hang_timeout",
    )
    values: dict[str, Any] = {name: v.number(name, 0.001) for name in names}
    if v.given("on_hang") and all(value is None for value in values.values()) and not v.text("expect"):
        v.warnings.append(f"{v.label('on_hang')}: only matters for worker.expires(), as no timeout is given")
    values["straggler_policy"] = v.text("straggler_policy")
    if values["straggler_policy"] == "replace" and known["rdzv_backend"] == "static":
        v.warnings.append(
            f"{v.label('straggler_policy')}: a static job has no spares; slow hosts are reported"
        )
    shown = truth(v.text("dashboard").strip()) is not False  # on the page
    watched = values["silence_timeout"] is not None or v.text("expect") or shown
    if watched and known["redirects"] == known["tee"] == "0":
        values["tee"] = "3"  # output that goes straight to the terminal cannot be observed
        if known["local_world_size"] == known["max_nodes"] == 1 and not known["log_line_prefix_template"]:
            values["log_line_prefix_template"] = ""  # nothing else is to change for it
    port = v.text("health_port")
    host, _, number = port.rpartition(":")
    if port and not (
        number.isascii() and number.isdigit() and int(number) <= 65535 and not host.endswith(":")
    ):
        raise v.bad("health_port", "write PORT or ADDRESS:PORT, with a port between 0 and 65535")
    values.update(on_hang=v.text("on_hang"), health_port=port, health_check=v.text("health_check"))
    values["check"] = v.flag("check")
    values["preempt_signal"] = sig = _preempt_signal(v)
    if sig is not None:
        import signal

        values["signals_to_handle"] = f"{known['signals_to_handle']},{signal.Signals(sig).name}"
    return values


def outside(v: Sources) -> dict[str, Any]:
    """What watches the output, and who is told of incidents."""
    told = {"notify": _notify(v), "metrics": _metrics(v), "otel": _otel(v)}
    return {**_expectations(v), **told, "dashboard": _dashboard(v)}


def _dashboard(v: Sources) -> tuple[str, int] | None:
    text = v.text("dashboard").strip()
    asked = truth(text)
    if asked is False:
        return None
    from importlib.util import find_spec

    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        from phalanx.web.dashboard_process import MISSING

        raise v.bad("dashboard", MISSING)
    if text == "1" or (asked and not text.isdecimal()):
        return "127.0.0.1", 0
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535) or (colon and not host):
        raise v.bad("dashboard", "write PORT or ADDRESS:PORT, with a port between 0 and 65535")
    return host or "127.0.0.1", int(port)


def _expectations(v: Sources) -> dict[str, Any]:
    pattern, finite = v.text("expect"), v.flag("expect_finite")
    every = _time(v, "expect_every", 30 * _DAY, "write a time, as in 300s or 10m") or None
    if not pattern:
        for dest, given in (("expect_every", every), ("expect_finite", finite)):
            if given:
                raise v.bad(dest, f"needs a pattern; add {v.name('expect')} REGEX")
    else:
        import re

        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise v.bad("expect", f"not a regular expression: {error}") from None
        if every is None and not finite:
            raise v.bad("expect", f"add {v.name('expect_every')} TIME, {v.name('expect_finite')}, or both")
    return {"expect": pattern, "expect_every": every, "expect_finite": finite}


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
    if asked and not v.text("health_port"):
        if "metrics" not in v.arguments:
            return False  # a variable for all jobs, and this one has no port
        raise v.bad(
            "metrics", f"served at the health port, and there is none; add {v.name('health_port')} PORT"
        )
    if asked:
        from importlib.util import find_spec

        if find_spec("prometheus_client") is None:
            from phalanx.web.metrics import MISSING

            v.warnings.append(f"{v.label('metrics')}: {MISSING}")
    return asked


def _otel(v: Sources) -> bool:
    asked = v.flag("otel")
    if asked:
        from phalanx.observe.trace_sender import MISSING, installed

        if not installed():
            v.warnings.append(f"{v.label('otel')}: {MISSING}")
    return asked


def _preempt_signal(v: Sources) -> int | None:
    name = v.text("preempt_signal")
    if not name:
        return None
    number = _signal_number(name if name.startswith("SIG") else f"SIG{name}")
    if number is None or name.removeprefix("SIG") in ("KILL", "STOP", "CHLD", "SEGV", "CONT"):
        raise v.bad("preempt_signal", "name a signal that can be handled, as in SIGUSR1")
    return number


def preparation(v: Sources) -> dict[str, Any]:
    """What the helper processes do before workers start."""
    mode, warm_up, preload = v.text("warm"), v.text("warmup"), v.words("preload")
    if warm_up:
        module, colon, function = warm_up.partition(":")
        if not colon or not function.isidentifier() or not module.replace(".", "_").isidentifier():
            raise v.bad("warmup", "write module:function")
        if mode != "standby":
            raise v.bad("warmup", "only standby workers run it; add --warm standby")
    for name in preload:
        if not name.replace(".", "_").isidentifier():
            raise v.bad("preload", f"{name} is not a module name")
        if _interpreter(v) == sys.executable and not _is_module(name):
            v.warnings.append(f"{v.label('preload')}: no module {name!r} on the Python path, left out")
    keep = _seconds(v, "keep_warm")
    if keep and mode == "off":
        if "keep_warm" in v.arguments:
            raise v.bad("keep_warm", "there is nothing to keep with --warm off")
        keep = 0.0
    return {"warm": mode, "preload": preload, "warmup": warm_up, "keep_warm": keep}


def _seconds(v: Sources, dest: str) -> float:
    """A time of up to a day; off or 0: none."""
    if v.text(dest).strip().lower() == "off":
        return 0.0
    return _time(v, dest, _DAY, "write a time of up to a day, as in 90s, 10m or 1h, or off")


def _time(v: Sources, dest: str, longest: float, advice: str) -> float:
    """A time as people write it: 90, 90s, 10m, 1.5h, 7d; 0 where none is given."""
    text = v.text(dest).strip().lower()
    if not text:
        return 0.0
    factor = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": _DAY}.get(text[-1:])
    try:
        value = float(text if factor is None else text[:-1]) * (factor or 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= longest:  # false for nan as well
        raise v.bad(dest, advice)
    return value


def kept_state(v: Sources) -> dict[str, Any]:
    """What becomes of the state that workers keep."""
    spill = v.text("keep_spill")
    if spill and not v.given("rdzv_id"):
        raise v.bad("keep_spill", "name the job with --rdzv-id, so that its next launch finds the state")
    replicas = v.integer("keep_replicas", 0)
    if replicas not in (0, 1):
        raise v.bad("keep_replicas", "write 0 or 1")
    # A requeued job has another run ID, and finds what the last attempt left all the same.
    taken = v.around is not None and "rdzv_id" in v.around.settings
    lasting = v.around.lasting_id if v.around is not None and taken else ""
    return {"keep_spill": spill, "keep_id": lasting, "keep_replicas": replicas}


def screen(v: Sources, known: Mapping[str, Any]) -> dict[str, Any]:
    """What the launcher itself does with the terminal."""
    attach, detach = v.integer("attach", 0), v.flag("detach")
    if attach is not None and detach:
        raise usage_error(
            f"{v.label('attach')} and --detach: a detached job has no terminal to read from; drop one"
        )
    count = known["local_world_size"]
    if attach is not None and known["max_nodes"] == 1 and attach >= count:
        raise v.bad("attach", f"ranks go from 0 to {count - 1} here" if count > 1 else "there is only rank 0")
    quiet, verbose = v.flag("quiet"), v.flag("verbose")
    if quiet and verbose:
        # A flag on this command line overrides a variable set for all of them.
        if ("quiet" in v.arguments) == ("verbose" in v.arguments):
            raise usage_error(f"{v.label('quiet')} and {v.label('verbose')}: choose one")
        quiet, verbose = "quiet" in v.arguments, "verbose" in v.arguments
    return {
        "attach": attach,
        "detach": detach,
        "dry_run": v.flag("dry_run"),
        "quiet": quiet,
        "verbose": verbose,
    }
