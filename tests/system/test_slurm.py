"""Jobs in a real Slurm: submitted, running, with a lost node, preempted, requeued, cancelled; no orphan."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import psutil
import pytest

from phalanx.core.exit_codes import DO_NOT_RETRY
from tests.support.slurm import SlurmCluster, read_until, settle, slurm_programs

pytestmark = pytest.mark.long  # a requeue alone may take Slurm minutes

PHALANX = (sys.executable, "-m", "phalanx")
# Counts the attempts in a file, as a checkpoint would; ends as the file "end" says.
TRAIN = """\
import os, select, sys
from phalanx import worker
e = os.environ
if len(sys.argv) == 1:
    sys.exit(print("world of", e["WORLD_SIZE"]))
name = f"state.{sys.argv[1]}.{e['RANK']}"
steps = int(open(name).read()) if os.path.exists(name) else 0
about = e["RANK"], e["WORLD_SIZE"], os.getpid(), e["TORCHELASTIC_RUN_ID"], steps
print("ready", sys.argv[1], *about, flush=True)
while not os.path.exists(f"end.{sys.argv[1]}"):
    if worker.should_checkpoint():
        open(name, "w").write(str(steps + 1))
        print("saved", e["RANK"], flush=True)
        sys.exit(0)
    select.select([], [], [], 0.05)
sys.exit(int(open(f"end.{sys.argv[1]}").read()))
"""


PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
# Commands of the page, and how often their output has which text.
COMMANDS = {
    "srun phalanx run --dry-run train.py": ("# from Slurm: --nnodes 2 (SLURM_STEP_NUM_TASKS=2)", 2),
    "srun phalanx run train.py": ("world of 2", 2),
    "phalanx slurm submit -N 4 --print train.py": ("#SBATCH --nodes=4", 1),
    "phalanx slurm status": ("COMPLETED", 0),
}


class Jobs:
    """Submits the script above, and reads what the jobs print."""

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "train.py").write_text(TRAIN)

    def submit(self, name: str, *words: str) -> str:
        said = self.cluster.command(
            *PHALANX, "slurm", "submit", "-o", f"{name}.out", *words, "train.py", name, cwd=self.folder
        )
        found = re.match(r"job (\d+) is submitted", said)
        assert found is not None, said
        return found[1]

    def ready(self, name: str, count: int) -> list[list[str]]:
        """What the workers say about themselves: rank, world size, pid, run id, steps."""
        read_until(self.folder / f"{name}.out", f"ready {name} ", count)
        read_until(self.folder / f"{name}.out", "\n", 1)
        return re.findall(
            rf"ready {name} (\d+) (\d+) (\d+) (\S+) (\d+)\n", (self.folder / f"{name}.out").read_text()
        )

    def end(self, name: str, code: int) -> None:
        draft = self.folder / f"draft.{name}"
        draft.write_text(str(code))
        draft.rename(self.folder / f"end.{name}")

    def status(self, job: str) -> str:
        return self.cluster.command(*PHALANX, "slurm", "status", job, cwd=self.folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    slurm_programs()
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    return tmp_path


def cluster_in(
    folder: Path, nodes: int, proctrack: str = "proctrack/linuxproc", preempts_after: int | None = None
) -> SlurmCluster:
    return SlurmCluster(nodes, proctrack, home=folder / "home", preempts_after=preempts_after)


# How Slurm itself finds the processes of a job: by parents, by process group, by control group.
TRACKERS = ["proctrack/linuxproc", "proctrack/pgid", "proctrack/cgroup"]


@pytest.mark.parametrize("proctrack", TRACKERS)
def test_a_job_outlives_a_node_a_preemption_and_nothing_outlives_it(folder: Path, proctrack: str) -> None:
    with cluster_in(folder, 4, proctrack) as cluster:
        jobs = Jobs(cluster, folder / "work")
        job = jobs.submit("a", "-N", "2", "--spares", "1", "--requeues", "1")
        first = jobs.ready("a", 2)
        assert {(world, run) for _, world, _, run, _ in first} == {("2", job)}
        tracked = Path(f"/proc/{first[0][2]}/cgroup").read_text()
        assert (f"/job_{job}/" in tracked) == (proctrack == "proctrack/cgroup")
        assert "RUNNING" in jobs.status(job)
        # A node is lost: the spare takes its place, and Slurm neither ends nor requeues the job.
        # Not the first one, which has the batch step and the store.
        lost = cluster.node_of(int(next(pid for rank, _, pid, *_ in first if rank == "1")))
        at = cluster.lose_node(lost)
        again = jobs.ready("a", 4)[2:]
        later = max(psutil.Process(int(pid)).create_time() for _, _, pid, *_ in again) - at
        print(f"all workers run {later:.2f} s after the loss of a node")
        assert sorted(rank for rank, *_ in again) == ["0", "1"]
        assert cluster.field(job, "Restarts") == "0"
        # A host that is quarantined is not part of the next attempt.
        words = ("quarantine", "add", "--run", job, lost, "--reason", "lost once")
        assert cluster.command(*PHALANX, *words) == f"{lost} is quarantined: lost once\n"
        # Slurm's notice before the time limit: workers save, the job goes back into the queue, and resumes.
        cluster.command("scancel", "--batch", "--signal=USR2", job)
        text = read_until(folder / "work" / "a.out", "requeue 1 of 1")
        assert text.count("saved") == 2
        cluster.start_node(lost)
        settle(lambda: cluster.field(job, "ExcNodeList") == lost, "the next attempt avoids the node")
        cluster.start_now(job)
        resumed = jobs.ready("a", 6)[4:]
        assert {(run, steps) for *_, run, steps in resumed} == {(f"{job}-r1", "1")}
        jobs.end("a", DO_NOT_RETRY)
        cluster.wait_state(job, "FAILED")
        assert cluster.field(job, "ExitCode") == f"{DO_NOT_RETRY}:0"
        said = jobs.status(job)
        assert "attempt 0: exit code 143; preempted" in said
        assert f"attempt 1: exit code {DO_NOT_RETRY}; exit code {DO_NOT_RETRY} says 'do not retry'" in said
        cluster.nothing_left()


@pytest.mark.parametrize("requeues", [1, 0])
def test_the_agents_give_the_nodes_back_when_the_batch_host_is_lost(folder: Path, requeues: int) -> None:
    """With its batch step and its store; the agents that are left requeue the job, or end it."""
    with cluster_in(folder, 4) as cluster:
        jobs = Jobs(cluster, folder / "work")
        job = jobs.submit("l", "-N", "2", "--spares", "1", "--requeues", str(requeues))
        jobs.ready("l", 2)
        cluster.lose_node(cluster.field(job, "BatchHost"))
        if not requeues:
            cluster.wait_state(job, "CANCELLED")
            assert "attempt 0: exit code 94; " in jobs.status(job)
            cluster.nothing_left()
            return
        settle(lambda: cluster.field(job, "Restarts") == "1", "the agents requeue the job")
        cluster.start_now(job)
        assert {run for *_, run, _ in jobs.ready("l", 4)[2:]} == {f"{job}-r1"}
        text = (folder / "work" / "l.out").read_text
        settle(lambda: "1 spare" in text().partition(f"(run {job}-r1)")[2], "the spare of the second attempt")
        jobs.end("l", 0)
        cluster.wait_state(job, "COMPLETED")
        assert "attempt 0: exit code 94; " in jobs.status(job)
        cluster.nothing_left()


@pytest.mark.parametrize("grace", [15, 0])
def test_a_job_that_slurm_preempts_is_requeued_and_resumes(folder: Path, grace: int) -> None:
    with cluster_in(folder, 2, preempts_after=grace) as cluster:
        jobs = Jobs(cluster, folder / "work")
        job = jobs.submit("p", "-N", "2", "--requeues", "1", "-p", "main")
        jobs.ready("p", 2)
        words = ("-p", "urgent", "-N", "2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
        cluster.command("sbatch", *words, cwd=folder)
        if grace:  # the agents have it requeued before Slurm would
            text = read_until(folder / "work" / "p.out", "preempted (exit code 143); requeue 1 of 1")
            assert text.count("saved") == 2
        else:
            text = read_until(folder / "work" / "p.out", "Slurm has put the job back into the queue")
            assert "phalanx slurm: not requeued: preempted" in text
        assert "the job was cancelled" not in text
        cluster.start_now(job)
        resumed = jobs.ready("p", 4)[2:]
        assert {run for *_, run, _ in resumed} == {f"{job}-r1"}
        if grace:
            assert {steps for *_, steps in resumed} == {"1"}
        jobs.end("p", 0)
        cluster.wait_state(job, "COMPLETED")
        assert cluster.field(job, "Restarts") == "1"
        cluster.nothing_left()


def test_a_job_without_a_spare_ends_as_soon_as_an_agent_is_lost(folder: Path) -> None:
    """Slurm knows of no lost node: the leader knows that srun starts nothing again."""
    with cluster_in(folder, 2) as cluster:
        jobs = Jobs(cluster, folder / "work")
        job = jobs.submit("n", "-N", "2", "--requeues", "1")
        first = jobs.ready("n", 2)
        other = cluster.node_of(int(next(pid for rank, _, pid, *_ in first if rank == "1")))
        cluster.lose_tasks(other)
        text = read_until(folder / "work" / "n.out", "requeue 1 of 1")
        assert "no other node can come: 1 of the 2 nodes that were started is gone" in text
        assert "attempt 0: exit code 94; " in jobs.status(job)
        cluster.command("scancel", job)
        cluster.nothing_left()


def test_nobody_waits_for_an_agent_that_refuses_its_command_line(folder: Path) -> None:
    with cluster_in(folder, 2) as cluster:
        work = Jobs(cluster, folder / "work").folder
        words = ("slurm", "submit", "--print", "-o", "r.out", "-N", "2", "train.py", "r")
        text = cluster.command(*PHALANX, *words, cwd=work)
        agent = '"${phalanx[@]}" run '
        elsewhere = """bash -c '[ "$SLURM_PROCID" = 0 ] || cd /; exec "$@"' - """  # without the script
        (work / "job.sh").write_text(text.replace(agent, elsewhere + agent))
        job = cluster.command("sbatch", "--parsable", "job.sh", cwd=work).strip()
        cluster.wait_state(job, "FAILED")
        assert cluster.field(job, "ExitCode") == "2:0"
        said = (work / "r.out").read_text()
        assert f"too few agents are left: {cluster.nodes[1]} refused the command line; stopped" in said
        cluster.nothing_left()


LIMITS, JOBS = 5, 4


def test_every_time_limit_ends_in_a_requeue_that_resumes(folder: Path) -> None:
    """Twenty of twenty: Slurm's own notice before the limit of two minutes, four jobs side by side."""
    with cluster_in(folder, 2) as cluster:
        jobs = Jobs(cluster, folder / "work")
        names = [f"t{number}" for number in range(JOBS)]
        options = ("-N", "2", "-t", "2", "--notice", "105", "--requeues", str(LIMITS))
        ids = {name: jobs.submit(name, *options) for name in names}
        for limit in range(1, LIMITS + 1):
            for name, job in ids.items():
                read_until(folder / "work" / f"{name}.out", f"requeue {limit} of {LIMITS}")
                cluster.start_now(job)
            for name, job in ids.items():
                resumed = jobs.ready(name, 2 * limit + 2)[2 * limit :]
                expected = [("0", f"{job}-r{limit}", str(limit)), ("1", f"{job}-r{limit}", str(limit))]
                assert sorted((rank, run, steps) for rank, _, _, run, steps in resumed) == expected
        for name, job in ids.items():
            jobs.end(name, 0)
            cluster.wait_state(job, "COMPLETED")
            assert cluster.field(job, "Restarts") == str(LIMITS)
            assert (folder / "work" / f"{name}.out").read_text().count("notice from Slurm") == LIMITS
        cluster.nothing_left()


@pytest.mark.parametrize("proctrack", TRACKERS)
def test_nothing_outlives_a_cancelled_job(folder: Path, proctrack: str) -> None:
    """Cancelled as usual; with SIGKILL for its steps; with SIGKILL for its batch step, too."""
    with cluster_in(folder, 2, proctrack) as cluster:
        jobs = Jobs(cluster, folder / "work")
        for name, words in {"c": (), "k": ("--signal=KILL",), "f": ("--signal=KILL", "--full")}.items():
            job = jobs.submit(name, "-N", "2", "--requeues", "1")
            jobs.ready(name, 2)
            cluster.command("scancel", *words, job)
            cluster.wait_state(job, "CANCELLED", "FAILED", "COMPLETED")
            cluster.nothing_left()
            assert cluster.field(job, "Restarts") == "0"


def test_arrays_and_scancel(folder: Path) -> None:
    with cluster_in(folder, 2) as cluster:
        jobs = Jobs(cluster, folder / "work")
        array = jobs.submit("b", "-N", "2", "-a", "0-1")
        assert {run for *_, run, _ in jobs.ready("b", 4)} == {f"{array}_0", f"{array}_1"}
        cluster.command("scancel", f"{array}_0")
        settle(lambda: cluster.state(f"{array}_0") == "CANCELLED", "the end of one task")
        jobs.end("b", 0)
        settle(lambda: cluster.state(f"{array}_1") == "COMPLETED", "the end of the other")
        cluster.nothing_left()
        assert cluster.field(f"{array}_0", "Restarts") == "0", "a cancelled job does not come back"
        # The commands of the documentation, as they stand there.
        page = PAGE.read_text()
        for command, shows in COMMANDS.items():
            assert f"    {command}\n" in page or f"`{command}`" in page, command
            said = cluster.command(
                "salloc", "-N2", "--ntasks-per-node=1", "bash", "-c", command, cwd=jobs.folder
            )
            assert said.count(shows[0]) == shows[1], said
