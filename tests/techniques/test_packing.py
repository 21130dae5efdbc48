"""Packing: sharing a row changes no document; models that cannot separate documents are refused."""

import copy
import csv
import json
from unittest import mock

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
from support.tape import TapeRecorder
from support.training import column, run_training
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AutoConfig, BertConfig, BloomConfig, GPT2Config, ModernBertConfig, RobertaConfig

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.data.cutting import MOST_IN_ROW, MicroBatchPlan
from fabric_ladder.data.loaders import TextCollator
from fabric_ladder.models import varlen
from fabric_ladder.models.configs import MODELS as CLASSES
from fabric_ladder.models.masks import DIGITS, declare_rows, document_ends
from fabric_ladder.models.probe import probe
from fabric_ladder.techniques import TECHNIQUES
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
VARLEN = [("bloom", CLASSIFICATION), ("bloom", INSTRUCTIONS), ("qwen3", INSTRUCTIONS), ("llama", CLASSIFICATION)]
VARLEN += [("bert", CLASSIFICATION), ("modernbert", CLASSIFICATION)]
BOTH = [(*case, None) for case in CASES] + [(*case, 16) for case in VARLEN]  # digits, and the most documents


def make(kind, task, dtype=torch.float32, packing=True, documents=None):
    """Return a tiny model whose attention matters, since its weights are larger than usual."""
    torch.manual_seed(0)
    model = CLASSES[task].from_config(CONFIGS[kind](), dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.3)
    fuse_attention(model)
    if packing:
        support_packing(model, 80, documents)
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


@pytest.mark.parametrize(("kind", "task", "documents"), BOTH)
def test_packing_changes_no_loss_and_no_gradient(tmp_path, fabric, kind, task, documents):
    tolerance = 1e-12
    model = make(kind, task, torch.float64, documents=documents)
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


@pytest.mark.parametrize(("kind", "task"), VARLEN)
def test_varlen_rounds_no_more_than_separate_documents(tmp_path, fabric, kind, task):
    apart, together = (
        effective_batch(tmp_path, fabric, task, **values)
        for values in ({"micro_batch_size": 1}, {"micro_batch_size": 2, "packing": True, "pad_to_multiple_of": 16})
    )
    exact = gradients(make(kind, task, torch.float64), apart)
    for dtype in (torch.float32, torch.bfloat16):
        alone = distance(exact, gradients(make(kind, task, dtype), apart))
        assert distance(exact, gradients(make(kind, task, dtype, documents=16), together)) < 1.1 * alone


def ends(positions, documents):
    with declare_rows(positions, 8, documents):
        return document_ends()


ROWS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 0, 0, 1, 2, 3]])


def test_the_ends_of_documents_are_found_without_waiting():
    """The rows have two documents and padding, one document, and four documents without padding."""
    expected = [0, 3, 5, 8, 16, 17, 19, 20, 24]
    assert ends(ROWS, 8).tolist() == expected
    assert ends(ROWS, 12).tolist() == [*expected, 24, 24, 24, 24]
    assert ends(ROWS, 12).dtype == torch.int32
    positions, found = ROWS[[1, 1, 1]].clone(), []
    replay = TapeRecorder().record(lambda: found.append(ends(positions, 8)))
    positions.copy_(ROWS)
    replay()
    assert found[0].tolist() == expected


def test_more_declared_documents_change_no_bit_with_varlen(tmp_path):
    """Evaluation of language models declares the most that rows can have."""
    for kind, task in VARLEN[:3]:
        model = make(kind, task, documents=16)
        inputs, _ = packed_and_alone(tmp_path, task)
        filler = torch.tensor([[inputs["input_ids"].numel() - 1, inputs["input_ids"].numel()]])
        more = {"spans": torch.cat([inputs["spans"], filler.expand(9, 2)])} if "spans" in inputs else {}
        inputs = {name: each for name, each in inputs.items() if name not in ("labels", "predicting")}
        with torch.set_grad_enabled("spans" in inputs):
            found = model(**inputs | more).logits[: len(inputs.get("spans", inputs["input_ids"]))]
        assert found.equal(model(**inputs).logits)


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


@pytest.mark.parametrize(
    ("kind", "documents"), [*((kind, None) for kind in CONFIGS), ("bloom", 16), ("bert", 16), ("qwen3", 16)]
)
def test_no_document_sees_another(tmp_path, kind, documents):
    """Changing the tokens of one document changes no bit of another document's output."""
    model = make(kind, CLASSIFICATION, torch.float16, documents=documents).eval()
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
        ("3_torch_compile", "--micro_batch_size 2 --attention varlen"),
        ("9_ddp", "--devices 2 --attention varlen"),
    ],
)
def test_packing_changes_no_printed_figure_of_a_rung(tmp_path, unpacked, name, options):
    """Training and evaluations print the same, on one process and on two."""
    after = assert_same_figures(run_rung(tmp_path, name, "--packing", "true", *options.split()), unpacked)
    if "compile_seconds" in after:
        assert after["compiled_graphs"] <= 4, "one row and several rows, forward and backward"


@pytest.mark.parametrize(
    ("model", "options"), [("bloom-quickstart", ()), ("qwen3-tiny", ("--task", INSTRUCTIONS, "--max_length", 512))]
)
def test_varlen_prints_the_losses_of_fused(tmp_path, model, options):
    sizes = ("--train_samples", 32, "--validation_samples", 8, "--test_samples", 8, "--micro_batch_size", 2)
    options = ("--model", MODELS / f"{model}.json", "--max_length", 64, *sizes, "--log_every", 16, *options)
    for attention in ("fused", "varlen"):
        more = ("--precision", "32-true", "--attention", attention)
        finished(run_script(SRC / "15_packing.py", *options, *more, cwd=tmp_path))
    fused, varlen = (column(tmp_path / "runs" / "15_packing" / run, "loss") for run in "12")
    assert len(fused) == 2
    assert varlen == pytest.approx(fused, abs=1e-4)
    assert fused != varlen or model == "qwen3-tiny"  # some CPUs round both kernels alike where no bias is added


def check(tmp_path, model, **values):
    settings = settings_for(tmp_path, **{"task": INSTRUCTIONS, "packing": True, "model": str(model)} | values)
    Packing().check(settings, None)


@pytest.mark.parametrize(
    ("values", "capability", "message"),
    [
        ({"packing": False}, None, "it computes packed rows alone; add --packing true"),
        ({"precision": "16-mixed"}, (7, 5), "compute capability 8.0 or above; use --attention fused"),
        ({"accelerator": "mps"}, None, "its kernels need a CUDA GPU .* use --attention fused"),
        ({"precision": "32-true"}, (9, 0), "in 16 bits, and --precision is 32-true; use --attention fused"),
        ({"model": "gpt2"}, (9, 0), r"gpt2.json has some in attention \(attn_pdrop 0.1\); use --attention fused"),
    ],
)
def test_varlen_is_refused_where_its_kernel_cannot_work(tmp_path, values, capability, message):
    values = {"precision": "bf16-mixed", "packing": True, "attention": "varlen", "model": "bloom-560m"} | values
    values["model"] = str(MODELS / f"{values['model']}.json")
    (technique,) = (each for each in TECHNIQUES if each.setting == "attention")
    with pytest.raises(UserError, match=f"^--attention varlen: [^\n]*{message}[^\n]*$"):
        technique.check(settings_for(tmp_path, **values), capability)
    technique.check(settings_for(tmp_path, **values | {"attention": "fused"}), capability)


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(TESTED))
def test_documents_are_separated_in_each_tested_architecture(kind, monkeypatch):
    """What is refused as dropout in attention is all that a model would draw there."""
    by_documents = mock.Mock(wraps=varlen.varlen_attn)
    monkeypatch.setattr(varlen, "varlen_attn", by_documents)
    config = AutoConfig.for_model(kind)
    tasks = [task for task in (CLASSIFICATION, INSTRUCTIONS) if type(config) in CLASSES[task]._model_mapping]
    task = next(task for task in tasks if task == CLASSIFICATION or not probe(config, task, 64).sees_later)
    for documents in (None, 6):
        assert packing_error(copy.deepcopy(config), task, 64, documents) < TOLERANCE
    assert by_documents.called
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0 if "att" in name else 0.5)
    with mock.patch.object(functional, "scaled_dot_product_attention", wraps=scaled_dot_product_attention) as called:
        packing_error(config, task, 64, training=True)
    assert called.call_args_list
    assert not any(each.kwargs["dropout_p"] for each in called.call_args_list)
