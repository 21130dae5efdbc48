"""bfloat16 where PyTorch is slow: the results of 32-bit operations, rounded."""

import pytest
import torch
from support.helpers import settings_for
from torch.nn import functional

from fabric_ladder.models import cpu_bfloat16
from fabric_ladder.models.cpu_bfloat16 import IN_PLACE, OPERATIONS, compute_in_32_bits, restore_bfloat16
from fabric_ladder.runs.process import prepare_process

pytestmark = pytest.mark.usefixtures("own_bfloat16")


def attention(query, key, value, mask):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


HEADS = [(2, 3, 20, 8)] * 3
CASES = {
    "mm": (torch.mm, [(30, 40), (40, 20)]),
    "addmm": (torch.addmm, [(20,), (30, 40), (40, 20)]),
    "addmm scaled": (lambda *given: torch.addmm(*given, beta=0.5, alpha=2), [(30, 20), (30, 40), (40, 20)]),
    "bmm": (torch.bmm, [(3, 30, 40), (3, 40, 20)]),
    "baddbmm": (torch.baddbmm, [(3, 30, 20), (3, 30, 40), (3, 40, 20)]),
    "linear": (functional.linear, [(5, 30, 40), (20, 40), (20,)]),
    "convolution": (functional.conv2d, [(2, 3, 16, 16), (8, 3, 4, 4), (8,)]),
    "attention": (functional.scaled_dot_product_attention, HEADS),
    "attention, masked": (attention, [*HEADS, (2, 1, 20, 20)]),
}


def results(function, inputs, gradient):
    """Return a function's result and its gradients."""
    inputs = [each.detach().requires_grad_(each.dim() != 4 or each.shape[1] != 1) for each in inputs]  # no mask's
    result = function(*inputs)
    result.backward(gradient.to(result.dtype))
    return [result.detach(), *(each.grad for each in inputs if each.requires_grad)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_32_bits_rounded(name):
    function, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    gradient = torch.randn(function(*inputs).shape).bfloat16()
    expected = results(function, [each.float() for each in inputs], gradient.float())
    compute_in_32_bits()
    found = results(function, inputs, gradient)
    for ours, wide in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        if "attention" in name:  # the backward pass reads the rounded result
            assert torch.allclose(ours.float(), wide, rtol=0.01, atol=0.02)
        else:
            assert torch.equal(ours, wide.bfloat16())


def test_the_cases_above_use_every_replaced_operation():
    called = set()
    for function, shapes in CASES.values():
        with torch.profiler.profile() as profile:
            inputs = [torch.randn(shape).bfloat16() for shape in shapes]
            results(function, inputs, torch.randn(function(*inputs).shape))
        called |= {event.key.removeprefix("aten::") for event in profile.key_averages()}
    assert called >= set(OPERATIONS)


@pytest.mark.parametrize("name", IN_PLACE)
def test_results_are_written_where_they_belong(name):
    """Columns of a larger tensor receive the result, and so does a tensor without elements."""
    operation = getattr(torch.ops.aten, name.removesuffix(".out"))
    torch.manual_seed(0)
    batch = (3,) if "bmm" in name else ()
    factors = [torch.randn(*batch, 30, 40).bfloat16(), torch.randn(*batch, 40, 20).bfloat16()]
    summand = torch.randn(*batch, 30, 20).bfloat16()
    added = "add" in name
    expected = (factors[0].float() @ factors[1].float() + (summand.float() if added else 0)).bfloat16()
    compute_in_32_bits()
    whole = torch.zeros(*batch, 30, 50).bfloat16()
    target = whole[..., 10:30]
    if name.endswith("_"):
        assert operation(target.copy_(summand), *factors) is target
    else:
        inputs = [summand, *factors] if added else factors
        assert operation.out(*inputs, out=target) is target
        assert torch.equal(operation.out(*inputs, out=torch.empty(0).bfloat16()), expected)
    assert torch.equal(target, expected)
    assert whole[..., :10].count_nonzero() == whole[..., 30:].count_nonzero() == 0


def test_types_that_do_not_match_are_refused():
    compute_in_32_bits()
    narrow, wide = torch.ones(4, 4).bfloat16(), torch.ones(4, 4)
    for operation in (torch.mm, wide.clone().addmm_):
        with pytest.raises(RuntimeError, match="dtype"):
            operation(narrow, wide)


def test_pytorch_gets_its_own_operations_back():
    torch.manual_seed(0)
    inputs = torch.randn(2, 3, 20, 8).bfloat16(), torch.randn(4, 3, 3, 3).bfloat16()
    before = functional.conv2d(inputs[0], inputs[1])
    restore_bfloat16()  # nothing is replaced yet
    compute_in_32_bits()
    restore_bfloat16()
    assert torch.equal(functional.conv2d(inputs[0], inputs[1]), before)
    assert not compute_in_32_bits.cache_info().currsize


@pytest.mark.parametrize(
    ("fast", "precision", "expected"),
    [(False, "bf16-true", 1), (False, "bf16-mixed", 1), (False, "32-true", 0), (True, "bf16-true", 0)],
)
def test_only_a_cpu_without_fast_bfloat16_computes_it_in_32_bits(tmp_path, monkeypatch, fast, precision, expected):
    monkeypatch.setattr(cpu_bfloat16, "cpu_has_fast_bfloat16", lambda: fast)
    prepare_process(settings_for(tmp_path, precision=precision, accelerator="cpu"))
    assert compute_in_32_bits.cache_info().currsize == expected
