"""BLOOM's fused attention compared with eager attention and with 64 bits, without a matrix of tokens x tokens."""

import copy

import pytest
import torch
from support.helpers import MODELS, relative_error, settings_for
from support.made import Made
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    BloomForSequenceClassification,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
)
from transformers.models.bloom.modeling_bloom import BloomAttention

from fabric_ladder import build_model
from fabric_ladder.planning.predict import blank_datasets
from fabric_ladder.techniques.fused_attention import fuse_attention

KINDS = {"classifier": BloomForSequenceClassification, "language model": BloomForCausalLM}


def pair(kind="language model", width=16, heads=4, spread=0.2, dtype=torch.float32, **values):
    """Return an eager and a fused model with the same weights, which are larger than usual."""
    torch.manual_seed(0)
    config = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "n_layer": 2} | values
    sizes = {"hidden_size": width * heads, "n_head": heads, "vocab_size": 64, "pad_token_id": 0}
    eager = KINDS[kind](BloomConfig(use_cache=False, **sizes, **config))
    with torch.no_grad():
        for weight in eager.parameters():
            if weight.dim() == 2:
                weight.normal_(0, spread)
    fused = copy.deepcopy(eager)
    fuse_attention(fused)
    return eager.to(dtype), fused.to(dtype)


def batch(length, padded=(0, 5), side="right", seed=0):
    """Return ids and mask of rows with N tokens of padding each."""
    torch.manual_seed(seed)
    ids = torch.randint(1, 64, (len(padded), length))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padded):
        place = slice(length - count, None) if side == "right" else slice(0, count)
        ids[row, place], mask[row, place] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def logits_and_gradients(model, inputs, autocast=False):
    """Return the logits of real tokens, and the gradients of a random projection of them."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(**inputs).logits
    if logits.dim() == 3 and inputs.get("attention_mask") is not None:
        logits = logits[inputs["attention_mask"].bool()]
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits.double() * direction).sum().backward()
    return logits.detach().double(), [weight.grad.double() for weight in model.parameters()]


def whole(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def error(got, expected):
    return relative_error([expected], [got])


def squares(made, tokens):
    """Return the shapes of tokens x tokens elements; no other size is a multiple of the number of tokens, a prime."""
    return [shape for shape in made.shapes if shape.numel() and shape.numel() % tokens**2 == 0]


@pytest.mark.parametrize(
    ("width", "length", "seeds", "precision"),
    [
        *((16, 48, 4, precision) for precision in ("32-true", "bf16-mixed", "bf16-true", "16-true")),
        *((24, 384, 2, precision) for precision in ("32-true", "bf16-mixed", "bf16-true")),
        pytest.param(24, 384, 2, "16-true", marks=pytest.mark.slow),
    ],
)
def test_fused_is_as_near_to_64_bit_as_eager(width, length, seeds, precision):
    """One width has a power of two as its scale, the other does not. Errors are means over some batches."""
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision, torch.float32)
    models = pair(width=width)
    exact, rounded = Exact.of(models[0]), [copy.deepcopy(model).to(dtype) for model in models]
    errors = torch.zeros(2, 2)
    for seed in range(seeds):
        inputs = batch(length, padded=(0, length // 4), seed=seed)
        truth = logits_and_gradients(exact, inputs)
        for row, model in enumerate(rounded):
            got = logits_and_gradients(model, inputs, autocast=precision == "bf16-mixed")
            errors[row] += torch.tensor([error(got[0], truth[0]), error(whole(got[1]), whole(truth[1]))])
    assert (errors[1] < 1.1 * errors[0]).all(), errors
    if length > 256 and dtype != torch.float32:  # a position needs more than 8 or 11 bits
        assert (errors[1] < 0.6 * errors[0]).all(), errors


class Exact(BloomAttention):
    """Eager attention in its simplest form, in the precision of its weights."""

    @classmethod
    def of(cls, model):
        model = copy.deepcopy(model).double()
        for block in model.base_model.h:
            block.self_attention.__class__ = cls
        return model

    def forward(self, hidden_states, residual, alibi, attention_mask, **others):
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        scores = query @ key.mT * self.inv_norm_factor + alibi.view(len(query), self.num_heads, 1, -1)
        weights = scores.masked_fill(attention_mask != 0, -torch.inf).softmax(-1)
        return self.dense((weights @ value).transpose(1, 2).flatten(2)) + residual, None


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_makes_no_matrix_of_tokens_by_tokens(kind, masked):
    eager, fused = pair(kind)
    inputs = batch(199, padded=(0, 60) if masked else (0, 0))
    if not masked:
        del inputs["attention_mask"]
    for model, wanted in ((eager, True), (fused, False)):
        with Made() as made:
            logits_and_gradients(model, inputs)
        assert bool(squares(made, 199)) == wanted


@pytest.mark.parametrize(("kind", "side"), [*zip(KINDS, ("left", "right"), strict=True)])
def test_padding_on_either_side_and_holes_are_hidden(kind, side):
    eager, fused = pair(kind)
    inputs = batch(40, padded=(7, 0, 31), side=side)
    inputs["attention_mask"][1, [3, 4, 11]] = 0
    expected, got = (logits_and_gradients(model, inputs) for model in (eager, fused))
    assert error(got[0], expected[0]) < 1e-5
    assert error(whole(got[1]), whole(expected[1])) < 1e-5
    inputs["input_ids"][0, 2 if side == "left" else -2] = 9  # the value of padding must not change the output
    if kind == "language model":
        assert error(logits_and_gradients(fused, inputs)[0], got[0]) < 1e-6


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_equals_eager_generation(cache):
    """Prompts are padded on the left. Generation runs with and without cached keys."""
    eager, fused = pair()
    inputs = batch(12, padded=(5, 0, 11), side="left")
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    results = [
        model.generate(**inputs, **how, use_cache=True, output_logits=True, return_dict_in_generate=True)
        for model in (eager, fused)
    ]
    assert results[0].sequences.equal(results[1].sequences)
    assert relative_error(results[0].logits, results[1].logits) < 1e-4
    assert fused.generate(**inputs, **(how | {"cache_implementation": None}), use_cache=False).equal(
        results[0].sequences
    )


def test_dropout_is_drawn_only_in_training():
    """The mean over many draws is the output without dropout, and each draw differs."""
    _, fused = pair(attention_dropout=0.5)
    inputs, outputs = batch(6, padded=(0,)), []
    fused.base_model.h[0].self_attention.register_forward_hook(lambda *args: outputs.append(args[2][0].detach()))
    fused.eval()(**inputs)
    fused.train()(**{name: tensor.expand(400, -1) for name, tensor in inputs.items()})
    expected, drawn = outputs
    assert not drawn[0].equal(drawn[1])
    torch.testing.assert_close(drawn.mean(0), expected[0], rtol=0, atol=0.1 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["bloom-quickstart", "llama-tiny"])
def test_the_setting_chooses_the_attention(tmp_path, name):
    """transformers has `sdpa` for the second model."""
    counts = {}
    for attention in ("fused", "eager"):
        values = {"model": str(MODELS / f"{name}.json"), "from_scratch": True, "task": "instruction-tuning"}
        model = build_model(settings_for(tmp_path, attention=attention, **values), blank_datasets(2)).eval()
        inputs = {"input_ids": torch.arange(1, 54)[None], "labels": torch.arange(1, 54)[None]}
        with Made() as made:
            model(**inputs, predicting=torch.arange(52)).loss.backward()
        counts[attention] = len(squares(made, 53))
    assert counts["fused"] == 0
    assert counts["eager"] > 0


def test_a_model_that_attends_to_chosen_keys_keeps_transformers_attention():
    """DeepSeek V3.2 applies its choice of keys only if the name of the attention is eager or sdpa."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "n_group": 1}
    sizes |= {"topk_group": 1, "num_experts_per_tok": 2, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
    model = DeepseekV32ForCausalLM(DeepseekV32Config(vocab_size=64, first_k_dense_replace=1, **sizes)).eval()
    fused = copy.deepcopy(model)
    fuse_attention(fused)
    inputs = batch(24)
    torch.testing.assert_close(fused(**inputs).logits, model(**inputs).logits, atol=0, rtol=0)
