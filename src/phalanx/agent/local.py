"""The former home of `LocalElasticAgent`."""

from phalanx.agent.torch_agent import LocalElasticAgent

__all__ = ["LocalElasticAgent"]
