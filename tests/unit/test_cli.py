"""The `phalanx` command: dispatch, exit codes, help, completion, and the bug report."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx import __version__, cli
from phalanx.check import environment
from phalanx.cli import completion, main
from phalanx.cli import help as help_module
from phalanx.cli.runs import NoSuchRun
from phalanx.core.exit_codes import TABLE
from phalanx.errors import StoreConnectionError, StoreTimeoutError
from phalanx.job.config import parse
from phalanx.job.options import OPTIONS


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[list[str]], int]], None]:
    """Put a function in the place of the real launch: what is tested here is the way to it."""

    def install(body: Callable[[list[str]], int]) -> None:
        module = types.ModuleType("fake_run_command")
        module.main = body  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_run_command", module)
        monkeypatch.setitem(cli.COMMANDS, "run", ("fake_run_command", "run a script"))

    return install


def parsing(argv: list[str]) -> int:
    parse(argv, {})
    return 0


def test_run_gets_its_words_and_its_code_comes_back(fake_run: Callable[..., None]) -> None:
    seen: list[list[str]] = []
    fake_run(lambda argv: seen.append(argv) or 17)
    assert main(["run", "--tee", "3", "s.py", "-h"]) == 17
    assert seen == [["--tee", "3", "s.py", "-h"]]


def test_bad_usage_is_one_line_and_code_2(
    fake_run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(parsing)
    assert main(["run", "--nnodes", "4:2", __file__]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "phalanx run: --nnodes 4:2: the minimum is larger than the maximum\n"


def test_a_value_error_of_the_program_is_not_taken_for_bad_usage(fake_run: Callable[..., None]) -> None:
    def broken(argv: list[str]) -> int:
        raise ValueError("a bug")

    fake_run(broken)
    with pytest.raises(ValueError, match="a bug"):
        main(["run"])


def test_interrupt_is_130(fake_run: Callable[..., None]) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    fake_run(interrupted)
    assert main(["run"]) == 130


@pytest.mark.parametrize("argv", [["run", "--help"], ["run", "--nnodes", "x", "-h"]])
def test_help_of_run(
    fake_run: Callable[..., None], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    fake_run(parsing)
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == help_module.run_help()
    assert all(len(line) <= 80 for line in out.splitlines())
    assert out.count("  phalanx run ") == 3
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", out, re.MULTILINE)
    assert shown == [option.name for option in OPTIONS if option.common]
    assert 20 <= len(shown) <= 30, "for the options that most jobs need"
    assert f"--help-all shows {len(OPTIONS) - len(shown)} more" in out


def test_all_options_are_in_the_long_help(
    fake_run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(parsing)
    assert main(["run", "--help-all"]) == 0
    out = capsys.readouterr().out
    assert out == help_module.manual()
    for option in OPTIONS:
        assert f"{option.name} " in out or f"{option.name}\n" in out
        assert option.env is None or f"[{option.env}" in out
    text = " ".join(out.split())
    assert "[PHALANX_RESTART_DELAY: 0]" in text
    assert "[PHALANX_LOG_RETENTION: 7d]" in text


def test_the_manual_page_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert all(len(line) <= 82 for line in out.splitlines())
    titles = [line for line in out.splitlines() if line.isupper() and not line.startswith(" ")]
    assert titles == ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "EXAMPLES", "SEE ALSO"]
    for option in OPTIONS:
        assert option.name in out


@pytest.mark.parametrize("words", [["run", "--version"], ["run", "--nnodes", "2", "--version", "x.py"]])
def test_the_version_of_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == f"phalanx {__version__}\n"


def test_the_exit_codes_are_in_the_help_and_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    assert main(["help", "exit-codes"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 82 for line in shown.splitlines())
    for code, meaning, advice in TABLE:
        assert f"| {code} | {meaning} | {advice} |" in page
        for text in (help_module.manual(), shown):
            assert f"\n  {code:<20}"[:-1] in text.replace("\n    ", "\n  ")
            assert f"{meaning.replace('`', '')} [{advice}]" in " ".join(text.split())


@pytest.mark.parametrize("example", range(3))
def test_the_examples_in_the_help_are_valid(
    example: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    monkeypatch.setattr("phalanx.devices.resolve_nproc", lambda *_, **__: 4)
    lines = help_module.EXAMPLES.replace("\\\n", "").splitlines()
    commands = [line.split() for line in lines if line.startswith("  phalanx run")]
    assert parse(commands[example][2:], {}).workers.local_world_size == (8 if example == 1 else 4)


def test_overview_version_and_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == [*cli.PUBLIC]
    assert [line[:-1] for line in out.splitlines() if line.endswith(":")] == [*cli.GROUPS]
    assert max(map(len, out.splitlines())) <= 80
    assert len(out.splitlines()) <= 33
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"phalanx {__version__}\n"
    assert main([]) == 2
    assert "Prepare:" in capsys.readouterr().err
    assert main(["rnu"]) == 2
    assert "did you mean phalanx run?" in capsys.readouterr().err
    assert main(["train.py"]) == 2
    assert "phalanx run train.py" in capsys.readouterr().err
    assert main(["help", "nothing"]) == 2
    assert main(["check", "--yaml"]) == 2
    assert main(["completion", "ksh"]) == 2
    assert main(["help", "check"]) == 0


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("status --all --watch", "--watch: not allowed with argument --all"),
        ("status --link --rdzv-endpoint a:1", "--link shows jobs of this machine; leave out"),
        ("logs --json", "--json prints events; add --events"),
        ("logs --events --grep x", "--events shows all events of a run of this machine; leave out --grep"),
        ("logs --events --rdzv-endpoint a:1", "leave out --rdzv-endpoint"),
    ],
)
def test_options_that_do_not_go_together(
    words: str, refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert refusal in capsys.readouterr().err


def complete(words: list[str], tmp_path: Path) -> set[str]:
    """Press Tab at the end of these words in a real bash."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"{completion.script('bash')}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}\n"
        '_shtab_phalanx; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path
    )
    return set(done.stdout.split())


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash_completion(tmp_path: Path) -> None:
    assert complete(["phalanx", "r"], tmp_path) == {"run", "restart"}
    assert complete(["phalanx", "run", "--nproc"], tmp_path) == {"--nproc-per-node"}
    assert complete(["phalanx", "run", "--nproc-per-node", ""], tmp_path) == {"auto", "gpu", "xpu", "cpu"}
    assert complete(["phalanx", "run", "--tee", "3", "--numa-binding", "s"], tmp_path) == {"socket"}
    assert complete(["phalanx", "run", "--warm", "st"], tmp_path) == {"standby"}
    assert complete(["phalanx", "completion", "z"], tmp_path) == {"zsh"}
    assert complete(["phalanx", "help", "st"], tmp_path) == {"store", "status", "stacks", "stop"}
    assert complete(["phalanx", "store", "--jou"], tmp_path) == {"--journal"}
    (tmp_path / "train.py").touch()
    assert complete(["phalanx", "run", "--standalone", "tr"], tmp_path) == {"train.py"}
    assert complete(["phalanx", "run", "--standalone", "train.py", "tr"], tmp_path) == {"train.py"}


def test_fish_completion(tmp_path: Path) -> None:
    fish = shutil.which("fish")
    if not fish:
        return  # the text is looked at below
    (tmp_path / "train.py").touch()
    (tmp_path / "completion").write_text(completion.script("fish"))

    def complete(line: str) -> set[str]:
        code = f"source completion; complete -C '{line}'"
        done = subprocess.run(
            [fish, "--no-config", "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd=tmp_path,
        )
        return {found.partition("\t")[0] for found in done.stdout.splitlines()}

    assert complete("phalanx ru") == {"run"}
    assert complete("phalanx run --nproc") == {"--nproc-per-node"}
    assert complete("phalanx run --nproc-per-node 2 --warm s") == {"standby"}
    assert complete("phalanx run --standalone tr") == {"train.py"}
    assert complete("phalanx completion ") == {"bash", "zsh", "fish", "tcsh"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_scripts_name_every_option_and_parse(shell: str, tmp_path: Path) -> None:
    text = completion.script(shell)
    for option in OPTIONS:
        name = {"fish": f"-l {option.name[2:]} ", "tcsh": option.name[2:]}.get(shell, option.name)
        assert name in text + " "
        assert option.flags[-1] == option.name or option.flags[-1] not in text, "one spelling of two"
    program = shutil.which(shell)
    if program:
        path = tmp_path / "completion"
        path.write_text(text)
        subprocess.run([program, "-n", str(path)], check=True, timeout=60)


def test_completion_is_reached_from_run(
    fake_run: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run(parsing)
    assert main(["run", "--print-completion", "bash"]) == 0
    assert capsys.readouterr().out == completion.script("bash") + "\n"


def test_report_has_every_section_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHALANX_TOKEN", "hunter2")
    monkeypatch.setenv("NCCL_AUTH_THING", "hunter2")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "http://me:hunter2@host:1")
    monkeypatch.setenv("PET_NNODES", "2:4")
    monkeypatch.setenv("UNRELATED_THING", "not to be seen")
    assert main(["check", "--environment", "--json"]) == 0
    text = capsys.readouterr().out
    facts = json.loads(text)
    assert {"versions", "machine", "devices", "limits", "container", "packages", "variables"} <= facts.keys()
    assert not [name for name, section in facts.items() if "failed" in section]
    assert facts["versions"]["phalanx"] == __version__
    assert facts["variables"]["PET_NNODES"] == "2:4"
    assert facts["variables"]["PET_RDZV_ENDPOINT"].endswith("@host:1")
    assert main(["check", "--environment"]) == 0
    text += capsys.readouterr().out
    assert "hunter2" not in text
    assert "not to be seen" not in text


def test_report_survives_a_section_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError("driver on fire")

    monkeypatch.setattr("phalanx.devices.count_gpus", broken)
    facts = environment.collect({})
    assert facts["devices"] == {"failed": "OSError: driver on fire"}
    assert "kernel" in facts["machine"]


def test_report_into_a_closed_pipe_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", "check", "--environment"],
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert done.stderr == b""
    assert done.returncode == 141


@pytest.mark.parametrize(
    "words", ["--version", "help", "run --help", "check --environment", "completion bash"]
)
def test_a_full_disk_is_said_in_one_line(words: str) -> None:
    for unbuffered in ("", "1"):
        done = subprocess.run(
            ["sh", "-c", f"'{sys.executable}' -m phalanx {words} >/dev/full"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
        assert done.stderr.endswith(": cannot write to stdout: No space left on device\n"), done.stderr
        assert done.stderr.count("\n") == 1
        assert done.returncode == 1


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full", "0<&- 1>&- 2>&-"])
@pytest.mark.parametrize("words", ["run --nnodes 0 x.py", "no-such-command", ""])
@pytest.mark.untraced
def test_bad_usage_is_code_2_also_when_nobody_can_be_told(words: str, stderr: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m phalanx {words} {stderr}"], timeout=60, check=False
    )
    assert done.returncode == 2


@pytest.mark.parametrize("words", ["", "run", "store", "drain", "check", "completion"])
def test_help_needs_no_more_than_ascii(words: str) -> None:
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    plain.pop("PYTHONIOENCODING", None)
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "help", *words.split()],
        capture_output=True,
        timeout=60,
        check=False,
        env=plain,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u" not in done.stdout or words not in ("", "run")


def test_python_m_phalanx() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"phalanx {__version__}\n"


@pytest.mark.parametrize("kind", [NoSuchRun, StoreTimeoutError, StoreConnectionError])
def test_the_failure_of_a_command_is_one_line_and_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    """Also where the exception is an OSError as well."""

    def fail(argv: list[str]) -> int:
        raise kind("gone")

    monkeypatch.setattr("phalanx.cli.status.main", fail)
    assert main(["status"]) == 1
    assert capsys.readouterr().err == "phalanx status: gone\n"
