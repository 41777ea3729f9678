"""What `make demo` runs: `phalanx run` in three short acts. Needs nothing but the package."""

import os
import subprocess
import sys
import tempfile
import time

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "elastic_cpu.py")
BOLD, PLAIN = ("\033[1m", "\033[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")


def act(title: str, why: str, folder: str, options: list[str], script: list[str]) -> int:
    """Show a command and what it does; its exit code."""
    shown = " ".join([*options, "examples/elastic_cpu.py", *script])
    print(f"\n{BOLD}{title}{PLAIN}\n{why}\n\n{BOLD}$ phalanx run {shown}{PLAIN}", flush=True)
    command = [sys.executable, "-m", "phalanx", "run", *options, SCRIPT, *script]
    begin = time.monotonic()
    ended = subprocess.run(command, cwd=folder, stderr=subprocess.STDOUT)
    print(f"(exit code {ended.returncode}, {time.monotonic() - begin:.2f} s in all)", flush=True)
    return ended.returncode


def read(folder: str, name: str) -> str:
    """A checkpoint as it is on disk."""
    with open(os.path.join(folder, name)) as file:
        return file.read()


def main() -> int:
    """Three acts, and whether each went as it should."""
    four = ["--nproc-per-node", "4"]
    with tempfile.TemporaryDirectory(prefix="phalanx-demo-") as folder:
        os.environ["TMPDIR"] = folder  # so that the logs of the failed job go with the demo
        codes = [
            act(
                "1. A healthy run",
                "Four workers fit a line together; ranks and a place to meet are given to them.",
                folder,
                four,
                ["--checkpoint", "a.json"],
            ),
            act(
                "2. One worker crashes",
                "The others are stopped at once, and the report says which one it was, and why.",
                folder,
                four,
                ["--checkpoint", "b.json", "--crash-at", "70"],
            ),
            act(
                "3. One worker is killed, and the ranks close again",
                "With a restart allowed, all four start anew and go on from the last checkpoint.",
                folder,
                [*four, "--max-restarts", "1"],
                ["--checkpoint", "c.json", "--kill-at", "70"],
            ),
        ]
        same = read(folder, "a.json") == read(folder, "c.json")
    print(f"\nThe same line to the last bit, with the kill and without: {'yes' if same else 'NO'}")
    return 0 if codes == [0, 1, 0] and same else 1


if __name__ == "__main__":
    sys.exit(main())
