"""What `make demo` runs: three short runs of `phalanx run`. Needs only the package."""

import os
import subprocess
import sys
import tempfile
import time

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "elastic_cpu.py")
BOLD, PLAIN = ("\033[1m", "\033[0m") if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else ("", "")


def show(title: str, why: str, folder: str, options: list[str], script: list[str]) -> int:
    """Print and run a command; returns its exit code."""
    shown = " ".join([*options, "examples/elastic_cpu.py", *script])
    print(f"\n{BOLD}{title}{PLAIN}\n{why}\n\n{BOLD}$ phalanx run {shown}{PLAIN}", flush=True)
    command = [sys.executable, "-m", "phalanx", "run", *options, SCRIPT, *script]
    begin = time.monotonic()
    ended = subprocess.run(command, cwd=folder, stderr=subprocess.STDOUT)
    print(f"(exit code {ended.returncode}, {time.monotonic() - begin:.2f} s)", flush=True)
    return ended.returncode


def read(folder: str, name: str) -> str:
    """The content of a checkpoint."""
    with open(os.path.join(folder, name)) as file:
        return file.read()


def main() -> int:
    """Run all three and check their results."""
    four = ["--nproc-per-node", "4"]
    with tempfile.TemporaryDirectory(prefix="phalanx-demo-") as folder:
        os.environ["TMPDIR"] = folder  # removes the logs of the failed job with the demo
        codes = [
            show(
                "1. A run without failures",
                "Four workers fit a line together; Phalanx gives them ranks and the address of a store.",
                folder,
                four,
                ["--checkpoint", "a.json"],
            ),
            show(
                "2. One worker crashes",
                "Phalanx stops the others at once and reports which worker failed, and why.",
                folder,
                four,
                ["--checkpoint", "b.json", "--crash-at", "70"],
            ),
            show(
                "3. One worker is killed and the group restarts",
                "With --max-restarts 1, all four start again and continue from the last checkpoint.",
                folder,
                [*four, "--max-restarts", "1"],
                ["--checkpoint", "c.json", "--kill-at", "70"],
            ),
        ]
        same = read(folder, "a.json") == read(folder, "c.json")
    print(f"\nThe same result to the last bit, with the kill and without: {'yes' if same else 'NO'}")
    return 0 if codes == [0, 1, 0] and same else 1


if __name__ == "__main__":
    sys.exit(main())
