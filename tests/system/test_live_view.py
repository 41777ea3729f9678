"""The live view in a terminal of 80×24 (tmux), of a job whose worker is killed; makes the picture in docs/.

`PHALANX_PICTURES=docs` writes it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import HUNG, wait_until
from tests.support.run_helpers import PHALANX, Running, plain_environment, script
from tests.support.terminal_picture import svg

ROOT = Path(__file__).parents[2]
PICTURES = os.environ.get("PHALANX_PICTURES", "")
COLUMNS, ROWS = 80, 24

WORKER = """
import os, time
from phalanx import worker

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("", "ready", rank, os.getpid(), flush=True)
worker.ready()
step = 20 * attempt
while True:
    time.sleep(0.25 if rank == 5 else 0.1)
    step += 1
    worker.heartbeat(step)
    if step % 10 == 0:
        print(f"step {step}  loss {2.5 / step ** 0.3:.4f}  lr 3.0e-04", flush=True)
"""


class Terminal:
    """A terminal of tmux, on a server of its own."""

    def __init__(self, folder: Path, command: str, env: dict[str, str]) -> None:
        self._socket = str(folder / "tmux")
        self._env = {**env, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        size = ("-x", str(COLUMNS), "-y", str(ROWS))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, command)

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-S", self._socket, *words],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=True,
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def screen(self, styled: bool = False) -> str:
        return self._tmux("capture-pane", "-p", *(["-e"] if styled else []))

    def wait(self, *words: str) -> str:
        """The screen, once it shows all of these."""
        wait_until(lambda: all(word in self.screen() for word in words), f"{words}:\n{self.screen()}")
        return self.screen()

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if shutil.which("tmux") is None:
        pytest.skip("needs tmux")
    return tmp_path


@pytest.mark.long
def test_the_live_view_of_a_killed_job(folder: Path) -> None:
    run = f"llm7-{os.getpid()}" if not PICTURES else "llm7"
    env = plain_environment(XDG_STATE_HOME=str(folder / "state"))
    words = ["--nproc-per-node", "16", "--max-restarts", "3", "--backoff", "0", "--rdzv-id", run, "-t", "3"]
    words += ["--log-dir", str(folder / "logs"), "--hang-timeout", "60"]
    with Running([*words, script(folder, WORKER)], env=env) as job:
        workers = job.workers(16)
        terminal = Terminal(folder, f"{PHALANX[0]} status {run} --watch", env)
        try:
            shown = terminal.wait("goodput ", "16 ranks", "\u25a0" * 5)
            assert all(len(line) <= COLUMNS for line in shown.splitlines())
            os.kill(workers[3], signal.SIGSTOP)
            terminal.wait("T", "stopped")
            os.kill(workers[3], signal.SIGKILL)
            terminal.wait("1 incident", "rank 3: SIGKILL; restart 1 of 3")
            # The slowest first, then the others, by rank.
            shown = terminal.wait("\u25bc", "loss")
            table = shown.splitlines().index(next(x for x in shown.splitlines() if "steps/s" in x))
            assert shown.splitlines()[table + 1].split()[0] == "5"
            if PICTURES:
                rates = re.compile(r"^ +5 ready .* [34]\.\d+ +\d\.\d s$", re.M)
                wait_until(lambda: rates.search(terminal.screen()), "the step rates", 3 * HUNG)
                (ROOT / PICTURES / "live-view.svg").write_text(
                    svg(terminal.screen(styled=True), COLUMNS, ROWS)
                )
            terminal.type("/", "2-4", "Enter")
            wait_until(
                lambda: "ranks 2-4" in terminal.screen() and "\u25bc" not in terminal.screen(), "a filter"
            )
            terminal.type("a", "g")
            terminal.wait("ready")
            wait_until(lambda: "\u25a0" * 2 not in terminal.screen(), "no grid")
            terminal.type("q")
            wait_until(lambda: "no server" in _state(terminal), "the end of the view")
        finally:
            terminal.close()


def _state(terminal: Terminal) -> str:
    done = subprocess.run(
        ["tmux", "-S", terminal._socket, "list-sessions"], capture_output=True, text=True, check=False
    )
    return "no server" if done.returncode else done.stdout
