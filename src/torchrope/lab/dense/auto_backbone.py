"""`Features` as a backbone of transformers; importing this module registers it with AutoConfig and AutoBackbone."""

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

from torchrope.integrations import own
from torchrope.models.features import Features


@strict
class FeaturesConfig(BackboneConfigMixin, PreTrainedConfig):
    """Describe a `Features` as transformers describes its backbones; `FeaturesConfig.of(features)` writes it.

    Args:
        model: What builds the `ViT` or `Swin`, as `torchrope.save` writes it: its class and arguments.
        features: What `Features` takes beside the model.
        out_features: Maps that are returned, "stage1" the first that `Features` gives; all by default.
        out_indices: The same by number, 0 the first.

    Raises:
        ValueError: maps that do not exist, and what the backbone refuses.

    Example:
        >>> from torchrope import ViT
        >>> vit = ViT((32, 32), patch_size=8, dim=32, depth=2, num_heads=2, encoding="liere:8")
        >>> config = FeaturesConfig.of(Features(vit, indices=(1, 2)))
        >>> maps = AutoBackbone.from_config(config)(torch.randn(1, 3, 32, 48)).feature_maps
        >>> [tuple(map.shape) for map in maps]
        [(1, 32, 4, 6), (1, 32, 4, 6)]
    """

    model_type = "torchrope_features"

    model: dict | None = None
    features: dict | None = None
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    @classmethod
    def of(cls, features: Features, **settings: Any) -> "FeaturesConfig":
        """The configuration that builds `features` again, with new weights.

        Raises:
            ValueError: a model built with what JSON cannot hold, such as an encoding that is no name.
        """
        described = {"model": own.recipe(features.model), "features": features.arguments}
        try:
            return cls(**json.loads(json.dumps(described)), **settings)
        except TypeError as error:
            raise ValueError(f"a configuration is JSON, got a model built with another: {error}") from None

    def __post_init__(self, **kwargs: Any) -> None:
        """Name the maps and choose among them."""
        self.model = self.model or {"class": "ViT", "arguments": {"input_size": [224, 224], "patch_size": 16}}
        self.features = self.features or {"pyramid": True}
        self.stage_names = [f"stage{index + 1}" for index in range(len(self.build("meta").channels))]
        chosen: dict[str, Any] = {name: kwargs.pop(name, None) for name in ("out_features", "out_indices")}
        if all(choice is None for choice in chosen.values()):
            chosen["out_features"] = list(self.stage_names)
        self.set_output_features_output_indices(**chosen)
        super().__post_init__(**kwargs)

    def build(self, device: str = "cpu") -> Features:
        """The `Features` that this describes, its weights drawn anew."""
        model: Any = own.rebuild(_tuples(self.model), device)
        with torch.device(device):
            return Features(model, **_tuples(self.features))


class FeaturesBackbone(BackboneMixin, PreTrainedModel):
    """Give the maps of a `Features` to a model of transformers: UperNet, Mask2Former, DPT, Deformable DETR.

    Built by `AutoBackbone.from_config`, or as the `backbone_config` of such a model. `save_pretrained` and
    `from_pretrained` keep all of it.

    Args:
        config: A `FeaturesConfig`.
    """

    config_class = FeaturesConfig
    config: FeaturesConfig
    base_model_prefix = "torchrope_features"
    main_input_name = "pixel_values"
    input_modalities = "image"
    has_attentions = False
    # from_pretrained(dtype=torch.bfloat16) would round frequencies and generators.
    _keep_in_fp32_modules_strict = ["encodings"]  # noqa: RUF012

    def __init__(self, config: FeaturesConfig) -> None:
        super().__init__(config)
        self.features = config.build()
        self.num_features = list(self.features.channels)
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        pixel_mask: Tensor | None = None,
    ) -> BackboneOutput | tuple[Any, ...]:
        """Compute the chosen maps.

        Args:
            pixel_values: `(batch, channels, height, width)` of any size.
            output_hidden_states: Also return all maps.
            output_attentions: Refused: the attention weights are never formed.
            return_dict: False returns a tuple.
            pixel_mask: True where the image is, `(batch, height, width)`; None where it is everywhere.

        Returns:
            `feature_maps`, and all of them as `hidden_states` where asked for.

        Raises:
            ValueError: output_attentions.
        """
        if output_attentions:
            raise ValueError("torchrope_features never forms its attention weights, got output_attentions=True")
        everything = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        mask = None if pixel_mask is None else pixel_mask.bool()
        maps = self.features(pixel_values.to(self.features.model.embed.proj.weight.dtype), mask)
        chosen: Any = tuple(maps[self.stage_names.index(name)] for name in self.out_features)
        output = BackboneOutput(feature_maps=chosen, hidden_states=tuple(maps) if everything else None)
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    @torch.no_grad()
    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Draw what a checkpoint did not hold as a new backbone does; transformers marks what it did.

        It goes through the modules one by one, and through this one last.
        """
        if module is not self or getattr(self, "_is_hf_initialized", False):
            return
        fresh = self.config.build().state_dict()
        for name, tensor in self.features.state_dict(keep_vars=True).items():
            if not getattr(tensor, "_is_hf_initialized", False):
                tensor.copy_(fresh[name])
        self._is_hf_initialized = True


def _tuples(value: Any) -> Any:
    """JSON knows lists alone; sizes are tuples."""
    if isinstance(value, dict):
        return {name: _tuples(part) for name, part in value.items()}
    return tuple(_tuples(part) for part in value) if isinstance(value, list) else value


AutoConfig.register(FeaturesConfig.model_type, FeaturesConfig)
AutoBackbone.register(FeaturesConfig, FeaturesBackbone)
# AutoBackbone.from_pretrained of transformers 5.23 asks the hub even for a directory; AutoModel reads it.
AutoModel.register(FeaturesConfig, FeaturesBackbone)
