"""The environment variables that Phalanx reads, their defaults, and the default ports.

Only this module reads a setting from the environment; everything else gets values as arguments. It stands
beside `config`, which uses it, because membership, workers and logs need single values and must not import
the tables of the command line. The variables of options (PET_*, PHALANX_*) are named in `options`; `config`
looks them up in the mapping that `variables()` returns.

Two kinds of code use `os.environ` itself: code that hands the environment to a child process, and code that
runs in a worker. tests/unit/test_environment.py lists both.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False  # on the way to the first worker: importing `typing` would cost milliseconds
if TYPE_CHECKING:
    from collections.abc import Mapping

STATIC_PORT = 29500  # MASTER_PORT where none is given
STORE_PORT = 29400
DEFAULT_QUARANTINE = "3:3600:3600"
ETCD_PORT = 2379

SHARED_MEMORY = "/dev/shm"

# Of the launcher.
SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
SHUTDOWN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
UNINTERRUPTIBLE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
HEALTH_PORT = "TORCHELASTIC_HEALTH_CHECK_PORT"
LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
ENABLE_FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"
WORKERS_IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"
OWN_WORKER_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
EVENTS_FILE = "PHALANX_EVENTS_FILE"
NAMESPACE = "PHALANX_NAMESPACE"
TOKEN = "PHALANX_TOKEN"
TOKEN_FILE = "PHALANX_TOKEN_FILE"
ETCD_PASSWORD = "PHALANX_ETCD_PASSWORD"
OUTCOMES = "PHALANX_OUTCOMES"
BATCH_STEP = "PHALANX_BATCH_STEP"  # of a job of Slurm: its host, its port, and how often it may be requeued
PYTHON_EXEC = "PYTHON_EXEC"
LOG_LEVEL = "LOGLEVEL"
OMP_THREADS = "OMP_NUM_THREADS"
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"  # of this pod, set by Kubernetes
JOB_UID = "PHALANX_JOB_UID"  # these three from labels of the pod, by its manifest
JOBSET_INDEX = "PHALANX_JOBSET_INDEX"
JOBSET_REPLICAS = "PHALANX_JOBSET_REPLICAS"
NODE_INDEXES = ("SLURM_NODEID", COMPLETION_INDEX)  # this node's index, set by its scheduler
# Of the workers, set by the launcher or by the user.
RUN_ID = "TORCHELASTIC_RUN_ID"
TIMER_FILE = "TORCHELASTIC_TIMER_FILE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
WORKER_COLLECTIVES = "PHALANX_COLLECTIVES"
WORKER_SERVER_SOCKET = "TORCH_WORKER_SERVER_SOCKET"
NCCL_RAS = "NCCL_RAS_ADDR"

NOTIFY = "PHALANX_NOTIFY"  # a command or a URL, which may hold a password

SECRETS = (TOKEN, TOKEN_FILE, ETCD_PASSWORD, NOTIFY)  # never handed to a worker

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
DEFAULT_SHUTDOWN_TIMEOUT = 30.0


def variables() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def without_secrets() -> dict[str, str]:
    """The environment for a command of the user's that is not part of the job."""
    return {name: value for name, value in os.environ.items() if name not in SECRETS}


def export(name: str, value: str) -> None:
    """Set a variable in this process, and so in every process that it starts."""
    os.environ[name] = value


def prepend_python_path(directory: str) -> None:
    """Make child processes look for modules in a directory first; idempotent."""
    before = os.environ.get("PYTHONPATH", "")
    if directory not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = directory + (os.pathsep + before if before else "")


def drop_python_path(directory: str) -> None:
    """Undo `prepend_python_path`."""
    left = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", directory)
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(left)
    if not left:
        del os.environ["PYTHONPATH"]


def own_environment() -> dict[str, str]:
    """A copy of this process's environment, for a child that gets it with changes."""
    return dict(os.environ)


_OF_A_HOST = (
    "HOME", "HOSTNAME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER", "_",
    "DISPLAY", "WAYLAND_DISPLAY", "KRB5CCNAME", "COLORTERM", "LS_COLORS",
)  # fmt: skip
_OF_A_SESSION = ("SSH_", "XDG_", "DBUS_", "SLURM_", "SLURMD_", "TMUX", "STY")


def carried_variables() -> dict[str, str]:
    """What an agent on another host gets: everything but what belongs to this host, session or secret."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_HOST and name not in SECRETS and not name.startswith(_OF_A_SESSION)
    }


def pet_variable(dest: str) -> str | None:
    """The variable that torchrun reads for an argument."""
    return os.environ.get(f"PET_{dest.upper()}")


def signals() -> str:
    """The names of the signals that stop the workers."""
    return os.environ.get(SIGNALS, DEFAULT_SIGNALS)


def shutdown_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Seconds between SIGTERM and SIGKILL."""
    raw = (variables() if environ is None else environ).get(SHUTDOWN_TIMEOUT, "")
    try:
        value = float(raw or DEFAULT_SHUTDOWN_TIMEOUT)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{SHUTDOWN_TIMEOUT}={raw}: must be a number of seconds, 0 or more")
    return value


def uninterruptible_timeout() -> float:
    """Seconds that a worker may spend in uninterruptible sleep; 0: any time."""
    raw = os.environ.get(UNINTERRUPTIBLE_TIMEOUT) or "0"
    try:
        return float(raw)
    except ValueError:
        raise ValueError(f"{UNINTERRUPTIBLE_TIMEOUT}={raw}: must be a number of seconds") from None


def health_port() -> str:
    """`[ADDR:]PORT` of the health endpoints; empty: none."""
    return os.environ.get(HEALTH_PORT, "")


def timer_file() -> str | None:
    """The path of the named pipe for timers; empty: choose one; None: no timers."""
    return os.environ.get(TIMER_FILE, "") if os.environ.get(ENABLE_FILE_TIMER) == "1" else None


def workers_are_identical() -> bool:
    """Whether all nodes run the same number of workers in one role, so that ranks need no exchange."""
    return os.environ.get(WORKERS_IDENTICAL, "0") == "1"


def shares_store() -> bool:
    """Whether the workers use the store that the agent serves."""
    return os.environ.get(OWN_WORKER_STORE, "0") != "1"


def events_file() -> str:
    """The file that the event handler `file` appends to; empty: none is set."""
    return os.environ.get(EVENTS_FILE, "")


def outcomes_directory() -> str:
    """Where this agent leaves how it ended; empty: nowhere, as in a worker of another job."""
    return "" if RUN_ID in os.environ else os.environ.get(OUTCOMES, "")


class StatusTarget:
    """Where Kubeflow's controller takes reports, and the files by which both sides know each other."""

    def __init__(self, url: str, ca_file: str, token_file: str) -> None:
        self.url, self.ca_file, self.token_file = url, ca_file, token_file


def train_status() -> StatusTarget | None:
    """Where a TrainJob wants progress to be reported; None: nowhere, as in a worker of another job."""
    names = (f"KUBEFLOW_TRAINER_STATUS_{what}" for what in ("URL", "CA_CERT", "TOKEN"))
    url, ca_file, token_file = (os.environ.get(name, "") for name in names)
    return StatusTarget(url, ca_file, token_file) if url and token_file and RUN_ID not in os.environ else None


def worker_server_socket() -> str:
    """The path of the worker's debug server; empty: none."""
    return os.environ.get(WORKER_SERVER_SOCKET, "")


def node_index() -> int:
    """This node's index at its scheduler; -1: unknown."""
    found = (os.environ.get(name, "") for name in NODE_INDEXES)
    return int(next((text for text in found if text.isdigit()), "-1"))


def in_pod() -> bool:
    """Whether this is a pod of Kubernetes, whose home directory no other pod shares unless it is mounted."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST") or os.environ.get(COMPLETION_INDEX))


def namespace(environ: Mapping[str, str] | None = None) -> str:
    """The jobs and commands of one user that see each other; empty: those that name none."""
    raw = (variables() if environ is None else environ).get(NAMESPACE, "")
    if raw and not (len(raw) <= 24 and raw.isascii() and raw.replace("-", "").replace("_", "").isalnum()):
        raise ValueError(f"{NAMESPACE}={raw!r}: must be at most 24 letters, digits, '-' and '_'")
    return raw


AGENT_SOCKET = "phalanx/"
"""How the names of the agents' sockets begin; `socket_scope` follows."""


def socket_scope() -> str:
    """How the names of our local sockets go on after their kind: the user, then the namespace."""
    return f"{os.geteuid()}/{namespace()}/"


def log_level() -> str:
    """The level of torch-style loggers."""
    return os.environ.get(LOG_LEVEL, "WARNING").upper()


def has_error_file() -> bool:
    """Whether whatever started this process reads an error file of it."""
    return bool(os.environ.get(ERROR_FILE))


def allows_colour() -> bool:
    """Whether a terminal may be sent colours."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def rewrites_lines() -> bool:
    """Whether the terminal can rewrite a line, as a progress line needs."""
    return os.environ.get("TERM", "dumb") != "dumb"


def temporary_directory() -> str:
    """The first usable directory of those that Python's tempfile tries; OSError says what was tried.

    After them comes shared memory, the one place that a container with a read-only file system can write."""
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    tried = [
        os.path.abspath(path)
        for path in (*named, "/tmp", "/var/tmp", "/usr/tmp", here, SHARED_MEMORY)
        if path
    ]
    for path in tried:
        if os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK):
            return path
    raise OSError(
        f"no directory for temporary files: none of {', '.join(dict.fromkeys(tried))} can be written; "
        "set TMPDIR to one that can"
    )


def nccl_ras_address() -> str:
    """Where NCCL in the workers answers questions; empty: at its default."""
    return os.environ.get(NCCL_RAS, "")
