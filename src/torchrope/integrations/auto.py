"""`TorchropeBackbone` for transformers; importing this module registers it with AutoConfig, AutoBackbone, AutoModel."""

import json
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoBackbone, AutoConfig, AutoModel
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BackboneOutput
from transformers.modeling_utils import PreTrainedModel

from torchrope.integrations.checkpoints.builders import torchrope as own
from torchrope.integrations.checkpoints.settings import Limits, errors_in_one_line, tuples
from torchrope.models.features import Features
from torchrope.models.swin import Swin
from torchrope.models.vit import ViT

_DEFAULT = {"class": "ViT", "arguments": {"input_size": [224, 224], "patch_size": 16, "num_outputs": 0}}


@strict
class TorchropeConfig(BackboneConfigMixin, PreTrainedConfig):
    """Configuration of a `TorchropeBackbone`; `TorchropeConfig.of(model)` builds it from a `ViT` or `Features`.

    A Swin is described as `Features` of its stages.

    Args:
        model: Class and arguments of the `ViT` or `Swin`, as `torchrope.save` writes them.
        features: Arguments of `Features` other than the model; None for a plain `ViT`, with any number of axes.
        apply_layernorm: Whether the final norm of a `ViT` is applied to each feature map; `Features` has its own.
        out_features: Names of the maps to return. In a `ViT` "stem" is the embedded patches, "stage1" layer 1, and so
            on; default: the last layer. In a `Features` "stage1" is its first map; default: all.
        out_indices: The same as indices into these names.

    Raises:
        ValueError: maps that do not exist, or invalid arguments of the model.

    Example:
        >>> from torchrope import ViT
        >>> vit = ViT((32, 32), patch_size=8, num_outputs=0, dim=32, depth=2, num_heads=2, encoding="liere:8")
        >>> backbone = AutoBackbone.from_config(TorchropeConfig.of(vit, out_indices=[1, 2]))
        >>> [tuple(map.shape) for map in backbone(torch.randn(1, 3, 32, 48)).feature_maps]
        [(1, 32, 4, 6), (1, 32, 4, 6)]
        >>> backbone = AutoBackbone.from_config(TorchropeConfig.of(Features(vit, pyramid=True, out_channels=16)))
        >>> [tuple(map.shape) for map in backbone(torch.randn(1, 3, 32, 48)).feature_maps]
        [(1, 16, 16, 24), (1, 16, 8, 12), (1, 16, 4, 6), (1, 16, 2, 3)]
    """

    model_type = "torchrope"

    model: dict | None = None
    features: dict | None = None
    apply_layernorm: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    @classmethod
    def of(cls, model: ViT | Swin | Features, **settings: Any) -> "TorchropeConfig":
        """Return the configuration that rebuilds a model, without its head and with newly initialised weights.

        Args:
            model: A `ViT`, a `Features`, or a `Swin` (stored as `Features(swin)`).
            settings: Further arguments, such as `out_indices`.

        Raises:
            ValueError: another model, or arguments that JSON cannot represent, such as an encoding given as a function.
        """
        if not isinstance(model, ViT | Swin | Features):
            raise ValueError(f"model must be a ViT, a Swin or a Features, got {type(model).__name__}")
        recipe = own.recipe(model)
        recipe["arguments"]["num_outputs"] = 0
        try:
            recipe = json.loads(json.dumps(recipe))
        except TypeError as error:
            raise ValueError(f"arguments of the model must be representable as JSON, got: {error}") from None
        return cls(features=recipe.pop("features", None), model=recipe, **settings)

    def __post_init__(self, **kwargs: Any) -> None:
        """Validate the model, name its feature maps and select those to return."""
        self.model = self.model or _DEFAULT
        if self.features is None and self.model.get("class") == "Swin":
            self.features = {}
        own.check_recipe(self._recipe(), Limits())
        with errors_in_one_line("invalid settings of the backbone"):
            built = self.build("meta")
        chosen: dict[str, Any] = {name: kwargs.pop(name, None) for name in ("out_features", "out_indices")}
        if isinstance(built, ViT):
            self.stage_names = ["stem", *(f"stage{index + 1}" for index in range(len(built.layers)))]
        else:
            self.stage_names = [f"stage{index + 1}" for index in range(len(built.channels))]
            if all(choice is None for choice in chosen.values()):
                chosen["out_features"] = list(self.stage_names)
        self.set_output_features_output_indices(**chosen)
        super().__post_init__(**kwargs)

    def build(self, device: str = "cpu") -> ViT | Features:
        """Build the described model with randomly initialised weights."""
        model: Any = own.rebuild(tuples(self._recipe()), device)
        return model

    def _recipe(self) -> dict[str, Any]:
        return {**(self.model or _DEFAULT), **({} if self.features is None else {"features": self.features})}


class TorchropeBackbone(BackboneMixin, PreTrainedModel):
    """Compute feature maps by a `ViT` or a `Features` for models of transformers: UPerNet, Mask2Former, DETR.

    Built by `AutoBackbone.from_config`, or from the `backbone_config` of such a model. `save_pretrained` and
    `from_pretrained` save and restore the whole backbone.

    Args:
        config: A `TorchropeConfig`.

    Attributes:
        model: The `ViT` or `Features`.
    """

    config_class = TorchropeConfig
    config: TorchropeConfig
    base_model_prefix = "torchrope"
    main_input_name = "pixel_values"
    input_modalities = "image"
    has_attentions = False
    # from_pretrained(dtype=torch.bfloat16) would round frequencies and generators.
    _keep_in_fp32_modules_strict = ["encodings"]  # noqa: RUF012

    def __init__(self, config: TorchropeConfig) -> None:
        super().__init__(config)
        self.model = config.build()
        self.num_features = (
            list(self.model.channels)
            if isinstance(self.model, Features)
            else [self.model.embed.proj.out_features] * len(config.stage_names)
        )
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        pixel_mask: Tensor | None = None,
    ) -> BackboneOutput | tuple[Any, ...]:
        """Compute the maps of the chosen stages.

        Args:
            pixel_values: `(batch, channels, *sizes)`; any sizes for a `Features`, multiples of the patch size for a
                `ViT`.
            output_hidden_states: Also return all stages: the tokens of a `ViT`, the maps of a `Features`.
            output_attentions: Not supported: attention weights are not computed.
            return_dict: False returns a tuple.
            pixel_mask: For a `Features`, True at valid pixels, `(batch, height, width)`; None for no padding.

        Returns:
            `feature_maps`, each `(batch, channels, *lattice)`, and `hidden_states` if requested.

        Raises:
            ValueError: output_attentions=True; for a `ViT` a mask, or other sizes.
        """
        if output_attentions:
            raise ValueError("output_attentions must be False, because attention weights are not computed, got True")
        return_all = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        chosen = [self.stage_names.index(name) for name in self.out_features]
        model, pixel_values = self.model, pixel_values.to(next(self.model.parameters()).dtype)
        if isinstance(model, Features):
            states = dict(enumerate(model(pixel_values, None if pixel_mask is None else pixel_mask.bool())))
            maps = [states[index] for index in chosen]
        elif pixel_mask is not None:
            rule = "pixel_mask must be None for a ViT (only Features takes one)"
            raise ValueError(f"{rule}, got {tuple(pixel_mask.shape)}")
        else:
            wanted = range(len(self.stage_names)) if return_all else chosen
            states = dict(zip(wanted, model.hidden_states(pixel_values, wanted), strict=True))
            norm = model.norm if self.config.apply_layernorm else nn.Identity()
            sizes = model.embed.lattice(pixel_values.shape[2:])
            maps = [model.to_map(norm(states[index]), sizes) for index in chosen]
        output = BackboneOutput(feature_maps=tuple(maps), hidden_states=tuple(states.values()) if return_all else None)
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    @torch.no_grad()
    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise tensors missing from a checkpoint; transformers marks those it loaded.

        transformers calls this for every module, and for the backbone itself last.
        """
        if module is not self or getattr(self, "_is_hf_initialized", False):
            return
        own_tensors = self.model.state_dict(keep_vars=True)
        missing = [name for name, one in own_tensors.items() if not getattr(one, "_is_hf_initialized", False)]
        fresh = self.config.build().state_dict() if missing else {}
        for name in missing:
            own_tensors[name].copy_(fresh[name])
        self._is_hf_initialized = True


AutoConfig.register(TorchropeConfig.model_type, TorchropeConfig)
AutoBackbone.register(TorchropeConfig, TorchropeBackbone)
# AutoBackbone.from_pretrained of transformers 5.23 queries the Hub even for a local directory; AutoModel reads it.
AutoModel.register(TorchropeConfig, TorchropeBackbone)
