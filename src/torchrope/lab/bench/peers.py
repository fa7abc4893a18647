"""Implementations that are measured: torchrope, its reference, and others with the same q, k and parameters."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrope.encodings import AxialRoPE, Encoding, MixedRoPE
from torchrope.lab.bench.config import Setting
from torchrope.lab.encodings import resolve_encoding
from torchrope.ops import BACKENDS, rotate
from torchrope.positions import grid, prefix

Pair = tuple[Tensor, Tensor]
Turn = Callable[[Tensor, Tensor], Pair]
Step = Callable[[], tuple[Pair, tuple[Tensor, ...]]]

OURS = "torchrope"
REFERENCE = "reference"
COMPILED = "compiled reference"
TIMM = "timm"
ROTARY_EMBEDDING = "rotary-embedding-torch"
COMPLEX = "complex multiply"
MATRIX_EXP = "matrix_exp"


class Unavailable(Exception):
    """An implementation cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Task:
    """What every implementation does: rotate q and k `(batch, heads, tokens, head_dim)` at these positions.

    Attributes:
        setting: The shape in words.
        encoding: The encoding, whose parameters all share or copy.
        positions: `(tokens, axes)`, on the lattice of the encoding's paper.
        q: Queries.
        k: Keys.
        cotangents: The gradients that come back to rotated q and k, the same for all.
    """

    setting: Setting
    encoding: Encoding
    positions: Tensor
    q: Tensor
    k: Tensor
    cotangents: Pair


@dataclass(frozen=True)
class Peer:
    """One way to do a task.

    Attributes:
        name: Of the implementation.
        turn: Builds the rotation from the parameters and applies it to q and k.
        parameters: What gets a gradient besides q and k.
        channels: Its channel i is channel `channels[i]` of torchrope's layout; None where they are the same.
    """

    name: str
    turn: Turn
    parameters: tuple[Tensor, ...]
    channels: Tensor | None = None


def make_encoding(name: str, setting: Setting) -> Encoding:
    """Build a rotary encoding by name, with the same parameters every time.

    Raises:
        ValueError: an unknown name, one that rotates nothing, or an encoding that the setting does not fit.
    """
    choice = resolve_encoding(name)
    if choice.absolute is not None or choice.bias is not None or name == "none":
        raise ValueError(f"bench measures rotary encodings, got {name!r}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoding = choice.rotary(num_axes=setting.axes, num_heads=setting.heads, head_dim=setting.head_dim)
    return encoding.to(setting.device, torch.float64 if setting.dtype == "float64" else torch.float32)


def make_task(name: str, setting: Setting) -> Task:
    """Draw the vectors of a task, the same every time.

    Raises:
        ValueError: as `make_encoding`.
    """
    encoding = make_encoding(name, setting)
    lattice = grid(*setting.lattice, **encoding.lattice(*setting.lattice), device=setting.device)
    wide = torch.float64 if setting.dtype == "float64" else torch.float32
    shape = (4, setting.batch, setting.heads, setting.tokens, setting.head_dim)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    vectors = drawn.to(setting.device, getattr(torch, setting.dtype))
    q, k = (vectors[i].clone().requires_grad_() for i in range(2))
    return Task(setting, encoding, prefix(lattice.to(wide), setting.prefix), q, k, (vectors[2], vectors[3]))


def make_step(task: Task, peer: Peer) -> Step:
    """A step of an implementation: rotated q and k, and the gradients to q, k and the parameters, in its layout."""
    q, k, *cotangents = (_arranged(x, peer.channels) for x in (task.q, task.k, *task.cotangents))
    inputs = (q, k, *peer.parameters)

    def step() -> tuple[Pair, tuple[Tensor, ...]]:
        turned = peer.turn(q, k)
        return turned, torch.autograd.grad(turned, inputs, cotangents)

    return step


def ours(task: Task, backend: str = "auto", name: str = OURS) -> Peer:
    """torchrope itself, by a backend."""

    def turn(q: Tensor, k: Tensor) -> Pair:
        return rotate(q, k, task.encoding(task.positions, backend=backend), layout="bhtd", backend=backend)

    return Peer(name, turn, tuple(task.encoding.parameters()))


def serving_backend(task: Task) -> str:
    """The kernels that serve a task by their own name; "reference" where none do, so that "auto" is no more than it."""
    for backend in BACKENDS:
        if backend in ("auto", "reference"):
            continue
        try:
            with torch.no_grad():
                ours(task, backend).turn(task.q, task.k)
        except (ValueError, RuntimeError):
            continue
        return backend
    return "reference"


def reference(task: Task) -> Peer:
    """torchrope's definition in plain PyTorch."""
    return ours(task, "reference", REFERENCE)


def compiled_reference(task: Task) -> Peer:
    """The reference through torch.compile, with static shapes."""
    plain = reference(task)
    # Every task compiles the same function; torch keeps a limited number of versions of one.
    torch.compiler.reset()
    peer = Peer(COMPILED, torch.compile(plain.turn, fullgraph=True, dynamic=False), plain.parameters)
    try:
        make_step(task, peer)()
    except Exception as error:  # whatever a missing C++ compiler and the stages of torch.compile raise
        raise Unavailable(f"torch.compile failed: {type(error).__name__}") from error
    return peer


def timm(task: Task) -> Peer:
    """timm's own modules: RotaryEmbeddingMixed, or RotaryEmbeddingCat, whose table it computes once and keeps."""
    layers = _installed("timm.layers")
    if task.setting.axes != 2 or task.setting.head_dim % 4:
        raise Unavailable("timm has two axes and heads divisible by 4")
    if isinstance(task.encoding, MixedRoPE):
        return _timm_mixed(task, task.encoding, layers)
    if isinstance(task.encoding, AxialRoPE):
        return _timm_axial(task, task.encoding, layers)
    raise Unavailable("timm has no such encoding")


def rotary_embedding_torch(task: Task) -> Peer:
    """The package rotary-embedding-torch: get_axial_freqs + apply_rotary_emb."""
    if not isinstance(task.encoding, AxialRoPE):
        raise Unavailable(f"{ROTARY_EMBEDDING} has no such encoding")
    package = _installed("rotary_embedding_torch")
    axes, setting = task.setting.axes, task.setting
    ladder = task.encoding.frequencies[0, ::axes].clone()
    module = package.RotaryEmbedding(dim=setting.head_dim // axes, custom_freqs=ladder).to(setting.device)

    def turn(q: Tensor, k: Tensor) -> Pair:
        angles = module.get_axial_freqs(*setting.lattice).flatten(0, -2)  # (tokens, head_dim)
        return _both(q, k, setting.prefix, lambda x: package.apply_rotary_emb(angles, x))

    return Peer(ROTARY_EMBEDDING, turn, (), _axis_after_axis(task))


def complex_multiply(task: Task) -> Peer:
    """Channel pairs as complex numbers times e^{i angle}: how RoPE-ViT's code does it."""
    if task.encoding.block_size != 2:
        raise Unavailable("complex numbers turn channel pairs alone")

    def turn(q: Tensor, k: Tensor) -> Pair:
        waves = _waves(task)
        return _times(q, waves), _times(k, waves)

    return Peer(COMPLEX, turn, tuple(task.encoding.parameters()))


def ready_complex_multiply(task: Task) -> Turn:
    """Likewise with e^{i angle} computed once, which leaves its frequencies without a gradient."""
    with torch.no_grad():
        waves = _waves(task)
    return lambda q, k: (_times(q, waves), _times(k, waves))


def matrix_exp(task: Task) -> Peer:
    """torch.matrix_exp per token, head and block, then dense block products: how LieRE and ComRoPE are published."""
    if task.encoding.block_size == 2:
        raise Unavailable("matrix_exp is for blocks larger than 2")
    block_size = task.encoding.block_size

    def turn(q: Tensor, k: Tensor) -> Pair:
        exponents = torch.einsum("ta,ahnij->htnij", task.positions, task.encoding.generators())
        blocks = torch.matrix_exp(exponents.contiguous())
        return _through_blocks(q, blocks, block_size), _through_blocks(k, blocks, block_size)

    return Peer(MATRIX_EXP, turn, tuple(task.encoding.parameters()))


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
    """The implementations that can do a task here, and by name why the others cannot."""
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
        raise Unavailable("not installed") from None


def _timm_mixed(task: Task, encoding: MixedRoPE, layers: Any) -> Peer:
    setting = task.setting
    module = layers.RotaryEmbeddingMixed(
        dim=setting.heads * setting.head_dim,
        depth=1,
        num_heads=setting.heads,
        feat_shape=list(setting.lattice),
        grid_indexing="ij",
    ).to(setting.device)
    with torch.no_grad():
        module.freqs.copy_(encoding.frequencies.unsqueeze(1))  # (axes, depth, heads, pairs)

    def turn(q: Tensor, k: Tensor) -> Pair:
        embedding = module.get_embed()[0]
        return _both(q, k, setting.prefix, lambda x: layers.apply_rot_embed_cat(x, embedding))

    return Peer(TIMM, turn, (module.freqs,))


def _timm_axial(task: Task, encoding: AxialRoPE, layers: Any) -> Peer:
    setting = task.setting
    module = layers.RotaryEmbeddingCat(
        setting.head_dim, temperature=encoding.base, in_pixels=False, feat_shape=list(setting.lattice)
    ).to(setting.device)

    def turn(q: Tensor, k: Tensor) -> Pair:
        embedding = module.get_embed()
        return _both(q, k, setting.prefix, lambda x: layers.apply_rot_embed_cat(x, embedding))

    return Peer(TIMM, turn, (), _axis_after_axis(task))


def _both(q: Tensor, k: Tensor, front: int, turn: Callable[[Tensor], Tensor]) -> Pair:
    return _behind(q, front, turn), _behind(k, front, turn)


def _behind(x: Tensor, front: int, turn: Callable[[Tensor], Tensor]) -> Tensor:
    """Turn all tokens but those in front, which these packages leave to their caller."""
    turned = turn(x[:, :, front:])
    return torch.cat([x[:, :, :front], turned], dim=2) if front else turned


def _axis_after_axis(task: Task) -> Tensor:
    """The channels of torchrope, whose pairs take axes in turn, in the order of one axis after the other."""
    pairs = torch.arange(task.setting.head_dim // 2).unflatten(0, (-1, task.setting.axes)).T.flatten()
    return torch.stack([2 * pairs, 2 * pairs + 1], dim=-1).flatten()


def _arranged(x: Tensor, channels: Tensor | None) -> Tensor:
    if channels is None:
        return x
    return x.detach()[..., channels.to(x.device)].clone().requires_grad_(x.requires_grad)


def _frequencies(encoding: Encoding) -> Tensor:
    """Radians per unit of position, `(axes, heads or 1, pairs)`."""
    if isinstance(encoding, MixedRoPE):
        return encoding.frequencies
    if isinstance(encoding, AxialRoPE):
        return encoding.frequencies.unsqueeze(1)
    return encoding.generators()[..., 1, 0]


def _waves(task: Task) -> Tensor:
    """e^{i angle}, `(heads or 1, tokens, pairs)`."""
    angles = torch.einsum("ta,ahp->htp", task.positions, _frequencies(task.encoding))
    return torch.polar(torch.ones_like(angles), angles)


def _times(x: Tensor, waves: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.to(waves.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * waves).flatten(-2).to(x.dtype)


def _through_blocks(x: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    columns = x.to(blocks.dtype).unflatten(-1, (-1, block_size))  # (batch, heads, tokens, n, b)
    return torch.einsum("htnij,bhtnj->bhtni", blocks, columns).flatten(-2).to(x.dtype)
