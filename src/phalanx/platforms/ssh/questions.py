"""Questions of several ssh processes (host keys, passwords) on one terminal, one after another.

ssh hands a question to the program in `SSH_ASKPASS` instead of asking on the terminal by itself. Here that is
a script that runs this module, which waits for its turn, asks, and prints the answer. OpenSSH before 8.4 asks
by itself.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import sys

from phalanx.job.environment import variables
from phalanx.kernel import die_with_parent
from phalanx.python_command import python_command

_REQUIRE = "SSH_ASKPASS_REQUIRE"


def one_question_at_a_time(directory: str) -> dict[str, str]:
    """Variables for the ssh processes; none where there is no terminal, or the user has a program for it."""
    path = os.path.join(directory, "ask")
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return {}
    with open(path, "w") as file:
        command = shlex.join(python_command("phalanx.platforms.ssh.questions", f"{directory}/turn"))
        file.write(f'#!/bin/sh\nexec {command} "$@"\n')
        os.fchmod(file.fileno(), 0o700)
    if _REQUIRE in variables() or not os.access(path, os.X_OK):  # a directory whose programs do not run
        return {}
    return {"SSH_ASKPASS": path, _REQUIRE: "force"}


def ask(lock: str, question: str) -> str:
    """The answer from the terminal, without echo unless the question is one for yes or no."""
    import termios

    with open(lock, "a") as turn, open("/dev/tty", "r+b", buffering=0) as terminal:
        fcntl.flock(turn, fcntl.LOCK_EX)
        before = termios.tcgetattr(terminal)
        quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        try:
            if "(yes/no" not in question:
                termios.tcsetattr(terminal, termios.TCSAFLUSH, quiet)
            terminal.write(os.fsencode(question))
            answer = terminal.readline()
        finally:
            termios.tcsetattr(terminal, termios.TCSAFLUSH, before)
        if "(yes/no" not in question:
            terminal.write(b"\n")
    return os.fsdecode(answer.rstrip(b"\n"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ssh ignores it; the starter restores the terminal
    die_with_parent()
    print(ask(sys.argv[1], sys.argv[2]))
