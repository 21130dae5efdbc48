"""bfloat16 on a CPU without its instructions: the results of 32-bit operations, rounded."""

import warnings

import pytest
import torch
from support.helpers import settings_for
from torch.nn import functional

from fabric_ladder.models import cpu_bfloat16
from fabric_ladder.models.cpu_bfloat16 import compute_in_32_bits
from fabric_ladder.runs.process import prepare_process

SLOW = {"avx2": True, "avx512_bf16": False}
FAST = {"avx2": True, "avx512_bf16": True}


def attention(query, key, value, mask):
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


HEADS = [(2, 3, 20, 8)] * 3
OPERATIONS = {
    "mm": (torch.mm, [(30, 40), (40, 20)]),
    "addmm": (torch.addmm, [(20,), (30, 40), (40, 20)]),
    "addmm scaled": (lambda *given: torch.addmm(*given, beta=0.5, alpha=2), [(30, 20), (30, 40), (40, 20)]),
    "bmm": (torch.bmm, [(3, 30, 40), (3, 40, 20)]),
    "baddbmm": (torch.baddbmm, [(3, 30, 20), (3, 30, 40), (3, 40, 20)]),
    "linear": (functional.linear, [(5, 30, 40), (20, 40), (20,)]),
    "convolution": (functional.conv2d, [(2, 3, 16, 16), (8, 3, 4, 4), (8,)]),
    "convolution without bias": (functional.conv2d, [(2, 3, 16, 16), (8, 3, 4, 4)]),
    "attention": (functional.scaled_dot_product_attention, HEADS),
    "attention, masked": (attention, [*HEADS, (2, 1, 20, 20)]),
}


@pytest.fixture
def replaced():
    """Replace the operations, and give PyTorch its own back after the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library = compute_in_32_bits()
    yield library
    library._destroy()
    compute_in_32_bits.cache_clear()


def results(function, inputs, gradient):
    """Return a function's result and its gradients."""
    inputs = [each.detach().requires_grad_(each.dim() != 4 or each.shape[1] != 1) for each in inputs]  # no mask's
    result = function(*inputs)
    result.backward(gradient.to(result.dtype))
    return [result.detach(), *(each.grad for each in inputs if each.requires_grad)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_and_gradients_are_those_of_32_bits_rounded(replaced, name):
    function, shapes = OPERATIONS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).bfloat16() for shape in shapes]
    gradient = torch.randn(function(*inputs).shape).bfloat16()
    found = results(function, inputs, gradient)
    expected = results(function, [each.float() for each in inputs], gradient.float())
    for ours, wide in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        if "attention" in name:  # the backward pass reads the rounded result
            assert torch.allclose(ours.float(), wide, rtol=0.01, atol=0.02)
        else:
            assert torch.equal(ours, wide.bfloat16())


def test_the_cases_above_use_every_replaced_operation(replaced):
    called = set()
    for function, shapes in OPERATIONS.values():
        with torch.profiler.profile() as profile:
            inputs = [torch.randn(shape).bfloat16() for shape in shapes]
            results(function, inputs, torch.randn(function(*inputs).shape))
        called |= {event.key.removeprefix("aten::") for event in profile.key_averages()}
    assert called >= set(cpu_bfloat16.OPERATIONS)


def test_other_types_keep_their_results(replaced):
    torch.manual_seed(0)
    wide, whole = torch.randn(64, 64), torch.arange(64).reshape(8, 8)
    found = wide @ wide, wide.double() @ wide.double(), wide.half() @ wide.half(), whole @ whole
    replaced._destroy()
    expected = wide @ wide, wide.double() @ wide.double(), wide.half() @ wide.half(), whole @ whole
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("capabilities", "precision", "expected"),
    [(SLOW, "bf16-true", 1), (SLOW, "bf16-mixed", 1), (SLOW, "32-true", 0), (FAST, "bf16-true", 0)],
)
def test_only_a_cpu_without_bfloat16_computes_it_in_32_bits(tmp_path, monkeypatch, capabilities, precision, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    compute_in_32_bits.cache_clear()
    prepare_process(settings_for(tmp_path, precision=precision, accelerator="cpu"))
    assert compute_in_32_bits.cache_info().currsize == expected
    if expected:
        compute_in_32_bits()._destroy()
        compute_in_32_bits.cache_clear()
