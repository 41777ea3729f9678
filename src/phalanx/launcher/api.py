"""torch.distributed.launcher.api's names."""

from phalanx.agent.job import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
