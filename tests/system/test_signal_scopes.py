"""Several groups of workers in one process: who handles a signal, and who does afterwards.

In processes of their own, because what is checked is what becomes of the whole process.
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.conftest import HUNG

COMMON = """
import os, signal, threading
from phalanx.elastic.multiprocessing import DefaultLogsSpecs, SignalException, start_processes

def group(program="exec sleep 1000"):
    return start_processes("g", "/bin/sh", {0: ("-c", program)}, {0: {}}, DefaultLogsSpecs())

def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

def handlers():
    return [signal.getsignal(sig) for sig in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)]

def terminate():
    signal.raise_signal(signal.SIGTERM)

before = handlers()
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMON + code], capture_output=True, text=True, timeout=HUNG, check=False
    )


@pytest.mark.parametrize("order", ["first, second", "second, first"])
def test_groups_that_overlap_may_end_in_any_order(order: str) -> None:
    ran = run(f"""
first, second = group(), group()
one, other = {order}
one.close()
try:
    terminate()
    print("not raised")
except SignalException as error:
    print(f"raised {{error.sigval}}")
other.close()
print(handlers() == before)
""")
    assert ran.stdout == f"raised {int(signal.SIGTERM)}\nTrue\n", ran.stderr


def test_a_handler_that_was_set_meanwhile_stays() -> None:
    ran = run("""
def mine(*_): print("mine")
one = group()
signal.signal(signal.SIGTERM, mine)
one.close()
terminate()
print(signal.getsignal(signal.SIGTERM) is mine)
""")
    assert ran.stdout == "mine\nTrue\n", ran.stderr


def test_a_handler_that_calls_the_one_before_it() -> None:
    ran = run("""
def lowest(*_): print("lowest")
signal.signal(signal.SIGTERM, lowest)
one = group()
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *args: (print("on top"), ours(*args)))
try:
    terminate()
except SignalException:
    print("raised")
one.close()
terminate()
""")
    assert ran.stdout == "on top\nraised\non top\nlowest\n", ran.stderr


@pytest.mark.parametrize(
    ("was", "code", "says"),
    [
        ("signal.SIG_DFL", -signal.SIGTERM, ""),
        ("signal.SIG_IGN", 0, "went on\n"),
        ("lambda *_: print('called')", 0, "called\nwent on\n"),
    ],
)
def test_a_group_that_is_closed_in_another_thread(was: str, code: int, says: str) -> None:
    """Python sets handlers in the main thread only, so ours stays, and must do as if it did not."""
    ran = run(f"""
signal.signal(signal.SIGTERM, {was})
for _ in range(2):
    in_a_thread(group().close)
terminate()
print("went on")
""")
    assert (ran.returncode, ran.stdout) == (code, says), ran.stderr


def test_the_next_group_takes_such_a_handler_out() -> None:
    ran = run("""
in_a_thread(group().close)
group().close()
print(handlers() == before)
""")
    assert ran.stdout == "True\n", ran.stderr


def test_a_stop_that_is_under_way_is_not_torn_apart() -> None:
    """Whichever group's handler gets the signal: the stop is hurried, and the signal raised at its end."""
    ran = run("""
import tempfile
ready = os.path.join(tempfile.mkdtemp(), "ready")
os.mkfifo(ready)
# When it is asked to end it does not, but asks us to.
deaf = f"trap 'kill -TERM {os.getpid()}' TERM; echo > {ready}; while true; do sleep 1000 & wait; done"
first = group(deaf)
second = group()
pid = first.pids()[0]
open(ready).read()
try:
    first.close(timeout=1000)
    print("not raised")
except SignalException:
    try:
        os.kill(pid, 0)
        print("still there")
    except ProcessLookupError:
        print("stopped")
second.close()
print(handlers() == before)
""")
    assert ran.stdout == "stopped\nTrue\n", ran.stderr


def test_within_a_loop_that_takes_signals_a_group_raises_none() -> None:
    """As in an agent whose subclass has a group of its own: its steps raise it, where that does no harm."""
    ran = run("""
from phalanx.agent.workers.signals import SignalScope
posted = []
with SignalScope(post=posted.append):
    one = group()
    terminate()
    one.close()
print(*posted, handlers() == before)
""")
    assert ran.stdout == f"{int(signal.SIGTERM)} True\n", ran.stderr
