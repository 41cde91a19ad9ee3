"""What holds for every test of the core."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums in another number of threads round differently, and the next test may compare them with another process."""
    yield
    assert torch.get_num_threads() == 1, "the test has left torch with more threads than one"
