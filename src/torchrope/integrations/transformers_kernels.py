"""`use_in_transformers`: the kernels of this library in the kernel slot `rotary_pos_emb` of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.integrations.tables import planar_from_tables
from torchrope.rotating import apply, rotate

SLOT = "rotary_pos_emb"
DEVICES = ("cpu", "cuda", "mps", "npu", "rocm", "xpu")


def use_in_transformers(devices: Sequence[str] = ("cpu",)) -> None:
    """Map the kernel slot `rotary_pos_emb` of transformers to `rotate`, for training and inference, in this process.

    Models that are then loaded with `use_kernels=True`, or told `model.set_use_kernels(True)`, rotate q and k in one
    operation with gradients. Each model's own function is first tried on one token, which tells its pairs of channels
    (adjacent or in halves), its direction and its table. A function that is not a planar rotation, other shapes than
    q `(batch, heads, tokens, head_dim)` and cos `(batch, tokens, pairs or 2 pairs)`, tables that differ between the
    channels of a pair, and `torch.compile`, which fuses the function itself, run the model's own function. Nothing is
    downloaded for this slot. transformers replaces the function for all models of the same module.

    Args:
        devices: Devices for which the slot is mapped: "cpu", "cuda", "mps", "npu", "rocm", "xpu". On a GPU `rotate` is
            plain PyTorch unless `python -m torchrope verify` recorded its kernels; for inference on CUDA, ROCm and XPU
            transformers names kernels of the Hub, which a mapping here replaces.

    Raises:
        ImportError: the package kernels is missing, or in a version that transformers does not accept.
        ValueError: an unknown device.

    Example:
        >>> import torchrope as tr
        >>> tr.integrations.use_in_transformers()  # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained(path, use_kernels=True)  # doctest: +SKIP
    """
    from transformers.integrations import hub_kernels
    from transformers.utils import import_utils

    if unknown := [device for device in devices if device not in DEVICES]:
        raise ValueError(f"devices must be among {', '.join(DEVICES)}, got {', '.join(unknown)}")
    if not import_utils.is_kernels_available():
        versions = f">={import_utils.KERNELS_MIN_VERSION},<{import_utils.KERNELS_MAX_VERSION}"
        raise ImportError(f"use_in_transformers requires the package kernels: pip install 'kernels{versions}'")
    # The table that `use_kernels=True` registers again each time, so that an entry outside it would be overwritten.
    mapping = hub_kernels.get_kernel_mapping_transformers()
    mapping.setdefault(SLOT, {}).update(dict.fromkeys(devices, _Repository()))
    hub_kernels.register_kernel_mapping_transformers()


@dataclass(frozen=True)
class _Repository:
    """What the package kernels asks for a layer; a LocalLayerRepository would need a folder with built binaries."""

    layer_name: str = "RotaryPosEmb"

    def load(self) -> type[nn.Module]:
        return RotaryPosEmb


class RotaryPosEmb(nn.Module):
    """The layer of the slot; the package kernels binds `forward` to the module of a model's own function."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self, q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate q and k, or q alone, as the function of the model does.

        Args:
            q: `(batch, heads, tokens, head_dim)`, or `(batch, tokens, heads, head_dim)` for unsqueeze_dim 2.
            k: The same layout, perhaps fewer heads; None for q alone.
            cos: `(batch or 1, tokens, pairs or 2 pairs)`.
            sin: The same shape.
            unsqueeze_dim: The dimension of heads, 1 or 2.

        Returns:
            Rotated q and k, in their dtypes.
        """
        function: Any = type(self)
        convention = None
        if not torch.compiler.is_compiling() and _fits(q, k, cos, sin, unsqueeze_dim):
            convention = _convention(function, q.shape[-1], cos.shape[-1])
        if convention is None or not (_repeats(cos, *convention[2:]) and _repeats(sin, *convention[2:])):
            result: tuple[Tensor, Tensor | None] = function.forward(self, q, k, cos, sin, unsqueeze_dim)
            return result
        interleaved, sign, read, _ = convention
        cos, sin = cos[..., read].unsqueeze(1), sign * sin[..., read].unsqueeze(1)
        rotation = planar_from_tables(cos, sin, q.shape[-1], interleaved=interleaved)
        layout = "bhtd" if unsqueeze_dim == 1 else "bthd"
        if k is None:
            return apply(q, rotation, layout=layout), None
        return rotate(q, k, rotation, layout=layout)


def _fits(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
    """Return whether shapes are those of `RotaryPosEmb.forward`; others are left to the model's function."""
    if unsqueeze_dim not in (1, 2) or q.ndim != 4 or cos.ndim != 3 or cos.shape != sin.shape:
        return False
    tokens, heads = (-2, -3) if unsqueeze_dim == 1 else (-3, -2)
    same_tokens = q.shape[tokens] == cos.shape[1] and cos.shape[0] in (1, q.shape[0])
    if k is None or not same_tokens:
        return same_tokens
    same = k.ndim == 4 and k.shape[0] == q.shape[0] and k.shape[tokens] == q.shape[tokens]
    return same and k.shape[-1] == q.shape[-1] and k.shape[heads] > 0 and q.shape[heads] % k.shape[heads] == 0


def _repeats(table: Tensor, read: slice, repeated: slice | None) -> bool:
    """Return whether both channels of a pair have one entry; remembered for a table, as reading a GPU waits for it."""
    if repeated is None:
        return True
    state = None if table.is_inference() else (table._version, read)  # without a version it may change unseen
    known: Any = getattr(table, "_torchrope_repeats", (None, False))
    if state is not None and known[0] == state:
        return bool(known[1])
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    try:
        equal = torch.equal(table[..., read], table[..., repeated])
    except RuntimeError:  # of tensors without values, as under torch.vmap
        return False
    table._torchrope_repeats = state, equal  # type: ignore[attr-defined]
    return equal


@cache
def _convention(function: type[nn.Module], head_dim: int, entries: int) -> tuple[bool, int, slice, slice | None] | None:
    """Return by trial which pairs a function rotates, in which direction, and which entries of cos it reads.

    Args:
        function: The module that the package kernels made of the function.
        head_dim: Channels of q and k.
        entries: Entries of cos per token.

    Returns:
        Whether pairs are adjacent, 1 or -1 for clockwise, an entry of the table for each pair, and the entries that
        must equal these, None if it does not read them; None for another function.
    """
    halves, adjacent = (slice(entries // 2), slice(entries // 2, None)), (slice(0, None, 2), slice(1, None, 2))
    tables: list[tuple[slice, slice | None]] = [(slice(None), None)]
    if entries % 2 == 0:
        tables += [(halves[0], None), halves, (adjacent[0], None), adjacent]
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        q, k = torch.arange(2.0 * head_dim, dtype=torch.float64, device="cpu").sin().view(2, 1, 1, 1, -1)
        for (read, repeated), interleaved, sign in product(tables, (False, True), (1, -1)):
            pairs = len(range(entries)[read])
            if not 0 < 2 * pairs <= head_dim:
                continue
            angles = torch.linspace(0.3, 2.9, pairs, dtype=torch.float64, device="cpu").view(1, 1, -1)
            rotation = planar_from_tables(
                angles.cos().unsqueeze(1), sign * angles.sin().unsqueeze(1), head_dim, interleaved=interleaved
            )
            cos, sin = torch.zeros(2, 1, 1, entries, dtype=torch.float64, device="cpu")
            for one in (read, repeated) if repeated is not None else (read,):
                cos[..., one], sin[..., one] = angles.cos(), angles.sin()
            if _agree(function, (q, k, cos, sin), rotate(q, k, rotation)):
                return interleaved, sign, read, repeated
    return None


def _agree(function: type[nn.Module], arguments: tuple[Tensor, ...], expected: tuple[Tensor, Tensor]) -> bool:
    """Return whether a function gives the expected q and k, up to rounding of float32, in which some compute."""
    try:
        result: Any = function.forward(function.__new__(function), *arguments)
    except (RuntimeError, IndexError):  # tables of another width
        return False
    return all(x.shape == y.shape and torch.allclose(x, y, atol=1e-5) for x, y in zip(result, expected, strict=True))
