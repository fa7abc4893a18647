"""Use encodings in models of other libraries, load published checkpoints, save and load models."""

from torchrope.checkpoints.published.files import read_state as read_state
from torchrope.checkpoints.saving import FILE as FILE
from torchrope.integrations import entries as entries
from torchrope.integrations.family import AttentionShape as AttentionShape
from torchrope.integrations.family import BuiltInRotation as BuiltInRotation
from torchrope.integrations.family import ModelFamily as ModelFamily
from torchrope.integrations.family import parameter_groups as parameter_groups
from torchrope.integrations.family import register_family as register_family
from torchrope.integrations.family import shard_groups as shard_groups
from torchrope.integrations.layer import AfterNorms as AfterNorms
from torchrope.integrations.layer import AfterSplit as AfterSplit
from torchrope.integrations.layer import CustomForward as CustomForward
from torchrope.integrations.layer import InFunction as InFunction
from torchrope.integrations.layer import Sdpa as Sdpa
from torchrope.integrations.own_rotation import OwnRotation as OwnRotation
from torchrope.integrations.positions import FromArgument as FromArgument
from torchrope.integrations.positions import FromCoordinates as FromCoordinates
from torchrope.integrations.positions import FromLayer as FromLayer
from torchrope.integrations.positions import FromPatches as FromPatches
from torchrope.integrations.rotary import Rotary as Rotary
from torchrope.integrations.swap import adapt as adapt
