"""Towers of transformers without a rotation of their own that go on: outputs kept, q and k turned where tokens are."""

import copy
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plain_towers import TOWERS, Tower, blip2_whole, depth_of_dinov2, sam
from rotating import error, learned, outputs
from torch import Tensor, nn

import torchrope as tr

NAMES = list(TOWERS)
OF_REGISTRY = [name for name in NAMES if not name.startswith("sam")]


def swapped(tower: Tower, encoding: str = "mixed", **settings: Any) -> Any:
    """A copy that is swapped; beside what it turns by, where it turns."""
    beside = "VJEPA2" in type(tower.model).__name__
    return tr.swap(copy.deepcopy(tower.model), encoding, keep_rotation=beside, **settings)


def rotary_of(model: nn.Module) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("rotary"))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_bit_identical_generators_learn_and_unswap_restores_the_model(name: str) -> None:
    tower = TOWERS[name]()
    expected, names = outputs(tower.model, tower.given), tower.model.state_dict().keys()
    model = swapped(tower)
    for mode in (True, False):
        torch.manual_seed(1)
        before = outputs(tower.model.train(mode), tower.given)
        torch.manual_seed(1)
        assert torch.equal(outputs(model.train(mode), tower.given), before)
    outputs(model, tower.given).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learned(model))
    model = swapped(tower, "liere:4", init="paper")
    assert error(outputs(model, tower.given), expected) > 0.05
    assert torch.equal(outputs(tr.unswap(model), tower.given), expected)
    assert model.state_dict().keys() == names


@pytest.mark.parametrize("name", OF_REGISTRY)
def test_attention_gets_q_and_k_turned_where_tokens_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = TOWERS[name]()
    plain, seen = transformers.AttentionInterface()["sdpa"], []

    def spy(layer: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((query.double(), key.double()))
        return plain(layer, query, key, *args, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "spy", spy)
    model = swapped(tower, init="paper")
    for one in (tower.model, model):
        one.set_attn_implementation("spy")
        outputs(one, tower.given)
    own, turned = seen[0], seen[len(seen) // 2]  # of the first layer, which gets the same in both
    rotary = rotary_of(model)
    spacing, origin = (torch.tensor(one) for one in (rotary.lattices[0].spacing, rotary.lattices[0].origin))
    positions = tr.prefix(origin + spacing * tower.indices.double(), tower.prefix)
    query, key = tr.rotate(*own, rotary.encodings[0].double()(positions))
    assert error(turned[0] @ turned[1].mT, query @ key.mT) < 1e-5


@pytest.mark.parametrize("name", ["sam", "sam_hq"])
def test_map_is_turned_by_places_in_windows_and_in_the_image(name: str) -> None:
    tower = TOWERS[name]()
    model = swapped(tower, init="paper")
    rotary, layers = rotary_of(model), [part for part in model.modules() if hasattr(part, "rel_pos_h")]
    for index, (layer, side) in enumerate(zip(layers, (3, 4), strict=True)):
        tokens = torch.randn(2, side, side, 32)
        rotation = rotary.encodings[index](rotary.lattices[index](side, side))
        q, k, v = layer.qkv(tokens).flatten(1, 2).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        bias = layer.get_decomposed_rel_pos(q.flatten(0, 1), layer.rel_pos_h, layer.rel_pos_w, (side,) * 2, (side,) * 2)
        q, k = tr.rotate(q, k, rotation)
        weights = (q @ k.mT / 4 + bias.reshape(2, 2, side**2, side**2)).softmax(dim=-1)
        expected = layer.proj((weights @ v).transpose(1, 2).flatten(2)).view(2, side, side, 32)
        assert error(layer(tokens)[0], expected) < 1e-5


def test_sam_gives_its_weights_where_they_are_asked_for() -> None:
    tower = sam(attn_implementation="eager")
    expected = outputs(tower.model, tower.given)
    model = swapped(tower)
    assert torch.equal(outputs(model, tower.given), expected)
    weights = model(**tower.given, output_attentions=True).attentions
    assert all(torch.allclose(one.sum(dim=-1), torch.ones(())) for one in weights)


@pytest.mark.parametrize("name", NAMES)
def test_checkpointed_layers_copies_pickles_and_what_is_loaded_are_the_same(name: str, tmp_path: Path) -> None:
    tower = TOWERS[name]()
    model = swapped(tower, "comrope-ld:2", init="paper")
    expected = outputs(model, tower.given)
    model.save_pretrained(tmp_path)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), tr.load(tmp_path, into=TOWERS[name]().model)]
    for one in copies:
        assert torch.equal(outputs(one, tower.given), expected)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        outputs(model.train(), tower.given).square().sum().backward()
        return [parameter.grad.clone() for parameter in learned(model)]

    before = gradients()
    model.activation_checkpointing_enable()
    for came, right in zip(gradients(), before, strict=True):
        assert torch.allclose(came, right, rtol=1e-4, atol=1e-5 * float(right.abs().max()))


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_keeps_outputs_and_generators_wide(name: str) -> None:
    tower = TOWERS[name]()
    tower = tower._replace(model=tower.model.to(torch.bfloat16), given=halved(tower.given))
    model = swapped(tower)
    assert torch.equal(outputs(model, tower.given), outputs(tower.model, tower.given))
    assert {parameter.dtype for parameter in learned(model)} == {torch.float32}


def halved(given: dict[str, Any]) -> dict[str, Any]:
    return {name: one.to(torch.bfloat16) if name.startswith("pixel_values") else one for name, one in given.items()}


# torch.compile calls the hooks of the outermost module itself and looks for the gradients of what they made.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name != "videomae-masked"])  # breaks by itself
def test_swapped_model_compiles_without_graph_breaks(name: str) -> None:
    tower = TOWERS[name]()
    model = swapped(tower, init="paper")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert error(outputs(compiled, tower.given), outputs(model, tower.given)) < 1e-5


@pytest.mark.parametrize("name", ["beit", "blip2", "deit", "sam", "siglip2", "videomae", "vit_mae"])
def test_tower_without_its_tables_ignores_positions(name: str) -> None:
    tower = TOWERS[name]()
    with pytest.warns(UserWarning, match="has no position information"):
        model = swapped(tower, keep_position_tables=False)
    assert error(outputs(model, tower.given), outputs(tower.model, tower.given)) > 0.01
    assert torch.equal(outputs(tr.unswap(model), tower.given), outputs(tower.model, tower.given))


@pytest.mark.parametrize("name", ["deit", "beit", "ijepa", "blip2", "vit_mae"])
def test_other_sizes_go_on_working(name: str) -> None:
    tower = TOWERS[name]()
    given = {"pixel_values": torch.randn(1, 3, 32, 48), "interpolate_pos_encoding": True}
    if name == "beit":
        given.pop("interpolate_pos_encoding")
    torch.manual_seed(1)
    expected = outputs(tower.model, given)
    torch.manual_seed(1)
    assert torch.equal(outputs(swapped(tower), given), expected)


def test_vit_mae_draws_what_it_drops_as_before() -> None:
    tower = TOWERS["vit_mae"]()
    model = swapped(tower)
    for given in ((tower.given["pixel_values"],), (tower.given["pixel_values"], tower.given["noise"])):
        both = []
        for one in (tower.model, model):
            torch.manual_seed(3)
            both.append(one(*given).last_hidden_state)
        assert torch.equal(*both)


@pytest.mark.parametrize("build", [depth_of_dinov2, blip2_whole])
def test_swap_of_a_multimodal_model_swaps_the_vision_tower(build: Callable[[], tuple[Any, dict[str, Any]]]) -> None:
    model, given = build()
    expected = outputs(model, given)
    tr.swap(model, "mixed")
    assert rotary_of(model).encodings[0].num_axes == 2
    assert torch.equal(outputs(model, given), expected)
    assert torch.equal(outputs(tr.unswap(model), given), expected)


def test_vjepa2_rotation_is_replaced_or_kept_but_not_continued() -> None:
    tower = TOWERS["vjepa2"]()
    expected = outputs(tower.model, tower.given)
    rule = "init must not be 'model' for V-JEPA 2, which rotates the two channels of a pair by different angles; "
    with pytest.raises(ValueError, match=rf"^{rule}init='zeros' or 'paper' replaces its rotation, keep_rotation=True"):
        tr.swap(tower.model, "mixed")
    with pytest.warns(UserWarning, match="^outputs change"):
        still = tr.swap(copy.deepcopy(tower.model), "mixed", init="zeros")
    assert error(outputs(still, tower.given), expected) > 0.05


def test_vjepa2_does_not_keep_lengths() -> None:
    """What is refused is no rotation: the length of a query depends on where it is."""
    layer = next(part for part in TOWERS["vjepa2"]().model.modules() if type(part).__name__ == "VJEPA2RopeAttention")
    query = torch.randn(1, 2, 8, 24)
    turned = layer.apply_rotary_embeddings(query, layer.get_position_ids(torch.zeros(1, 8, 48)))
    assert (turned.norm(dim=-1) - query.norm(dim=-1)).abs().max() > 0.1


def test_sam2_is_refused_with_the_way_by_hand() -> None:
    config = transformers.Sam2HieraDetConfig(
        hidden_size=8,
        num_attention_heads=1,
        image_size=[64, 64],
        blocks_per_stage=[1, 1, 1, 1],
        embed_dim_per_stage=[8, 16, 32, 64],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[4, 4, 4, 4],
        global_attention_blocks=[2],
    )
    message = (
        r"^swap needs attention that rotates q and k by positions, but the queries of SAM 2's Hiera are max-pooled "
        r"over several tokens; torchrope\.rotate\(q, k, rotation, key_rotation=\.\.\.\) in a "
        r"Sam2MultiScaleAttention of your own takes any positions, got Sam2HieraDetModel$"
    )
    with pytest.raises(ValueError, match=message):
        tr.swap(transformers.Sam2HieraDetModel(config), "mixed")


def test_encoders_that_were_rewritten_are_those_of_transformers() -> None:
    """DPT's loop over its layers, which is replaced, does no more than hand tokens on."""
    encoder = TOWERS["dpt"]().model.encoder
    body = inspect.getsource(type(encoder).forward)
    assert body.count("hidden_states = ") == 1
    assert "layer_module(hidden_states)" in body
