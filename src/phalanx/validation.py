"""What makes a request for a run valid, subject by subject.

Each public function takes the raw `Sources` and returns the fields of `RunConfig` it is responsible for, or
raises `UsageError`. They look at the machine (files, PATH, devices, installed plug-ins) but change nothing.
Anything costly is looked up only when the request names it: the plain command line must stay cheap.
"""

from __future__ import annotations

import os
import sys

from phalanx.devices import resolve_nproc
from phalanx.options import DEFAULT_SIGNALS, usage_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from phalanx.config import Sources

DEFAULT_GRACE = 30.0
STATIC_PORT = 29500
STORE_PORT = 29400
_BACKENDS = ("static", "phalanx", "c10d", "etcd")
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def program(v: Sources, script: str) -> dict[str, Any]:
    """What each worker runs, found and runnable."""
    _check_directory()
    module, no_python, run_path = v.flag("module"), v.flag("no_python"), v.flag("run_path")
    python = v.environ.get("PYTHON_EXEC", "")
    if python and _which(python, v.environ) is None:
        raise usage_error(
            f"PYTHON_EXEC={python}: no such program, or not executable; unset it or correct the path"
        )
    python = python or sys.executable
    if module and no_python:
        raise usage_error(
            f"{v.label('module')} and {v.label('no_python')}: only Python runs modules; drop one of the two"
        )
    if module and run_path:
        raise usage_error(
            f"{v.label('module')} and {v.label('run_path')}: one takes a module, the other a file; drop one"
        )
    if module:
        _check_module(v, script, python)
    elif no_python and not run_path:
        _check_binary(script, v.environ)
    else:
        _check_file(script, v.environ)
    return {"module": module, "no_python": no_python, "run_path": run_path, "python_exec": python}


def _check_directory() -> None:
    """Workers start where we are, and relative paths count from there."""
    try:
        os.getcwd()
    except OSError:
        raise usage_error("the current directory has been deleted; cd to one that exists") from None


def _check_binary(program: str, environ: Mapping[str, str]) -> None:
    if _which(program, environ) is not None:
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
        hint, where = "give the path from here, or an absolute one", f"script in {os.getcwd()}"
        if os.path.isfile(script + ".py"):
            hint = f"did you mean {script}.py?"
        elif _which(script, environ):
            hint = "for a program add --no-python, for a module -m"
        elif os.path.isabs(script):
            hint, where = "check the path", "script"
        raise usage_error(f"{script or repr(script)}: no such {where}; {hint}")
    elif not os.access(script, os.R_OK):
        raise usage_error(f"{script}: cannot be read by this user; check its permissions")


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


def _is_module(name: str, directory: str = "") -> bool:
    """Whether this interpreter finds a module's package, here or in another directory."""
    top = name.partition(".")[0]
    places = (None, [os.getcwd(), os.path.abspath(directory)])
    return any(finder.find_spec(top, path) is not None for finder in sys.meta_path for path in places)


def _which(name: str, environ: Mapping[str, str]) -> str | None:
    """Where a program is, by PATH unless the name holds a slash (`shutil.which` is a costly import)."""
    places = [""] if "/" in name else environ.get("PATH", os.defpath).split(os.pathsep)
    for place in places:
        path = os.path.join(place, name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


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
    if not role.strip() or not role.isprintable() or "/" in role or len(role) > 128:
        raise v.bad("role", "a role is a printable name of 1 to 128 characters without '/'")
    omp = 1 if count > 1 and "OMP_NUM_THREADS" not in v.environ else None
    return {
        "nproc_per_node": asked,
        "local_world_size": count,
        "virtual_local_rank": virtual,
        "role": role,
        "omp_num_threads": omp,
        "numa_binding": v.text("numa_binding") or None,
        "start_method": v.text("start_method"),
    }


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
    return {"min_nodes": least, "max_nodes": most, **_rendezvous(v, least, most), **_trust(v)}


def _trust(v: Sources) -> dict[str, Any]:
    """The files that nodes know each other by: there and readable; what is in them the store looks at."""
    files = {dest: v.text(dest) or None for dest in ("token_file", "tls_cert", "tls_key", "tls_ca")}
    for dest, path in files.items():
        if path is not None and not os.access(path, os.R_OK):
            raise v.bad(dest, "cannot be read by this user" if os.path.exists(path) else "no such file")
    if files["tls_key"] is not None and files["tls_cert"] is None:
        raise v.bad("tls_key", "a key without its certificate; add --tls-cert FILE")
    return {**files, "store_grace": v.number("store_grace", 0)}


def _rendezvous(v: Sources, least: int, most: int) -> dict[str, Any]:
    backend, endpoint, addr = v.text("rdzv_backend"), v.text("rdzv_endpoint"), v.text("master_addr")
    port, rank = v.integer("master_port", 0, 65535), v.integer("node_rank", 0) or 0
    alone = v.flag("standalone")
    if alone or (most == 1 and backend == "static" and not endpoint and port is None):
        alone, backend, endpoint = True, "phalanx", "localhost:0"
    elif backend == "static":
        if least != most:
            raise v.bad(
                "nnodes",
                "static needs a fixed number; add --rdzv-backend phalanx --rdzv-endpoint HOST:PORT",
            )
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
            v.warnings.append("no --rdzv-endpoint: using localhost, so only nodes on this machine can meet")
        endpoint = endpoint or (f"localhost:{STORE_PORT}" if most > 1 else "localhost:0")
    else:
        _check_backend(v, backend, endpoint)
    _check_endpoint(v, endpoint)
    if backend == "static":  # where nodes meet is where workers meet
        addr, port = _host_and_port(v, endpoint)
    run_id = v.text("rdzv_id")
    if alone and not v.given("rdzv_id"):
        run_id = os.urandom(6).hex()
    if not run_id.isprintable() or "/" in run_id or run_id[:1] in ("", ".") or len(run_id.encode()) > 128:
        raise v.bad(
            "rdzv_id",
            "a job id names directories and keys: at most 128 bytes, printable, no '/', no '.' in front",
        )
    return {
        "standalone": alone,
        "rdzv_backend": backend,
        "rdzv_endpoint": endpoint,
        "rdzv_conf": rendezvous_settings(v),
        "run_id": run_id,
        "master_addr": addr,
        "master_port": port,
        "local_addr": v.text("local_addr") or None,
        "node_rank": rank,
        "node_rank_given": v.given("node_rank"),
    }


def _check_backend(v: Sources, backend: str, endpoint: str) -> None:
    if backend == "etcd-v2":
        raise v.bad("rdzv_backend", "etcd's v2 API is not supported; use etcd, which speaks v3")
    if backend == "etcd":
        if not endpoint:
            raise v.bad("rdzv_backend", "needs --rdzv-endpoint HOST:PORT of the etcd server")
        return
    known = _plugins("torchrun.handlers", "phalanx.handlers")
    if backend not in known:
        raise v.bad("rdzv_backend", f"no such backend; known are {', '.join((*_BACKENDS, *sorted(known)))}")


def _check_endpoint(v: Sources, endpoint: str) -> None:
    """Catch a port that is none; everything else about an address only the network can tell."""
    tail = endpoint.rpartition("]")[2]
    port = tail.partition(":")[2] if tail.count(":") == 1 else ""
    if tail.endswith(":") or (port and not (port.isdigit() and int(port) <= 65535)):
        where = "rdzv_endpoint" if v.given("rdzv_endpoint") else "master_addr"
        raise v.bad(where, "write HOST:PORT, with a port between 0 and 65535")


def _host_and_port(v: Sources, endpoint: str) -> tuple[str, int]:
    """What the endpoint of a static rendezvous says about MASTER_ADDR and MASTER_PORT."""
    from phalanx.membership.address import parse_rendezvous_endpoint

    try:
        return parse_rendezvous_endpoint(endpoint, STATIC_PORT)
    except ValueError as error:
        where = "rdzv_endpoint" if v.given("rdzv_endpoint") else "master_addr"
        raise v.bad(where, str(error)) from None


def rendezvous_settings(v: Sources) -> dict[str, str]:
    """--rdzv-conf as a dictionary."""
    conf: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in v.text("rdzv_conf").split(","))):
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key or not value:
            raise v.bad("rdzv_conf", f"{pair!r} is not key=value; write key=value,key=value")
        conf[key] = value
    return conf


def _plugins(*groups: str) -> set[str]:
    """Names installed packages offer for an extension point (a slow search: only for names not built in)."""
    from importlib.metadata import entry_points

    return {entry.name for group in groups for entry in entry_points(group=group)}


def restarts(v: Sources) -> dict[str, Any]:
    """When to try again, and how to stop."""
    return {
        "max_restarts": v.integer("max_restarts", 0),
        "restart_window": v.number("restart_window", 0.001),
        "no_restart_on": frozenset(_exit_codes(v)),
        "shutdown_timeout": _grace(v),
        "signals_to_handle": _signals(v),
        "monitor_interval": v.number("monitor_interval", 0.001),
    }


def _signals(v: Sources) -> str:
    """The names that mean something; of the others we warn here, once, and hand them to nobody."""
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
    """--grace, --shutdown-timeout, then their variables in that order: an argument beats any variable."""
    grace, other = v.number("grace", 0), v.integer("shutdown_timeout", 0)
    if grace is not None and ("grace" in v.arguments or "shutdown_timeout" not in v.arguments):
        return float(grace)
    if other is not None:
        return float(other)
    raw = v.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    try:
        value = float(raw or DEFAULT_GRACE)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise usage_error(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={raw}: must be a number of seconds, 0 or more")
    return value


def _exit_codes(v: Sources) -> Iterable[int]:
    for word in filter(None, (part.strip() for part in v.text("no_restart_on").split(","))):
        number = _signal_number(word)
        if number is None and word.removeprefix("-").isdigit():
            number = -int(word) if word.startswith("-") else 0
            if not number and 1 <= int(word) <= 255:
                yield int(word)
                continue
        if not number or number > 64:
            raise v.bad("no_restart_on", f"{word!r} is neither an exit code (1 to 255) nor a signal name")
        yield 128 + number


def _signal_number(name: str) -> int | None:
    import signal

    found = getattr(signal, name, None) if name.startswith("SIG") else None
    return int(found) if isinstance(found, signal.Signals) else None


def output(v: Sources, count: int) -> dict[str, Any]:
    """Where the workers' output goes."""
    log_dir = v.text("log_dir") or None
    if log_dir is not None and os.path.exists(log_dir) and not os.path.isdir(log_dir):
        raise v.bad("log_dir", "is a file; name a directory")
    for dest in ("redirects", "tee"):
        _check_std(v, dest, count)
    specs = v.text("logs_specs") or None
    if specs is not None:
        known = _plugins("torchrun.logs_specs", "phalanx.logs_specs")
        if specs not in known:
            raise v.bad("logs_specs", f"no such plug-in; installed are: {', '.join(sorted(known)) or 'none'}")
    return {
        "log_dir": log_dir,
        "redirects": v.text("redirects"),
        "tee": v.text("tee"),
        "local_ranks_filter": _ranks(v, count),
        "log_line_prefix_template": v.text("log_line_prefix_template") or None,
        "duplicate_stdout_filters": v.words("duplicate_stdout_filters"),
        "duplicate_stderr_filters": v.words("duplicate_stderr_filters"),
        "logs_specs": specs,
        "event_log_handler": _event_handler(v),
    }


def _event_handler(v: Sources) -> str:
    name = v.text("event_log_handler")
    if name != "null":
        from phalanx.observe.events import destinations

        if name not in destinations():
            raise v.bad("event_log_handler", f"no such handler; use {', '.join(destinations())}")
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


def _ranks(v: Sources, count: int) -> frozenset[int] | None:
    raw = v.text("local_ranks_filter")
    if not raw:
        return None
    try:
        ranks = frozenset(int(part) for part in raw.split(","))
    except ValueError:
        ranks = frozenset((-1,))
    if min(ranks) < 0:
        raise v.bad("local_ranks_filter", "write local ranks between commas, as in 0,1,2")
    if not ranks & frozenset(range(count)):
        v.warnings.append(
            f"{v.label('local_ranks_filter')}: none of these ranks exists (of {count}): nothing will show"
        )
    return ranks


def watching(v: Sources, known: dict[str, Any]) -> dict[str, Any]:
    """What counts as a hang, and what follows from it; health and preemption."""
    names = ("heartbeat_timeout", "silence_timeout", "startup_timeout", "partial_exit_timeout")
    values: dict[str, Any] = {name: v.number(name, 0.001) for name in names}
    if v.given("on_hang") and all(value is None for value in values.values()):
        v.warnings.append(f"{v.label('on_hang')}: only matters for worker.expires(), as no timeout is given")
    if values["silence_timeout"] is not None and known["redirects"] == known["tee"] == "0":
        values["tee"] = "3"  # what goes straight to the terminal, nobody can see
    port = v.text("health_port")
    host, _, number = port.rpartition(":")
    if port and not (
        number.isascii() and number.isdigit() and int(number) <= 65535 and not host.endswith(":")
    ):
        raise v.bad("health_port", "write PORT or ADDRESS:PORT, with a port between 0 and 65535")
    values.update(on_hang=v.text("on_hang"), health_port=port, health_check=v.text("health_check"))
    return {**values, "preempt_signal": _preempt_signal(v)}


def _preempt_signal(v: Sources) -> int | None:
    name = v.text("preempt_signal")
    if not name:
        return None
    number = _signal_number(name if name.startswith("SIG") else f"SIG{name}")
    if number is None or name.removeprefix("SIG") in ("KILL", "STOP", "CHLD", "SEGV", "CONT"):
        raise v.bad("preempt_signal", "name a signal that can be handled, as in SIGUSR1")
    return number


def helpers(v: Sources, python: str) -> dict[str, Any]:
    """How far ahead of the workers the helpers are."""
    mode, warm_up = v.text("warm"), v.text("warmup")
    if warm_up:
        module, colon, function = warm_up.partition(":")
        if not colon or not function.isidentifier() or not module.replace(".", "_").isidentifier():
            raise v.bad("warmup", "write module:function")
        if mode != "standby":
            raise v.bad("warmup", "only parked workers run it; add --warm standby")
    for name in v.words("preload"):
        if not name.replace(".", "_").isidentifier():
            raise v.bad("preload", f"{name} is no module name")
        if python == sys.executable and not _is_module(name):
            v.warnings.append(f"{v.label('preload')}: no module {name!r} on the Python path, left out")
    return {"warm": mode, "preload": v.words("preload"), "warmup": warm_up}


def terminal(v: Sources, known: dict[str, Any]) -> dict[str, Any]:
    """What the launcher itself does with the terminal."""
    attach, detach = v.integer("attach", 0), v.flag("detach")
    if attach is not None and detach:
        raise usage_error(
            f"{v.label('attach')} and --detach: a run without a terminal has none to lend; drop one"
        )
    count = known["local_world_size"]
    if attach is not None and known["max_nodes"] == 1 and attach >= count:
        raise v.bad("attach", f"ranks go from 0 to {count - 1} here" if count > 1 else "there is only rank 0")
    quiet, verbose = v.flag("quiet"), v.flag("verbose")
    if quiet and verbose:
        # A flag on this command line overrules a variable set for all of them.
        if ("quiet" in v.arguments) == ("verbose" in v.arguments):
            raise usage_error(f"{v.label('quiet')} and {v.label('verbose')}: choose one")
        quiet, verbose = "quiet" in v.arguments, "verbose" in v.arguments
    return {
        **helpers(v, known["python_exec"]),
        "attach": attach,
        "detach": detach,
        "dry_run": v.flag("dry_run"),
        "quiet": quiet,
        "verbose": verbose,
    }
