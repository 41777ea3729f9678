"""What other programs rely on in the launcher: TorchX, schedulers, containers, plug-ins."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import HUNG
from tests.support.run_helpers import PHALANX, Running, ended, plain_environment, run, script, unshare

SHOW = "import os; print(repr(os.environ['ROLE_NAME']), flush=True)"


def test_an_empty_role(tmp_path: Path) -> None:
    """TorchX passes --role with whatever the role is called, also nothing."""
    done = run("--role", "", script(tmp_path, SHOW))
    assert (done.code, done.out) == (0, "''\n"), done
    done = run("--role", "", script(tmp_path, "raise SystemExit(3)"))
    assert done.code == 3, done
    assert "Root cause: rank 0 on" in done.err, done
    assert run("--role", "  ", script(tmp_path, SHOW)).code == 2


# -- the error file of the launcher itself ----------------------------------------------------------------


def root_cause(tmp_path: Path, text: str, *words: str) -> tuple[int, dict[str, object]]:
    path = tmp_path / "launcher" / "error.json"
    done = run(*words, script(tmp_path, text), env=plain_environment(TORCHELASTIC_ERROR_FILE=str(path)))
    return done.code, json.loads(path.read_text())["message"] if path.exists() else {}


def test_the_error_file_of_the_launcher_gets_the_root_cause(tmp_path: Path) -> None:
    code, cause = root_cause(
        tmp_path,
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('bad batch')\ntime.sleep(1000)",
        "--nproc-per-node",
        "2",
    )
    assert code == 1
    assert cause["message"] == "ValueError: bad batch"
    assert cause["errorCode"] == 1
    extra = cause["extraInfo"]
    assert isinstance(extra, dict)
    assert "in <module>" in extra["py_callstack"]
    assert extra["timestamp"].isdigit()


def test_a_cause_without_a_record_of_its_own(tmp_path: Path) -> None:
    code, cause = root_cause(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert code == 137
    assert str(cause["message"]).startswith("Signal 9 (SIGKILL) received by PID ")
    assert cause["errorCode"] == -9


def test_success_leaves_no_error_file(tmp_path: Path) -> None:
    assert root_cause(tmp_path, "pass") == (0, {})


def test_a_launcher_in_a_launcher_shows_the_innermost_cause(tmp_path: Path) -> None:
    inner = script(tmp_path, "raise KeyError('deep inside')", "inner.py")
    done = run("--no-python", PHALANX[0], "run", inner)
    assert done.code == 1, done
    assert done.err.rindex("KeyError: 'deep inside'") > done.err.rindex("Root cause: rank 0"), done
    # The report of the outer one is the last; the inner one's own is above it.
    assert done.err.count("Root cause: rank 0") == 2, done


def test_without_files_workers_do_not_write_into_the_launchers(tmp_path: Path) -> None:
    """Whose error file is that of a launcher around it."""
    path = tmp_path / "error.json"
    text = "import os\nprint([os.environ['TORCHELASTIC_ERROR_FILE']], flush=True)\nos.abort()"
    env = plain_environment(TORCHELASTIC_ERROR_FILE=str(path))
    done = run("--log-dir", os.devnull, script(tmp_path, text), env=env)
    assert done.code == 128 + signal.SIGABRT, done
    assert done.out == "['']\n", done
    assert "/dev/null" not in done.err, done
    assert sorted(os.listdir(tmp_path)) == ["error.json", "train.py"]
    assert "SIGABRT" in json.loads(path.read_text())["message"]["message"]


def test_run_main_in_python_writes_it_too(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    failing = script(tmp_path, "raise ValueError('bad batch')")
    program = script(
        tmp_path,
        "import sys\n"
        "from phalanx.run import main\n"
        "from phalanx.errors import ChildFailedError\n"
        "try:\n    main(sys.argv[1:])\n"
        "except ChildFailedError as error:\n    print(error.get_first_failure()[1].message)\n",
        "program.py",
    )
    env = plain_environment(TORCHELASTIC_ERROR_FILE=str(path))
    done = ended([sys.executable, program, failing], env)
    assert (done.code, done.out) == (0, "ValueError: bad batch\n"), done
    assert json.loads(path.read_text())["message"]["message"] == "ValueError: bad batch"


# -- temporary files --------------------------------------------------------------------------------------


def read_only_tmp(var_tmp: str) -> list[str]:
    """Words that run what follows with a read-only /tmp, empty /var/tmp and /dev/shm; none if not allowed."""
    words = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.geteuid() else [])]
    # In place, because the checkout may be below it; the others are new, so that nothing is left there.
    mounts = "mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp && "
    mounts += f"mount -t tmpfs -o {var_tmp} none /var/tmp && mount -t tmpfs -o {var_tmp} none /dev/shm"
    words += ["sh", "-c", f'{mounts} && exec "$@"', "sh"]
    try:
        allowed = subprocess.run([*words, "true"], capture_output=True, timeout=HUNG, check=False)
    except FileNotFoundError:
        return []
    return words if allowed.returncode == 0 else []


@pytest.mark.parametrize("words", [[], ["-r", "3"]], ids=["console", "files"])
def test_a_read_only_tmp(words: list[str]) -> None:
    """As tempfile does: the next directory that can be written."""
    before = read_only_tmp("rw")
    if not before:
        assert not os.environ.get("CI"), "namespaces must be allowed in CI"
        pytest.skip("namespaces are not allowed here")
    env = {name: value for name, value in plain_environment().items() if name != "TMPDIR"}
    command = [*before, *PHALANX, "-q", *words, "--no-python", sys.executable, "-c"]
    done = ended([*command, "import os; print(os.environ['TORCHELASTIC_ERROR_FILE'])"], env, Path("/"))
    assert done.code == 0, done
    if not words:
        assert done.out.startswith("/var/tmp/phalanx_"), done


def test_no_directory_for_temporary_files() -> None:
    before = read_only_tmp("ro")
    if not before:
        assert not os.environ.get("CI"), "namespaces must be allowed in CI"
        pytest.skip("namespaces are not allowed here")
    env = {name: value for name, value in plain_environment().items() if name != "TMPDIR"}
    done = ended([*before, *PHALANX, "--no-python", "true"], env, Path("/tmp"))
    assert done.code == 2, done
    (line,) = done.said or done.err.splitlines()
    assert "/tmp, /var/tmp, /usr/tmp, /dev/shm can" in line
    assert "set TMPDIR" in line


# -- settings ---------------------------------------------------------------------------------------------


def test_an_unknown_setting_gets_a_line(tmp_path: Path) -> None:
    settings = "store_type=file,timeout=20,read_timeout=3,jion_timeout=5"
    done = run("--rdzv-backend", "c10d", "--rdzv-conf", settings, script(tmp_path, "pass"))
    assert done.code == 0, done
    warned = [line for line in done.said if "--rdzv-conf" in line]
    assert sorted(line.split()[2] for line in warned) == ["jion_timeout=5:", "store_type=file:"]
    assert all("ignored" in line for line in warned)


# -- event handlers ---------------------------------------------------------------------------------------


PLUG_IN = """
import logging, os

class Handler(logging.Handler):
    def emit(self, record):
        with open(os.environ["EVENTS_HERE"], "a") as file:
            file.write(record.getMessage() + "\\n")

def line(text):
    with open(os.environ["EVENTS_HERE"], "a") as file:
        file.write(text + "\\n")
"""


@pytest.mark.parametrize("name", ["by_handler", "by_function"])
def test_an_event_handler_of_a_package(tmp_path: Path, name: str) -> None:
    package = tmp_path / "packages"
    (package / "sink-1.dist-info").mkdir(parents=True)
    (package / "sink.py").write_text(PLUG_IN)
    (package / "sink-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sink\nVersion: 1\n")
    (package / "sink-1.dist-info" / "entry_points.txt").write_text(
        "[phalanx.event_handlers]\nby_handler = sink:Handler\nby_function = sink:line\n"
    )
    out = tmp_path / "events"
    env = plain_environment(PYTHONPATH=str(package), EVENTS_HERE=str(out))
    done = run("--event-log-handler", name, script(tmp_path, "pass"), env=env)
    assert done.code == 0, done
    events = [json.loads(line) for line in out.read_text().splitlines()]
    assert any(event["metadata"]["state"] == "SUCCEEDED" for event in events)


def test_the_handlers_are_listed(tmp_path: Path) -> None:
    done = run("--event-log-handler", "nothing", script(tmp_path, "pass"))
    assert done.code == 2, done
    assert "file" in done.err
    assert "phalanx.event_handlers" in done.err
    assert "file" in next(
        text for text in run("--help-all").out.split("\n    --") if text.startswith("event-log-handler")
    )


# -- process 1 of a container -----------------------------------------------------------------------------


WAIT_FOR_REAPING = """
import os, select, sys, time
with open(sys.argv[1], "w") as gate:
    orphan = int(open(sys.argv[2]).read())
    gate.write("go\\n")
end = time.monotonic() + 100
while os.path.exists(f"/proc/{orphan}"):
    if time.monotonic() > end:
        sys.exit(9)
    select.select([], [], [], 0.01)
"""


def test_process_1_reaps_zombies_of_others(tmp_path: Path) -> None:
    before = unshare()
    if not before:
        assert not os.environ.get("CI"), "namespaces must be allowed in CI"
        pytest.skip("namespaces are not allowed here")
    gate, pid = tmp_path / "gate", tmp_path / "pid"
    os.mkfifo(gate)
    orphan = f"echo $$ > {shlex.quote(str(pid))}; read x < {shlex.quote(str(gate))}"
    shell = ["sh", "-c", f'(sh -c {shlex.quote(orphan)} &); exec "$@"', "sh"]
    words = [script(tmp_path, WAIT_FOR_REAPING), str(gate), str(pid)]
    with Running(words, before=[*before, *shell]) as job:
        assert job.end().code == 0, job.text
