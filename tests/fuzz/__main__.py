"""Coverage-guided fuzzing by hand: `python -m tests.fuzz wire|commands|torch|etcd [libFuzzer options]`.

    pip install atheris
    python -m tests.fuzz wire -max_total_time=600 corpus/

A find is written to a file whose name is printed; give that file as the only argument to see it again.
"""

from __future__ import annotations

import sys


def main() -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed here: pip install atheris (it has wheels for some Pythons only)")
    with atheris.instrument_imports(include=["phalanx"]):
        from tests.fuzz.targets import TARGETS
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz {'|'.join(TARGETS)} [options of libFuzzer]")
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
