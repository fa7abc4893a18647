"""Pickles of plain values and arrays of bytes, read without running what else they ask for."""

import io
import math
import pickle
import pickletools
from typing import Any

import torch
from torch import Tensor

# How numpy 1 and 2 name what makes an array.
_MAKERS = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}
_BUFFERS = {("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer")}


def read_arrays(content: bytes, what: str) -> dict[str, Any]:
    """Read a pickled dict of numbers, text, lists and arrays of bytes.

    Nothing of numpy or of any other module is called: the names that a pickled array asks for are answered by
    stand-ins that only take note of shape and bytes, and every other name is refused.

    Args:
        content: The pickle, of Python 2 or 3.
        what: What it is, for errors.

    Returns:
        The dict, its keys as text, arrays as uint8 tensors.

    Raises:
        ValueError: it is damaged, holds something else, or asks for another name; the message tells the name.
    """
    try:
        _check_claims(content)
        stored = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(stored, dict):
            raise ValueError(f"a {type(stored).__name__} in place of a dict")
        return {_text(key): _plain(value) for key, value in stored.items()}
    except MemoryError:
        raise
    # A damaged pickle can raise nearly anything.
    except Exception as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{what} must be a whole pickle of plain values and arrays of bytes, got: {why}") from None


def _check_claims(content: bytes) -> None:
    """Raise ValueError where the pickle claims more bytes or values than it has, before memory is taken for them."""
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name.endswith("PUT") and int(argument) > number:  # type: ignore[arg-type]
            raise ValueError(f"place {argument} for the value of number {number}")


class _StandIn:
    """Neither takes state nor is called, unless a subclass says how."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise ValueError(f"state for {type(self).__name__}")


class _ArrayType(_StandIn):
    __slots__ = ()


class _ByteType(_StandIn):
    """The type of an array's elements: bytes alone."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like mean nothing to bytes."""


class _MakeType(_StandIn):
    __slots__ = ()

    def __call__(self, code: Any, *_: Any) -> _ByteType:
        if _text(code) not in ("u1", "|u1"):
            raise ValueError(f"an array of {_text(code)!r}, not of bytes")
        return _ByteType()


class _Array(_StandIn):
    """An array that is being read."""

    __slots__ = ("content", "shape")

    def __setstate__(self, state: Any) -> None:
        _, self.shape, kind, fortran, content = state
        if not isinstance(kind, _ByteType) or fortran:
            raise ValueError("an array that is not of bytes, row by row")
        self.content = content

    def tensor(self) -> Tensor:
        """Uint8 of its shape."""
        content = self.content.encode("latin1") if isinstance(self.content, str) else self.content
        if not isinstance(self.shape, tuple) or {type(length) for length in self.shape} - {int}:
            raise ValueError("an array whose shape is no tuple of whole numbers")
        if not isinstance(content, bytes | bytearray) or math.prod(self.shape) != len(content):
            raise ValueError(f"an array of shape {str(self.shape)[:60]} without its bytes")
        if not content:
            return torch.empty(self.shape, dtype=torch.uint8)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(self.shape)


class _MakeArray(_StandIn):
    __slots__ = ()

    def __call__(self, *_: Any) -> _Array:
        return _Array()


class _FromBuffer(_StandIn):
    """How protocol 5 makes an array at once."""

    __slots__ = ()

    def __call__(self, content: Any, kind: Any, shape: Any, order: Any) -> _Array:
        array = _Array()
        array.__setstate__((1, shape, kind, order != "C", content))
        return array


class _Encode(_StandIn):
    """How Python 3 writes bytes where the protocol has none."""

    __slots__ = ()

    def __call__(self, text: str, encoding: str) -> bytes:
        if _text(encoding) != "latin1":
            raise ValueError(f"text encoded as {_text(encoding)!r}")
        return text.encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _MAKERS:
            return _MakeArray()
        if (module, name) in _BUFFERS:
            return _FromBuffer()
        if (module, name) == ("numpy", "ndarray"):
            return _ArrayType()
        if (module, name) == ("numpy", "dtype"):
            return _MakeType()
        if (module, name) == ("_codecs", "encode"):
            return _Encode()
        raise ValueError(f"the name {module}.{name}, which no such file needs")


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.tensor()
    if isinstance(value, _StandIn):
        raise ValueError(f"{type(value).__name__} in place of a value")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, bytes | str):  # and never str(value): lists of lists of one list have no end
        raise ValueError(f"{type(value).__name__} in place of text")
    return value.decode("latin1") if isinstance(value, bytes) else value
