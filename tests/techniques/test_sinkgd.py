"""SinkGD: steps of balanced gradients, without state."""

import pytest
import torch
from support.helpers import settings_for
from torch import nn

from fabric_ladder import build_optimizer
from fabric_ladder.techniques import sinkgd

SHAPES = ((7, 5), (40, 30), (2, 64), (6, 4, 3), (9,), ())


def step_of(tmp_path, gradient, dtype=torch.float64):
    """Return the step at a learning rate of 1, and the optimizer."""
    weight = nn.Parameter(torch.zeros(gradient.shape, dtype=dtype))
    weight.grad = gradient.to(dtype)
    optimizer = build_optimizer(
        settings_for(tmp_path, optimizer="sinkgd", learning_rate=1.0), nn.ParameterList([weight])
    )
    optimizer.step()
    return -weight.detach(), optimizer


def in_the_paper(gradient):
    """Return SR-Sinkhorn's result: rows and columns are divided by their norms, five times by turns."""
    rows, columns = gradient.shape
    for _ in range(5):
        gradient = gradient / gradient.norm(dim=1, keepdim=True) * columns**0.5
        gradient = gradient / gradient.norm(dim=0) * rows**0.5
    return gradient


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_the_gradient_balanced_as_in_the_paper(tmp_path, monkeypatch, shape):
    torch.manual_seed(0)
    gradient = torch.randn(shape, dtype=torch.float64) * 10 ** torch.randn(shape[:1] + (1,) * (len(shape) - 1))
    expected = in_the_paper(gradient.reshape(shape[0] if shape else 1, -1)).reshape(shape)
    for size in (2**22, 70, 1):  # a matrix in one part, in several, and row by row
        monkeypatch.setattr(sinkgd, "PART_SIZE", size)
        step, optimizer = step_of(tmp_path, gradient)
        torch.testing.assert_close(step, expected)
    assert not any(optimizer.state.values())
    if len(shape) < 2:
        torch.testing.assert_close(step, gradient.sign())


def test_rows_of_zeros_stay_and_do_not_count(tmp_path):
    torch.manual_seed(0)
    seen = torch.randn(5, 8)
    table = torch.zeros(50, 8)
    table[10:15] = seen
    step, _ = step_of(tmp_path, table, torch.float32)
    # another shape may sum in another order
    torch.testing.assert_close(step[10:15], step_of(tmp_path, seen, torch.float32)[0], rtol=1e-6, atol=1e-6)
    assert not step[:10].any()
    assert not step[15:].any()
    assert not step_of(tmp_path, torch.zeros(3, 4))[0].any(), "as that of an adapter whose partner is 0"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scale_of_a_gradient_does_not_matter(tmp_path, dtype):
    torch.manual_seed(0)
    gradient = torch.randn(16, 12).to(dtype)
    step, _ = step_of(tmp_path, gradient, dtype)
    assert step.equal(step_of(tmp_path, gradient * 2**6, dtype)[0])
    assert step.double().square().mean() == pytest.approx(1, rel=1e-2)
    tiny, _ = step_of(tmp_path, torch.full((4, 4), 1e-30), torch.float32)
    assert not tiny.any(), "its squares are 0"


def test_a_gradient_that_is_not_a_number_is_not_hidden(tmp_path):
    gradient = torch.ones(3, 3)
    gradient[1, 1] = torch.nan
    assert step_of(tmp_path, gradient)[0].isnan().any()
