"""Random models under random layouts equal one device, or are refused by name; `tests.generated.prove` has more."""

import pytest
import torch

from tests.generated.prove import prove, sound

torch.set_num_threads(1)


@pytest.mark.parametrize("seed", [1, 2, 5, 8])
def test_a_random_model_equals_one_device_or_is_refused(seed: int) -> None:
    assert [verdict for verdict in prove(seed, 2) if not sound(verdict)] == []
