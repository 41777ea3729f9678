"""Phalanx in a Ray cluster: one actor for each node, with `elastic_launch` inside.

    python examples/ray_launch.py --nodes 2 --nproc-per-node 4 train.py --lr 0.1

Ray finds the machines, starts an actor on each and starts a lost one again. Phalanx does the rest: ranks,
restarts, and no worker that outlives its actor. The output of all workers arrives here through Ray.
"""

import argparse
import os
import secrets
import socket
import sys

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from phalanx import ChildFailedError, LaunchConfig, elastic_launch


# An actor that is lost with its node is started again, and so is what it was doing. An exception is final.
@ray.remote(max_restarts=-1, max_task_retries=-1)
class Node:
    """The agent of one node."""

    def endpoint(self) -> str:
        """An address for the job's store."""
        with socket.create_server(("", 0)) as server:
            return f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"

    def run(self, config: LaunchConfig, token: str, directory: str, words: list[str]) -> str:
        """Run this node's workers to the end of the job; what went wrong, or nothing."""
        os.environ["PHALANX_TOKEN"] = token  # not as a variable of Ray's, which its dashboard shows
        os.chdir(directory)
        try:
            elastic_launch(config, sys.executable)(*words)
        except ChildFailedError as error:
            return str(error)
        return ""


def launch(args: argparse.Namespace) -> str:
    """Run the job on the cluster that Ray is connected to; the report of a failure, or nothing."""
    # Each bundle on a node of its own, all or none.
    bundle = {"CPU": args.cpus, **({"GPU": args.gpus} if args.gpus else {})}
    group = placement_group([bundle] * args.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    try:
        nodes = [
            Node.options(
                num_cpus=args.cpus,
                num_gpus=args.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote()
            for index in range(args.nodes)
        ]
        config = LaunchConfig(
            min_nodes=args.min_nodes or args.nodes,
            max_nodes=args.nodes,
            nproc_per_node=args.nproc_per_node,
            max_restarts=args.max_restarts,
            run_id=f"ray-{ray.get_runtime_context().get_job_id()}",
            rdzv_endpoint=ray.get(nodes[0].endpoint.remote()),  # on one of its addresses: that node hosts it
        )
        words = ["-u", args.script, *args.script_args]
        token = secrets.token_hex(32)
        running = [node.run.remote(config, token, os.getcwd(), words) for node in nodes]
        return next(filter(None, ray.get(running)), "")
    finally:
        remove_placement_group(group)  # and with it the actors


def main() -> None:
    """Read the arguments and run the job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--min-nodes", type=int, default=0, help="go on with fewer nodes after a loss")
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--cpus", type=float, default=1, help="CPUs that Ray reserves on each node")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs that Ray reserves on each node")
    parser.add_argument("--max-restarts", type=int, default=3)
    parser.add_argument("--address", help="of the cluster; without it, the one that Ray finds, or a new one")
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    ray.init(address=args.address)
    failure = launch(args)
    if failure:
        sys.exit(failure)


if __name__ == "__main__":
    main()
