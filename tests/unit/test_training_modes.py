"""Modes of submodules are put back one by one, also those that a module's own `train` sets."""

from __future__ import annotations

from torch import nn

from meshwright.parallel.training_modes import evaluation_mode, set_training_modes, training_modes


class Merging(nn.Linear):
    """Changes more than a flag when it is told to evaluate, as adapters that merge their weights do."""

    merged = False

    def train(self, mode: bool = True) -> Merging:
        self.merged = not mode
        return super().train(mode)


def test_every_submodule_has_its_own_mode_again() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    module[1][0].eval()
    before = training_modes(module)
    assert before == {"": True, "0": True, "1": True, "1.0": False, "1.1": True}
    with evaluation_mode([module]):
        assert not any(training_modes(module).values())
    assert training_modes(module) == before


def test_a_train_of_the_module_s_own_is_called() -> None:
    module = nn.Sequential(Merging(2, 2))
    with evaluation_mode([module]):
        assert module[0].merged
    assert not module[0].merged
    set_training_modes(module, {"": False, "0": True})
    assert module[0].training and not module.training
