"""Kept state in one process: what comes back, which memory is used, and what survives what."""

from __future__ import annotations

import array
import gc
import os
import pickle
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from phalanx.agent.state.spill import SpillDirectory
from phalanx.errors import StateError
from phalanx.worker.state import memory_limit
from phalanx.worker.state.agreement import newest_common
from phalanx.worker.state.memory_file import NAMES, REGIONS, MemoryFile, region_at
from phalanx.worker.state.rank_state import RankState, StatePlace, read_place
from phalanx.worker.state.tree_codec import encode, torch_view


@pytest.fixture
def file() -> Iterator[MemoryFile]:
    made = MemoryFile.create()
    yield made
    made.close()
    gc.collect()  # trees in reference cycles, such as those of an optimizer, are still mapped


def state_of(file: MemoryFile, rank: int = 0, world_size: int = 1, round_: int = 1) -> RankState:
    """As a new process sees it."""
    found = os.fstat(file.fd)
    return RankState(StatePlace(file.fd, -1, found.st_dev, found.st_ino, round_, rank, world_size))


def tree_of(state: RankState, name: str = "model", step: int | None = None, anywhere: bool = False) -> Any:
    found = state.kept(name, step, anywhere)
    return None if found is None else found.tree


def test_two_saves_are_held(file: MemoryFile) -> None:
    state = state_of(file)
    assert state.kept("model", None, False) is None
    for step in (1, 2, 3):
        state.keep("model", {"step": step, "more": ["x", (1.5, None)]}, step, True)
    again = state_of(file)
    assert tree_of(again) == {"step": 3, "more": ["x", (1.5, None)]}
    assert tree_of(again, step=2)["step"] == 2
    assert tree_of(again, step=1) is None
    assert tree_of(again, "other") is None


def test_a_tree_that_cannot_be_pickled_changes_nothing(file: MemoryFile) -> None:
    state = state_of(file)
    state.keep("model", 1, 1, True)
    state.keep("model", 2, 2, True)
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        state.keep("model", lambda: 0, 3, True)
    assert [tree_of(state, step=step) for step in (1, 2, 3)] == [1, 2, None]


@pytest.mark.parametrize("step", [-1, True, 1.5, 1 << 62])
def test_steps_are_checked(file: MemoryFile, step: Any) -> None:
    with pytest.raises(ValueError, match="step number"):
        state_of(file).keep("model", 1, step, True)


def test_names_are_checked_and_counted(file: MemoryFile) -> None:
    state = state_of(file)
    for name in ("", "x" * 201, "é" * 101):
        with pytest.raises(ValueError, match="1 to 200 bytes"):
            state.keep(name, 1, 1, True)
    for number in range(NAMES):
        state.keep(f"é {number}", number, 1, True)
    with pytest.raises(ValueError, match="no room for more"):
        state.keep("one more", 1, 1, True)
    assert tree_of(state, "é 7") == 7


def test_another_place_is_asked_for(file: MemoryFile) -> None:
    state_of(file, rank=2, world_size=4).keep("model", "of 2", 7, True)
    for state in (state_of(file, 2, 3), state_of(file, 1, 4)):
        assert tree_of(state) is None
        assert state.moments("model") == []
        found = state.kept("model", None, True)
        assert found is not None
        assert (found.tree, found.step, found.rank, found.world_size) == ("of 2", 7, 2, 4)


def test_a_damaged_header_is_not_a_save(file: MemoryFile) -> None:
    state = state_of(file)
    state.keep("model", "old", 1, True)
    state.keep("model", "new", 2, True)
    number = file.names()["model"]
    (newest, _) = file.slots(number)
    at = 4096 + 1024 * number + (256, 384)[newest.slot]
    for offset in range(64):
        byte = os.pread(file.fd, 1, at + offset)
        os.pwrite(file.fd, bytes([byte[0] ^ 1]), at + offset)
        assert tree_of(state) == ("old" if offset < 60 or byte else "new")
        os.pwrite(file.fd, byte, at + offset)
    assert tree_of(state) == "new"


def memory_of(file: MemoryFile) -> int:
    return os.fstat(file.fd).st_blocks * 512


class Buffer:
    """Something that gives its memory to pickle."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        import pickle

        return Buffer, (pickle.PickleBuffer(self.data),)


def test_a_tree_in_use_is_not_overwritten(file: MemoryFile) -> None:
    state = state_of(file)
    size = 3 << 20
    state.keep("model", Buffer(bytearray(b"a" * size)), 1, True)
    first = tree_of(state)
    for step, letter in enumerate(b"bcdefgh", 2):
        state.keep("model", Buffer(bytes([letter]) * size), step, True)
        assert bytes(first.data[:3]) + bytes(first.data[-3:]) == b"aaaaaa"
    first.data[:1] = b"z"  # a view of its own
    assert memory_of(file) < 4 * (size + (2 << 20))
    del first
    state.keep("model", Buffer(b"i" * size), 9, True)
    state.keep("model", Buffer(b"j" * size), 10, True)
    assert sum(1 for have in file.sizes(0) if have) == 2
    assert bytes(tree_of(state).data) == b"j" * size
    assert bytes(tree_of(state, step=9).data) == b"i" * size


def test_too_many_trees_in_use_are_named(file: MemoryFile) -> None:
    state = state_of(file)
    in_use = []
    for step in range(REGIONS):
        state.keep("model", Buffer(bytes(100)), step, True)
        in_use.append(tree_of(state))
    with pytest.raises(StateError, match="still in use"):
        state.keep("model", 1, REGIONS, True)


def test_what_a_killed_save_had_reserved_is_used_again(file: MemoryFile) -> None:
    state = state_of(file)
    state.keep("model", 1, 1, True)
    number = file.names()["model"]
    for region in range(1, REGIONS):
        file.grow(number, region, 0, 1 << 20)
    state_of(file).keep("model", 2, 2, True)
    assert sum(1 for have in file.sizes(number) if have) == 2


def test_the_machines_memory_is_a_limit() -> None:
    assert 0 < memory_limit.available() < 1 << 50


def test_a_control_groups_memory_is_a_limit(tmp_path: Any) -> None:
    """The files as kernels of both versions write them, in a directory of the test."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for _, kinds, path in own:
        if kinds == "":
            group = tmp_path / path.strip("/")
            group.mkdir(parents=True, exist_ok=True)
            (group / "memory.max").write_text("1000000\n")
            (group / "memory.current").write_text("600000\n")
            (group / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    found = memory_limit._groups(str(tmp_path))
    assert found == [450000] or not any(kinds == "" for _, kinds, _ in own)


def test_the_newest_save_that_all_have() -> None:
    assert newest_common([[(11, 1), (10, 1)], [(10, 1), (9, 1)]]) == (10, 1)
    assert newest_common([[(11, 2), (10, 1)], [(11, 1), (10, 1)]]) == (10, 1)  # not the same eleven
    assert newest_common([[(3, 2), (9, 1)], [(3, 2), (9, 1)]]) == (3, 2)
    assert newest_common([[(3, 2)], []]) is None
    assert newest_common([[]]) is None


def test_ranks_forget_what_they_did_not_agree_on(file: MemoryFile) -> None:
    state = state_of(file)
    state.keep("model", "ten", 10, True)
    state.keep("model", "eleven", 11, True)
    assert state.moments("model") == [(11, 1), (10, 1)]
    state.forget_newer("model", (10, 1))
    assert tree_of(state) == "ten"
    state_of(file, round_=2).keep("model", "eleven again", 11, True)
    assert state.moments("model") == [(11, 2), (10, 1)]


def test_a_save_that_was_damaged_on_disk_is_left_out(file: MemoryFile, tmp_path: Path) -> None:
    state = state_of(file)
    for step in (1, 2):
        state.keep("model", Buffer(bytes([step]) * 9_000_000), step, True)
    spill = SpillDirectory(str(tmp_path), "job")
    spill.prepare()
    assert spill.write(0, file) > 18_000_000
    (path,) = Path(spill.path).iterdir()
    good = path.read_bytes()
    for damaged_step, older in ((2, 1), (1, 2)):
        data = bytearray(good)
        start = data.index(bytes([damaged_step]) * 100)
        for offset in random.sample(range(9_000_000), 200):
            data[start + offset] ^= 1 << random.randrange(8)
        path.write_bytes(data)
        with closing(MemoryFile.create()) as again:
            (said,) = spill.read(0, again)
            assert f"'model', step {damaged_step}" in said
            assert state_of(again).moments("model") == [(older, 1)]
            assert bytes(tree_of(state_of(again)).data) == bytes([older]) * 9_000_000
            gc.collect()
    for _ in range(50):  # one bit anywhere
        data = bytearray(good)
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)
        with closing(MemoryFile.create()) as again:
            try:
                assert spill.read(0, again)
            except ValueError:
                pass  # in a record: nothing after it can be found
    path.write_bytes(good)
    with closing(MemoryFile.create()) as again:
        assert spill.read(0, again) == []
        assert state_of(again).moments("model") == [(2, 1), (1, 1)]


def test_another_processes_descriptor_is_not_taken(file: MemoryFile) -> None:
    found = os.fstat(file.fd)
    text = f"{file.fd},-1,{found.st_dev},{found.st_ino},1,0,1"
    assert read_place(text) is not None
    for wrong in ("", "1,2", text.replace(str(found.st_ino), str(found.st_ino + 1)), f"9999,{text[2:]}", "x"):
        assert read_place(wrong) is None


def test_arrays_of_numpy_come_back(file: MemoryFile) -> None:
    np = pytest.importorskip("numpy")
    tree = {
        "plain": np.arange(1000.0),
        "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "strided": np.arange(20)[::2],
        "empty": np.empty((0, 3)),
        "scalar": np.float32(1.5),
        "array": array.array("d", [1.0, 2.0]),
    }
    state_of(file).keep("model", tree, 1, True)
    found = tree_of(state_of(file))
    for name, value in tree.items():
        assert np.array_equal(found[name], value), name
    found["plain"][0] = 5  # private
    assert tree_of(state_of(file))["plain"][0] == 0


def test_tensors_of_torch_come_back(file: MemoryFile) -> None:
    torch = pytest.importorskip("torch")
    image = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    tree = {
        "image": image,
        "turned": torch.arange(6).reshape(2, 3).t(),
        "strided": torch.arange(100)[::7],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64) * 1j,
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(3).to_sparse(),
        "conjugate": (torch.ones(2, dtype=torch.complex64) * 1j).conj(),
    }
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state_of(file).keep(
        "model", [tree, model.state_dict(), optimizer.state_dict(), image, image.detach()], 1, True
    )
    found, weights, moments, same, alias = tree_of(state_of(file))
    for name, value in tree.items():
        assert torch.equal(found[name].to_dense(), value.to_dense()), name
        assert found[name].dtype == value.dtype
        assert type(found[name]) is type(value)
    assert found["image"].stride() == image.stride()
    assert found["parameter"].requires_grad
    assert same.data_ptr() == alias.data_ptr() == found["image"].data_ptr()
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(weights)
    again = torch.optim.Adam(other.parameters())
    again.load_state_dict(moments)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(
        again.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


def test_arrays_of_jax_come_back(file: MemoryFile) -> None:
    pytest.importorskip("jax")
    import jax
    import jax.numpy as jnp

    tree = {"plain": jnp.arange(5.0), "half": jnp.ones((2, 2), jnp.bfloat16), "scalar": jnp.float32(2)}
    state_of(file).keep("model", tree, 1, True)
    found = tree_of(state_of(file))
    for name, value in tree.items():
        assert isinstance(found[name], jax.Array)
        assert found[name].dtype == value.dtype
        assert (found[name] == value).all()


def test_tensors_are_read_onto_a_device(file: MemoryFile) -> None:
    """The way of CUDA tensors, with the CPU as the device; bench/gpu/keep.py has the real one."""
    torch = pytest.importorskip("torch")
    from phalanx.worker.state.device_load import DeviceLoad

    sources = {
        "large": torch.arange(10_000_000, dtype=torch.int32),  # several parts
        "small": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 2),
        "bool": torch.tensor([True, False, True]),
    }
    encoded = encode(sources)
    number = file.number_of("model")
    file.grow(number, 0, 0, encoded.used)
    mapping = file.shared(number, 0, encoded.used)
    for at, tensor in encoded.tensors:
        torch_view(torch, mapping, at, tensor.dtype, tuple(tensor.shape)).copy_(tensor)
    load = DeviceLoad("cpu")
    placed = [(load.place(at, tensor.dtype, tuple(tensor.shape)), tensor) for at, tensor in encoded.tensors]
    load.run(file.fd, region_at(number, 0))
    assert len(placed) == 4
    for found, tensor in placed:
        assert torch.equal(found, tensor)
    short = DeviceLoad("cpu")
    short.place(0, torch.uint8, (10,))
    with pytest.raises(EOFError):
        short.run(file.fd, 1 << 52)
