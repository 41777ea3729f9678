"""Plain Python that outlives the death of a rank: survivors keep what they have computed.

    phalanx run --nproc-per-node 3 --max-restarts 3 examples/reenter_plain.py

Rank 1 kills itself in the first round. The others are called again in the same processes, with their tables;
the new process of rank 1 gets its table from a survivor, through the store of the round.
"""

import json
import os
import signal
from typing import Any

from phalanx import worker
from phalanx.store.tcpstore.client import TorchStoreClient

table: dict[int, int] = {}  # what took long to compute


@worker.reenter
def main(round: Any) -> None:
    """Square numbers, one after the other, all ranks at the same one."""
    with TorchStoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 60.0) as store:
        if round.survivors:
            # A survivor may be one entry ahead of another.
            store.set(f"table/{round.rank}", json.dumps(sorted(table.items())))
            store.wait([f"table/{rank}" for rank in round.survivors], 60.0)
            tables = [json.loads(store.get(f"table/{rank}")) for rank in round.survivors]
            table.clear()
            table.update(min(tables, key=len))
        print(f"rank {round.rank}, pid {os.getpid()}: {len(table)} entries", flush=True)
        for number in range(len(table), 20):
            if (round.number, round.rank, number) == (1, 1, 10):
                os.kill(os.getpid(), signal.SIGKILL)
            store.set(f"done/{number}/{round.rank}", "")
            store.wait([f"done/{number}/{rank}" for rank in range(round.world_size)], 60.0)
            table[number] = number * number
    if round.rank == 0:
        print(f"the sum is {sum(table.values())}", flush=True)


main()
