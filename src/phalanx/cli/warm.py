"""`phalanx warm`: what is known about the imports of scripts, and what `--warm-for` has left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from phalanx.agent.node_view import memory_of
from phalanx.agent.warm.keep_warm import ask, connect, converse, names
from phalanx.cli.parser import Parser
from phalanx.helpers.kept_zygote import peer_of
from phalanx.helpers.messages import Describe, EndKept, KeptDescription
from phalanx.job.command_line import usage_error
from phalanx.job.environment import variables
from phalanx.job.time_budgets import KEPT_ANSWER
from phalanx.kernel import stat_fields
from phalanx.log import printable
from phalanx.observe.duration import duration

DESCRIPTION = """\
The workers of a script are forked from a Python that has imported the listed
packages at its top (phalanx run --warm auto). With --warm-for, that process
stays for the next launch. Without an option: list those that stay, with age
and memory.
"""


def main(argv: Sequence[str]) -> int:
    """List, stop, explain or forget; the exit code."""
    options = make_parser().parse_args(argv)
    script = options.module or options.script
    if options.explain or options.forget:
        return _imports(options.explain, ["module" if options.module else "script", script])
    return _kept(options.stop, script)


def make_parser() -> Parser:
    """The options."""
    parser = Parser("warm", DESCRIPTION)
    parser.add_argument("script", nargs="?", default="", metavar="SCRIPT", help="only of this file [all]")
    parser.add_argument("-m", "--module", default="", help="only of this module")
    one = parser.add_mutually_exclusive_group()
    for flag, about in (
        ("--stop", "end them"),
        ("--explain", "print per package whether it is preloaded, and why not"),
        ("--forget", "forget what was seen of a script, or of all"),
    ):
        one.add_argument(flag, action="store_true", help=about)
    return parser


def _kept(stop: bool, script: str) -> int:
    found = [(name, kept) for name in names() if (kept := _describe(name)) is not None]
    found = [(name, kept) for name, kept in found if _is_meant(kept.script, script)]
    if stop:
        return _stop(found)
    for _, kept in found:
        print(_line(kept))
    if not found:
        what = f"nothing is kept warm for {script}" if script else "nothing is kept warm"
        print(f"phalanx warm: {what}", file=sys.stderr)
    return 0


def _imports(explaining: bool, program: list[str]) -> int:
    from phalanx.agent.warm.explain import explain, forget

    kind, target = program
    if explaining:
        if not target:
            raise usage_error("--explain: name a script, as in: phalanx warm --explain train.py")
        if kind == "script" and not os.path.exists(target):
            raise usage_error(f"--explain {target}: no such file")
        print(printable(explain(program, variables())), end="")
        return 0
    count = forget(program if target else None, variables())
    print(printable(f"{target or 'all scripts'}: {count} list{'s' * (count != 1)} removed"))
    return 0


def _describe(name: str) -> KeptDescription | None:
    """What a kept process says about itself, or what is known of one that does not answer."""
    sock = connect(name)
    if sock is None:
        return None
    pid = peer_of(sock)[0]
    kept = converse(sock, Describe(), KEPT_ANSWER)
    fields = stat_fields(pid)
    if kept is not None or fields is None:
        return kept
    return KeptDescription(name.rpartition("/")[2], [int(fields[1]), pid], 0.0, 0.0, None)


def _is_meant(script: str, word: str) -> bool:
    known = script if os.path.isabs(script) else os.path.join(os.path.dirname(os.path.realpath(word)), script)
    return not word or word in (script, os.path.basename(script)) or os.path.realpath(word) == known


def _line(kept: KeptDescription) -> str:
    megabytes = memory_of(kept.pids) / 1e6
    if kept.modules is None:
        return f"{kept.script}: pid {kept.pids[1]}, {megabytes:.0f} MB, not ready: it still imports"
    age, left = duration(max(0.0, time.time() - kept.since)), duration(kept.left)
    return (
        f"{kept.script}: pid {kept.pids[1]}, {kept.modules} modules, {megabytes:.0f} MB, "
        f"kept for {age}, ends in {left} unless it is used"
    )


def _stop(found: list[tuple[str, KeptDescription]]) -> int:
    for name, kept in found:
        pid = kept.pids[0]
        if kept.modules is None:
            for one in kept.pids:  # the keeper first, which would start another one
                _kill(one)
        else:
            ask(name, EndKept(), KEPT_ANSWER)
        end = time.monotonic() + KEPT_ANSWER
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
            time.sleep(0.005)  # not a child: its end is no event
        print(f"stopped {kept.script} (pid {kept.pids[1]})")
    return 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
