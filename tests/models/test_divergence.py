"""Settings of the guard and its units; what it does in a run is in tests/test_resuming.py."""

import pytest
import torch

from models.divergence import DivergenceGuard, _withhold


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"policy": "ignore"}, "policy must be one of stop, skip, got ignore"), ({"limit": -1}, "at least 0, got -1")],
)
def test_wrong_settings_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        DivergenceGuard(**{"policy": "stop", "limit": 0, "run_dir": str(tmp_path), **changes})


@pytest.mark.parametrize("fused", [True, False])
def test_a_withheld_step_leaves_weights_moments_and_count_alone(fused):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)

    def step(gradient, withheld):
        parameter.grad = torch.full((3,), gradient)
        _withhold(optimizer, torch.tensor(withheld))
        optimizer.step()
        state = optimizer.state[parameter]
        return [parameter.detach().clone(), *(state[name].clone() for name in ("exp_avg", "exp_avg_sq", "step"))]

    first = step(1.0, 0.0)
    assert all(map(torch.equal, step(float("nan"), 1.0), first))
    assert not any(map(torch.equal, step(1.0, 0.0), first))


def test_the_count_outlives_a_resumption(tmp_path):
    guard = DivergenceGuard(policy="skip", limit=3, run_dir=str(tmp_path))
    guard.num_withheld = 2
    resumed = DivergenceGuard(policy="skip", limit=3, run_dir=str(tmp_path))
    resumed.load_state_dict(guard.state_dict())
    assert resumed.num_withheld == 2
