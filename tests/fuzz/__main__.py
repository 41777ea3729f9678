"""Coverage-guided fuzzing: `python -m tests.fuzz wire|commands|torch|etcd [libFuzzer options]`.

    pip install atheris
    mkdir corpus && python -m tests.fuzz wire -max_total_time=600 corpus

An empty corpus is filled with valid inputs. A failing input is written to a file whose name is printed; pass
that file as the only argument to reproduce the failure.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    try:
        import atheris
    except ImportError:
        sys.exit(
            "atheris is not installed: pip install atheris (wheels exist for some versions of Python only)"
        )
    with atheris.instrument_imports(include=["phalanx"]):
        from tests.fuzz.targets import TARGETS, seeds
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz {'|'.join(TARGETS)} [options of libFuzzer]")
    name = sys.argv.pop(1)
    for corpus in filter(Path.is_dir, map(Path, sys.argv[1:])):
        if not any(corpus.iterdir()):
            for number, seed in enumerate(seeds(name)):
                (corpus / f"seed{number}").write_bytes(seed)
    atheris.Setup(sys.argv, TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
