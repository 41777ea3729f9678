"""The bare worker, with few imports: stamps its first line, then acts on its first argument.

wait   waits; SIGTERM and SIGUSR1 are stamped and end it
child  as wait, with a child of its own; SIGUSR2 ends it with code 1
print  prints as many time stamps as the second argument says, with pauses, without flushing
"""

import time

FIRST = time.monotonic()  # the first line of user code; everything below comes after the measurement

import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402


def stamp(what: str, at: float) -> None:
    """Send an event; the line is short enough to be atomic in a pipe."""
    rank = os.environ.get("RANK", "0")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    os.write(EVENTS, f"{what} {rank} {attempt} {os.getpid()} {at!r}\n".encode())


def ended(number: int, _frame: object) -> None:
    """Stamp the signal and exit at once."""
    stamp("term" if number == signal.SIGTERM else "exit", time.monotonic())
    os._exit(1 if number == signal.SIGUSR2 else 0)


EVENTS = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY)
mode = sys.argv[1]
for sig in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(sig, ended)
if mode == "child":
    child = os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)
    stamp(f"child-{child}", FIRST)
stamp("up", FIRST)
if mode in ("wait", "child"):
    while True:
        signal.pause()
if mode == "print":
    for number in range(int(sys.argv[2])):
        time.sleep(0.05 + 0.017 * (number % 7))  # unrelated to any polling rate
        print("stamp", repr(time.monotonic()))
