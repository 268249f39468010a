"""What tests of several modules share: torch on one thread, and hypothesis as CI has it."""

import pytest
import torch
from hypothesis import settings

# The same examples here as in CI, and no deadline: a slow moment of the machine is no finding.
settings.load_profile("ci")


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
