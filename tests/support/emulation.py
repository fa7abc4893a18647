"""CPU kernels built for another processor, each call run by an emulator: `native.LIBRARY` without that processor."""

import ctypes
import gc
import shutil
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from building import KERNELS, compile_sources
from torch import Tensor, nn

from torchrope.ops import native

CROSS_COMPILER = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")

_REPLAY = Path(__file__).with_name("replay.c")
_NAMES = tuple(f"torchrope_{name}" for name in ("planar", "block", "basis", "skew_exp", "skew_eig"))


def build_program(program: Path, compiler: str, *flags: str) -> Path:
    """Compile the kernels, with a main function that runs one call of them, into a program without dependencies."""
    return compile_sources(compiler, [*KERNELS, _REPLAY], program, "-static", *flags)


class EmulatedLibrary:
    """What stands in for a `ctypes.CDLL` of kernels: a program that runs one call and ends.

    Args:
        command: The program of `build_program`, after the emulator if it needs one.
    """

    def __init__(self, *command: str | Path) -> None:
        self._command = command
        self._name = " ".join(map(str, command))
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name not in _NAMES:
            raise AttributeError(name)
        return lambda arguments, backward: self._call(name, arguments, int(backward))

    def _call(self, name: str, arguments: bytes, backward: int) -> int:
        self.calls.append(name)
        used, pointers = _find_memory(name, arguments)
        pieces = [ctypes.string_at(address, size) for address, size in used]
        numbers = [_NAMES.index(name), backward, len(arguments), len(pointers), len(pieces), *sum(pointers, ())]
        numbers += [size for _, size in used]
        sent = struct.pack(f"{len(numbers)}q", *numbers) + arguments + b"".join(pieces)
        left = subprocess.run(self._command, input=sent, capture_output=True, check=True).stdout
        at = 8
        for address, size in used:
            ctypes.memmove(address, left[at : at + size], size)
            at += size
        assert at == len(left)
        return int(struct.unpack_from("q", left)[0])


def _find_memory(name: str, arguments: bytes) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Find the tensors that arguments point into.

    Returns:
        Address and bytes of each piece of memory; and for each pointer its offset in the arguments, the index of its
        piece, and the byte of the piece that it points at.
    """
    known = sorted(_memory_of_tensors())
    used: list[tuple[int, int]] = []
    pointers = []
    values = native.STRUCTS[name].unpack(arguments)
    for index, (kind, address) in enumerate(zip(native.kinds(name), values, strict=True)):
        if kind != "P" or not address:
            continue
        piece = known[bisect_right(known, (address, 1 << 62)) - 1]
        assert piece[0] <= address < sum(piece), "a kernel must be called on the memory of tensors"
        if piece not in used:
            used.append(piece)
        pointers.append((8 * index, used.index(piece), address - piece[0]))
    return used, pointers


def _memory_of_tensors() -> Iterator[tuple[int, int]]:
    """Yield address and bytes of the storage of every tensor that is alive."""
    for value in gc.get_objects():
        if type(value) in (Tensor, nn.Parameter) and value.is_cpu and value.layout is torch.strided:
            storage = value.untyped_storage()
            if storage.nbytes() and storage.data_ptr():
                yield storage.data_ptr(), storage.nbytes()
