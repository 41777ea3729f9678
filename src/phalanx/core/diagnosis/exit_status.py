"""Exit codes and signals in words, and what to check next where nothing but the exit status is known."""

from __future__ import annotations

_SIGNALS = {
    "SIGABRT": "the program aborted itself",
    "SIGBUS": "bad memory access, often a full /dev/shm or a truncated mapped file",
    "SIGFPE": "arithmetic error in native code",
    "SIGHUP": "terminal closed",
    "SIGILL": "illegal instruction: code built for another CPU",
    "SIGINT": "interrupted",
    "SIGKILL": "killed by the kernel or another process",
    "SIGPIPE": "wrote to a closed pipe",
    "SIGQUIT": "asked to quit",
    "SIGSEGV": "invalid memory access in native code",
    "SIGSYS": "forbidden system call: a sandbox or seccomp rule",
    "SIGTERM": "asked to terminate",
    "SIGTRAP": "hit a breakpoint or a failed native check",
    "SIGXCPU": "CPU time limit exceeded",
    "SIGXFSZ": "file size limit exceeded",
}


def signal_label(number: int) -> str:
    """`SIGKILL`, `SIGRTMIN+3`, or `signal 99`."""
    import signal

    try:
        return signal.Signals(number).name
    except ValueError:
        pass
    low, high = int(getattr(signal, "SIGRTMIN", 0)), int(getattr(signal, "SIGRTMAX", -1))
    return f"SIGRTMIN+{number - low}" if low <= number <= high else f"signal {number}"


def code_in_words(code: int, pid: int | None = None) -> str:
    """A description of an exit code or (negative) signal; with the pid, in torch's words for a signal."""
    if code < 0:
        name = signal_label(-code)
        meaning = _SIGNALS.get(name)
        number = f"{name} (signal {-code})" if name.startswith("SIG") else name
        if pid is not None and name.startswith("SIG"):
            number = f"Signal {-code} ({name}) received by PID {pid}"
        return f"{number}: {meaning}" if meaning else number
    if code == 126:
        return "exit code 126 (found but not executable)"
    if code == 127:
        return "exit code 127 (command or shared library not found)"
    if 128 < code <= 128 + 64:
        name = signal_label(code - 128)
        return f"exit code {code} (a shell or wrapper reports {name}: {_SIGNALS.get(name, 'a signal')})"
    if code == 255:
        return "exit code 255 (exit(-1), or ssh could not connect)"
    return f"exit code {code}"


_NEXT = {
    "SIGKILL": "find the sender: `dmesg`, the scheduler's or container's events, another user",
    "SIGSEGV": "native code crashed: check the last frame above and the extension modules it calls",
    "SIGABRT": "the last lines of stderr usually name the check that failed",
    "SIGBUS": "check free space in /dev/shm (`df -h /dev/shm`) and files that were truncated while mapped",
    "SIGILL": "a native library was built for another CPU: compare `lscpu` with the build machine's",
    "SIGTERM": "something outside Phalanx terminated this rank: the scheduler, a time limit, another user",
    "SIGINT": "it was interrupted from the keyboard or by its own code",
    "SIGXCPU": "raise the CPU time limit (`ulimit -t`) or the scheduler's",
    "SIGXFSZ": "raise the file size limit (`ulimit -f`)",
    "SIGPIPE": "it wrote to a pipe whose reader had exited",
    "SIGSYS": "check the seccomp profile of the sandbox or container",
}


def next_step(code: int) -> str:
    """What to check if only the exit status is known; empty if it gives no hint."""
    if code == 126:
        return "make the file executable (`chmod +x`) and check its first line (`#!…`)"
    if code == 127:
        return "check the command's name, PATH, and `ldd` for missing libraries"
    number = -code if code < 0 else code - 128 if 128 < code <= 192 else 0
    return _NEXT.get(signal_label(number), "") if number else ""
