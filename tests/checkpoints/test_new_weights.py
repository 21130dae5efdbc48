"""Weights that a checkpoint lacks, or has in another form, are trained and saved, refused or named."""

import json
import shutil

import pytest
import torch
from support import resuming
from support.data_files import load_in, write_images
from support.export import run_here, words_tokenizer
from support.helpers import ROOT, settings_for, tiny_model, token_datasets
from support.training import losses, run_training
from transformers import (
    AlbertConfig,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BigBirdConfig,
    Dinov2Config,
    DistilBertConfig,
    LevitConfig,
    MobileBertConfig,
    MobileViTConfig,
    RobertaConfig,
    ViTConfig,
)

from fabric_ladder import UserError, build_model
from fabric_ladder.checkpoints.export import find_result, load_result, write_plain
from fabric_ladder.checkpoints.save import BASE
from fabric_ladder.checks import check
from fabric_ladder.planning.predict import blank_datasets
from fabric_ladder.techniques.advice import explain

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
         "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3}  # fmt: skip
ENCODERS = {
    "albert": AlbertConfig(**SIZES, embedding_size=16),
    "bert": BertConfig(**SIZES),
    "distilbert": DistilBertConfig(**SIZES, dim=16, hidden_dim=32, n_layers=1, n_heads=2),
    "mobilebert": MobileBertConfig(**SIZES, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    "roberta": RobertaConfig(**SIZES),
}
ADAPTERS = {"lora": True}
WAYS = {"full": {}, "adapters": ADAPTERS, "4 bits": ADAPTERS | {"quantization": "nf4"}}
IMAGES = {"task": "image-classification", "batch_size": 8, "micro_batch_size": 4}
VIT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "patch_size": 8}
MOBILEVIT = {"hidden_sizes": [8, 8, 8], "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 8], "num_attention_heads": 2}
LEVIT = {"hidden_sizes": [16, 16, 16], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [4, 4, 4]}
WITH_BATCH_NORM = {
    "levit": LevitConfig(image_size=32, architectures=["LevitForImageClassification"], **LEVIT),
    "mobilevit": MobileViTConfig(image_size=32, patch_size=2, **MOBILEVIT),
}


def text_data(names=("bad", "good"), seed=0):
    datasets = token_datasets(train=32, seed=seed)
    datasets.tokenizer = words_tokenizer()
    datasets.class_names[:] = names
    return datasets


def trained(tmp_path, model, datasets, **values):
    torch.manual_seed(0)
    values = {"save": "consolidated"} | values
    model = build_model(settings_for(tmp_path, model=str(model), **values), datasets)
    return run_training(tmp_path, model, datasets, **values)


def text_logits(model):
    for module in model.modules():  # an evaluation on a CPU would repack 4-bit weights, and round them
        module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(5, 29).reshape(2, 12)).logits


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "full") for kind in ENCODERS), ("bert", "adapters"), ("albert", "4 bits")],
)
def test_a_masked_language_model_becomes_a_classifier_that_is_exported_as_it_was_tested(tmp_path, kind, way):
    """Its files lack a pooler or layers of the head, which would otherwise be drawn again by each export."""
    AutoModelForMaskedLM.from_config(ENCODERS[kind]).save_pretrained(tmp_path / kind)
    run, model = trained(tmp_path, tmp_path / kind, text_data(), **WAYS[way])
    result = find_result(run.folder)
    torch.testing.assert_close(text_logits(load_result(result)), text_logits(model.module))
    lacks = (run.folder / "log.txt").read_text().count("random weights, trained like the head")
    assert lacks == (kind not in ("distilbert", "roberta"))
    if way != "4 bits":
        write_plain(load_result(result), tmp_path / "plain", result.folder)
        plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
        torch.testing.assert_close(text_logits(plain), text_logits(model.module))


def test_an_adapter_without_the_pooler_that_its_base_lacks_is_refused(tmp_path):
    AutoModelForMaskedLM.from_config(ENCODERS["bert"]).save_pretrained(tmp_path / "bert")
    run, _ = trained(tmp_path, tmp_path / "bert", text_data(), **ADAPTERS)
    path = run.folder / "adapter" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"modules_to_save": ["classifier"]}))
    with pytest.raises(UserError, match=r"nor its base .*bert has the weights of bert.pooler.dense: train again"):
        load_result(find_result(run.folder))


def image_data(tmp_path, model):
    write_images(tmp_path / "images", {"cat": 12, "dog": 12})
    return load_in(tmp_path, tmp_path / "images", task="image-classification", model=str(model))


def save_image_model(config, folder, size=32):
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    facts = {"image_processor_type": "ViTImageProcessor", "size": {"height": size, "width": size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(facts))
    return folder


def test_dinov2_keeps_its_positions_for_smaller_images(tmp_path):
    folder = save_image_model(Dinov2Config(**VIT, image_size=56, initializer_range=0.3), tmp_path / "dinov2")
    positions = AutoModelForImageClassification.from_pretrained(folder).dinov2.embeddings.position_embeddings
    data = image_data(tmp_path, folder)
    run, model = trained(tmp_path, folder, data, **IMAGES, **ADAPTERS, learning_rate=1e-3)
    saved = load_result(find_result(run.folder))
    own = next(value for name, value in saved.named_parameters() if name.endswith("position_embeddings"))
    torch.testing.assert_close(own, positions, atol=0.05, rtol=0)
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(saved(pixel_values=pixels).logits, model.eval()(pixel_values=pixels).logits)


def test_images_of_a_size_that_the_model_does_not_take_are_refused(tmp_path):
    folder = save_image_model(ViTConfig(**VIT, image_size=48), tmp_path / "vit")
    with pytest.raises(UserError, match=r"vit takes images of 48 pixels, not 32: use --image_size 48 \(Input image"):
        check(settings_for(tmp_path, model=str(folder), **IMAGES | {"image_size": 32}))


def test_weights_of_the_body_of_another_size_are_refused(tmp_path):
    """The head may have another number of classes."""
    folder = tmp_path / "bert"
    tiny_model("bert", classes=5).save_pretrained(folder)
    settings = settings_for(tmp_path, model=str(folder))
    assert build_model(settings, text_data()).new_head
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40}))
    text = r"bert stores bert.*position_embeddings.weight with the sizes \[512, 16\], but its config.json .* \[40, 16\]"
    with pytest.raises(UserError, match=text):
        build_model(settings, text_data())


def test_a_pretrained_head_follows_the_names_of_its_classes(tmp_path):
    model = tiny_model("llama", classes=3)
    model.config.id2label = {0: "Positive", 1: "NEUTRAL", 2: "negative"}
    model.save_pretrained(tmp_path / "model")
    settings = settings_for(tmp_path, model=str(tmp_path / "model"))
    swapped = build_model(settings, text_data(("negative", "neutral", "positive")))
    torch.testing.assert_close(text_logits(swapped), text_logits(model).flip(1))
    assert not swapped.notices
    other = build_model(settings, text_data(("a", "b", "c")))
    assert torch.equal(text_logits(other), text_logits(model))
    assert other.notices == [
        "The pretrained head has the classes Positive, NEUTRAL, negative and starts as a, b, c, in this order"
    ]
    assert not build_model(settings, text_data(("Positive", "neutral", "negative"))).notices


def test_a_loaded_checkpoint_keeps_the_meaning_of_its_weights(tmp_path):
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    run, _ = trained(tmp_path, model, text_data(("pos", "neg")), save="sharded", save_every=9)
    folder = run.folder / "checkpoint"

    def loaded(datasets, load=folder, **values):
        run, _ = trained(tmp_path, model, datasets, save="no", load=str(load), **values)
        return (run.folder / "log.txt").read_text()

    line = "The pretrained head has the classes pos, neg and starts as"
    assert line not in loaded(text_data(("Pos", "neg")))
    assert f"{line} no, yes, in this order\n" in loaded(text_data(("no", "yes")))
    state = run.folder / "checkpoints" / "step-000000002-validated" / "state"
    assert f"--load {state} has no config.json: its classes and its tok" in loaded(text_data(("neg", "pos")), state)
    with pytest.raises(
        UserError, match=rf"--load {folder}: the classes of its head are pos, neg, .* neg, pos; .*model"
    ):
        loaded(text_data(("neg", "pos")))
    with pytest.raises(UserError, match="are pos, neg, those of the data a, b, c; "):
        loaded(text_data(("a", "b", "c")))
    for file, change, message in (
        ("config.json", ("single_label_classification", "regression"), "--problem_type regression, not single_label"),
        (
            "tokenizer.json",
            ('"word8": 8', '"word8": 9'),
            "another tokenizer; use its own: --tok",
        ),
    ):
        copy = shutil.copytree(folder, tmp_path / file)
        (copy / file).write_text((copy / file).read_text().replace(*change))
        with pytest.raises(UserError, match=f"--load {copy}: trained with {message}"):
            loaded(text_data(("pos", "neg")), copy)


def test_a_checkpoint_gives_its_own_tokenizer_to_a_run_on_other_texts(tmp_path):
    resuming.run_rung_2(tmp_path, "--save", "sharded")
    other = ["--load", tmp_path / "runs" / "2_grad_accum" / "1" / "checkpoint", "--split_seed", 5]
    with pytest.raises(UserError, match="trained with another tokenizer; use its own: --tok"):
        resuming.run_rung_2(tmp_path, *other)
    assert resuming.run_rung_2(tmp_path, *other, "--tokenizer", other[1])[0] == 0


@pytest.mark.parametrize("way", [*list(WAYS.values())[1:], ADAPTERS | {"stream_layers": True}])
def test_an_adapter_goes_on_only_with_the_weights_of_its_base(tmp_path, way):
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    run, _ = trained(tmp_path, model, text_data(), **way, save="sharded", save_every=9)
    loaded = {"load": str(run.folder / "checkpoint"), "save": "no"}
    trained(tmp_path, model, text_data(), **way, **loaded, seed=5, precision="bf16-true")
    trained(tmp_path, model, text_data(), **(ADAPTERS if len(way) > 1 else WAYS["4 bits"]), **loaded)
    tiny_model("llama", seed=1).save_pretrained(model)
    resumed = {"resume": str(run.folder), "save": "sharded", "save_every": 9}
    for option in (loaded, resumed):
        with pytest.raises(UserError, match=r"^--(load|resume) .*: its adapter was trained on a base model with other"):
            trained(tmp_path, model, text_data(), **way, **option)
    (run.folder / "checkpoint" / BASE).unlink()
    trained(tmp_path, model, text_data(), **way, **loaded)


def test_big_bird_attends_fully_from_the_start(tmp_path):
    """It would switch at the first short text, and a resumed or exported model would begin with the other attention."""
    sizes = {"block_size": 2, "num_random_blocks": 1, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    AutoModelForSequenceClassification.from_config(BigBirdConfig(**SIZES, **sizes)).save_pretrained(tmp_path / "model")
    run, model = trained(tmp_path, tmp_path / "model", text_data(), micro_batch_size=1)
    together, _ = trained(tmp_path, tmp_path / "model", text_data())
    assert losses(run) == pytest.approx(losses(together), abs=1e-5)
    assert "Attention is full, not block-sparse" in (run.folder / "log.txt").read_text()
    saved = AutoModelForSequenceClassification.from_pretrained(run.folder / "model")
    assert saved.config.attention_type == "original_full"
    torch.testing.assert_close(text_logits(saved), text_logits(model.module))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("levit", "consolidated"), pytest.param("mobilevit", "sharded", marks=pytest.mark.slow)],
)
def test_adapters_leave_batch_norm_as_it_is(tmp_path, kind, layout):
    """Its statistics are not saved with an adapter, so the exported model would differ."""
    folder = save_image_model(WITH_BATCH_NORM[kind], tmp_path / kind)
    values = {**IMAGES, **ADAPTERS, "lora_dropout": 0.0, "save": layout, "learning_rate": 1e-3}
    runs = [trained(tmp_path, folder, image_data(tmp_path, folder), **values | {"micro_batch_size": size})
            for size in (4, 8)]  # fmt: skip
    assert losses(runs[0][0]) == pytest.approx(losses(runs[1][0]), abs=1e-5)
    assert "normalizes over the micro-batch" not in (runs[0][0].folder / "log.txt").read_text()
    saved, pixels = load_result(find_result(runs[0][0].folder)), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = runs[0][1].eval()(pixel_values=pixels).logits
        torch.testing.assert_close(saved(pixel_values=pixels).logits, expected)


def test_a_line_says_that_batch_norm_depends_on_the_micro_batch(tmp_path):
    folder = save_image_model(WITH_BATCH_NORM["mobilevit"], tmp_path / "model")
    for size, lines in ((4, 1), (8, 0)):
        settings = settings_for(tmp_path, model=str(folder), **IMAGES | {"micro_batch_size": size})
        notices = build_model(settings, blank_datasets(2, 32)).notices
        assert len(notices) == lines, notices
    model = build_model(settings, blank_datasets(2, 32))
    with pytest.raises(ValueError, match="Expected more than 1 value") as error:
        model(pixel_values=torch.randn(1, 3, 32, 32))
    assert explain(error.value).endswith("use a --micro_batch_size above 1 that divides --batch_size")


def test_an_export_of_4_bit_training_says_what_its_accuracy_was_measured_on(tmp_path, monkeypatch, capsys):
    AutoModelForMaskedLM.from_config(ENCODERS["roberta"]).save_pretrained(tmp_path / "model")
    for way, notes in (("4 bits", 1), ("adapters", 0)):
        run, _ = trained(tmp_path, tmp_path / "model", text_data(), **WAYS[way])
        run_here(monkeypatch, ROOT / "scripts" / "export_model.py", run.folder)
        note = "The adapter was trained on 4-bit weights and is merged into whole ones: outputs differ a little"
        assert capsys.readouterr().out.count(f"{note}\n") == notes
        card = (run.folder / "export" / "README.md").read_text()
        assert card.count(f"{note}. The accuracy was measured on the 4-bit weights.") == notes
