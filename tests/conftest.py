"""Every test starts from the same random state and two threads."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    torch.manual_seed(0)
