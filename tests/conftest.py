"""What tests of several modules share: torch on one thread."""

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
