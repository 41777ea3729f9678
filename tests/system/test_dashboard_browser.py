"""The page in a real browser, against a real job whose worker is killed. Also makes the pictures in docs/.

`PHALANX_PICTURES=docs` writes them. axe-core comes with the package axe-core-python, which CI has.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.chromium import Chromium
from tests.support.jobs import python_with
from tests.support.run_helpers import Ended, Running, plain_environment, script
from tests.system.test_dashboard import Page, link_of

ROOT = Path(__file__).parents[2]
PICTURES = os.environ.get("PHALANX_PICTURES", "")

WORKER = """
import os, sys, time
from phalanx import worker

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("", "ready", rank, os.getpid(), flush=True)
if rank == 2:
    print("<script>document.title = 'owned'</script>", flush=True)
    print("<img src=x onerror=\\"document.title = 'owned'\\">", flush=True)
    print("\\x1b[31mred\\x1b[0m \\x1b]0;title\\x07 plain \\x1b[2J", flush=True)
worker.ready()
step = 20 * attempt
while True:
    time.sleep(0.25 if rank == 5 else 0.1)
    step += 1
    worker.heartbeat(step)
    if step % 10 == 0:
        print(f"step {step}  loss {2.5 / step ** 0.3:.4f}  lr 3.0e-04", flush=True)
    if rank == 1 and step == 90 and attempt == 1:
        raise ValueError("shard 00317.tar: checksum does not match the index")
"""


@pytest.fixture
def browser() -> Iterator[Chromium]:
    python_with("starlette", "uvicorn")
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, Chromium(Path(folder)) as found:
        yield found


def text(browser: Chromium, selector: str) -> str:
    return str(browser.run(f"document.querySelector({json.dumps(selector)}).textContent"))


def faults(browser: Chromium) -> list[str]:
    """What axe-core finds serious; it is run past the page's policy, as a browser's own tools are."""
    package = find_spec("axe_core_python")
    if package is None or package.origin is None:
        if os.environ.get("CI"):
            pytest.fail("no axe-core-python here; `make test TORCH=1` installs it")
        return []
    browser.run(Path(package.origin).with_name("axe.min.js").read_text() + "; 0")
    found = browser.run("axe.run().then((r) => JSON.stringify(r.violations))")
    return [
        f"{one['id']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
        for one in json.loads(found)
        if one["impact"] in ("serious", "critical")
    ]


def picture(browser: Chromium, name: str) -> None:
    if PICTURES:
        browser.picture(ROOT / PICTURES / name)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the job is: for pictures, a place whose name tells nothing of this machine."""
    if not PICTURES:
        yield tmp_path
        return
    neutral = Path("/tmp/llm")
    neutral.mkdir()
    yield neutral
    shutil.rmtree(neutral)


def test_the_page_in_a_browser(folder: Path, browser: Chromium) -> None:
    words = ["--nproc-per-node", "8", "--max-restarts", "3", "--backoff", "0", "--dashboard"]
    with Running([*words, script(folder, WORKER)], env=plain_environment(TMPDIR=str(folder))) as job:
        workers = job.workers(8)
        page = Page(link_of(job))
        browser.resize(1280, 1180)
        browser.open(page.link)
        browser.wait("location.search === '' && document.body.dataset.ready === 'yes'", "the page")
        assert page.token not in str(browser.run("document.documentElement.outerHTML"))
        assert text(browser, "h1") == "train.py"
        # What a worker prints stays text.
        browser.wait("document.querySelector('#log').textContent.includes('<script>')", "the output")
        assert browser.run("document.querySelectorAll('#log script, #log img').length") == 0
        assert "owned" not in str(browser.run("document.title"))
        red = browser.run("document.querySelector('#log .a-31').parentElement.textContent")
        assert red == "red  plain "
        # The grid changes: rank 3 is stopped, then killed; the incident appears.
        label = "document.querySelector('#grid').getAttribute('aria-label')"
        browser.wait(f"{label}.startsWith('8 ranks: 8 training')", "eight ranks in training")
        os.kill(workers[3], signal.SIGSTOP)
        browser.wait(f"{label}.includes('1 stopped')", "the stopped rank")
        os.kill(workers[3], signal.SIGKILL)
        browser.wait("document.querySelectorAll('#incidents .recovery').length === 1", "the incident")
        assert text(browser, "#cause-headline").startswith("rank 3: SIGKILL")
        # Another rank fails by itself; its cause is there in full.
        browser.wait("document.querySelectorAll('#incidents .recovery').length === 2", "the second incident")
        assert text(browser, "#cause-headline").startswith("rank 1: ValueError: shard 00317.tar")
        browser.wait("document.querySelector('#cause').textContent.includes('Traceback')", "the traceback")
        browser.wait(f"{label}.startsWith('8 ranks: 8 training')", "eight ranks in training again")
        # By keyboard: details of a rank, then its output alone.
        browser.run("document.querySelector('#grid').focus()")
        browser.key("ArrowRight")
        browser.wait(
            "document.querySelector('#detail').textContent.includes('Rank 1')", "the details of rank 1"
        )
        browser.wait(
            "document.querySelector('#rates .late')?.textContent.includes('rank 5')", "the straggler"
        )
        browser.wait("document.querySelectorAll('#log div').length > 20", "output that follows")
        if PICTURES:  # of a job that has been running for a while
            browser.wait("Number(document.querySelector('#step').textContent) > 700")
        picture(browser, "dashboard.png")
        browser.key("Enter")
        browser.wait("[...document.querySelectorAll('#log b')].every((one) => one.textContent === '1')")
        browser.wait("document.querySelectorAll('#log div').length > 1", "output of rank 1")
        last = (
            "Number([...document.querySelectorAll('#log div')].pop()?.textContent.match(/step (\\d+)/)?.[1])"
        )
        reached = int(browser.wait(last))
        browser.wait(f"{last} > {reached}", "output that goes on")
        browser.run("document.querySelector('#log-search').value = 'LOSS'")
        browser.run("document.querySelector('#log-search').dispatchEvent(new Event('input'))")
        browser.wait("document.querySelector('#log mark')?.textContent === 'loss'", "what was searched for")
        assert faults(browser) == []
        # Dark, on a phone.
        browser.prefer("dark")
        browser.resize(360, 780, phone=True)
        browser.wait("document.documentElement.classList.contains('dark')")
        browser.wait("document.documentElement.scrollWidth <= 360", "a page as wide as the phone")
        assert faults(browser) == []
        browser.run("window.scrollTo(0, 0)")
        picture(browser, "dashboard-phone.png")
        # A deed is behind a confirmation: Escape leaves it, the button does it.
        browser.run("document.querySelector('#nodes button').click()")
        browser.wait("document.querySelector('#confirm').open")
        assert faults(browser) == []
        browser.key("Escape")
        browser.wait("!document.querySelector('#confirm').open")
        browser.run("document.querySelector('#stacks').click()")
        browser.run("document.querySelector('#confirm-yes').click()")
        browser.wait(
            "document.querySelector('#sheet').open && document.querySelector('#sheet pre') !== null", "stacks"
        )
        assert "train.py" in text(browser, "#sheet-body")
        browser.run("document.querySelector('#sheet-close').click()")
        # A console that is not read would hold the end up.
        ended: list[Ended] = []
        reader = threading.Thread(target=lambda: ended.append(job.end()))
        reader.start()
        browser.run("document.querySelector('#nodes button').click()")
        browser.run("document.querySelector('#confirm-yes').click()")
        reader.join()
        assert ended
        assert ended[0].code == 0
        browser.wait("document.querySelector('#badge').textContent.includes('drained')", "the end")
        assert [m for m in browser.messages if "Failed to load resource" not in m and "net::" not in m] == []


@pytest.mark.long
def test_4096_ranks_are_there_within_a_second(browser: Chromium) -> None:
    command = [sys.executable, "-m", "tests.support.simulated_job", "4096"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            browser.resize(1280, 1180)
            took = []
            link = server.stdout.readline().strip()
            for _ in range(3):
                browser.open("about:blank")
                browser.open(link)
                browser.wait("location.search === '' && document.body.dataset.ready === 'yes'", "the page")
                took.append(float(browser.run("performance.getEntriesByName('ready')[0].startTime")))
            assert browser.run("document.querySelector('#grid').getAttribute('aria-label')").startswith(
                "4096"
            )
            kept_out = browser.run("document.querySelector('#quarantine:not([hidden])').textContent")
            assert kept_out.startswith("quarantined: gpu-999: its node was lost (for another 30 min"), (
                kept_out
            )
            picture(browser, "dashboard-4096.png")
            print(f"interactive after {[round(one) for one in took]} ms")
            assert min(took) < 1000
        finally:
            server.kill()
