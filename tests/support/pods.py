"""Pods as Kubernetes makes them from our manifest: real containers (runc), each in a network of its own.

The image is this machine's programs and libraries, read-only. A pod has a user without a name, a home that
nobody can write to, 64 MB of /dev/shm unless the manifest has another, a token from a Secret, a termination
log, names in /etc/hosts and DNS. The kubelet is the test: it ends pods, and makes them again elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.late_names import LateNames
from tests.support.netns import Network
from tests.support.run_helpers import Running

DOMAIN = "default.svc.cluster.local"
USER = 12345
_ROOT = Path(__file__).parents[2]
_NAMESPACES = ("pid", "ipc", "uts", "mount")


@cache
def containers_possible() -> bool:
    """Whether runc is there, and allowed to make a container."""
    if os.geteuid() or shutil.which("runc") is None:
        return False
    folder = Path(f"/tmp/pods-try-{os.getpid()}")
    try:
        _bundle(folder, _config(["true"], [], "try", []))
        return subprocess.run(_runc(folder, folder.name), capture_output=True, check=False).returncode == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Pods:
    """The pods of one Job; `documents`: the manifest."""

    def __init__(self, folder: Path, documents: list[dict[str, Any]]) -> None:
        self.folder = folder
        job = next(one for one in documents if one["kind"] == "Job")
        secret = next(one for one in documents if one["kind"] == "Secret")
        self.name: str = job["metadata"]["name"]
        self.spec: dict[str, Any] = job["spec"]["template"]["spec"]
        names = [f"{self.name}-{index}" for index in range(job["spec"]["completions"])]
        self.network = Network(*names)
        self.names: LateNames | None = None
        self.data = folder / "data"  # a volume that all of them share
        self.data.mkdir()
        self.data.chmod(0o777)
        self.app = folder / "app"  # where the image has the script
        self.app.mkdir()
        self.app.chmod(0o755)
        self._lay_out_secret(secret["stringData"])
        self._made = 0
        self._pods: list[Pod] = []

    def __enter__(self) -> Pods:
        self.network.__enter__()
        try:
            self.names = LateNames(self.network.switch, self.folder)
            self.names.__enter__()
        except BaseException:
            self.network.__exit__()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pod in self._pods:
            if kind is not None:
                pod.read_rest()
                print(f"---- {pod.name}\n{pod.text}")
            pod.__exit__(kind, error, trace)
        if self.names is not None:
            self.names.__exit__(kind, error, trace)
        self.network.__exit__()

    def _lay_out_secret(self, found: dict[str, str]) -> None:
        """As the kubelet does it: links to a directory that is replaced as a whole."""
        real = self.folder / "secret" / "..2026"
        real.mkdir(parents=True)
        real.parent.chmod(0o1777)
        (real.parent / "..data").symlink_to("..2026")
        for name, text in found.items():
            (real / name).write_text(text)
            (real / name).chmod(0o444)
            (real.parent / name).symlink_to(f"..data/{name}")

    def start(self, index: int, command: Sequence[str] = ()) -> Pod:
        """Make the pod of an index; each one has an address that none had before.

        `command`: instead of the one in the manifest."""
        self._made += 1
        host = self.network.hosts[f"{self.name}-{index}"]
        address = f"10.77.0.{100 + self._made}"
        inside = ["ip", "-n", host.namespace, "addr"]
        subprocess.run([*inside, "flush", "dev", "eth0"], check=True)
        subprocess.run([*inside, "add", f"{address}/24", "dev", "eth0"], check=True)
        folder = self.folder / f"pod{self._made}"
        container = self.spec["containers"][0]
        full = f"{host.name}.{self.spec['subdomain']}.{DOMAIN}"
        for name, text in {
            "nsswitch.conf": "hosts: files dns\n",
            "hosts": f"127.0.0.1\tlocalhost\n{address}\t{full}\t{host.name}\n",
            "termination-log": "",
        }.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
            (folder / name).chmod(0o666)
        assert self.names is not None
        mounts = [
            _bind(self.data, "/data", "rw"),
            _bind(self.folder / "secret", "/var/run/secrets/phalanx"),
            _bind(folder / "hosts", "/etc/hosts"),
            _bind(folder / "nsswitch.conf", "/etc/nsswitch.conf"),
            _bind(self.names.resolver, "/etc/resolv.conf"),
            _bind(folder / "termination-log", "/dev/termination-log", "rw"),
            _bind(self.app, "/app"),
        ]
        environ = [
            f"JOB_COMPLETION_INDEX={index}",
            "KUBERNETES_SERVICE_HOST=10.0.0.1",
            "PHALANX_JOB_UID=0a1b2c3d-0000-0000-0000-000000000000",
        ]
        environ += [f"{one['name']}={one['value']}" for one in container["env"] if "value" in one]
        words = list(command) or [word.replace("$$(", "$(") for word in container["command"]]
        config = _config(words, environ, host.name, mounts, f"/var/run/netns/{host.namespace}")
        config["process"]["cwd"] = "/app"
        if any(one["name"] == "tmp" for one in self.spec["volumes"]):  # else only /dev/shm can be written
            tmp = {"destination": "/tmp", "type": "tmpfs", "source": "tmp", "options": ["mode=1777"]}
            config["mounts"].insert(1, tmp)  # early: the checkout may be below it
        _bundle(folder, config)
        pod = Pod(host.name, full, address, folder, f"{host.namespace}-{self._made}")
        self._pods.append(pod)
        return pod


class Pod(Running):
    """One container, from its start to its end."""

    def __init__(self, name: str, full_name: str, address: str, folder: Path, container: str) -> None:
        self.name, self.full_name, self.address = name, full_name, address
        self._folder, self._container = folder, container
        super().__init__([], launcher=_runc(folder, container), env={"PATH": os.environ["PATH"]})

    @property
    def record(self) -> str:
        """Its name in DNS."""
        return f"{self.full_name} {self.address}"

    @property
    def termination_log(self) -> str:
        """What Kubernetes would show."""
        return (self._folder / "termination-log").read_text()

    def kill(self) -> None:
        """End it at once, as the loss of its machine would."""
        subprocess.run(
            ["runc", "--root", str(self._folder / "state"), "kill", self._container, "KILL"],
            check=True,
            capture_output=True,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(
            ["runc", "--root", str(self._folder / "state"), "delete", "--force", self._container],
            check=False,
            capture_output=True,
        )
        super().__exit__(kind, error, trace)


def _runc(folder: Path, name: str) -> list[str]:
    return ["runc", "--root", str(folder / "state"), "run", "--bundle", str(folder), name]


def _bind(source: Path, target: str, mode: str = "ro") -> dict[str, Any]:
    return {"destination": target, "type": "none", "source": str(source), "options": ["rbind", mode]}


def _config(
    words: list[str], environ: list[str], host: str, mounts: list[dict[str, Any]], network: str = ""
) -> dict[str, Any]:
    """A container as the OCI's runtime specification describes it."""
    programs = {"/usr", "/bin", "/sbin", "/lib", "/lib64", sys.base_prefix, sys.prefix, str(_ROOT)}
    image = [_bind(Path(path), path) for path in sorted(programs) if os.path.exists(path)]
    namespaces: list[dict[str, str]] = [{"type": kind} for kind in _NAMESPACES]
    namespaces.append({"type": "network", **({"path": network} if network else {})})
    memory = ["nosuid", "nodev", "mode=1777", "size=65536k"]
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": USER, "gid": 0},
            "args": words,
            "env": [
                f"PATH={Path(sys.executable).parent}:/usr/bin:/bin",
                "PYTHONDONTWRITEBYTECODE=1",
                *environ,
            ],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": host,
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755", "size=64k"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": memory},
            *image,
            *mounts,
        ],
        "linux": {"namespaces": namespaces},
    }


def _bundle(folder: Path, config: dict[str, Any]) -> None:
    (folder / "rootfs").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
