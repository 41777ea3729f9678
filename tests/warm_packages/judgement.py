"""One graph of all modules that were observed: rows of the shipped list, or the reason why there is none.

A module does not suit a fork if its import has an effect that a worker would miss or share, and neither does
a module that imports it. A package whose top module is among them is left out; otherwise only the submodule
is.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from phalanx.helpers.preload.packages import GOES_THROUGH_ALL

Row = tuple[str, str, tuple[str, ...]]

# Values that differ in every process, and of no consequence, or made again in a way of their own.
KNOWN = {
    # The name of a semaphore that existed during the import only.
    "joblib._multiprocessing_helpers name": "",
    # The last of a set of functions, which is in another order in every process.
    "scipy.sparse._data name": "",
    "torch._dynamo.variables.torch_function banned_attrs": "",
    # The date in the comments of C code that it writes.
    "numpy.f2py.rules module_rules": "",
    # The first number of unnamed symbols.
    "sympy.core.symbol Dummy": "randint 1000000 9000000 sympy.core.symbol Dummy._base_dummy_index",
}

# One entry for a family of variables, so that a slightly newer version is covered, too.
_FAMILIES = """
ACCELERATE_ AIOHTTP_ ALBUMENTATIONS_ AOT ARROW_ ATTR_ AWS_ BEARTYPE_ BITSANDBYTES_ BNB_ BOTO_ CATBOOST_
COLAB_ COLORLOG_ COMPILE_STROBELIGHT_ CUPY_ DASK_ DATASETS_ DEEPSPEED_ DIFFUSERS_ DNNL_ DS_ EINOPS_ EINX_
ENABLE_PJRT_ EVALUATE_ FAISS_ FLAX_ FROZENLIST_ FSSPEC_ FX_ GCSFS_ GCS_ GFORTRAN_ GIT_PYTHON_ GOMP_ GOOGLE_
GOTO_ GRPC_ GYM_ H5PY_ HDF5_ HF_ HUGGINGFACE_ HUGGING_FACE_ HYDRA_ IMAGEIO_ INDUCTOR_ IPYTHON I_MPI_ JAX2TF_
JAX_ JOBLIB_ KAGGLE_ KINETO_ KMP_ KORNIA_ LGBM_ LIBROSA_ LIBTPU_ LIGHTNING_ LOGURU_ LOKY_ MKLDNN_ MKL_
MLFLOW_ MPITRAMPOLINE_ MPL MPMATH_ MULTIDICT_ NETWORKX_ NLTK_ NO_ALBUMENTATIONS_ NPY_ NUMBA_ NUMPY_ OMPI_
OMP_ ONEDNN_ ONNX_ OPENBLAS_ OPENCV_ OPENSSL_ OPTAX_ OPTUNA_ ORBAX_ ORT_ OTEL_ PANDAS_ PEFT_ PL_ POLARS_
PROPCACHE_ PROTOCOL_BUFFERS_ PYDANTIC_ PYTORCH RAY_ REDIS_ RICH_ S3FS_ SAGEMAKER_ SCIPY_ SKIMAGE_ SKLEARN_
SM_ SPACY_ SQLALCHEMY_ SYMPY_ TF_ THINC_ TORCH TPU_ TQDM_ TRANSFORMERS_ TRITON_ WANDB_ XGB_ XLA_ YARL_ ZARR_
"""
FAMILIES = tuple(_FAMILIES.split())
# Read by libc, the linker, or Python itself, before a script could set them; and what the observer sets.
_NEVER = (
    "LD_", "LC_", "LANG", "PYTHON", "_PYTHON_", "MALLOC_", "GLIBC_", "GCONV_", "LOCPATH", "NLSPATH", "PROOF_",
)  # fmt: skip
_OF_THE_OBSERVER = {"PATH", "HOME", "TMPDIR"}
# Read by C code when a device or a connection is opened (packages.py of the preload).
_READ_LATER = (
    "CUDA_", "NCCL_", "NVIDIA_", "GLOO_", "UCX_", "HIP_", "ROCR_", "HSA_", "TORCH_NCCL_", "MASTER_",
)  # fmt: skip
_OF_A_WORKER = re.compile(
    "(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PHALANX)_.*"
)
ALL = "*"


class Module:
    """What is known about one module, from all observations."""

    def __init__(self) -> None:
        self.row = ""  # '' for the standard library and namespaces
        self.variables: set[str] = set()
        self.effects: dict[str, None] = {}
        self.imports: set[str] = set()
        self.values: set[str] = set()


class Judgement:
    """Built from observations; `rows` and `left_out` are what ships."""

    def __init__(self) -> None:
        self.modules: dict[str, Module] = {}
        self.versions: dict[str, str] = {}
        self.distributions: dict[str, str] = {}
        self.rows: dict[str, Row] = {}
        self.left_out: dict[str, str] = {}
        self._graphs: list[dict[str, set[str]]] = []  # of each environment: module → what it imports
        self._unsuitable: set[str] = set()

    def add(self, one: dict[str, Any], two: dict[str, Any], unproven: str = "") -> None:
        """Two observations of the same import, in two processes; `unproven`: why they do not suffice."""
        graph: dict[str, set[str]] = {}
        self._graphs.append(graph)
        for seen in (one, two):
            for name, facts in seen["modules"].items():
                module = self._module(name)
                module.row = seen["rows"].get(name, "")
                # A function of the standard library that imports for others (pkgutil) is no importer.
                imports = {one for one in facts["imports"] if _is_standard(one) or not _is_standard(name)}
                module.imports |= imports
                graph.setdefault(name, set()).update(imports)
                module.effects |= dict.fromkeys(facts["effects"])
                self._add_reads(name, module, facts)
            for name, row in seen["rows"].items():  # those that were put into sys.modules by others, too
                self._module(name).row = row
                graph.setdefault(name, set())
            for row, (distribution, version) in seen["versions"].items():
                self.distributions[row] = distribution
                version = version.partition("+")[0]
                if _key(version) >= _key(self.versions.get(row, "0")):
                    self.versions[row] = version
            main = self._module(seen["asked"][0])
            main.effects |= dict.fromkeys(seen["whole"]["effects"])
        for name, why in {**one["failed"], **two["failed"]}.items():
            module = self._module(name)
            module.row = module.row or name  # it is not there any more
            graph.setdefault(name, set())
            module.effects[f"cannot be imported: {why}"] = None
        main = self._module(two["asked"][0])
        if unproven:
            main.effects[unproven] = None
        for variable, value in two["whole"]["environment"].items():
            if one["whole"]["environment"].get(variable) != value:
                main.effects[f"sets {variable[2:-1]} to a random value"] = None
        self._add_values(one, two, main)

    def _module(self, name: str) -> Module:
        return self.modules.setdefault(name, Module())

    def _add_reads(self, name: str, module: Module, facts: dict[str, Any]) -> None:
        reads = set(facts["reads"])
        if ALL in reads:
            reads -= {ALL, *_OF_THE_OBSERVER}
            looked_for = GOES_THROUGH_ALL.get(module.row, GOES_THROUGH_ALL.get(name.partition(".")[0]))
            if looked_for is None:
                module.effects["reads all variables, RANK among them"] = None
            else:
                reads.add(looked_for)
        later = {word for word in facts["c reads"] if not word.startswith(_READ_LATER)}
        for variable in sorted(reads | later):
            if _OF_A_WORKER.fullmatch(variable):
                module.effects[f"reads {variable}"] = None
            elif not variable.startswith(_NEVER):
                module.variables.add(variable)

    def _add_values(self, one: dict[str, Any], two: dict[str, Any], main: Module) -> None:
        for place in two["words"]:
            module = self._module(place.partition(" ")[0])
            if place not in KNOWN:
                name = place.partition(" ")[2]
                module.effects[f"makes a random value ({name})"] = None
            elif KNOWN[place]:
                module.values.add(KNOWN[place])
        for line in two["again"]:
            self._module(line.split(" ")[1]).values.add(line)
        texts = {found["text"] for found in one["uuids"]}
        for found in two["uuids"]:
            module = self._module(found["module"])
            if found["text"] not in texts and found["all"]:
                for place in found["places"]:
                    self._module(place.partition(" ")[0]).values.add(f"uuid {place}")
            elif found["text"] not in texts:
                module.effects["keeps a random identifier"] = None
        states = {found["state"] for found in one["generators"]}
        for found in two["generators"]:
            same = found["state"] in states
            if found["at"] == "random _inst":
                if same:
                    main.effects["seeds the generator of `random`"] = None
            elif not same and found["at"]:
                self._module(found["at"].partition(" ")[0]).values.add(f"seed {found['at']}")
            elif not same:
                main.effects[f"keeps a random generator out of reach ({found['kind']})"] = None

    # -- the verdict --------------------------------------------------------------------------------

    def settle(self) -> None:
        """Fill in `rows` and `left_out`."""
        cause: dict[str, str] = {}  # unsuitable module → the one that made it so
        for graph in self._graphs:
            for name, why in self._causes(graph).items():
                cause.setdefault(name, why)
        for (
            graph
        ) in self._graphs:  # what suits a fork where a package is missing that it can do without does so
            found = self._causes(graph)
            for name in graph:
                if name not in found:
                    cause.pop(name, None)
        self._unsuitable = set(cause)
        for row in sorted({module.row for module in self.modules.values()} - {""}):
            inside = [name for name, module in self.modules.items() if module.row == row]
            if row in cause:
                self.left_out[row] = self._why(row, cause[row])
                continue
            for name in inside:
                parent = name.rpartition(".")[0]
                if name in cause and parent not in cause:
                    self.left_out[name] = self._why(name, cause[name])
            suitable = [name for name in inside if name not in cause]
            if row in self.versions:
                own = {line for name in suitable for line in self.modules[name].values}
                self.rows[row] = self.versions[row], " ".join(self._variables(suitable)), tuple(sorted(own))

    def _causes(self, graph: dict[str, set[str]]) -> dict[str, str]:
        """In one environment: each unsuitable module, and the one with an effect that it imports."""
        importers: dict[str, set[str]] = {name: set() for name in graph}
        for name, imported in graph.items():
            for one in {*imported, name.rpartition(".")[0]} & graph.keys():
                importers[one].add(name)
        pending = deque(name for name in graph if self.modules[name].effects)
        cause = {name: name for name in pending}
        while pending:
            name = pending.popleft()
            for importer in sorted(importers[name] - cause.keys()):
                cause[importer] = cause[name]
                pending.append(importer)
        return cause

    def _why(self, name: str, cause: str) -> str:
        row, other = self.modules[name].row, self.modules[cause].row
        effect = next(iter(self.modules[cause].effects))
        if other == row or not other:
            return effect if cause == name else f"{cause}: {effect}"
        return f"imports {cause if other not in self.left_out and cause != other else other}"

    def _variables(self, modules: Iterable[str]) -> list[str]:
        """What they and everything that they import read."""
        seen = set(modules)
        pending = deque(seen)
        found: set[str] = set()
        while pending:
            name = pending.popleft()
            module = self.modules.get(name)
            if module is None or name in self._unsuitable:
                continue
            found |= module.variables
            new = module.imports - seen
            seen |= new
            pending.extend(new)
        return sorted({_family(name) for name in found})


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _family(variable: str) -> str:
    return next((f"{prefix}*" for prefix in FAMILIES if variable.startswith(prefix)), variable)


def _key(version: str) -> list[int]:
    return [int(word) for word in re.findall(r"\d+", version)]
