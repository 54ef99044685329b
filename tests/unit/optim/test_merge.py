"""What parameters become that were trained while their average was on its way."""

from __future__ import annotations

import torch

from shoal.optim.merge import Merge, merged

OUTER, LOCAL, CUT = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.5]), torch.tensor([9.0, 20.0, 31.0])


def test_what_was_learnt_since_the_cut_is_carried_on_top_of_the_average() -> None:
    assert merged(Merge.CARRY, OUTER, LOCAL.clone(), CUT).tolist() == [2.0, 2.0, 2.5]


def test_the_mean_of_the_average_and_the_own_parameters_goes_on() -> None:
    assert merged(Merge.MEAN, OUTER, LOCAL.clone(), CUT).tolist() == [5.5, 11.0, 16.75]


def test_merging_changes_neither_the_average_nor_the_cut() -> None:
    before = OUTER.clone(), CUT.clone()
    local = LOCAL.clone()
    found = merged(Merge.CARRY, OUTER, local, CUT)
    assert found.data_ptr() == local.data_ptr()
    assert torch.equal(OUTER, before[0])
    assert torch.equal(CUT, before[1])
