"""`phalanx run` as process 1 of a container: a parent that only reaps.

The kernel makes process 1 the parent of every process whose own parent is gone (of a `docker exec`, say), and
one that does not wait for them fills the process table with zombies. The agent cannot do that itself: it
cannot tell the children that its libraries wait for from those that are nobody's. So process 1 forks, the
child becomes the agent, and process 1 reaps everything, passes signals on, and exits as the agent does.
"""

from __future__ import annotations

import os
import signal


def stay_behind() -> None:
    """Returns in the child; process 1 stays here until the child exits."""
    signals = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children would leave no status
    # Before the fork: a signal between the two is kept, not lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os._exit(_serve(child, signals))


def _serve(child: int, signals: set[signal.Signals]) -> int:
    """Reap and pass signals on until the child has exited; its exit code."""
    while True:
        info = signal.sigwaitinfo(signals)
        if info.si_signo == signal.SIGCHLD:
            code = _reap(child)
            if code is not None:
                return code
        elif info.si_code <= 0:  # sent by a process; the terminal's own reach the child as well
            os.kill(child, info.si_signo)


def _reap(child: int) -> int | None:
    """Wait for everything that has exited; the child's exit code, if it is among it."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
