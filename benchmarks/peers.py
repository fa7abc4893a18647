"""Implementations to compare: torchrope, its reference, and other packages with the same q, k and parameters."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from setting import Setting
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrope.encodings import AxialRoPE, Encoding, MixedRoPE
from torchrope.ops import backend as choose
from torchrope.positions import grid, prefix
from torchrope.rotating import rotate
from torchrope_lab.encodings import resolve_encoding

Pair = tuple[Tensor, Tensor]
Rotate = Callable[[Tensor, Tensor], Pair]
Step = Callable[[], tuple[Pair, tuple[Tensor, ...]]]

OURS = "torchrope"
REFERENCE = "reference"
COMPILED = "compiled reference"
TIMM = "timm"
ROTARY_EMBEDDING = "rotary-embedding-torch"
COMPLEX = "complex multiply"
MATRIX_EXP = "matrix_exp"
NOT_INSTALLED = "not installed"


class Unavailable(Exception):
    """An implementation cannot be measured; the message gives the reason."""


@dataclass(frozen=True)
class Task:
    """Inputs of all implementations: q and k `(batch, heads, tokens, head_dim)`, upstream gradients of both rotated,
    positions `(tokens, axes)`, and the encoding, whose parameters every implementation shares or copies.
    """

    setting: Setting
    encoding: Encoding
    positions: Tensor
    q: Tensor
    k: Tensor
    cotangents: Pair


@dataclass(frozen=True)
class Peer:
    """An implementation that builds the rotation from its parameters and rotates q and k.

    Its channel i is channel `channels[i]` in torchrope's layout; None if the layouts are equal.
    """

    name: str
    rotate: Rotate
    parameters: tuple[Tensor, ...]
    channels: Tensor | None = None


def make_encoding(name: str, setting: Setting) -> Encoding:
    """Build a rotary encoding by name, with the same parameters every time."""
    build = resolve_encoding(name).rotary
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoding = build(num_axes=setting.axes, num_heads=setting.heads, head_dim=setting.head_dim)
    return encoding.to(setting.device, torch.float64 if setting.dtype == "float64" else torch.float32)


def make_task(name: str, setting: Setting) -> Task:
    """Draw q, k and upstream gradients of a task with a fixed seed."""
    encoding = make_encoding(name, setting)
    lattice = grid(*setting.lattice, **encoding.lattice.spaced(*setting.lattice), device=setting.device)
    wide = torch.float64 if setting.dtype == "float64" else torch.float32
    shape = (4, setting.batch, setting.heads, setting.tokens, setting.head_dim)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    vectors = drawn.to(setting.device, getattr(torch, setting.dtype))
    q, k = (vectors[i].clone().requires_grad_() for i in range(2))
    return Task(setting, encoding, prefix(lattice.to(wide), setting.prefix), q, k, (vectors[2], vectors[3]))


def make_step(task: Task, peer: Peer) -> Step:
    """Return a function that computes rotated q and k and gradients of q, k and parameters, in the peer's layout."""
    q, k, *cotangents = (_reordered(x, peer.channels) for x in (task.q, task.k, *task.cotangents))
    inputs = (q, k, *peer.parameters)

    def step() -> tuple[Pair, tuple[Tensor, ...]]:
        rotated = peer.rotate(q, k)
        return rotated, torch.autograd.grad(rotated, inputs, cotangents)

    return step


def ours(task: Task, backend: str = "auto", name: str = OURS) -> Peer:
    """Build the peer for torchrope with a backend."""

    def rotate_ours(q: Tensor, k: Tensor) -> Pair:
        with choose(backend):
            return rotate(q, k, task.encoding(task.positions), layout="bhtd")

    return Peer(name, rotate_ours, tuple(task.encoding.parameters()))


def serving_backend(task: Task) -> str:
    """Return the backend that "auto" uses for the task."""
    operators = _Operators()
    with torch.no_grad(), operators:
        ours(task).rotate(task.q, task.k)
    if not operators.called:
        return REFERENCE
    return "native" if task.q.device.type == "cpu" else "triton"


class _Operators(TorchDispatchMode):
    """Record whether operators of torchrope, which run kernels, are called."""

    called = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called |= func.namespace == "torchrope"
        return func(*args, **(kwargs or {}))


def reference(task: Task) -> Peer:
    """Build the peer for the reference in plain PyTorch."""
    return ours(task, "reference", REFERENCE)


def compiled_reference(task: Task) -> Peer:
    """Build the peer for the reference under torch.compile, with static shapes."""
    plain = reference(task)
    # Every task compiles the same function, of which torch caches a limited number of versions.
    torch.compiler.reset()
    peer = Peer(COMPILED, torch.compile(plain.rotate, fullgraph=True, dynamic=False), plain.parameters)
    try:
        make_step(task, peer)()
    except Exception as error:  # torch.compile raises many types, for example without a C++ compiler
        raise Unavailable(f"torch.compile failed: {type(error).__name__}") from error
    return peer


def timm(task: Task) -> Peer:
    """Build the peer for timm's RotaryEmbeddingMixed or RotaryEmbeddingCat; the latter caches its table."""
    layers = _installed("timm.layers")
    encoding, setting, lattice = task.encoding, task.setting, list(task.setting.lattice)
    if setting.axes != 2 or setting.head_dim % 4:
        raise Unavailable("timm supports two axes and a head_dim divisible by 4")
    if isinstance(encoding, MixedRoPE):
        module = layers.RotaryEmbeddingMixed(
            dim=setting.heads * setting.head_dim,
            depth=1,
            num_heads=setting.heads,
            feat_shape=lattice,
            grid_indexing="ij",
        )
        with torch.no_grad():
            module.freqs.copy_(encoding.frequencies.unsqueeze(1))  # (axes, depth, heads, pairs)
    elif isinstance(encoding, AxialRoPE):
        module = layers.RotaryEmbeddingCat(
            setting.head_dim, temperature=encoding.base, in_pixels=False, feat_shape=lattice
        )
    else:
        raise Unavailable("timm has no such encoding")
    module, mixed = module.to(setting.device), isinstance(encoding, MixedRoPE)

    def rotate_timm(q: Tensor, k: Tensor) -> Pair:
        embedding = module.get_embed()[0] if mixed else module.get_embed()
        return _rotate_lattice_tokens(q, k, setting.prefix, lambda x: layers.apply_rot_embed_cat(x, embedding))

    if mixed:
        return Peer(TIMM, rotate_timm, (module.freqs,))
    return Peer(TIMM, rotate_timm, (), _grouped_by_axis(task))


def rotary_embedding_torch(task: Task) -> Peer:
    """Build the peer for rotary-embedding-torch: get_axial_freqs and apply_rotary_emb."""
    if not isinstance(task.encoding, AxialRoPE):
        raise Unavailable(f"{ROTARY_EMBEDDING} has no such encoding")
    package = _installed("rotary_embedding_torch")
    axes, setting = task.setting.axes, task.setting
    frequencies = task.encoding.frequencies[0, ::axes].clone()
    module = package.RotaryEmbedding(dim=setting.head_dim // axes, custom_freqs=frequencies).to(setting.device)

    def rotate_lattice(q: Tensor, k: Tensor) -> Pair:
        angles = module.get_axial_freqs(*setting.lattice).flatten(0, -2)  # (tokens, head_dim)
        return _rotate_lattice_tokens(q, k, setting.prefix, lambda x: package.apply_rotary_emb(angles, x))

    return Peer(ROTARY_EMBEDDING, rotate_lattice, (), _grouped_by_axis(task))


def complex_multiply(task: Task) -> Peer:
    """Multiply channel pairs as complex numbers by e^{i angle}, as in RoPE-ViT's code."""
    if task.encoding.block_size != 2:
        raise Unavailable("a complex multiply rotates channel pairs only")

    def multiply(q: Tensor, k: Tensor) -> Pair:
        phases = phases_of(task)
        return multiply_pairs(q, phases), multiply_pairs(k, phases)

    return Peer(COMPLEX, multiply, tuple(task.encoding.parameters()))


def matrix_exp(task: Task) -> Peer:
    """Build the peer that computes torch.matrix_exp per token, head and block, as in LieRE's and ComRoPE's code."""
    if task.encoding.block_size == 2:
        raise Unavailable("matrix_exp is for blocks larger than 2")
    block_size = task.encoding.block_size

    def rotate_blocks(q: Tensor, k: Tensor) -> Pair:
        exponents = torch.einsum("ta,ahnij->htnij", task.positions, task.encoding.generators())
        blocks = torch.matrix_exp(exponents.contiguous())
        return _block_product(q, blocks, block_size), _block_product(k, blocks, block_size)

    return Peer(MATRIX_EXP, rotate_blocks, tuple(task.encoding.parameters()))


PEERS: dict[str, Callable[[Task], Peer]] = {
    OURS: ours,
    REFERENCE: reference,
    COMPILED: compiled_reference,
    TIMM: timm,
    ROTARY_EMBEDDING: rotary_embedding_torch,
    COMPLEX: complex_multiply,
    MATRIX_EXP: matrix_exp,
}
"""All implementations by name, torchrope first."""


def available_peers(task: Task) -> tuple[list[Peer], dict[str, str]]:
    """Return the implementations available for a task, and by name the reasons why others are not."""
    peers, left_out = [], {}
    for name, build in PEERS.items():
        try:
            peers.append(build(task))
        except Unavailable as reason:
            left_out[name] = str(reason)
    return peers, left_out


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise Unavailable(NOT_INSTALLED) from None


def _rotate_lattice_tokens(q: Tensor, k: Tensor, prefix: int, apply: Callable[[Tensor], Tensor]) -> Pair:
    """Rotate all tokens but the prefix, which these packages leave to their caller."""

    def rotated(x: Tensor) -> Tensor:
        on_lattice = apply(x[:, :, prefix:])
        return torch.cat([x[:, :, :prefix], on_lattice], dim=2) if prefix else on_lattice

    return rotated(q), rotated(k)


def _grouped_by_axis(task: Task) -> Tensor:
    """Return the order of torchrope's channels, whose pairs interleave the axes, that groups pairs by axis."""
    pairs = torch.arange(task.setting.head_dim // 2).unflatten(0, (-1, task.setting.axes)).T.flatten()
    return torch.stack([2 * pairs, 2 * pairs + 1], dim=-1).flatten()


def _reordered(x: Tensor, channels: Tensor | None) -> Tensor:
    if channels is None:
        return x
    return x.detach()[..., channels.to(x.device)].clone().requires_grad_(x.requires_grad)


def _frequencies(encoding: Encoding) -> Tensor:
    """Return frequencies in radians per unit of position, `(axes, heads or 1, pairs)`."""
    if isinstance(encoding, MixedRoPE):
        return encoding.frequencies
    if isinstance(encoding, AxialRoPE):
        return encoding.frequencies.unsqueeze(1)
    return encoding.generators()[..., 1, 0]


def phases_of(task: Task) -> Tensor:
    """Compute e^{i angle}, `(heads or 1, tokens, pairs)`."""
    angles = torch.einsum("ta,ahp->htp", task.positions, _frequencies(task.encoding))
    return torch.polar(torch.ones_like(angles), angles)


def multiply_pairs(x: Tensor, phases: Tensor) -> Tensor:
    """Multiply channel pairs as complex numbers."""
    pairs = torch.view_as_complex(x.to(phases.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * phases).flatten(-2).to(x.dtype)


def _block_product(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    columns = x.to(blocks.dtype).unflatten(-1, (-1, block_size))  # (batch, heads, tokens, n, b)
    return torch.einsum("htnij,bhtnj->bhtni", blocks, columns).flatten(-2).to(x.dtype)
