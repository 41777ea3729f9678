"""torch.distributed.launcher.api's names."""

from phalanx.agent.elastic_launch import LaunchConfig, elastic_launch, launch_agent

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]
