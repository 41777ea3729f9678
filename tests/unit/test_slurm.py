"""Slurm's variables and lists: what `phalanx run` makes of them, case by case."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from phalanx.cli.dry_run import plan
from phalanx.cli.slurm import main, parse_submit, submit
from phalanx.errors import UsageError
from phalanx.job.config import parse
from phalanx.job.slurm_allocation import look, run_id
from phalanx.job.slurm_host_list import first_host, parse_counts, parse_host_list
from phalanx.platforms.outcomes import AgentOutcome, write_outcome
from phalanx.platforms.slurm import job_end
from phalanx.platforms.slurm.batch_script import batch_script
from phalanx.platforms.slurm.requeue import AttemptEnd
from tests.conftest import wait_until
from tests.support.run_helpers import plain_environment

LISTS = [
    ("", []),
    ("n1", ["n1"]),
    ("n1,n2", ["n1", "n2"]),
    (" n1, n2 ,", ["n1", "n2"]),
    ("login,n[1-3]", ["login", "n1", "n2", "n3"]),
    ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
    ("n[9-11]", ["n9", "n10", "n11"]),
    ("n[09-11]", ["n09", "n10", "n11"]),
    ("n[001,010-012]", ["n001", "n010", "n011", "n012"]),
    ("n[1-2],m[5,8-9],x", ["n1", "n2", "m5", "m8", "m9", "x"]),
    ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
    ("n[1-2].cluster.org,gpu", ["n1.cluster.org", "n2.cluster.org", "gpu"]),
    ("rack[1-2]n[01-02]", ["rack1n01", "rack1n02", "rack2n01", "rack2n02"]),
    ("r[1,3]c[0-1]s[7-8]x", [f"r{r}c{c}s{s}x" for r in (1, 3) for c in (0, 1) for s in (7, 8)]),
    ("[1-3]", ["1", "2", "3"]),
    ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ("node[1-1]", ["node1"]),
    ("dgx-a100-[08-10]", ["dgx-a100-08", "dgx-a100-09", "dgx-a100-10"]),
]


@pytest.mark.parametrize(("text", "hosts"), LISTS, ids=[text for text, _ in LISTS])
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert parse_host_list(text) == hosts
    assert first_host(text) == (hosts[0] if hosts else "")


@pytest.mark.parametrize(
    "text", ["n[1", "n1]", "n[[1]]", "n[3-1]", "n[a-b]", "n[]", "n[1-]", "n[1-99999999]"]
)
def test_lists_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="host list"):
        parse_host_list(text)


def test_a_huge_list_is_not_made_for_its_first_host() -> None:
    assert first_host("n[1-999999999]m[1-999999999]") == "n1m1"


@pytest.mark.parametrize(
    ("text", "counts"), [("", []), ("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("1(x2),4(x1)", [1, 1, 4])]
)
def test_counts(text: str, counts: list[int]) -> None:
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["x", "2(x", "2(xa)", "1(x99999999)"])
def test_counts_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match="not a list of counts"):
        parse_counts(text)


ALLOCATION = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "n[07-08]",
    "SLURM_NODELIST": "n[07-08]",
}
STEP = {
    **ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "n08",
}
ENDPOINT = f"n07:{16384 + 1234 * 31 % 13000}"
NINE = ENDPOINT.replace("n07", "n09")
MEET = {
    "nnodes": "2",
    "node_rank": "1",
    "rdzv_id": "1234",
    "rdzv_backend": "phalanx",
    "rdzv_endpoint": ENDPOINT,
}
HET = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "1234",
    "SLURM_JOB_ID_HET_GROUP_1": "1235",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n09",  # the first task is there, although the step's list is sorted
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[07-08]",
    "SLURM_STEP_NODELIST": "n[07-09]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
SOLO = {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n07", "SLURM_NODELIST": "n07"}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURMD_NODENAME": "n07"}

# What it is, the variables, the options that the user gave, and the settings that follow.
CASES: list[tuple[str, dict[str, str], dict[str, str], dict[str, str]]] = [
    ("one task on each node", STEP, {}, MEET),
    ("GPUs of the node", {**STEP, "SLURM_GPUS_ON_NODE": "8"}, {}, {**MEET, "nproc_per_node": "8"}),
    (
        "GPUs, typed, for each task",
        {**STEP, "SLURM_GPUS_PER_TASK": "a100:2", "SLURM_GPUS_ON_NODE": "4"},
        {},
        {**MEET, "nproc_per_node": "2"},
    ),
    (
        "GPUs for each task, as newer versions write them",
        {**STEP, "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:a100=4"},
        {},
        {**MEET, "nproc_per_node": "4"},
    ),
    (
        "two tasks on one node",
        {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0",
         "SLURM_LOCALID": "1"},
        {},
        MEET,
    ),
    (
        "two tasks on one node, each with its GPU",
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_GPUS_PER_TASK": "1",
         "SLURM_GPUS_ON_NODE": "2"},
        {},
        {**MEET, "nproc_per_node": "1"},
    ),
    (
        "fewer tasks than nodes",
        {**STEP, "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "n[05-08]"},
        {},
        MEET,
    ),
    ("an array", {**STEP, "SLURM_ARRAY_JOB_ID": "1200", "SLURM_ARRAY_TASK_ID": "7"}, {},
     {**MEET, "rdzv_id": "1200_7"}),
    ("requeued", {**STEP, "SLURM_RESTART_COUNT": "2"}, {},
     {**MEET, "rdzv_id": "1234-r2", "rdzv_endpoint": f"n07:{16384 + (1234 * 31 + 14) % 13000}"}),
    (
        "the second step",
        {**STEP, "SLURM_STEP_ID": "1"},
        {},
        {**MEET, "rdzv_id": "1234.1", "rdzv_endpoint": f"n07:{16384 + (1234 * 31 + 1) % 13000}"},
    ),
    (
        "components of a heterogeneous job",
        {**STEP, **HET, "SLURM_PROCID": "2"},
        {},
        {**MEET, "nnodes": "3", "node_rank": "2", "role": "group1", "rdzv_endpoint": NINE},
    ),
    (
        "components of an allocation by srun itself",
        {**STEP, **{name.replace("HET_GROUP", "PACK_GROUP"): value for name, value in HET.items()},
         "SLURMD_NODENAME": "n09", "SLURM_PROCID": "0", "SLURM_NODEID": "0"},
        {},
        {**MEET, "nnodes": "3", "node_rank": "0", "role": "group0", "rdzv_endpoint": NINE},
    ),
    (
        "a step in one component",
        {**STEP, **HET, "SLURM_STEP_NODELIST": "n[07-08]", "SLURM_STEP_NUM_TASKS": "2"},
        {},
        MEET,
    ),
    ("options win", STEP, {"nnodes": "1:2", "rdzv_id": "mine", "nproc_per_node": "2"},
     {k: v for k, v in MEET.items() if k not in ("nnodes", "rdzv_id")}),
    ("a meeting of one's own", STEP, {"rdzv_backend": "c10d", "rdzv_endpoint": "head:29400"},
     {"nnodes": "2", "node_rank": "1"}),
    ("torchrun's static line without its rank", STEP, {"nnodes": "2", "master_addr": "head"},
     {"node_rank": "1"}),
    ("a step of one task", {**STEP, **ONE}, {}, {"rdzv_id": "1234"}),
    ("one task, one node", {**STEP, **ONE, **SOLO, "SLURM_GPUS_ON_NODE": "4"}, {},
     {"rdzv_id": "1234", "nproc_per_node": "4"}),
    ("one task of several steps that meet elsewhere", {**STEP, **ONE},
     {"nnodes": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "h:1"}, {}),
    ("a batch script on one node", {**BATCH, **SOLO, "SLURM_GPUS_ON_NODE": "2"}, {}, {"nproc_per_node": "2"}),
    ("a shell of salloc", {**ALLOCATION, **SOLO, "SLURM_GPUS_ON_NODE": "2"}, {}, {}),
    ("standalone", STEP, {"standalone": "1"}, {}),
    ("a batch script that says how", BATCH, {"standalone": "1"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("environ", "given", "wanted"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_settings(environ: dict[str, str], given: dict[str, str], wanted: dict[str, str]) -> None:
    found = look(environ, given)
    assert found is not None
    assert found.refusal == ""
    assert {dest: taken.value for dest, taken in found.settings.items()} == wanted
    for taken in found.settings.values():
        name, _, value = taken.origin.partition("=")
        assert environ[name] == value


REFUSED = [
    ("a batch script on several nodes without srun", BATCH, "has 2 nodes, and this is not a task of srun"),
    ("a shell of salloc on several nodes", ALLOCATION, "has 2 nodes, and this is not a task of srun"),
    ("an interactive step", {**STEP, "SLURM_STEP_ID": "4294967290"}, "this is not a task of srun"),
    (
        "tasks that share the GPUs of a node",
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_GPUS_ON_NODE": "8"},
        "2 tasks of srun share the 8 GPUs",
    ),
]


@pytest.mark.parametrize(("environ", "why"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_refusals(environ: dict[str, str], why: str, script: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        parse([script], environ)
    assert "\n" not in str(caught.value)


WARNED = [
    ("standalone", STEP, ["--standalone"], "--standalone in a step of 2 tasks"),
    ("one node", STEP, ["--nnodes", "1"], "--nnodes 1 in a step of 2 tasks"),
    ("too many", STEP, ["--nnodes", "4"], "--nnodes 4: this step of Slurm has 2 tasks only"),
    ("one task", {**STEP, **ONE}, [], "one of the 2 nodes of Slurm job 1234 is used"),
    ("a shell", {**ALLOCATION, **SOLO}, [], "Slurm job 1234 is not used"),
    ("not Slurm's", {**STEP, "SLURM_PROCID": "x"}, [], "SLURM_PROCID=x: not a number; nothing is taken"),
    ("no hosts", {**STEP, "SLURM_STEP_NODELIST": "n[1"}, [], "brackets do not match; nothing is taken"),
]


@pytest.mark.parametrize(("environ", "words", "line"), [c[1:] for c in WARNED], ids=[c[0] for c in WARNED])
def test_lines(environ: dict[str, str], words: list[str], line: str, script: str) -> None:
    assert any(line in warning for warning in parse([*words, script], environ).warnings)


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text("")
    return str(tmp_path / "train.py")


def test_a_launch_in_a_worker_of_the_job_is_a_job_of_its_own(script: str) -> None:
    job = parse([script], {**STEP, "TORCHELASTIC_RUN_ID": "1234"})
    assert (job.cluster.max_nodes, job.taken, job.warnings) == (1, (), ())


def test_the_job_and_its_plan(script: str) -> None:
    job = parse([script], {**STEP, "SLURM_RESTART_COUNT": "1", "SLURM_GPUS_ON_NODE": "3"})
    assert (job.cluster.min_nodes, job.cluster.max_nodes, job.workers.local_world_size) == (2, 2, 3)
    assert (job.cluster.run_id, job.state.keep_id) == ("1234-r1", "1234")
    assert job.cluster.rdzv_conf == {"is_host": "0", "all_nodes": "2", "name": "n08", "rank": 1}
    text = plan(job)
    assert "# from Slurm: --nnodes 2 (SLURM_STEP_NUM_TASKS=2)" in text
    assert "# from Slurm: --nproc-per-node 3 (SLURM_GPUS_ON_NODE=3)" in text
    assert "# from Slurm: --rdzv-endpoint n07:" in text
    assert "(SLURM_STEP_NODELIST=n[07-08])" in text


def test_variables_of_options_win(script: str) -> None:
    job = parse([script], {**STEP, "PET_NNODES": "1:2", "PET_RDZV_ID": "mine", "PET_NPROC_PER_NODE": "2"})
    assert (
        job.cluster.min_nodes,
        job.cluster.max_nodes,
        job.workers.local_world_size,
        job.cluster.run_id,
    ) == (1, 2, 2, "mine")
    assert "--rdzv-id" not in [option for option, _, _ in job.taken]


def test_a_bad_value_of_slurm_is_named_with_its_origin(script: str) -> None:
    with pytest.raises(UsageError, match=r"--rdzv-id 1/2 \(from SLURM_JOB_ID=1/2\)"):
        parse([script], {**STEP, **ONE, **SOLO, "SLURM_JOB_ID": "1/2"})


def test_an_option_whose_value_may_be_left_out_leaves_the_script_alone() -> None:
    job, _ = parse_submit(["-N", "2", "--dashboard", "train.py", "--lr", "1"])
    assert (job.run_words, job.script, job.script_args) == (("--dashboard",), "train.py", ("--lr", "1"))
    job, _ = parse_submit(["-N", "2", "--dashboard", "0.0.0.0:8000", "train.py"])
    assert (job.run_words, job.script) == (("--dashboard", "0.0.0.0:8000"), "train.py")


# An agent's end, attempt 1 of a job whose batch step ran on n1; what Slurm shows, one line for each question
# about the job; the states of n1; and the commands that change something.
STANDS_IN: list[tuple[str, str, int, str, str, list[str]]] = [
    ("the host is lost", "FAILED", 94, "RUNNING 1", "DOWN*", ["scontrol requeue 7"]),
    ("Slurm takes a while", "FAILED", 94, "RUNNING 1|RUNNING 1", "MIXED|MIXED*", ["scontrol requeue 7"]),
    ("Slurm is silent at first", "FAILED", 94, "|RUNNING 1", "DOWN", ["scontrol requeue 7"]),
    ("another agent was faster", "FAILED", 94, "RUNNING 1|COMPLETING 2", "MIXED", []),
    ("Slurm has cancelled it", "SIGNALED", 143, "COMPLETING 1", "MIXED", []),
    ("the program failed", "FAILED", 3, "RUNNING 1", "DOWN*", ["scancel --state=RUNNING 7"]),
    ("the job succeeded", "SUCCEEDED", 0, "RUNNING 1", "DOWN*", ["scancel --state=RUNNING 7"]),
    ("a node that has left", "LEFT", 0, "RUNNING 1", "DOWN*", []),
    ("an unfit node", "FAILED", 95, "RUNNING 1", "DOWN*", []),
    ("an agent that has refused its command line", "", 2, "RUNNING 1", "DOWN*", []),
]
# Gives the next answer, or the last one again.
COMMAND = """#!/bin/bash
next() { head -n 1 "$0.$1"; [ "$(wc -l < "$0.$1")" -gt 1 ] && sed -i 1d "$0.$1"; }
case "$1 $2" in
"show job") set -- $(next job); echo "${1:+JobState=$1 Restarts=$2}" ;;
"show node") echo "NodeName=localhost State=$(next node)" ;;
*) kill -TERM $PPID; echo "${0##*/} $*" >> "${0%/*}/requests" ;;  # the step of the agent ends with the job
esac
"""

HOLDS = """#!/bin/bash
case "$1" in
show) echo "JobState=RUNNING Restarts=0" ;;
update) read -r < "${0%/*}/gone"; echo "$*" >> "${0%/*}/asked" ;;
*) echo "$*" >> "${0%/*}/asked" ;;
esac
"""


@pytest.mark.parametrize("case", STANDS_IN, ids=[case[0] for case in STANDS_IN])
def test_an_agent_in_the_place_of_the_batch_step(
    case: tuple[str, str, int, str, str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, word, code, jobs, nodes, wanted = case
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(COMMAND)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "scontrol.job").write_text(jobs.replace("|", "\n") + "\n")
    (tmp_path / "scontrol.node").write_text(nodes.replace("|", "\n") + "\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(job_end, "_PAUSE", 0.0)
    listener = job_end.BatchListener()
    environ = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "HOME": str(tmp_path)}
    environ |= job_end.batch_place({"SLURMD_NODENAME": "localhost"}, listener.port, 2)
    outcome = AgentOutcome("n2", word, code)
    outcomes = job_end.SlurmAttempt(environ, print).record.outcomes(1)
    write_outcome(outcomes, outcome, "n2.1")
    requests = tmp_path / "requests"
    job_end.stand_in(outcomes, outcome, environ, print)
    assert not requests.exists(), "the batch step is alive"
    listener.drain()
    listener.close()
    job_end.stand_in(outcomes, outcome, environ, print)
    assert (requests.read_text().splitlines() if requests.exists() else []) == wanted
    kept = job_end.SlurmAttempt(environ, print).record.attempts()
    assert [(one["attempt"], one["code"]) for one in kept] == ([(1, code)] if wanted else [])


def test_the_step_ends_although_slurm_holds_a_request_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the loss of a node, a job can be changed only when its batch step is gone."""
    os.mkfifo(tmp_path / "gone")
    (tmp_path / "scontrol").write_text(HOLDS)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    here = job_end.SlurmAttempt({"SLURM_JOB_ID": "7", "HOME": str(tmp_path)}, print)
    outcomes = here.record.outcomes(0)
    write_outcome(outcomes, AgentOutcome("n2", "FAILED", 95), "n2.0")
    assert here.end(outcomes, AttemptEnd(95, most=1)).exclude == ("n2",)
    assert capsys.readouterr().out.endswith("; requeue 1 of 1\n"), "and no complaint"
    (tmp_path / "gone").write_text("")
    asked = tmp_path / "asked"
    wait_until(lambda: asked.exists() and "update" in asked.read_text(), "the request")
    assert asked.read_text() == "requeue 7\nupdate JobId=7 ExcNodeList=n2\n"


# In the place of srun: each line of stdin is a host and the words of its agent.
SRUN = """#!/bin/bash
trap 'echo killed >> srun.log; exit 15' TERM
while read -r host words; do
    SLURMD_NODENAME=$host {python} -m phalanx run $words < /dev/null
    echo "$host $?" >> srun.log
done
"""


def test_the_others_do_not_wait_for_agents_that_refuse_their_command_line(tmp_path: Path) -> None:
    log, asked = tmp_path / "srun.log", tmp_path / "asked"
    said = {"srun": SRUN.format(python=sys.executable), "scontrol": HOLDS, "scancel": HOLDS}
    for name, text in said.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    words = ["slurm", "batch", "--requeues", "3", "--missing", "1", "--wait", "600", "--", "srun"]
    pipe = subprocess.PIPE
    batch = subprocess.Popen(
        [sys.executable, "-m", "phalanx", *words],
        cwd=tmp_path, env=plain_environment(**path), stdin=pipe, stderr=pipe, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert batch.stdin is not None
    try:
        print("n2 absent.py", file=batch.stdin, flush=True)
        wait_until(lambda: log.exists() and log.read_text() == "n2 2\n", "an agent that has refused")
        batch.send_signal(signal.SIGUSR2)
        wait_until(lambda: asked.exists() and "--signal=TERM 7" in asked.read_text(), "a turn of the loop")
        # Is refused only when the agent is made.
        print(
            "n3 --rdzv-backend etcd --rdzv-endpoint 1::2:x --rdzv-conf name=n3 srun",
            file=batch.stdin,
            flush=True,
        )
        wait_until(lambda: batch.poll() is not None, "the end of the batch step")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(batch.pid, signal.SIGKILL)
        _, errors = batch.communicate()
    assert batch.returncode == 2
    assert log.read_text() == "n2 2\nn3 2\nkilled\n"
    assert "too few agents are left: n2,n3 refused the command line; stopped\n" in errors
    assert errors.endswith("phalanx slurm: not requeued: exit code 2 is the program's own\n")


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["-N", "2"], 0),
        (["-N", "2", "--spares", "1"], 1),
        (["-N", "4", "--nnodes", "3:4"], 1),
        (["-N", "2", "--spares", "1", "--nnodes=1:2"], 2),
        (["-N", "2", "--standalone"], 1),
        (["-N", "1"], 0),
    ],
)
def test_how_many_agents_a_job_can_do_without(
    words: list[str], missing: int, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    submit([*words, "--print", script])
    assert f" slurm batch --requeues 10 --missing {missing} --wait 130 -- " in capsys.readouterr().out


def test_no_kill_only_where_the_job_can_go_on_without_a_node() -> None:
    def outlives(*words: str) -> bool:
        text = batch_script(parse_submit(["-N", "2", *words, "train.py"])[0], ["phalanx"])
        assert ("#SBATCH --no-kill\n" in text) == (" --no-kill " in text)
        return " --no-kill " in text

    assert not outlives()
    assert outlives("--spares", "1")
    assert outlives("--nnodes=1:2")


def test_nothing_is_imported_from_the_directory_of_the_job(tmp_path: Path) -> None:
    """The start of the script, with another program in the place of the rest."""
    (tmp_path / "select.py").write_text("open('imported', 'w')")
    text = batch_script(parse_submit(["-N", "2", "train.py"])[0], ["phalanx"])
    start = text.partition("exec ")[0] + 'exec "${phalanx[@]}" --version\n'
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(["bash", "-c", start], cwd=tmp_path, capture_output=True, text=True, env=environ)
    assert done.stdout.startswith("phalanx"), done
    assert not (tmp_path / "imported").exists()


def test_the_run_id_of_an_array_that_was_requeued() -> None:
    environ = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "1"}
    assert run_id({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "2", **environ}) == "9_3.2-r1"


def test_options_of_sbatch_are_passed_on_in_their_order() -> None:
    words = "-t 1:00 --sbatch --nice=10 -N2 --exclusive --sbatch=no-kill --gpus_per_node 8 -J a --no-such"
    with pytest.raises(UsageError, match="--no-such"):
        parse_submit([*words.split(), "train.py"])
    job, only_print = parse_submit([*words.split()[:-1], "--max-restarts", "3", "train.py", "--lr", "-1"])
    expected = [("time", "1:00"), ("nice", "10"), ("exclusive", None), ("no-kill", None)]
    assert list(job.sbatch) == [*expected, ("gpus-per-node", "8"), ("job-name", "a")]
    assert (job.nodes, job.run_words, job.script_args) == (2, ("--max-restarts", "3"), ("--lr", "-1"))
    assert not only_print
    for bad in (["--sbatch", "nice=1\n2"], ["-J", "a\nb"]):
        with pytest.raises(UsageError, match="a line break would end the line of the script"):
            parse_submit(["-N", "1", *bad, "train.py"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "required: submit|status"),
        (["cancel"], "invalid choice: 'cancel'"),
        (["submit"], "no script given"),
        (["submit", "train.py"], "-N NODES is missing"),
        (["submit", "-N"], "-N/--nodes: expected one argument"),
        (["submit", "-N", "0", "train.py"], "-N/--nodes: 0: must be 1 or more"),
        (["submit", "-N", "1", "--notice", "soon", "train.py"], "--notice: soon: not a duration"),
        (["status", "1", "2"], "write: phalanx slurm status [JOB]"),
        (["batch", "--requeues", "x", "--wait", "1", "--", "srun"], "slurm batch is run by the script"),
    ],
)
def test_bad_usage(words: list[str], line: str) -> None:
    with pytest.raises(UsageError) as refused:
        main(words)
    assert line in str(refused.value)
