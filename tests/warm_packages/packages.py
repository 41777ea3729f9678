"""What is examined: a package, what is imported of it, and what is installed for that."""

from __future__ import annotations

# PACKAGE=MODULE[,MODULE...]; those that have both names the same stand for themselves.
_LIST = """
numpy=numpy,numpy.random,numpy.linalg,numpy.fft,numpy.ma,numpy.polynomial
torch=torch,torch.nn,torch.optim,torch.utils.data,torch.distributed,torch.nn.functional,torch.nn.parallel,torch.multiprocessing,torch.amp,torch.cuda,torch.utils.checkpoint,torch.optim.lr_scheduler
torch-distributed=torch.distributed,torch.distributed.fsdp,torch.distributed.device_mesh,torch.distributed.tensor,torch.distributed.checkpoint,torch.distributed.elastic.multiprocessing.errors,torch.distributed.algorithms.join
torch-dynamo=torch._dynamo transformers transformers-trainer=transformers,transformers.trainer
jax=jax,jax.numpy,jax.random accelerate lightning pytorch-lightning=pytorch_lightning
pandas scipy=scipy,scipy.stats,scipy.sparse,scipy.optimize,scipy.signal,scipy.ndimage,scipy.spatial
scikit-learn=sklearn,sklearn.linear_model,sklearn.metrics matplotlib=matplotlib,matplotlib.pyplot
datasets tokenizers huggingface_hub safetensors=safetensors,safetensors.torch wandb mlflow
tensorboard=tensorboard,torch.utils.tensorboard flax=flax,flax.linen optax chex
orbax-checkpoint=orbax.checkpoint opencv=cv2 pillow=PIL,PIL.Image pyarrow polars numba sympy ray
grpcio=grpc s3fs boto3 hydra-core=hydra omegaconf pydantic rich=rich,rich.console,rich.progress
tqdm=tqdm,tqdm.auto requests aiohttp httpx fastapi uvicorn click typer absl-py=absl,absl.logging,absl.flags
protobuf=google.protobuf,google.protobuf.message h5py zarr xarray dask=dask,dask.array einops peft timm
torchmetrics torchvision torchaudio sentencepiece nltk seaborn plotly=plotly,plotly.graph_objects networkx
scikit-image=skimage onnx onnxruntime imageio gymnasium optuna xgboost lightgbm
statsmodels=statsmodels.api cloudpickle joblib msgpack orjson lxml=lxml,lxml.etree beautifulsoup4=bs4
sqlalchemy redis psutil pyyaml=yaml jsonschema attrs=attr,attrs loguru fsspec gcsfs
google-cloud-storage=google.cloud.storage tiktoken sentence-transformers=sentence_transformers diffusers
cuda-bindings=cuda.bindings,cuda.bindings.driver,cuda.bindings.runtime
evaluate deepspeed bitsandbytes einx jaxtyping beartype librosa soundfile catboost ipython=IPython triton
faiss-cpu=faiss spacy kornia albumentations
nvidia-ml-py=pynvml httpcore flatbuffers cython=Cython pydot monkeytype dill multiprocess six
"""
PACKAGES = {word.partition("=")[0]: word.rpartition("=")[2].split(",") for word in _LIST.split()}

# What is installed, where it is not the package alone.
_TORCH = "torch==2.13.0"  # the constraint of all: its CPU build is large enough
INSTALLED = {
    "torch": [_TORCH, "numpy"],
    "torch-distributed": [_TORCH, "numpy"],
    "torch-dynamo": [_TORCH, "numpy"],
    "transformers": ["transformers", _TORCH],
    "transformers-trainer": ["transformers", "accelerate", _TORCH],
    "safetensors": ["safetensors", _TORCH, "numpy"],
    "tensorboard": ["tensorboard", _TORCH],
    "opencv": ["opencv-python-headless"],
    "bitsandbytes": ["bitsandbytes", _TORCH],
    "torchvision": ["torchvision", _TORCH],
    "torchaudio": ["torchaudio", _TORCH],
    "einops": ["einops", "numpy"],
    "dask": ["dask", "numpy"],
    "diffusers": ["diffusers", _TORCH, "transformers", "accelerate"],
    "deepspeed": ["deepspeed", _TORCH, "setuptools"],
    "jaxtyping": ["jaxtyping", "numpy"],
    "faiss-cpu": ["faiss-cpu"],
}
CONSTRAINTS = [_TORCH]
# What cannot be examined, and why.
_NO_CPU_BUILD = "not examined: its package index has builds for CUDA only"
REMARKS = {
    "torchvision": _NO_CPU_BUILD,
    "torchaudio": _NO_CPU_BUILD,
    "timm": "not examined: needs torchvision, which has builds for CUDA only",
}

# Gigabytes of CUDA, which nothing here needs: never installed.
_NEVER = """
nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-cublas nvidia-cublas-cu12 nvidia-cudnn-cu12 nvidia-cudnn-cu13
nvidia-cuda-runtime nvidia-cuda-runtime-cu12 nvidia-cuda-nvrtc nvidia-cuda-nvrtc-cu12 nvidia-cufft
nvidia-cusolver nvidia-cusparse nvidia-nvjitlink nvidia-cusparselt-cu13 nvidia-nvshmem-cu13 cuda-toolkit
"""
NEVER = _NEVER.split()


def installed_for(package: str) -> list[str]:
    """What pip gets."""
    return INSTALLED.get(package, [package])
