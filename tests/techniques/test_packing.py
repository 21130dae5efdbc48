"""Packing: sharing a row changes no document; models that cannot separate documents are refused."""

import copy
import csv
import json
import re

import pytest
import torch
from support.helpers import (
    MODELS,
    SRC,
    finished,
    relative_error,
    run_script,
    settings_for,
    tiny_model,
    token_datasets,
)
from support.made import Made
from support.packing_twin import TOLERANCE, packing_error
from support.training import run_training
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, BertConfig, BloomConfig, GPT2Config, ModernBertConfig, RobertaConfig

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.data.cutting import MOST_IN_ROW, MicroBatchPlan
from fabric_ladder.data.loaders import TextCollator
from fabric_ladder.models.configs import MODELS as CLASSES
from fabric_ladder.models.masks import DIGITS
from fabric_ladder.models.probe import probe
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.packing import TESTED, Packing, support_packing

SIZES = {"vocab_size": 64, "pad_token_id": 0, "use_cache": False}
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS = {
    "bloom": lambda: BloomConfig(hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0, attention_dropout=0, **SIZES),
    "llama": lambda: AutoConfig.from_pretrained(MODELS / "llama-tiny.json", **SIZES),
    "qwen3": lambda: AutoConfig.from_pretrained(MODELS / "qwen3-tiny.json", **SIZES),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SIZES),
    "bert": lambda: BertConfig(**BERT, **SIZES),
    "roberta": lambda: RobertaConfig(**BERT, **SIZES),
    "modernbert": lambda: ModernBertConfig(
        **{name: value for name, value in BERT.items() if "dropout" not in name}, layer_types=["full_attention"] * 2,
        classifier_pooling="mean", local_attention=256, **SIZES,
    ),
}  # fmt: skip
CLASSIFICATION, INSTRUCTIONS = "text-classification", "instruction-tuning"
CASES = [(kind, CLASSIFICATION) for kind in CONFIGS]
CASES += [(kind, INSTRUCTIONS) for kind in ("bloom", "llama", "qwen3", "gpt2")]
ARCHITECTURES = (  # names of model types in transformers
    "bloom gpt2 gpt_neox opt llama qwen2 qwen3 mistral gemma gemma2 gemma3_text phi phi3 olmo2 granite starcoder2 "
    "mamba falcon mpt bert roberta xlm-roberta distilbert electra camembert mpnet albert modernbert deberta-v2"
).split()


def make(kind, task, dtype=torch.float32, packing=True):
    """Return a tiny model whose attention matters, since its weights are larger than usual."""
    torch.manual_seed(0)
    model = CLASSES[task].from_config(CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.3)
    fuse_attention(model)
    if packing:
        support_packing(model, 80)
    return model.to(dtype)


def collator(tmp_path, task, **values):
    datasets = token_datasets(per_token=task == INSTRUCTIONS)
    return TextCollator(datasets, "train", settings_for(tmp_path, task=task, max_length=80, **values))


def batch_of(tmp_path, task, rows, packs=None, **values):
    """Return the inputs of some training samples."""
    return collator(tmp_path, task, **values).micro_batch(MicroBatchPlan(rows, len(rows), 1.0, packs)).inputs


def packed_and_alone(tmp_path, task):
    """Return the inputs of a packed micro-batch of two rows, and the inputs of its samples one by one."""
    packed = batch_of(tmp_path, task, [0, 1, 2, 3, 4], [3, 2], pad_to_multiple_of=8)
    return packed, [batch_of(tmp_path, task, [row]) for row in range(5)]


def losses(model, inputs):
    """Return the loss of each item, in the model's own dtype."""
    inputs = dict(inputs)
    labels, predicting = inputs.pop("labels").flatten(), inputs.pop("predicting", None)
    logits = model(**inputs).logits
    if predicting is None:
        return cross_entropy(logits, labels, reduction="none")
    return cross_entropy(logits.flatten(0, 1)[predicting], labels[predicting + 1], reduction="none")


def gradients(model, batches):
    """Return the gradients of an effective batch, and zeros for weights without one, such as a key's bias."""
    model.zero_grad()
    for inputs, weight in batches:
        (losses(model, inputs).mean() * weight).backward()
    return [torch.zeros_like(each) if each.grad is None else each.grad.clone() for each in model.parameters()]


def effective_batch(tmp_path, fabric, task, **values):
    settings = settings_for(tmp_path, task=task, max_length=80, **values)
    batch = next(iter(build_dataloaders(fabric, token_datasets(per_token=task == INSTRUCTIONS), settings)[0]))
    return [(part.inputs, part.weight) for part in batch.micro_batches]


def distance(first, second):
    """Return the relative distance of all gradients as one vector."""
    first, second = (torch.cat([each.flatten().double() for each in parts]) for parts in (first, second))
    return ((first - second).norm() / first.norm()).item()


@pytest.mark.parametrize(("kind", "task"), CASES)
def test_packing_changes_no_loss_and_no_gradient(tmp_path, fabric, kind, task):
    tolerance = 1e-12
    model = make(kind, task, torch.float64)
    packed, alone = packed_and_alone(tmp_path, task)
    with torch.no_grad():
        expected = torch.cat([losses(model, inputs) for inputs in alone])
        assert relative_error([expected], [losses(model, packed)]) < tolerance
    whole = gradients(model, effective_batch(tmp_path, fabric, task, micro_batch_size=1))
    for rows, values in (
        (2, {"micro_batch_size": 2}),
        (4, {"micro_batch_tokens": 400, "pad_to_multiple_of": 8}),
        (1, {"micro_batch_tokens": 1}),
    ):
        batches = effective_batch(tmp_path, fabric, task, packing=True, **values)
        assert max(len(inputs["input_ids"]) for inputs, _ in batches) == rows
        assert distance(whole, gradients(model, batches)) < tolerance


def test_a_text_that_ends_with_the_padding_token_is_read_as_by_transformers():
    model, unpacked = (make("llama", CLASSIFICATION, packing=packing).eval() for packing in (True, False))
    texts = [[5, 9, 7, 0], [3, 4, 0], [8, 0, 0], [6, 2, 1]]
    lengths = torch.tensor([len(text) for text in texts])
    ends = lengths.cumsum(0)
    with torch.no_grad():
        alone = [
            unpacked(input_ids=torch.tensor([text]), attention_mask=torch.ones(1, len(text))).logits for text in texts
        ]
        packed = model(
            input_ids=torch.tensor([[token for text in texts for token in text]]),
            position_ids=torch.cat([torch.arange(len(text)) for text in texts])[None],
            spans=torch.stack([ends - lengths, ends], dim=1),
        ).logits
    assert torch.allclose(packed, torch.cat(alone), atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_document_sees_another(tmp_path, kind):
    """Changing the tokens of one document changes no bit of another document's output."""
    model = make(kind, CLASSIFICATION, torch.float16).eval()
    inputs, _ = packed_and_alone(tmp_path, CLASSIFICATION)
    inputs = {name: inputs[name] for name in ("input_ids", "position_ids", "spans")}
    with torch.no_grad():
        before = model(**inputs).logits
        for document, (start, end) in enumerate(inputs["spans"].tolist()):
            ids = inputs["input_ids"].flatten().clone()
            ids[start:end] = ids[start:end] % 63 + 1
            after = model(**inputs | {"input_ids": ids.view_as(inputs["input_ids"])}).logits
            changed = (before != after).any(-1)
            assert changed.tolist() == [other == document for other in range(len(changed))]


def test_a_row_of_the_most_documents_keeps_them_apart():
    """The row has 127 documents and padding. One more document needs more digits."""
    model = make("bert", CLASSIFICATION, torch.float64)
    model.config.max_position_embeddings = 512

    def first_logits(count, changed):
        ids = torch.arange(2 * count + 2)[None] % 60 + 1
        ids[0, changed] = 63
        spans = torch.arange(2 * count).view(-1, 2).clone()
        spans[:, 1] += 1
        return model(input_ids=ids, position_ids=torch.tensor([[0, 1] * (count + 1)]), spans=spans).logits[0]

    assert 2**DIGITS == MOST_IN_ROW + 1
    expected = first_logits(MOST_IN_ROW, 2)
    for changed in range(3, 2 * MOST_IN_ROW + 2, 2):
        assert first_logits(MOST_IN_ROW, changed).equal(expected)
    assert not first_logits(MOST_IN_ROW + 1, 2 * MOST_IN_ROW + 2).equal(first_logits(MOST_IN_ROW + 1, 2))


def squares(model, task, length=1_000):
    """Run forward and backward on fake tensors, and return the shapes that have `length` twice."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        ids = torch.ones(3, length, dtype=torch.long)
        inputs = {"input_ids": ids, "position_ids": ids}
        if task == CLASSIFICATION:
            inputs["spans"] = torch.ones(30, 2, dtype=torch.long)
        with Made() as made:
            model(**inputs).logits.float().sum().backward()
    assert len(made.shapes) > 50
    return [shape for shape in made.shapes if list(shape).count(length) > 1]


@pytest.mark.parametrize(("kind", "task"), CASES)
def test_no_matrix_of_tokens_by_tokens_is_made(kind, task):
    with torch.device("meta"):
        model = make(kind, task)
    assert not squares(model, task)


def test_transformers_own_attention_makes_such_a_matrix():
    with torch.device("meta"):
        model = make("llama", INSTRUCTIONS, packing=False)
    assert squares(model, INSTRUCTIONS)


def figures(folder):
    """Return the losses and accuracies of a run, in order, and its results."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    values = ["loss", "train_accuracy", "validation_loss", "validation_accuracy", "test_loss", "test_accuracy"]
    results = json.loads((folder / "run.json").read_text())["results"]
    return [float(row[value]) for row in rows for value in values if row[value]], results


def assert_same_figures(packed, unpacked):
    """Assert that training and evaluations print the same; return the results of the packed run."""
    (got, after), (expected, before) = figures(packed), figures(unpacked)
    assert len(expected) == 4 + 3 + 2
    assert got == pytest.approx(expected, abs=1e-5)
    assert before["samples_hash"] == after["samples_hash"]
    return after


def test_packing_changes_no_printed_figure(tmp_path):
    data, model = token_datasets(train=64), tiny_model()
    unpacked, _ = run_training(tmp_path, tiny_model(), data)
    fuse_attention(model)
    support_packing(model, 64)
    packed, _ = run_training(tmp_path, model, data, packing=True, max_length=64, micro_batch_size=2)
    assert_same_figures(packed.folder, unpacked.folder)


def run_rung(tmp_path, name, *options):
    """Run a script of the ladder; return the folder of its run."""
    sizes = ["--train_samples", 64, "--validation_samples", 40, "--test_samples", 40, "--log_every", 16]
    finished(run_script(SRC / f"{name}.py", *sizes, "--precision", "32-true", *options, cwd=tmp_path))
    return max((tmp_path / "runs" / name).iterdir(), key=lambda path: int(path.name))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    return run_rung(tmp_path_factory.mktemp("unpacked"), "2_grad_accum")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("4_mixed_precision", "--micro_batch_size 2"),
        ("9_ddp", "--devices 2"),
        ("3_torch_compile", "--micro_batch_size 2"),
    ],
)
def test_packing_changes_no_printed_figure_of_a_rung(tmp_path, unpacked, name, options):
    """Training and evaluations print the same, on one process and on two."""
    after = assert_same_figures(run_rung(tmp_path, name, "--packing", "true", *options.split()), unpacked)
    if "compile_seconds" in after:
        assert after["compiled_graphs"] <= 4, "one row and several rows, forward and backward"


def check(tmp_path, model, **values):
    settings = settings_for(tmp_path, **{"task": INSTRUCTIONS, "packing": True, "model": str(model)} | values)
    Packing().check(settings, None)


def test_other_architectures_are_refused(tmp_path):
    AutoConfig.for_model("mamba").to_json_file(tmp_path / "other.json", use_diff=False)
    with pytest.raises(UserError, match=r"may see each other in .* .mamba., which is not among the tested") as error:
        check(tmp_path, tmp_path / "other.json")
    assert "\n" not in str(error.value)
    check(tmp_path, tmp_path / "other.json", packing=False)


def test_the_twin_detects_leaks():
    """Mamba's state runs through the whole row."""
    assert packing_error(AutoConfig.for_model("llama"), INSTRUCTIONS, 512) < TOLERANCE
    config = AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, state_size=4)
    assert packing_error(config, INSTRUCTIONS, 512) > TOLERANCE


def test_a_window_that_is_shorter_than_rows_is_refused(tmp_path):
    AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=512).to_json_file(tmp_path / "short.json")
    with pytest.raises(UserError, match=r"attend to 512 tokens, and rows have up to 1024.* --max_length 512"):
        check(tmp_path, tmp_path / "short.json")
    check(tmp_path, tmp_path / "short.json", max_length=512)


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        ({"output_attentions": True}, {}, "output_attentions in the config of .* packed texts would see each other"),
        ({}, {"attention": "eager"}, "--packing true: eager .* use --attention fused"),
    ],
)
def test_eager_attention_is_refused(tmp_path, change, values, message):
    config = json.loads((MODELS / "bloom-quickstart.json").read_text()) | change
    (tmp_path / "exact.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        check(tmp_path, tmp_path / "exact.json", **values)


def served(kind, task):
    """Return whether an architecture can be packed, up to how many tokens."""
    config = AutoConfig.for_model(kind)
    if type(config) not in CLASSES[task]._model_mapping:
        return "-"
    if task == INSTRUCTIONS and getattr(probe(config, task, 1024), "sees_later", False):
        return "no"
    for length, answer in ((1024, "yes"), (64, "up to 64 tokens")):
        try:
            return answer if packing_error(copy.deepcopy(config), task, length) < TOLERANCE else "no"
        except UserError:
            continue
        except Exception:  # the twin cannot be made
            return "no"
    return "no"


@pytest.mark.slow
def test_the_tested_architectures_are_those_whose_twins_agree():
    found = {kind: f"{served(kind, CLASSIFICATION)} | {served(kind, INSTRUCTIONS)}" for kind in ARCHITECTURES}
    accepted = {kind for kind, answers in found.items() if re.search("yes|up to", answers)}
    assert accepted == TESTED & set(ARCHITECTURES), found
