"""torch.distributed.elastic.agent.server.health_check_server's names."""

from phalanx.elastic.lazy_modules import found_in
from phalanx.web.health import HealthCheckServer, create_healthcheck_server

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

__getattr__ = found_in(__name__)
