"""Adapters that keep 16-bit inputs compute the same bits as PEFT's, and keep fewer bytes."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.helpers import tiny_model
from torch import nn

from fabric_ladder.techniques.adapter_inputs import keep_16_bit_inputs
from fabric_ladder.techniques.lora import _keep_trained_in_32_bit

NAMES = ["q_proj", "k_proj", "v_proj"]


def adapted(dtype, dropout, targets="all-linear", **options):
    torch.manual_seed(0)
    model = tiny_model("llama").to(dtype)
    config = LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=dropout, target_modules=targets, **options)
    model = get_peft_model(model, config)
    _keep_trained_in_32_bit(model)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    return model.train()


def trained(model):
    """Return the loss, all gradients, and the bytes of distinct storages that autograd keeps."""
    torch.manual_seed(1)
    ids, kept = torch.arange(80).reshape(2, 40) % 40 + 4, {}
    frozen = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in frozen:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(inputs_embeds=embedded, labels=torch.tensor([0, 1])).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss, gradients | {"inputs": embedded.grad}, sum(kept.values())


@pytest.mark.parametrize(("dtype", "dropout"), [(torch.bfloat16, 0.1), (torch.float16, 0.0), (torch.float32, 0.1)])
def test_losses_and_gradients_are_the_same_bit_by_bit(dtype, dropout):
    first = adapted(dtype, dropout)
    second = copy.deepcopy(first)
    keep_16_bit_inputs(second)
    assert list(first.state_dict()) == list(second.state_dict())
    (expected, gradients, bytes_before), (loss, ours, bytes_after) = trained(first), trained(second)
    assert torch.equal(loss, expected)
    assert gradients.keys() == ours.keys()
    assert len(gradients) > 14
    assert all(torch.equal(gradients[name], ours[name]) for name in gradients)
    assert bytes_after < bytes_before if dtype != torch.float32 else bytes_after == bytes_before
    second.eval()
    first.eval()
    ids = torch.arange(4, 44)[None]
    assert torch.equal(first(ids).logits, second(ids).logits)


def test_query_key_and_value_keep_one_input():
    """Without adapters on other layers, the three share one 16-bit tensor; PEFT keeps three in 32 bits."""
    first = adapted(torch.bfloat16, 0.0, NAMES)
    second = copy.deepcopy(first)
    keep_16_bit_inputs(second)
    width, layers, tokens = first.config.hidden_size, first.config.num_hidden_layers, 80
    assert trained(first)[2] - trained(second)[2] == layers * tokens * width * (3 * 4 - 2)


def test_dora_keeps_pefts_way():
    model = adapted(torch.bfloat16, 0.1, NAMES, use_dora=True)
    keep_16_bit_inputs(model)
    firsts = [module for name, module in model.named_modules() if name.endswith("lora_A.default")]
    assert {type(first) for first in firsts} == {nn.Linear}
