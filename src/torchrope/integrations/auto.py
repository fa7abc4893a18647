"""A backbone for the models of transformers; importing this module registers it with AutoConfig and AutoBackbone."""

from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoBackbone, AutoConfig, AutoModel
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BackboneOutput
from transformers.modeling_utils import PreTrainedModel

from torchrope.models.vit import ViT, initialize


@strict
class TorchropeConfig(BackboneConfigMixin, PreTrainedConfig):
    """Describe a `torchrope.ViT` as transformers describes its models.

    Args:
        encoding: Any name of an encoding: "mixed", "liere:8", "learned+axial".
        share_layers: One encoding for all layers.
        spacing: Distance between neighbouring patches, one number or one per axis; the paper's by default.
        origin: Position of the first patch, likewise.
        image_size: Training size, one number for a square or one per axis; three axes make a backbone for video.
        patch_size: Extent of a patch, likewise.
        num_channels: Channels of the data.
        hidden_size: Channels of a token.
        num_hidden_layers: Layers.
        num_attention_heads: Attention heads.
        intermediate_size: Channels inside the MLP; 4 hidden_size by default.
        use_cls_token: Whether a class token takes part.
        num_register_tokens: Further tokens without a place.
        qkv_bias: Whether queries, keys and values have a bias.
        hidden_dropout_prob: Probability of dropping a channel.
        attention_probs_dropout_prob: Probability of dropping an attention weight.
        drop_path_rate: Probability of skipping a branch in the last layer.
        layerscale_value: Initial factor on each branch, or None for no factors.
        apply_layernorm: Whether the final norm is applied to each feature map.
        out_features: Stages whose maps are returned: "stem" is the embedded patches, "stage1" layer 1, and so on.
        out_indices: The same by number, 0 the stem; the last layer by default.

    Raises:
        ValueError: stages that do not exist; the model raises for all else that `ViT` refuses.

    Example:
        >>> from transformers import AutoBackbone
        >>> config = TorchropeConfig(encoding="liere:8", image_size=32, patch_size=8, hidden_size=32,
        ...                          num_hidden_layers=2, num_attention_heads=2, out_indices=[1, 2])
        >>> maps = AutoBackbone.from_config(config)(torch.randn(1, 3, 32, 48)).feature_maps
        >>> [tuple(map.shape) for map in maps]
        [(1, 32, 4, 6), (1, 32, 4, 6)]
    """

    model_type = "torchrope_vit"

    encoding: str = "mixed"
    share_layers: bool = False
    spacing: float | int | list | tuple | None = None
    origin: float | int | list | tuple | None = None
    image_size: int | list[int] | tuple[int, ...] = 224
    patch_size: int | list[int] | tuple[int, ...] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    use_cls_token: bool = True
    num_register_tokens: int = 0
    qkv_bias: bool = True
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.0
    layerscale_value: float | int | None = None
    apply_layernorm: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Name the stages and choose among them."""
        self.stage_names = ["stem", *(f"stage{index}" for index in range(1, self.num_hidden_layers + 1))]
        self.set_output_features_output_indices(
            out_indices=kwargs.pop("out_indices", None), out_features=kwargs.pop("out_features", None)
        )
        super().__post_init__(**kwargs)

    def build(self) -> ViT:
        """The ViT that this describes, without a head."""
        return ViT(
            (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size,
            patch_size=self.patch_size,
            in_channels=self.num_channels,
            num_classes=0,
            dim=self.hidden_size,
            depth=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            mlp_dim=self.intermediate_size,
            encoding=self.encoding,
            share_layers=self.share_layers,
            spacing=self.spacing,
            origin=self.origin,
            pool="cls" if self.use_cls_token else "mean",
            num_registers=self.num_register_tokens,
            qkv_bias=self.qkv_bias,
            dropout=self.hidden_dropout_prob,
            attention_dropout=self.attention_probs_dropout_prob,
            drop_path=self.drop_path_rate,
            layer_scale=self.layerscale_value,
        )


class TorchropeBackbone(BackboneMixin, PreTrainedModel):
    """Give the feature maps of a `torchrope.ViT` to a model of transformers: UPerNet, Mask2Former, DETR.

    Built by `AutoBackbone.from_config`, or as the `backbone_config` of such a model. `save_pretrained` and
    `from_pretrained` keep all of it, since it is a class of its own.

    Args:
        config: A `TorchropeConfig`.
    """

    config_class = TorchropeConfig
    config: TorchropeConfig
    base_model_prefix = "torchrope_vit"
    main_input_name = "pixel_values"
    input_modalities = "image"
    has_attentions = False
    # from_pretrained(dtype=torch.bfloat16) would round frequencies and generators.
    _keep_in_fp32_modules_strict = ["encodings"]  # noqa: RUF012

    def __init__(self, config: TorchropeConfig) -> None:
        super().__init__(config)
        self.vit = config.build()
        self.num_features = [config.hidden_size] * len(config.stage_names)
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BackboneOutput | tuple[Any, ...]:
        """Compute the maps of the chosen stages.

        Args:
            pixel_values: `(batch, num_channels, *sizes)`, sizes divisible by the patch, any of them.
            output_hidden_states: Also return the tokens of every stage.
            output_attentions: Refused: the attention weights are never formed.
            return_dict: False returns a tuple.

        Returns:
            `feature_maps`, each `(batch, hidden_size, *lattice)`, and `hidden_states` where asked for.

        Raises:
            ValueError: output_attentions, and sizes that patches do not fill.
        """
        if output_attentions:
            raise ValueError("torchrope_vit never forms its attention weights, got output_attentions=True")
        everything = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        chosen: Sequence[int] = [self.stage_names.index(name) for name in self.out_features]
        pixel_values = pixel_values.to(self.vit.embed.proj.weight.dtype)
        states = self.vit.hidden_states(pixel_values, range(len(self.stage_names)) if everything else chosen)
        sizes = self.vit.embed.lattice(pixel_values.shape[2:])
        norm = self.vit.norm if self.config.apply_layernorm else nn.Identity()
        mapped = [states[index] for index in chosen] if everything else states
        maps: Any = tuple(self.vit.to_map(norm(tokens), sizes) for tokens in mapped)
        hidden: Any = tuple(states) if everything else None
        output = BackboneOutput(feature_maps=maps, hidden_states=hidden)
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what a checkpoint did not hold; transformers marks what it did."""
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not all(getattr(tensor, "_is_hf_initialized", False) for tensor in own):
            initialize(module)


AutoConfig.register(TorchropeConfig.model_type, TorchropeConfig)
AutoBackbone.register(TorchropeConfig, TorchropeBackbone)
# AutoBackbone.from_pretrained of transformers 5.23 asks the hub even for a directory; AutoModel reads it.
AutoModel.register(TorchropeConfig, TorchropeBackbone)
