"""torch.distributed.elastic.control_plane's names."""

from phalanx.job.environment import WORKER_SERVER_SOCKET as TORCH_WORKER_SERVER_SOCKET
from phalanx.supervision.worker_server import worker_main

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]
