"""`phalanx warm`: what is known about the imports of scripts, and how to forget it.

phalanx warm --explain train.py      per package: preloaded or not, and why
phalanx warm --forget train.py       learn the script's imports anew; without a script: those of all
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.environment import variables
from phalanx.log import printable
from phalanx.options import usage_error

USAGE = """\
usage: phalanx warm --explain SCRIPT | --forget [SCRIPT]

From its second launch on, the workers of a script are forked from a Python that
has imported what earlier workers imported (phalanx run --warm auto). SCRIPT is a
file, or -m MODULE.

  --explain SCRIPT    print per package whether it is preloaded, and why not
  --forget [SCRIPT]   forget what was learned about a script, or about all
"""


def main(argv: Sequence[str]) -> int:
    """`phalanx warm --explain SCRIPT | --forget [SCRIPT]`."""
    words = list(argv)
    if not words or "-h" in words or "--help" in words:
        print(USAGE, end="")
        return 0 if words else 2
    option, *rest = words
    if option not in ("--explain", "--forget"):
        raise usage_error(f"{option}: use --explain SCRIPT or --forget [SCRIPT]")
    from phalanx.warm.explain import explain, forget

    program = _program(option, rest)
    if option == "--explain":
        if program is None:
            raise usage_error("--explain: name a script, as in: phalanx warm --explain train.py")
        print(printable(explain(program, variables())), end="")
        return 0
    count = forget(program, variables())
    about = program[1] if program is not None else "all scripts"
    print(printable(f"{about}: {count} list{'s' * (count != 1)} removed"))
    return 0


def _program(option: str, words: list[str]) -> list[str] | None:
    """Mode, target and interpreter flags, as `phalanx run` has them."""
    import os

    if not words:
        return None
    if words[0] == "-m":
        if len(words) < 2:
            raise usage_error(f"{option} -m: name a module")
        return ["module", words[1]]
    if words[0].startswith("-"):
        raise usage_error(f"{option} {words[0]}: name a script, or -m MODULE")
    if option == "--explain" and not os.path.exists(words[0]):
        raise usage_error(f"{option} {words[0]}: no such file")
    return ["script", words[0]]
