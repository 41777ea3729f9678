"""The worker of a campaign: records that it lives, writes numbered lines, ends when it is asked to.

Run as a script, with the episode's directory and the seconds to linger after SIGTERM as its arguments. Life
signs go to `signs/<node>.<incarnation>-<pid>`: a line of JSON about the worker, then one line per life sign:
the time, and how many numbered lines had been written completely before. Requests are files: `finish-<node>`
(exit with 0) and `exit-<pid>` (exit with the code in it).
"""

import json
import os
import signal
import sys
import time
import zlib

BEAT = 0.04
LINES_AT_START = 50


def main() -> None:
    folder, linger = sys.argv[1], float(sys.argv[2])
    environ, pid = os.environ, os.getpid()
    owner = environ["CHAOS_NODE"].rpartition("/")[2]
    if os.fork() == 0:  # a descendant in a session of its own: it must not outlive the worker's agent
        os.setsid()
        while True:
            signal.pause()
    about = {
        "owner": owner,
        "pid": pid,
        "rank": int(environ["RANK"]),
        "size": int(environ["WORLD_SIZE"]),
        # Every round of an elastic job has a port of its own; the attempt tells those of a static one apart.
        "world": f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}/{environ['TORCHELASTIC_RESTART_COUNT']}",
        "run": environ["TORCHELASTIC_RUN_ID"],
        "log": os.path.join(os.path.dirname(environ["TORCHELASTIC_ERROR_FILE"]), "stdout.log"),
        "started": time.time(),
    }
    signs = os.open(
        f"{folder}/signs/{owner}-{pid}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    os.write(signs, json.dumps(about).encode() + b"\n")
    ends_at = [float("inf")]

    def on_term(_signum: int, _frame: object) -> None:
        ends_at[0] = min(ends_at[0], time.monotonic() + linger)

    signal.signal(signal.SIGTERM, on_term)
    finish, leave = f"{folder}/finish-{owner.partition('.')[0]}", f"{folder}/exit-{pid}"
    number = 0
    while True:
        os.write(signs, b"%.6f %d\n" % (time.time(), number))
        for _ in range(1 if number else LINES_AT_START):
            number += 1
            print(f"chaos-line {pid} {number} {zlib.crc32(b'%d %d' % (pid, number)):08x}", flush=True)
        code = None
        if os.path.exists(finish):
            code = 0
        elif os.path.exists(leave):
            with open(leave) as file:
                code = int(file.read())
        elif time.monotonic() >= ends_at[0]:
            code = 143
        if code is not None:
            os.write(signs, b"%.6f %d\n" % (time.time(), number))
            os._exit(code)
        time.sleep(BEAT)


if __name__ == "__main__":
    main()
