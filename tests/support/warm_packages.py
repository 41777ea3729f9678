"""Does a script that imports a package see the same at every launch? The differential test of the preload.

For each package: a start with `--warm off`, a first launch, a second one, and a restart within it. The script
imports the package and prints everything that it can observe (SNAPSHOT). The four have to agree, apart from
what differs between any two processes; that has to differ between the second launch and its restart, too.

    python -m tests.support.warm_packages --python VENV/bin/python [PACKAGE ...]

prints the table of docs/warm.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HUNG = 600.0  # seconds
# The last value of a loop over a set of functions, which has another order in every process.
OF_NO_MEANING = {"scipy.sparse._data.name"}

# distribution → what is imported; those that have both names the same stand for themselves
PACKAGES = {
    name.partition("=")[0]: name.rpartition("=")[2]
    for name in """
    numpy pandas scipy=scipy.stats scikit-learn=sklearn.linear_model matplotlib=matplotlib.pyplot torch
    torch-distributed=torch.distributed torch-dynamo=torch._dynamo transformers transformers-trainer=transformers.trainer
    datasets tokenizers huggingface_hub accelerate lightning wandb mlflow tensorboard=torch.utils.tensorboard jax
    flax optax chex orbax-checkpoint=orbax.checkpoint opencv=cv2 pillow=PIL.Image pyarrow polars numba sympy ray
    grpcio=grpc s3fs boto3 hydra-core=hydra omegaconf pydantic rich=rich.console tqdm requests aiohttp httpx
    fastapi uvicorn click typer absl-py=absl.logging protobuf=google.protobuf.message h5py zarr xarray
    dask=dask.array einops safetensors=safetensors.torch peft timm torchmetrics torchvision sentencepiece nltk
    seaborn plotly=plotly.graph_objects networkx scikit-image=skimage onnx onnxruntime imageio gymnasium optuna
    xgboost lightgbm statsmodels=statsmodels.api cloudpickle joblib msgpack orjson lxml=lxml.etree
    beautifulsoup4=bs4 sqlalchemy redis psutil pyyaml=yaml jsonschema attrs=attr loguru fsspec gcsfs
    google-cloud-storage=google.cloud.storage tiktoken sentence-transformers=sentence_transformers diffusers
    evaluate deepspeed bitsandbytes einx jaxtyping beartype librosa soundfile catboost ipython=IPython triton
    faiss-cpu=faiss spacy kornia albumentations
    """.split()
}

SNAPSHOT = r"""
import sys
early = "MODULE" in sys.modules
failed = ""
try:
    import MODULE
except ImportError as error:
    failed = error
third = [name for name in list(sys.modules) if name.partition(".")[0] not in sys.stdlib_module_names
         and not name.startswith(("phalanx", "setproctitle", "__"))]
import asyncio, atexit, builtins, decimal, faulthandler, gc, json, locale, logging, multiprocessing, os, random
import resource, signal, threading, types, warnings

def name_of(thing):
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"

def plain(value):
    if type(value) in (list, tuple):
        return len(value) < 200 and all(map(plain, value))
    return type(value) in (str, bytes, int, float, bool, type(None))

def files():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if int(fd) > 2 and not what.startswith(("/memfd:phalanx", "/proc/", "/tmp/phalanx")) and ".stack" not in what:
            found.append(what.partition("[")[0])
    return sorted(found)

def values():
    found = {}
    for name in third:
        space = types.ModuleType.__dict__["__dict__"].__get__(sys.modules[name]) if isinstance(
            sys.modules[name], types.ModuleType) else {}
        for key, value in list(space.items()):
            if not key.startswith("__") and plain(value):
                found[f"{name}.{key}"] = repr(value)[:200]
    return found

own = ("RANK", "TORCHELASTIC", "PHALANX", "MASTER_PORT", "_RANK", "WORLD_SIZE", "ROLE", "PWD", "SHLVL")
state = {
    "signals": {int(s): name_of(signal.getsignal(s)) if callable(signal.getsignal(s)) else str(signal.getsignal(s))
                for s in signal.valid_signals()},
    "sys.path": sys.path, "sys.argv": sys.argv, "sys.orig_argv": sys.orig_argv[1:],
    "main": [sys.modules["__main__"].__file__, sorted(k for k in vars(sys.modules["__main__"]) if k[0] == "_")],
    "finders": [name_of(one) for one in sys.meta_path if "Recorder" not in name_of(one)],
    "path hooks": len(sys.path_hooks),
    "hooks": [name_of(one) for one in (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook,
              threading.excepthook)] + [str(sys.gettrace()), str(sys.getprofile())],
    "warnings": [str(one) for one in warnings.filters] + [name_of(warnings.showwarning)],
    "root logger": [logging.root.level, [name_of(one) for one in logging.root.handlers], logging.root.manager.disable],
    "loggers": {name: [one.level, one.propagate, [name_of(h) for h in one.handlers]]
                for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)},
    "locale": locale.setlocale(locale.LC_ALL), "umask": os.umask(0o22), "directory": os.getcwd(),
    "limits": [resource.getrlimit(n) for n in range(16)], "nice": os.getpriority(0, 0),
    "cpus": sorted(os.sched_getaffinity(0)), "start method": multiprocessing.get_start_method(allow_none=True),
    "gc": [gc.isenabled(), gc.get_threshold(), len(gc.callbacks)], "faulthandler": faulthandler.is_enabled(),
    "interpreter": [sys.getrecursionlimit(), sys.getswitchinterval(), sys.get_int_max_str_digits(),
                    sys.getdlopenflags(), sys.dont_write_bytecode],
    "builtins": sorted(vars(builtins)), "decimal": str(decimal.getcontext()),
    "exit functions": atexit._ncallbacks(),
    "policy": name_of(asyncio.get_event_loop_policy()),
    "environment": {k: v for k, v in os.environ.items() if not any(word in k for word in own)},
    "files": files(), "threads": sorted(t.name.rstrip("0123456789") for t in threading.enumerate()),
    "modules": sorted(third), "timer": signal.getitimer(signal.ITIMER_REAL)[0] > 0,
    "streams": [sys.stdout is sys.__stdout__, sys.stdout.encoding, sys.stdout.line_buffering],
    "failed": str(failed),
}
drawn = {"random": random.random()}
if "numpy.random" in sys.modules:
    drawn["numpy"] = float(sys.modules["numpy.random"].rand())
if "torch" in sys.modules and hasattr(sys.modules["torch"], "rand"):
    drawn["torch"] = float(sys.modules["torch"].rand(1, dtype=sys.modules["torch"].float64))
out = os.environ["SNAPSHOT_TO"] + os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(out, "w") as file:
    json.dump({"state": state, "values": values(), "drawn": drawn, "early": early}, file, default=str)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ.get("SNAPSHOT_AGAIN"):
    os._exit(1)
"""

VET = """
import os, sys, time
from phalanx.warm.import_cache import ImportCache
from phalanx.zygote.spawner import Spawner
learned = ImportCache(["script", sys.argv[1]], os.environ)
lines = learned.all_lines()
helpers = Spawner("python", preload=lines)
while helpers.importing:
    helpers.events()
learned.judge(lines, helpers.log)
learned.save()
for line in helpers.log.in_words():
    print(line)
helpers.close()
"""


class PackageResult:
    """What was found about one package."""

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self.module = module
        self.missing = ""
        self.early = False
        self.left_out: list[str] = []
        self.differences: list[str] = []

    def row(self) -> str:
        if self.missing:
            return f"| {self.name} | – | {self.missing} |"
        verdict = "**differs**: " + "; ".join(self.differences) if self.differences else "same"
        how = "preloaded" if self.early else "imported by the workers"
        left_out = "; ".join(self.left_out[:3]) + (" …" if len(self.left_out) > 3 else "")
        return f"| {self.name} | {verdict} | {how}{': ' + left_out if left_out else ''} |"


def examine(python: str, name: str, module: str) -> PackageResult:
    """Launch a script that imports the package in four ways, and compare."""
    result = PackageResult(name, module)
    with tempfile.TemporaryDirectory(prefix="warm-packages") as folder:
        script = Path(folder, "script.py")
        script.write_text(SNAPSHOT.replace("MODULE", module))
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
        env |= {"PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": f"{folder}/cache", "PYTHONHASHSEED": "0"}
        env |= {"TMPDIR": folder, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

        def launch(kind: str, *words: str, **more: str) -> dict[str, Any]:
            out = f"{folder}/{kind}"
            command = [python, "-m", "phalanx", "run", "--nproc-per-node", "1", "-q", *words, str(script)]
            done = subprocess.run(
                command, env={**env, **more, "SNAPSHOT_TO": out}, capture_output=True, text=True, timeout=HUNG
            )
            last = f"{out}1" if more else f"{out}0"
            if not os.path.exists(last):
                raise RuntimeError(f"{kind}: exit code {done.returncode}: {done.stderr[-300:]}")
            return dict(json.loads(Path(last).read_text()))

        cold = launch("cold", "--warm", "off")
        if cold["state"]["failed"]:
            result.missing = cold["state"]["failed"][:150]
            return result
        first = launch("first")
        vetted = subprocess.run(
            [python, "-c", VET, str(script)],
            env=env,
            capture_output=True,
            text=True,
            timeout=HUNG,
            check=True,
        )
        result.left_out = vetted.stdout.splitlines()
        again = launch("second", "--max-restarts", "1", SNAPSHOT_AGAIN="1")
        second = dict(json.loads(Path(folder, "second0").read_text()))
        result.early = second["early"]
        result.differences = compare({"cold": cold, "launch 1": first, "launch 2": second, "restart": again})
    return result


def compare(found: dict[str, dict[str, Any]]) -> list[str]:
    """What is not the same, in words."""
    cold, first, second, again = found.values()
    differences = []
    for kind, snapshot in list(found.items())[1:]:
        for what, value in cold["state"].items():
            if snapshot["state"].get(what) != value and what != "environment":
                differences.append(f"{kind}: {what}: {_first_difference(value, snapshot['state'].get(what))}")
        theirs = {k: v for k, v in snapshot["state"]["environment"].items() if not k.startswith("SNAPSHOT")}
        ours = {k: v for k, v in cold["state"]["environment"].items() if not k.startswith("SNAPSHOT")}
        if ours != theirs:
            differences.append(f"{kind}: environment: {_first_difference(ours, theirs)}")
        differences += [
            f"{kind}: {name} = {snapshot['values'].get(name)} instead of {value}"
            for name, value in cold["values"].items()
            if first["values"].get(name) == value != snapshot["values"].get(name)
            and name not in OF_NO_MEANING
        ]
    shots = list(found.values())
    for name, value in cold["values"].items():
        if first["values"].get(name) != value and second["values"].get(name) == again["values"].get(name):
            differences.append(f"random, but shared: {name}")
    for name in cold["drawn"]:
        if len({shot["drawn"].get(name) for shot in shots}) != len(shots):
            differences.append(f"the same random numbers: {name}")
    return differences


def _first_difference(one: Any, two: Any) -> str:
    if isinstance(one, list) and isinstance(two, list):
        lost = [str(x) for x in one if x not in two][:3]
        new = [str(x) for x in two if x not in one][:3]
        return f"without {lost}, with {new}" if lost or new else "another order"
    if isinstance(one, dict) and isinstance(two, dict):
        keys = [key for key in {**one, **two} if one.get(key) != two.get(key)][:3]
        return ", ".join(f"{key}: {one.get(key)} → {two.get(key)}" for key in keys)
    return f"{one} → {two}"


def table(python: str, names: Iterable[str]) -> Iterable[PackageResult]:
    """One result after the other."""
    for name in names:
        began = time.monotonic()
        try:
            result = examine(python, name, PACKAGES.get(name, name))
        except (RuntimeError, subprocess.SubprocessError) as error:
            result = PackageResult(name, name)
            result.differences = [f"{type(error).__name__}: {error}"[:300].replace("\n", " ")]
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        yield result


def main(words: list[str]) -> int:
    """Print the table."""
    python = sys.executable
    if words[:1] == ["--python"]:
        python, words = words[1], words[2:]
    bad = 0
    for result in table(python, words or list(PACKAGES)):
        bad += bool(result.differences)
        print(result.row(), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
