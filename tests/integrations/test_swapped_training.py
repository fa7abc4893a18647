"""Training of swapped models: recomputed blocks know their forward, and no policy of precision rounds positions."""

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import timm.layers
import torch
import torch.distributed as dist
import transformers
from diffusing import built, inputs, output
from rotating import packed, shared, strong, text, tokens
from swapped import made
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import scaled_dot_product_attention
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchrope as tr
from torchrope.integrations import AttentionShape, FromCoordinates, ModelFamily, Sdpa

pytestmark = pytest.mark.filterwarnings("ignore:outputs change:UserWarning")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Points(nn.Module):
    """Checkpoints its layers by a function that it has imported by name."""

    reentrant: bool | None = None  # None: no checkpointing

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.x = nn.Parameter(torch.randn(2, 9, 32))  # with a gradient for reentrant checkpointing

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Unknown(Points):
    """Checkpoints its layers by a function that `swap` does not know."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=bool(self.reentrant))
        return x


for kind in (Points, Unknown):
    tr.integrations.register_family(
        ModelFamily(
            f"*.{kind.__name__}",
            layers="layers.*",
            shape=lambda model, layer: AttentionShape(2, 16, (1, 1), sized=False),
            positions=FromCoordinates("positions", 1),
            intercept=Sdpa(),
        )
    )

VIT = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=64)
DRAW = torch.Generator().manual_seed(1)
FIRST, SECOND, WIDE = (torch.randn(*shape, generator=DRAW) for shape in ((9, 2), (9, 2), (1, 3, 32, 64)))
SQUARE, WORDS = WIDE.repeat(1, 1, 2, 1), torch.arange(3, 12).unsqueeze(0)
ALL = dict(attention_mask=torch.ones_like(WORDS), use_cache=False)
timm_vit = partial(made, "vit", dynamic_img_size=True)

# How a model is built and called, and at which two positions of the same tokens, or images of two shapes.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Tensor], tuple[Any, Any]]] = {
    "timm": (timm_vit, lambda model, x: model(x), (WIDE, WIDE.mT)),
    "features": (timm_vit, lambda model, x: model.forward_features(x), (WIDE, WIDE.mT)),
    "intermediates": (timm_vit, lambda model, x: model.forward_intermediates(x)[1][0], (WIDE, WIDE.mT)),
    "dropped": (partial(made, "vit", patch_drop_rate=0.5), lambda model, x: model(x), (SQUARE, SQUARE)),
    "moved": (partial(made, "dinov3", rope_rescale_coords=2.0), lambda model, x: model(x), (SQUARE, SQUARE)),
    "transformers": (
        lambda: strong(transformers.ViTModel(transformers.ViTConfig(**VIT, patch_size=16))),
        lambda model, x: model(pixel_values=x, interpolate_pos_encoding=True)[0],
        (WIDE, WIDE.mT),
    ),
    "registered": (Points, lambda model, at: model(model.x, at), (3 * FIRST, 3 * SECOND)),
    "text": (
        lambda: text("LlamaModel"),
        lambda model, at: model(WORDS, position_ids=at, **ALL)[0],
        (torch.arange(9).unsqueeze(0), torch.arange(9).unsqueeze(0) * 5),
    ),
}


def swapped(name: str, shared: bool = False) -> Any:
    torch.manual_seed(0)
    encoding: Any = "mixed"
    if shared:
        encoding = tr.MixedRoPE(num_axes=1 if name == "text" else 2, num_heads=1 if name == "text" else 2, head_dim=16)
    model = tr.swap(MODELS[name][0](), encoding, init="model" if name == "moved" else "paper")
    return model.train()


def checkpointed(model: Any, way: str) -> Any:
    reentrant = way.endswith("reentrant")
    if way.startswith("wrapped"):
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        wrapper: Any = partial(checkpoint_wrapper, checkpoint_impl=impl)
        apply_activation_checkpointing(model, wrapper, check_fn=set(blocks_of(model)).__contains__)
    elif isinstance(model, Points):
        model.reentrant = reentrant
    elif hasattr(model, "set_grad_checkpointing"):
        timm.layers.set_reentrant_ckpt(reentrant)
        model.set_grad_checkpointing()
    else:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    return model


@pytest.fixture(autouse=True)
def _checkpointing_of_timm() -> Iterator[None]:
    before = timm.layers.use_reentrant_ckpt()
    yield
    timm.layers.set_reentrant_ckpt(before)


def gradients(model: Any, name: str, situation: str = "") -> Tensor:
    """Gradients of two forwards, of which the first has other positions than the second."""
    if situation == "threads":
        with ThreadPoolExecutor(2) as pool:
            twins = [copy.deepcopy(model) for _ in range(4)]
            first, *others = pool.map(partial(gradients, name=name, situation="in a thread"), twins)
        assert all(torch.equal(first, other) for other in others)
        return first
    _, call, given = MODELS[name]
    if situation != "in a thread":
        torch.manual_seed(3)  # for models that draw what they drop or where they move
    copies = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    hooks: Any = {"copied": copies, "on cpu": torch.autograd.graph.save_on_cpu()}.get(situation, nullcontext())
    run: Any = torch.compile(model, backend="eager") if situation == "compiled" else model
    with hooks:
        losses = [(3 * call(run, given[0])).cos().square().sum(), (2 * call(run, given[1])).sin().sum()]
    if situation == "reverse":
        losses[1].backward()
        losses[0].backward()
    elif situation == "elsewhere":  # a GPU's backward pass has a thread of its own
        with ThreadPoolExecutor(1) as pool:
            pool.submit(sum(losses).backward).result(60)
    else:
        sum(losses).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([getattr(grad, "full_tensor", lambda grad=grad: grad)().flatten() for grad in found])


def differs(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).norm() / expected.norm())


REENTRANT = ("timm", "features", "dropped", "transformers", "registered")
WAYS = [
    *((name, "own") for name in MODELS),
    *((name, "own reentrant") for name in REENTRANT),
    *((name, way) for name in ("timm", "intermediates", "transformers") for way in ("wrapped", "wrapped reentrant")),
]
SITUATIONS = ["", "copied", "threads"]
RARE = [pytest.param(one, marks=pytest.mark.slow) for one in ("on cpu", "reverse", "elsewhere", "compiled")]


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("situation", [*SITUATIONS, *RARE])
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_gradients_are_those_without_checkpointing(name: str, way: str, situation: str, shared: bool) -> None:
    if (situation == "threads" and name in ("dropped", "moved")) or (situation == "compiled" and "reentrant" in way):
        pytest.skip("draws of threads are not in an order, and torch.compile has no reentrant checkpointing")
    expected = gradients(swapped(name, shared), name)
    assert differs(gradients(checkpointed(swapped(name, shared), way), name, situation), expected) < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_recomputation_that_does_not_know_its_forward_is_refused(shared: bool, reentrant: bool) -> None:
    encoding: Any = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16) if shared else "mixed"
    model = tr.swap(Unknown(), encoding, init="paper").train()
    model.reentrant = reentrant
    with pytest.raises(ValueError, match=r"checkpoint|forward|recompute") as caught:
        gradients(model, "registered")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ltx_inputs() -> Any:
    given = {key: value for key, value in inputs("ltx", 2, 6, 8).items() if key != "video_coords"}
    return {**given, "rope_interpolation_scale": (8 / 25, 32, 32)}


LONG: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[Any, Any], Tensor]]] = {
    "llama": (lambda: text("LlamaModel", max_position_embeddings=4096), lambda: tokens(1, 3000), lambda m, x: m(x)[0]),
    "qwen2_5_vl": (
        lambda: shared("qwen2_5_vl"), lambda: packed("qwen2_5_vl", (1, 2, 600)), lambda m, x: m(**x)[0],
    ),
    "ltx": (lambda: built("ltx"), ltx_inputs, output),
    "flux": (lambda: built("flux"), lambda: inputs("flux", 1, 1500), output),
}  # fmt: skip


def blocks_of(model: Any) -> list[nn.Module]:
    lists = ("layers", "blocks", "transformer_blocks", "single_transformer_blocks")
    return [block for name in lists for block in getattr(model, name, ())]


def narrow_inputs(model: Any) -> Any:
    """The caller of a model gives it tokens in bfloat16, and ids in float32."""

    def half(name: str, x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point() and not name.endswith("_ids")
        return x.bfloat16() if floating else x

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tuple(half("", x) for x in args), {name: half(name, x) for name, x in kwargs.items()}

    model.register_forward_pre_hook(cast, with_kwargs=True)
    return model


def fsdp2(model: Any) -> Any:
    policy = partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16)  # whose default is to cast inputs
    for group in tr.integrations.shard_groups(model) if hasattr(model, "rotary") else ():
        fully_shard(group, mp_policy=MixedPrecisionPolicy())
    for block in blocks_of(model):
        fully_shard(block, mp_policy=policy())
    return narrow_inputs(fully_shard(model, mp_policy=policy(cast_forward_inputs=False)))


def fsdp1(model: Any) -> Any:
    policy = MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True, cast_root_forward_inputs=False)
    whole = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks_of(model)}), use_orig_params=True,
        mixed_precision=policy, device_id=torch.device("cpu"),
        ignored_modules=[model.rotary] if hasattr(model, "rotary") else [],
    )  # fmt: skip
    return narrow_inputs(whole)


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("wrap", [fsdp2, fsdp1])
@pytest.mark.parametrize("encoding", ["mixed", pytest.param("liere:4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LONG)
def test_policies_round_no_positions(name: str, encoding: str, wrap: Callable[[Any], Any]) -> None:
    build, draw, call = LONG[name]
    torch.manual_seed(0)
    model, given = build(), draw()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = call(model, given)
        wrapped = wrap(tr.swap(copy.deepcopy(model), encoding)), wrap(model)
        found, usual = (float((call(m, given).float() - exact).norm() / exact.norm()) for m in wrapped)
    assert found < 1.5 * usual + 2e-3


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("name", ["timm", "transformers", "text"])
def test_sharded_models_are_checkpointed(name: str) -> None:
    plain, recomputed = (fsdp2(model) for model in (swapped(name), checkpointed(swapped(name), "own")))
    assert differs(gradients(recomputed, name), gradients(plain, name)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl", "ltx", "flux"])
def test_positions_that_are_cast_all_the_same_are_refused(name: str) -> None:
    build, draw, call = LONG[name]
    model, given = tr.swap(build(), "mixed"), tokens(1, 300) if name == "llama" else draw()
    tables = {"position_embeddings", "image_rotary_emb"}

    def cast(block: nn.Module, args: Any, kwargs: Any) -> Any:
        narrow = partial(pytree.tree_map_only, Tensor, Tensor.bfloat16)
        return args, {key: narrow(value) if key in tables else value for key, value in kwargs.items()}

    handles = [block.register_forward_pre_hook(cast, with_kwargs=True) for block in blocks_of(model)]
    with pytest.raises(ValueError, match="bfloat16") as caught:
        call(model, given)
    assert "\n" not in str(caught.value)
    for handle in handles:
        handle.remove()
    call(model, given)
