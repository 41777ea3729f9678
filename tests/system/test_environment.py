"""The same command lines with torchrun and with us: the same environment, arguments and start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import HUNG
from tests.support.netns import free_port
from tests.support.run_helpers import PHALANX, plain_environment, run, script

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None and not os.environ.get("CI"),
    reason="torch is not installed (pip install torch)",
)

# Every worker writes down what it was given, as seen by Python, or by a shell for programs that are not.
DUMP = """\
import json, os, sys
what = {"env": dict(os.environ), "argv": sys.argv, "name": __name__, "cwd": os.getcwd(), "path": sys.path[0],
        "executable": sys.executable, "spec": str(__spec__ and __spec__.name), "package": __package__,
        "module": sys.modules["__main__"].__dict__ is globals(), "file": globals().get("__file__")}
with open(os.path.join(os.environ["DUMP"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(what, file)
print("line of", os.environ["RANK"])
"""
SHELL = """\
#!/bin/bash
"$PYTHON" - "$@" <<'EOF'
import json, os, sys
what = {"env": dict(os.environ), "argv": sys.argv[1:]}
with open(os.path.join(os.environ["DUMP"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(what, file)
EOF
"""


class Case(NamedTuple):
    """One way to call it; `{d}` is the directory of the script `{s}`, `{n}` two workers."""

    name: str
    words: str
    env: dict[str, str] = {}
    workers: int = 1
    unlike: tuple[str, ...] = ()  # facts about the script that are better with us


UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

CASES = [
    Case("plain", "{s}"),
    Case("plain-n", "{n} {s} a -b --nproc-per-node 7 -- -m", workers=2),
    Case("underscore", "--nproc_per_node=2 --max_restarts=2 {s}", workers=2),
    Case("standalone", "--standalone {n} {s} x", workers=2),
    Case("standalone-nodes", "--standalone --nnodes 1 --nproc-per-node=1 {s}"),
    Case("macro", "{n} {s} --lr=${{local_rank}} ${{local_rank}}${{local_rank}} ${{rank}}", workers=2),
    Case("module", "{n} -m dump a b", workers=2),
    Case("module-package", "--nproc-per-node 1 -m package.dump -c"),
    Case("no-python", "{n} --no-python {d}/dump.sh a ${{local_rank}}", workers=2),
    Case("run-path", "{n} --run-path {s} a ${{local_rank}}", workers=2, unlike=("path", "package", "module")),
    Case("master", "{n} --master-addr 127.0.0.1 --master-port {port} {s}", workers=2),
    Case("master-static", "--nnodes 1 --node-rank 0 --rdzv-id s --master-port {port} {s}"),
    Case("c10d", "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id job7 {n} {s}", workers=2),
    Case("c10d-nodes", "--nnodes 1:1 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 --max-restarts 3 {s}"),
    Case("restarts", "--max-restarts 5 --nproc-per-node 1 {s}"),
    Case("role", "--role trainer {n} {s}", workers=2),
    Case("redirect", "--redirects 3 --log-dir {log} {n} {s}", workers=2),
    Case("redirect-some", "-r 0:1,1:3 --log-dir {log} {n} {s}", workers=2),
    Case("tee", "--tee 0:3 --log-dir {log} {n} {s}", workers=2),
    Case("tee-filter", "-t 3 --local-ranks-filter 1 --log-dir {log} {n} {s}", workers=2),
    Case("prefix", "--redirect 1 --log-dir {log} {s}"),
    Case("omp-set", "{n} {s}", {"OMP_NUM_THREADS": "3"}, workers=2),
    Case("omp-empty", "{n} {s}", {"OMP_NUM_THREADS": ""}, workers=2),
    Case("omp-one", "--nproc-per-node 1 {s}"),
    Case("pet", "{s}", {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "r"}, workers=2),
    Case("pet-beaten", "--role mine {s}", {"PET_ROLE": "r", "PET_STANDALONE": "1"}),
    Case("nccl", "{s}", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    Case("no-shared-store", "{n} {s}", {UNSHARED: "1"}, workers=2),
    Case("virtual", "--virtual-local-rank {n} {s}", {"CUDA_VISIBLE_DEVICES": "3,5"}, workers=2),
    Case("virtual-uuid", "--virtual-local-rank {s}", {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}),
    Case("python-exec", "--nproc-per-node 1 {s}", {"PYTHON_EXEC": sys.executable}),
    Case("signals", "--signals-to-handle SIGTERM,SIGINT {s}"),
    Case("monitor", "--monitor-interval 0.5 --start-method fork {s}"),
    Case("events", "{n} --event-log-handler console {s}", workers=2),
    Case("stale", "{s}", {"RANK": "9", "WORLD_SIZE": "9", "LOCAL_RANK": "9", "MASTER_ADDR": "nowhere"}),
]  # fmt: skip

# Values that may differ, and the form in which ours must come.
DIFFERS = {
    "MASTER_PORT": r"\d+",
    "TORCHELASTIC_RUN_ID": r"[\w-]+",
    "TORCHELASTIC_ERROR_FILE": r"/.+/attempt_0/\d+/error\.json",
    "DUMP": r"/.+",
    "_": r"/.+",
    "HOME": r"/.+",
    "TMPDIR": r"/.+",
    "XDG_STATE_HOME": r"/.+",
    "PWD": r"/.+/scripts",  # set by the shell of --no-python
}

# torchrun itself, many times in one process: importing torch takes longer than everything else here.
DRIVER = """\
import json, os, sys
import torch.distributed.run as launcher
jobs = json.load(sys.stdin)
running = {}
def reap():
    pid, status = os.wait()
    name = running.pop(pid)
    print(json.dumps([name, os.waitstatus_to_exitcode(status)]), flush=True)
for job in jobs:
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(job["env"])
        os.chdir(job["cwd"])
        sys.argv = ["torchrun", *job["words"]]
        code = 1
        try:
            launcher.main(job["words"])
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    running[pid] = job["name"]
    if len(running) >= 3:
        reap()
while running:
    reap()
"""


class Place:
    """The scripts, and what one launcher's workers leave."""

    def __init__(self, root: Path) -> None:
        self.scripts = root / "scripts"
        (self.scripts / "package").mkdir(parents=True, exist_ok=True)
        script(self.scripts, DUMP, "dump.py")
        script(self.scripts / "package", DUMP, "dump.py")
        script(self.scripts / "package", "", "__init__.py")
        Path(script(self.scripts, SHELL, "dump.sh")).chmod(0o755)
        self.root = root

    def job(self, case: Case, launcher: str) -> dict[str, Any]:
        dump = self.root / launcher / case.name
        dump.mkdir(parents=True)
        port = free_port()
        given = {"d": self.scripts, "s": self.scripts / "dump.py", "n": "--nproc-per-node 2"}
        words = case.words.format(**given, log=dump / "logs", port=port).split()
        own = plain_environment(TMPDIR=str(dump), XDG_STATE_HOME=str(dump))
        env = {**own, "DUMP": str(dump), "PYTHON": sys.executable, **case.env}
        return {"name": case.name, "words": words, "env": env, "cwd": str(self.scripts), "port": port,
                "dump": dump, "log": str(dump / "console")}  # fmt: skip


def dumped(directory: Path, workers: int) -> list[dict[str, Any]]:
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(workers)]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What the workers of real torchrun were given, by case."""
    place = Place(tmp_path_factory.mktemp("torchrun"))
    jobs = [place.job(case, "torchrun") for case in CASES]
    told = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([{**job, "dump": str(job["dump"])} for job in jobs]),
        capture_output=True,
        text=True,
        timeout=4 * HUNG,
        check=True,
        env=plain_environment(),
    )
    codes = dict(json.loads(line) for line in told.stdout.splitlines())
    bad = {name: Path(job["log"]).read_text() for job in jobs if codes[name := job["name"]] != 0}
    assert not bad, f"torchrun itself failed: {bad}"
    made = {case.name: dumped(place.root / "torchrun" / case.name, case.workers) for case in CASES}
    console = next(Path(job["log"]) for job in jobs if job["name"] == "events")
    return {**made, "console": status_events(console.read_text())}


def differences(theirs: dict[str, str], ours: dict[str, str], job: dict[str, Any]) -> list[str]:
    found = [f"{name} only with torchrun" for name in theirs.keys() - ours.keys()]
    # What is ours alone carries our name.
    found += [
        f"{name} only with us" for name in ours.keys() - theirs.keys() if not name.startswith("PHALANX_")
    ]
    for name in theirs.keys() & ours.keys():
        pattern = DIFFERS.get(name)
        if name == "MASTER_PORT" and str(job["port"]) in job["words"]:
            pattern = str(job["port"])
        if name == "TORCHELASTIC_RUN_ID" and "--rdzv-id" in job["words"]:
            pattern = None
        if pattern is None:
            if theirs[name] != ours[name]:
                found.append(f"{name}: {theirs[name]!r} with torchrun, {ours[name]!r} with us")
        elif not re.fullmatch(pattern, ours[name]):
            found.append(f"{name}: {ours[name]!r} is not of the form {pattern}")
    return sorted(found)


@needs_torch
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_same_as_torchrun(case: Case, torchrun: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    place = Place(tmp_path)
    job = place.job(case, "phalanx")
    ended = run(*job["words"], env=job["env"], cwd=Path(job["cwd"]))
    assert ended.code == 0, ended
    ours = dumped(job["dump"], case.workers)
    for theirs, mine in zip(torchrun[case.name], ours, strict=True):
        assert differences(theirs.pop("env"), mine.pop("env"), job) == []
        for name in case.unlike:
            del theirs[name], mine[name]
        assert strip(theirs) == strip(mine)


def strip(what: dict[str, Any]) -> dict[str, Any]:
    """Directories differ between the two sides by their last parts only."""
    text = json.dumps(what)
    text = re.sub(r'"/[^"]*/scripts', '"scripts', text)
    return dict(json.loads(re.sub(r"(/bin/python)[\d.]*", r"\1", text)))


def status_events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"name"')]


@needs_torch
@pytest.mark.timeout(300)
def test_events_have_torchs_names(torchrun: dict[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    ended = run("--nproc-per-node", "2", "--event-log-handler", "console", script(tmp_path, ""))
    ours, theirs = status_events(ended.err), torchrun["console"]
    assert [(e["name"], e["source"]) for e in ours] == [(e["name"], e["source"]) for e in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        assert mine["metadata"].keys() >= other["metadata"].keys()
        assert mine["metadata"]["hostname"] == other["metadata"]["hostname"]
        packed, torchs = (json.loads(event["metadata"]["metadata"]) for event in (mine, other))
        assert packed.keys() == torchs.keys()


@needs_torch
def test_every_torchrun_option_is_known() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", "from torch.distributed.run import get_args_parser as g\n"
         "print(*(o for a in g()._actions for o in a.option_strings))"],
        capture_output=True, text=True, timeout=2 * HUNG, check=True,
    )  # fmt: skip
    from phalanx.job.options import OPTIONS

    known = {flag for option in OPTIONS for flag in option.flags}
    assert set(listed.stdout.split()) - known == set()
    assert PHALANX[-1] == "run"


def test_the_token_is_not_for_workers(tmp_path: Path) -> None:
    code = "import os; print('secret' in ' '.join(os.environ.values()), os.environ['PHALANX_GRACE'])"
    ended = run(script(tmp_path, code), env=plain_environment(PHALANX_TOKEN="secret", PHALANX_GRACE="7"))
    assert (ended.code, ended.out) == (0, "False 7\n"), ended


@pytest.mark.parametrize("words", ["--standalone", "--no-python"])
def test_script_arguments_are_untouched(words: str, tmp_path: Path) -> None:
    odd = [
        "--",
        "-m",
        "--nproc-per-node=3",
        "",
        " a b ",
        "$$",
        "$local_rank",
        "${other}",
        "*",
        "'\"\\",
        "é\n",
        "-h",
    ]
    path = script(tmp_path, f"#!{sys.executable}\nimport sys; print(ascii(sys.argv[1:]))")
    Path(path).chmod(0o755)
    ended = run(words, path, *odd)
    assert (ended.code, ended.out) == (0, f"{odd!a}\n"), ended
