"""A language model's loss in chunks: the numbers of the whole loss, without a tensor of its size."""

import copy

import pytest
import torch
from support.helpers import relative_error
from support.made import Made
from torch.nn.functional import cross_entropy, linear
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    RwkvConfig,
)

from fabric_ladder.techniques.chunked_loss import chunked_loss, use_chunked_loss

TOKENS, WIDTH, WORDS = 37, 16, 640
COMMON = {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2}
HEADS = COMMON | {"num_attention_heads": 2, "intermediate_size": 32}
PLAIN = [
    BloomConfig(n_head=2, **COMMON),
    GPT2Config(n_head=2, n_embd=WIDTH, n_layer=2, vocab_size=WORDS, bos_token_id=1, eos_token_id=2,
               resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    LlamaConfig(**HEADS),
    PhiConfig(**HEADS),
]  # fmt: skip
WITH_MORE = [  # a soft cap, a factor, a divisor, another decoder, other outputs
    Gemma2Config(num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.5, **HEADS),
    CohereConfig(**HEADS),
    GraniteConfig(logits_scaling=3.0, **HEADS),
    OPTConfig(ffn_dim=32, num_attention_heads=2, word_embed_proj_dim=WIDTH, dropout=0.0, **COMMON),
    RwkvConfig(**COMMON),
]


def tensors(dtype=torch.float32, bias=True, seed=0):
    torch.manual_seed(seed)
    hidden, weight = torch.randn(TOKENS, WIDTH, dtype=dtype), torch.randn(WORDS, WIDTH, dtype=dtype)
    made = [hidden, weight, *([torch.randn(WORDS, dtype=dtype)] if bias else [])]
    return [tensor.requires_grad_() for tensor in made], torch.randint(WORDS, (TOKENS,))


def whole(inputs, targets):
    logits = linear(*inputs).float() if inputs[0].dtype != torch.float64 else linear(*inputs)
    return cross_entropy(logits, targets), (logits.argmax(-1) == targets).sum()


def gradients(loss, inputs):
    return torch.autograd.grad(loss * 3.0, inputs)  # a micro-batch's weight multiplies the loss


@pytest.mark.parametrize(("chunk", "bias"), [(1, True), (8, False), (37, True), (1000, False)])
def test_the_loss_and_its_gradients_equal_the_whole_loss(chunk, bias):
    inputs, targets = tensors(torch.float64, bias=bias)
    loss, correct = chunked_loss(*inputs, *([] if bias else [None]), targets, chunk)
    expected, right = whole(inputs, targets)
    assert loss.dtype == torch.float64
    assert correct == right
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradients(loss, inputs), gradients(expected, inputs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_in_16_bit_the_loss_is_as_near_to_32_bit_as_the_whole_loss(dtype, autocast):
    """Errors are the rounding errors of the number format. A second rounding of the gradient may add half of that."""
    exact, targets = tensors()
    reference = gradients(whole(exact, targets)[0], exact)
    inputs = exact if autocast else [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    with torch.autocast("cpu", dtype, enabled=autocast):
        losses = chunked_loss(*inputs, targets, 8)[0], whole(inputs, targets)[0]
    mine, its = (
        [torch.linalg.vector_norm(a.float() - b) for a, b in zip(gradients(loss, inputs), reference, strict=True)]
        for loss in losses
    )
    assert all(ours <= 1.5 * theirs for ours, theirs in zip(mine, its, strict=True)), (mine, its)
    assert losses[0].dtype == torch.float32


@pytest.mark.parametrize(("frozen", "autocast"), [(False, True), (True, True), (False, False)])
def test_small_probabilities_keep_their_gradient_where_a_scaled_loss_is_in_float16(frozen, autocast):
    """A class of probability 1e-8 gets its share: float16 would round the probability to 0."""
    (hidden, weight, bias), targets = tensors()
    with torch.no_grad():
        hidden.mul_(0.1)  # all tokens then have about the same probabilities
        weight[5], bias[5] = 0, -11.5
    weight.requires_grad_(not frozen)
    inputs = [hidden, weight, bias]
    if not autocast:  # as DeepSpeed keeps its weights
        inputs = [tensor.detach().half().requires_grad_() for tensor in inputs]
    with Made() as made:
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss, correct = chunked_loss(*inputs, targets.clamp(min=6), 4)
        learning = [tensor for tensor in inputs if tensor.requires_grad]
        found = torch.autograd.grad(loss * 2.0**16, learning)
    assert made.largest == WORDS * WIDTH, "the head in float16, and no tensor of all logits"
    exact = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in inputs]
    expected, right = whole(exact, targets.clamp(min=6))
    reference = torch.autograd.grad(expected * 2.0**16, [tensor for tensor in exact if tensor.requires_grad])
    assert correct == right
    assert relative_error([each.float() for each in reference], found) < 2e-3
    rare = reference[-1][5]
    assert 0 < rare / 2.0**16 < 3e-8, "below float16's smallest number"
    assert found[-1][5] == pytest.approx(rare.item(), rel=0.02)
    if not frozen:
        assert relative_error([reference[1][5]], [found[1][5]]) < 0.02


def test_frozen_weights_get_no_gradient():
    (hidden, weight, bias), targets = tensors()
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    with Made() as made:
        chunked_loss(hidden, weight, bias, targets, 4)[0].backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert made.largest < WORDS * WIDTH, "no gradient of the head was made"


def test_an_evaluation_makes_no_gradient():
    inputs, targets = tensors()
    with torch.no_grad(), Made() as made:
        loss, correct = chunked_loss(*inputs, targets, 8)
    assert made.largest == 8 * WORDS
    assert not loss.requires_grad
    assert not correct.requires_grad


def batch(rows=3, length=29):
    """Return a batch whose prompts have different lengths, and the positions before trained tokens."""
    torch.manual_seed(1)
    ids = torch.randint(3, WORDS, (rows, length))
    labels = ids.clone()
    for row, prompt in enumerate((5, 12, 20)):
        labels[row, :prompt] = -100
    follows = torch.zeros(rows, length, dtype=torch.bool)
    follows[:, :-1] = labels[:, 1:] != -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}, follows.flatten().nonzero()[
        :, 0
    ]


def models(config):
    torch.manual_seed(0)
    config.use_cache = False
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    mine = copy.deepcopy(theirs)
    use_chunked_loss(mine, 8)
    return mine, theirs


@pytest.mark.parametrize("config", PLAIN + WITH_MORE, ids=lambda config: config.model_type)
def test_a_model_learns_the_same_from_it(config):
    """A plain head makes no tensor as large as the logits of all trained tokens."""
    mine, theirs = models(config)
    inputs, predicting = batch()
    expected = theirs(**inputs)
    with Made() as made:
        outputs = mine(**inputs, predicting=predicting)
        outputs.loss.backward()
    assert (made.largest < len(predicting) * WORDS) == (config in PLAIN)
    if config in PLAIN:
        assert made.largest <= max(parameter.numel() for parameter in mine.parameters())
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert outputs.correct == (expected.logits.flatten(0, 1)[predicting].argmax(-1)
                               == inputs["labels"].flatten()[predicting + 1]).sum()  # fmt: skip
    expected.loss.backward()
    for (name, own), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        if other.grad is not None:
            norm = torch.linalg.vector_norm(other.grad)
            assert torch.linalg.vector_norm(own.grad - other.grad) <= 1e-6 * norm + 1e-8, name


@pytest.mark.parametrize("config", [PLAIN[0], *WITH_MORE], ids=lambda config: config.model_type)
def test_a_model_without_values_gets_the_same_loss_as_one_with_values(config):
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            use_chunked_loss(model, 8)
        found.append(model.forward.args[1])
    assert found == [8 if config in PLAIN else None] * 2
