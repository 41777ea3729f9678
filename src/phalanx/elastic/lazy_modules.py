"""Names at torch's import paths, imported on first use: most programs need one of them.

In torch, importing a package imports most of its submodules, so that `mp.errors.record` works after `import
…elastic.multiprocessing as mp`, and a module also has the names that it imports itself, which programs take
from there.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_IMPORTED = {
    "elastic.agent.server.api": """
        rdzv=elastic.rendezvous store_util=elastic.utils.store elastic.events.api.Event
        elastic.multiprocessing.api.SignalException
        elastic.events.api.EventSource elastic.events.record elastic.metrics.api.prof
        elastic.metrics.api.put_metric elastic.multiprocessing.errors.ProcessFailure
        elastic.utils.logging.get_logger logger
    """,
    "elastic.agent.server.health_check_server": "elastic.utils.logging.get_logger log=logger",
    "elastic.agent.server.local_elastic_agent": """
        elastic.timer elastic.events elastic.agent.server.health_check_server.create_healthcheck_server
        elastic.agent.server.health_check_server.HealthCheckServer elastic.metrics.api.prof
        elastic.multiprocessing.api.LogsSpecs elastic.multiprocessing.api.PContext
        elastic.multiprocessing.start_processes elastic.utils.api.macros
        elastic.utils.logging.get_logger elastic.utils.process_state.is_uninterruptible_state
        elastic.utils.process_state.read_proc_state logger
    """,
    "elastic.control_plane": "elastic.multiprocessing.errors.record",
    "elastic.multiprocessing": "elastic.utils.logging.get_logger",
    "elastic.multiprocessing.api": """
        elastic.internals.IS_WINDOWS elastic.internals.IS_MACOS logger
        elastic.multiprocessing.redirects.redirect_stderr elastic.multiprocessing.redirects.redirect_stdout
    """,
    "elastic.multiprocessing.errors": "elastic.utils.logging.get_logger logger",
    "elastic.multiprocessing.errors.error_handler": "logger",
    "elastic.multiprocessing.redirects": "elastic.internals.IS_WINDOWS elastic.internals.IS_MACOS logger",
    "elastic.multiprocessing.subprocess_handler.subprocess_handler": "elastic.internals.IS_WINDOWS",
    "elastic.multiprocessing.tail_log": "logger",
    "elastic.rendezvous.api": "elastic.utils.distributed.get_free_port",
    "elastic.rendezvous.c10d_rendezvous_backend": """
        elastic.events.construct_and_record_rdzv_event elastic.events.api.NodeState
        elastic.rendezvous.api.RendezvousConnectionError elastic.rendezvous.api.RendezvousError
        elastic.rendezvous.api.RendezvousParameters elastic.rendezvous.api.RendezvousStateError
        elastic.rendezvous.dynamic_rendezvous.RendezvousBackend elastic.rendezvous.dynamic_rendezvous.Token
        elastic.rendezvous.utils.parse_rendezvous_endpoint logger
        DEFAULT_PORT=job.environment.STORE_PORT
    """,
    "elastic.rendezvous.dynamic_rendezvous": """
        elastic.events.construct_and_record_rdzv_event elastic.events.api.NodeState
        elastic.rendezvous.api.RendezvousClosedError elastic.rendezvous.api.RendezvousError
        elastic.rendezvous.api.RendezvousGracefulExitError elastic.rendezvous.api.RendezvousHandler
        elastic.rendezvous.api.RendezvousInfo elastic.rendezvous.api.RendezvousStateError
        elastic.rendezvous.api.RendezvousStoreInfo elastic.rendezvous.api.RendezvousTimeoutError logger
    """,
    "elastic.rendezvous.etcd_server": "logger",
    "elastic.rendezvous.registry": """
        handler_registry=elastic.rendezvous.api.rendezvous_handler_registry
        elastic.rendezvous.api.RendezvousHandler elastic.rendezvous.api.RendezvousParameters
        elastic.rendezvous.dynamic_rendezvous.create_handler log=logger
    """,
    "elastic.rendezvous.static_tcp_rendezvous": """
        elastic.rendezvous.api.RendezvousHandler elastic.rendezvous.api.RendezvousInfo
        elastic.rendezvous.api.RendezvousParameters elastic.rendezvous.api.RendezvousStoreInfo
        elastic.rendezvous.utils.parse_rendezvous_endpoint logger
    """,
    "elastic.timer.api": "logger",
    "elastic.timer.debug_info_logging": "elastic.utils.logging.get_logger logger",
    "elastic.timer.file_based_local_timer": """
        elastic.timer.api.TimerRequest elastic.utils.logging.get_logger logger
    """,
    "elastic.timer.local_timer": "elastic.timer.api.RequestQueue elastic.timer.api.TimerServer logger",
    "elastic.utils.distributed": "elastic.utils.logging.get_logger elastic.utils.store.barrier logger",
    "launcher.api": """
        rdzv_registry=elastic.rendezvous.registry elastic.events elastic.metrics
        elastic.agent.server.api.WorkerSpec
        elastic.agent.server.health_check_server.create_healthcheck_server
        elastic.agent.server.health_check_server.HealthCheckServer
        elastic.agent.server.local_elastic_agent.LocalElasticAgent
        TORCHELASTIC_HEALTH_CHECK_PORT=job.environment.HEALTH_PORT
        elastic.multiprocessing.api.DefaultLogsSpecs elastic.multiprocessing.api.LogsSpecs
        elastic.multiprocessing.api.SignalException elastic.multiprocessing.errors.ChildFailedError
        elastic.rendezvous.api.RendezvousParameters elastic.rendezvous.utils.parse_rendezvous_endpoint
        elastic.utils.logging.get_logger logger
    """,
    "run": """
        elastic.multiprocessing.DefaultLogsSpecs launcher.api.LaunchConfig elastic.multiprocessing.LogsSpecs
        elastic.multiprocessing.Std launcher.api.elastic_launch elastic.utils.logging.get_logger
        elastic.utils.macros elastic.multiprocessing.errors.record argparse.REMAINDER
        argparse_util.check_env argparse_util.env logger
    """,
}
"""The names that torch's modules have by import, and the modules here do not: module → paths below phalanx.

Made from torch's modules, and compared with them by tests/unit/test_torch_paths.py. `NAME=PATH`: under
another name; `logger`: the module's own.
"""


def found_in(module: str, *submodules: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module with these submodules, and with what torch's imports."""

    def find(name: str) -> Any:
        from importlib import import_module

        if name in submodules:
            return import_module(f"{module}.{name}")
        path = _paths(module).get(name)
        if path is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if path == "logger":
            import logging

            from phalanx.job.environment import log_level

            logger = logging.getLogger(module)
            logger.setLevel(log_level())
            return logger
        path = path if path.startswith("argparse.") else f"phalanx.{path}"
        parent, _, last = path.rpartition(".")
        try:
            return getattr(import_module(parent), last)
        except AttributeError:
            return import_module(path)

    return find


def _paths(module: str) -> dict[str, str]:
    words = _IMPORTED.get(module.removeprefix("phalanx."), "").split()
    named = (word.rpartition("=") for word in words)
    return {name or path.rpartition(".")[2]: path for name, _, path in named}


def seen_in(module: str, name: str, own: Any) -> Any:
    """`own`, or what a program has put in its place in a module at torch's path, as `mock.patch` does."""
    import sys

    return vars(sys.modules[module]).get(name, own) if module in sys.modules else own
