"""torch.distributed.launcher's names."""

from phalanx.elastic.agent.elastic_launch import LaunchConfig, elastic_launch, launch_agent
from phalanx.launcher import api as api

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
