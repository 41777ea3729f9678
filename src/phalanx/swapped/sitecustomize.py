"""Installs the swap in a Python that was started with this directory on PYTHONPATH (see phalanx/swap.py)."""

import os
import sys


def _next_sitecustomize() -> None:
    """Run the sitecustomize that this one hides."""
    import importlib.machinery
    import importlib.util

    here = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    import phalanx.swap

    phalanx.swap.install(children=False)  # the environment has what they need
except ImportError:
    pass  # another interpreter, without Phalanx
_next_sitecustomize()
