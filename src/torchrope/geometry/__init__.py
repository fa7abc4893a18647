"""Encodings of tokens of several views: poses of cameras, and rays through pixels."""

from torchrope.geometry.poses import PoseAction as PoseAction
from torchrope.geometry.poses import PoseEncoding as PoseEncoding
from torchrope.geometry.poses import Poses as Poses
from torchrope.geometry.poses import from_quaternions as from_quaternions
from torchrope.geometry.rays import RayAction as RayAction
from torchrope.geometry.rays import RayEncoding as RayEncoding
