"""torch.distributed.elastic.control_plane's names."""

from phalanx.supervision.worker_server import TORCH_WORKER_SERVER_SOCKET, worker_main

__all__ = ["TORCH_WORKER_SERVER_SOCKET", "worker_main"]
