"""Blocks that are trained in turn: equal to separate Adams by hand, with gradients and state for one block alone."""

import copy
import json

import pytest
import torch
from lightning import Fabric
from support.helpers import VOCABULARY, settings_for, token_datasets
from torch.autograd.graph import saved_tensors_hooks

from fabric_ladder import UserError, build_model, build_optimizer
from fabric_ladder.checkpoints.save import read_state, write_state
from fabric_ladder.checks import check

SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0, "hidden_size": 16}
LLAMA = {"num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32, "num_key_value_heads": 1}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
CONFIGS = {
    "bloom": SIZES | {"model_type": "bloom", "n_layer": 3, "n_head": 2, "hidden_dropout": 0, "attention_dropout": 0},
    "llama": SIZES | LLAMA | {"model_type": "llama"},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCABULARY, "pad_token_id": 0} | GPT2,
    "swin": {"model_type": "swin", "image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1]}
    | {"window_size": 4},
    "resnet": {"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8},
}
BF16 = {"precision": "bf16-true"}
LANGUAGE = {"task": "instruction-tuning", "loss_chunk": 16}
STEPS = 9


def settings_of(tmp_path, kind="bloom", **values):
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    chosen = {"model": str(path), "from_scratch": True, "max_length": 64, "block_steps": 2}
    return settings_for(tmp_path, **(chosen | values))


def made(settings):
    torch.manual_seed(0)
    model = build_model(settings, token_datasets(per_token=settings.task == "instruction-tuning"))
    return model.to(torch.bfloat16 if settings.precision == "bf16-true" else torch.float32)


def blocks_of(model):
    return model.base_model.layers if model.config.model_type == "llama" else model.base_model.h


def loss_of(model, step):
    tokens = torch.randint(1, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(step))
    if hasattr(model, "score"):
        return model(input_ids=tokens, labels=torch.tensor([0, 1])).loss
    return model(input_ids=tokens, labels=tokens, predicting=torch.arange(23)[torch.arange(23) % 12 != 11]).loss


def step_by_hand(weights, copies, optimizer):
    """Step 32-bit copies of weights, and round them back."""
    for weight, copied in zip(weights, copies, strict=True):
        copied.grad = weight.grad.float()
    optimizer.step()
    with torch.no_grad():
        for weight, copied in zip(weights, copies, strict=True):
            weight.copy_(copied)


def copies_of(weights):
    copies = [weight.detach().float().clone().requires_grad_() for weight in weights]
    return copies, torch.optim.Adam(copies, lr=5e-3, fused=True)


@pytest.mark.parametrize(("kind", "task", "always"), [("bloom", {}, 3), ("llama", LANGUAGE, 1), ("gpt2", LANGUAGE, 2)])
def test_the_weights_are_those_of_an_adam_for_each_turn(tmp_path, kind, task, always):
    """`always`: the weights that are trained all the time, which are the last norm and a classifier."""
    settings = settings_of(tmp_path, kind, learning_rate=5e-3, **BF16, **task)
    model = made(settings)
    by_hand = copy.deepcopy(model)
    optimizer = build_optimizer(settings, model)
    blocks = [[*block.parameters()] for block in blocks_of(by_hand)]
    in_blocks = {weight for block in blocks for weight in block}
    after = [weight for weight in by_hand.parameters() if weight.requires_grad and weight not in in_blocks]
    assert len(after) == always
    after_copies = copies_of(after)
    for step in range(STEPS):
        optimizer.take_turn(step, STEPS)
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            block = blocks[step // 2 % 3]
            block_copies = copies_of(block)
        expected = loss_of(by_hand, step)
        expected.backward()
        step_by_hand(block, *block_copies)
        step_by_hand(after, *after_copies)
        by_hand.zero_grad()
        assert torch.equal(loss, expected)
    for (name, weight), reference in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(weight, reference, rtol=0, atol=0, msg=name)


def test_one_block_has_gradients_and_state_and_the_backward_pass_ends_at_it(tmp_path):
    settings = settings_of(tmp_path, block_steps=1, learning_rate=1e-2, **BF16)
    model = made(settings)
    before = copy.deepcopy(model)
    optimizer = build_optimizer(settings, model)
    kept = []
    for step, block in enumerate(blocks_of(model)):
        optimizer.take_turn(step, 3)
        saved = []
        with saved_tensors_hooks(lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda tensor: tensor):
            loss = loss_of(model, step)
        loss.backward()
        kept.append(len(saved))
        wanted = {*block.parameters(), *model.base_model.ln_f.parameters(), model.score.weight}
        assert {weight for weight in model.parameters() if weight.grad is not None} == wanted
        optimizer.step()
        optimizer.zero_grad()
        assert set(optimizer.state) == wanted
        assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    assert kept[0] - kept[1] == kept[1] - kept[2] > 3
    changed = {
        name
        for (name, weight), old in zip(model.named_parameters(), before.parameters(), strict=True)
        if not torch.equal(weight, old)
    }
    frozen = {name for name, _ in model.named_parameters() if "word_embeddings" in name}
    assert changed == {name for name, _ in model.named_parameters()} - frozen


@pytest.mark.parametrize(("length", "steps", "turns"), [("auto", 7, "0011220"), ("auto", 3, "012"), ("auto", 2, "01"),
                                                        ("auto", 301, "0" * 100 + "1" * 100 + "2" * 100 + "0"),
                                                        (2, 8, "00112200")])  # fmt: skip
def test_auto_shares_the_steps_among_the_blocks(tmp_path, length, steps, turns):
    settings = settings_of(tmp_path, block_steps=length)
    model = made(settings)
    optimizer = build_optimizer(settings, model)
    found = []
    for done in range(steps):
        optimizer.take_turn(done, steps)
        found += [
            str(place) for place, block in enumerate(blocks_of(model)) if block.mlp.dense_h_to_4h.weight.requires_grad
        ]
    assert "".join(found) == turns


def test_the_best_weights_come_without_the_state_of_later_steps(tmp_path):
    """Otherwise a 32-bit copy of later steps would replace them."""
    settings = settings_of(tmp_path, block_steps=2, **BF16)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-true")
    model = fabric.setup(made(settings))
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
    (tmp_path / "state").mkdir()
    write_state(tmp_path / "state", model, optimizer, 0)
    fabric.backward(loss_of(model, 0))
    optimizer.step()
    assert optimizer.state
    read_state("--best_weights", tmp_path / "state", model, optimizer)
    assert not optimizer.state


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("bloom", {"devices": 2, "strategy": "ddp"}, "only on one device"),
        ("resnet", {"task": "image-classification", "image_size": 32}, "marks no blocks in resnet"),
        ("swin", {"task": "image-classification", "image_size": 32}, "a later block has more weights than the first"),
    ],
)
def test_what_cannot_take_turns_is_refused_in_one_line(tmp_path, kind, values, reason):
    with pytest.raises(UserError, match="--block_steps 2: ") as error:
        check(settings_of(tmp_path, kind, **values))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
