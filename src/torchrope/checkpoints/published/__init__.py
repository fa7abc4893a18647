"""Load checkpoints published with papers (`load_published`) as `ViT` or `Swin`."""

import inspect
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchrope.checkpoints.published import comrope, liere, rope_swin, rope_vit, timm_vit
from torchrope.checkpoints.published.files import read_state

# Modules with FAMILY, a name; MARKS, names of tensors, of which a checkpoint has one of each tuple; and `convert`.
_FAMILIES = (rope_vit, timm_vit, rope_swin, liere, comrope)


def load_published(path: str | os.PathLike[str], **options: Any) -> nn.Module:
    """Load a published checkpoint as a `ViT` or `Swin` in evaluation mode, with the logits of the original model.

    The architecture is inferred from the names and shapes of the tensors; each tensor must be used exactly once.
    Pickles are read without running their code.

    Args:
        path: A `.safetensors` file or one of `torch.save`: a state dict, or a checkpoint that holds one under "model",
            "state_dict", "model_state_dict" or "module"; prefixes of wrappers are removed.
        options: Settings that the shapes do not determine, by family; read from the file or as published by default.
            - rope-vit, and timm's `vit_*_patch16_rope_*`: `num_heads`, `input_size`, `encoding`: "axial", or "none"
              for DeiT III, whose own checkpoints look like those of RoPE-Axial with APE.
            - timm's ViT, DeiT, DINOv2, CLIP: `num_heads`; `input_size`, needed if the patches are not a square; and
              `activation`: "gelu" or, for CLIP's own weights, "quick_gelu".
            - Swin, Microsoft's, timm's and rope-vit's: `window_size`, 7 if the file does not determine it, and
              `input_size`, by default the one whose last stage is one window.
            - LieRE: `input_size` and `patch_size`, needed unless images are square with three channels or clips as
              published; `spacing`, by default 1 / (n - 1) for n patches; and `layers`. Files may have generators for
              each layer, but LieRE's code uses those of layer 0 in all layers: "as published" does the same, "per
              layer" uses those of each layer.
            - ComRoPE: `input_size`, needed without a position table: pixels, after frames if any; `num_axes`, by
              default 3 with frames, else 2; `activation`: "quick_gelu" or "gelu"; and `positions`: whether the
              "spacing" or, as in its code, the "range" of positions is constant across input sizes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unsafe or damaged file; an unknown family or option; a tensor that is missing, unused or of a
            wrong shape. The message is one line and names the tensor.

    References:
        Heo et al., github.com/naver-ai/rope-vit; Ostmeier et al., github.com/StanfordMIMI/LieRE; Yu et al.,
        github.com/Longin-Yu/ComRoPE; Wightman, github.com/huggingface/pytorch-image-models.
    """
    return convert(read_state(path), **options)


def convert(state: Mapping[str, Tensor], **options: Any) -> nn.Module:
    """Convert the tensors of a published checkpoint to a model; options and errors as of `load_published`."""
    family = family_of(state)
    takes = options_of(family)
    foreign = sorted(set(options) - set(takes))
    if foreign:
        raise ValueError(f"options of {family.FAMILY} must be among {', '.join(takes)}, got {', '.join(foreign)}")
    return family.convert(state, **options)


def family_of(state: Mapping[str, Tensor]) -> Any:
    """Return the module that converts checkpoints with these tensors; ValueError if there is none."""
    for family in _FAMILIES:
        if all(not state.keys().isdisjoint(names) for names in family.MARKS):
            return family
    known, names = ", ".join(family.FAMILY for family in _FAMILIES), ", ".join(sorted(state)[:3])
    raise ValueError(f"load_published supports checkpoints of {known}, got {len(state)} tensors such as {names}")


def options_of(family: Any) -> list[str]:
    """Return the names of the options of a family's `convert`."""
    return [name for name in inspect.signature(family.convert).parameters if name != "state"]
