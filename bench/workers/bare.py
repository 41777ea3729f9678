"""The bare worker: stamps its first line, then does what its first argument says. Imports next to nothing.

wait   stays; SIGTERM and SIGUSR1 are stamped and end it
child  as wait, with a child of its own; rank 0 ends with code 1 on SIGUSR2
print  prints a time stamp now and then, without flushing, for the number of times in the second argument
"""

import time

FIRST = time.monotonic()  # the first line of user code; everything below comes after the measurement

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402


def tell(what: str, stamp: float) -> None:
    """One line to whoever measures; short enough to be atomic in a pipe."""
    rank = os.environ.get("RANK", "0")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.write(EVENTS, f"{what} {rank} {attempt} {os.getpid()} {stamp!r}\n".encode())


def ended(number: int, _frame: object) -> None:
    """Stamp the signal and be gone, without the interpreter's own tidying up."""
    tell("term" if number == signal.SIGTERM else "exit", time.monotonic())
    os._exit(1 if number == signal.SIGUSR2 else 0)


EVENTS = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
mode = sys.argv[1]
for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(sig, ended)
if mode == "child":
    child = os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
    tell(f"child-{child}", FIRST)
tell("up", FIRST)
if mode in ("wait", "child"):
    while True:
        signal.pause()
if mode == "print":
    for number in range(int(sys.argv[2])):
        time.sleep(0.05 + 0.017 * (number % 7))  # unrelated to any polling rate
        print("stamp", repr(time.monotonic()))
