"""torch.distributed.launcher.api's names."""

from phalanx.elastic.agent.elastic_launch import LaunchConfig, elastic_launch, launch_agent
from phalanx.elastic.internals import addr_and_port as _get_addr_and_port  # noqa: F401
from phalanx.elastic.internals import entrypoint_name as _get_entrypoint_name  # noqa: F401
from phalanx.elastic.lazy_modules import found_in

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

__getattr__ = found_in(__name__)
