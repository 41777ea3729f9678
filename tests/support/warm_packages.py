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

from tests.support.vet import VET

ROOT = Path(__file__).parents[2]
HUNG = 600.0  # seconds
# The last value of a loop over a set of functions, which has another order in every process, and the name of
# a semaphore that is gone.
OF_NO_MEANING = {
    "scipy.sparse._data.name",
    "torch._dynamo.variables.torch_function.banned_attrs",
    "joblib._multiprocessing_helpers.name",
}

# distribution → what is imported; those that have both names the same stand for themselves
_LIST = """
numpy pandas scipy=scipy.stats scikit-learn=sklearn.linear_model matplotlib=matplotlib.pyplot torch
torch-distributed=torch.distributed torch-dynamo=torch._dynamo transformers
transformers-trainer=transformers.trainer datasets tokenizers huggingface_hub accelerate lightning
wandb mlflow tensorboard=torch.utils.tensorboard jax flax optax chex
orbax-checkpoint=orbax.checkpoint opencv=cv2 pillow=PIL.Image pyarrow polars numba sympy ray
grpcio=grpc s3fs boto3 hydra-core=hydra omegaconf pydantic rich=rich.console tqdm requests aiohttp
httpx fastapi uvicorn click typer absl-py=absl.logging protobuf=google.protobuf.message h5py zarr
xarray dask=dask.array einops safetensors=safetensors.torch peft timm torchmetrics torchvision
sentencepiece nltk seaborn plotly=plotly.graph_objects networkx scikit-image=skimage onnx
onnxruntime imageio gymnasium optuna xgboost lightgbm statsmodels=statsmodels.api cloudpickle joblib
msgpack orjson lxml=lxml.etree beautifulsoup4=bs4 sqlalchemy redis psutil pyyaml=yaml jsonschema
attrs=attr loguru fsspec gcsfs google-cloud-storage=google.cloud.storage tiktoken
sentence-transformers=sentence_transformers diffusers evaluate deepspeed bitsandbytes einx jaxtyping
beartype librosa soundfile catboost ipython=IPython triton faiss-cpu=faiss spacy kornia
albumentations
"""
PACKAGES = {word.partition("=")[0]: word.rpartition("=")[2] for word in _LIST.split()}

SNAPSHOT = (Path(__file__).parent / "package_snapshot.py").read_text()


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
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
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
    differences += [
        f"random, but shared: {name}"
        for name, value in cold["values"].items()
        if first["values"].get(name) != value
        and second["values"].get(name) == again["values"].get(name)
        and name not in OF_NO_MEANING
        and not _is_time_or_address(value)
    ]
    for name in cold["drawn"]:
        if len({shot["drawn"].get(name) for shot in shots}) != len(shots):
            differences.append(f"the same random numbers: {name}")
    return differences


def _is_time_or_address(text: str) -> bool:
    """In whole seconds: a restart takes less."""
    if " at 0x" in text:
        return True
    return text.isdigit() and (abs(int(text) - time.time()) < 3600 or 1 << 32 <= int(text) < 1 << 47)


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
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
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
