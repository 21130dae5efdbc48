"""Read the saved model of a run in one process, without its data, and write it in the format of transformers."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from fabric_ladder.checkpoints.disk import let_others_read
from fabric_ladder.checkpoints.save import OPTIMIZER
from fabric_ladder.checkpoints.sharded import read_index, read_tensors
from fabric_ladder.data.hub import reachable
from fabric_ladder.distributed.deepspeed import EngineState
from fabric_ladder.errors import UserError, first_line, refused
from fabric_ladder.models.configs import load_config, load_weights, silence_loading
from fabric_ladder.models.layers import head_names
from fabric_ladder.runs.folder import CHECKPOINTS
from fabric_ladder.techniques.qlora import NF4

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
PROCESSOR = (".json", ".jinja", ".txt", ".model")  # files of tokenizers and image preprocessors
OTHERS = ("config.json", "adapter_config.json", OPTIMIZER)
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class Result(NamedTuple):
    """A saved model.

    Attributes:
        folder: Its folder, or its name on the Hub.
        format: `model` (transformers), `adapter` (PEFT), `sharded` (torch.distributed.checkpoint) or `engine` (see
            `distributed/deepspeed.py`).
        adapter: Whether it is only an adapter, whose base model is stored elsewhere.
    """

    folder: Path
    format: str
    adapter: bool

    def has(self, *files: str) -> bool:
        """Return whether the folder has any of the files."""
        return any((self.folder / file).is_file() for file in files)

    @property
    def config(self) -> PretrainedConfig | None:
        """The config of the trained model, or None for an adapter from another project."""
        return None if self.adapter and not self.has("config.json") else load_config(self.folder.as_posix())

    @property
    def adapter_config(self):
        """The config of an adapter, a `PeftConfig`.

        Raises:
            UserError: It cannot be read.
        """
        from peft import PeftConfig

        with refused(f"cannot read {self.folder / 'adapter_config.json'}"):
            return PeftConfig.from_pretrained(self.folder)


def find_result(name: str | Path) -> Result:
    """Find the saved model in a run's folder, or in one of its folders `checkpoint`, `model` and `adapter`.

    Raises:
        UserError: The folder does not exist or holds no saved model.
    """
    if not Path(name).is_dir():
        raise UserError(f"the folder {name} does not exist: give the folder of a run, e.g. runs/10_fsdp/1")
    for folder in (Path(name), *(Path(name) / below for below in ("adapter", "model", "checkpoint"))):
        adapter = (folder / "adapter_config.json").is_file()
        formats = {
            "sharded": (folder / OPTIMIZER).is_file(),
            "engine": (folder / EngineState.file).is_file(),
            "adapter": (folder / "adapter_model.safetensors").is_file(),
            "model": (folder / "config.json").is_file() and any(any(folder.glob(names)) for names in WEIGHTS),
        }
        if found := next((name for name, there in formats.items() if there), None):
            return Result(folder, found, adapter)
    if runs := sorted(Path(name).glob("*/run.json")):
        raise UserError(f"{name} holds runs: give one of them, e.g. {runs[-1].parent}")
    if (Path(name) / CHECKPOINTS).is_dir():
        raise UserError(
            f"{name} holds no saved model, only checkpoints: train on with --resume {name} --save consolidated"
        )
    raise UserError(f"{name} holds no saved model: train with --save sharded or --save consolidated")


def load_result(
    result: Result, base: str | None = None, dtype: torch.dtype | None = None, quantization: str | None = None
) -> nn.Module:
    """Return the model in eval mode on the CPU, or a `PeftModel` for an adapter.

    Args:
        result: From `find_result`.
        base: Base model of an adapter: a folder or a name on the Hub. Default: the base of its training.
        dtype: Precision of the weights. Default: the saved precision; 32-bit for an adapter's base.
        quantization: `nf4` loads 4-bit weights, `no` whole weights. Default: as in the adapter's training.

    Raises:
        UserError: The base or the model cannot be read, weights are missing or do not fit the config, or the adapter
            does not fit the base.
    """
    silence_loading()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which would warn
    if result.adapter:
        return _load_adapter(result, base, dtype, quantization).eval()
    config = result.config
    name = result.folder.as_posix()
    model_class = _model_class(config, name)
    if result.format == "model":
        options = four_bits(config, dtype or config.dtype or torch.float32) if quantization == "nf4" else {}
        with reachable(name, "weights") as local:
            return load_weights(model_class, name, dtype=dtype or "auto", **options, **local).eval()
    if quantization == "nf4":
        raise UserError(f"{name} cannot be loaded in 4 bits: run scripts/export_model.py, and load its output")
    with no_init_weights():
        model = model_class(config)
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in _read(result).items()
    }
    with refused(f"{name}: the weights do not fit its config.json"):
        model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model.eval()


def write_plain(model: nn.Module, folder: Path, source: Path) -> None:
    """Write a model into a folder that `from_pretrained` reads.

    Args:
        model: From `load_result`. A `PeftModel` is merged into its base, which changes it in place.
        folder: Receives weights and config.
        source: Contains the tokenizer or preprocessor, and perhaps a generation config; they are copied.
    """
    if hasattr(model, "merge_and_unload"):
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    for path in source.iterdir():
        if path.suffix in PROCESSOR and path.name not in OTHERS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `output`, and rename it to `output` when it is complete.

    Raises:
        UserError: `output` exists and is not empty, or cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} already exists; choose another --output")
    unfinished = output.absolute().parent / f".{output.name}.unfinished-{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        let_others_read(unfinished)
        unfinished.rename(output)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write {output} ({first_line(error)}): free disk space, or choose another --output"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def base_name(result: Result, base: str | None = None) -> str:
    """Return the folder or the name of an adapter's base model: `base`, or the base of its training.

    Raises:
        UserError: The adapter does not name its base, or the folder does not exist.
    """
    name = base or result.adapter_config.base_model_name_or_path
    if not name:
        raise UserError(f"{result.folder} does not name its base model: add --base NAME")
    beside = result.folder.parent / "base"
    if not base and Path(name).name == "base" and beside.is_dir():  # the recorded folder may be another run's by now
        return beside.as_posix()
    if not Path(name).is_dir() and (Path(name).is_absolute() or name.startswith(".")):
        wanted = f"--base {name}" if base else f"{result.folder} is an adapter for {name}, which"
        raise UserError(f"{wanted} does not exist: give --base FOLDER or a name on the Hub")
    return name


def note_on_4_bits(result: Result, base: str | None = None) -> str:
    """Return a sentence about an adapter of 4-bit weights that is merged into whole ones, else an empty text."""
    if not (result.adapter and hasattr(result.config, "quantization_config")):
        return ""
    if hasattr(load_config(base_name(result, base)), "quantization_config"):
        return ""
    return "The adapter was trained on 4-bit weights and is merged into whole ones: outputs differ a little"


def four_bits(config: PretrainedConfig, dtype: torch.dtype) -> dict:
    """Return `from_pretrained`'s options for 4-bit weights: the config's own options, or NF4."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("4-bit weights need bitsandbytes: pip install bitsandbytes==0.50.2, or --quantization no")
    saved = getattr(config, "quantization_config", None) or NF4
    return {"quantization_config": BitsAndBytesConfig.from_dict(saved, bnb_4bit_compute_dtype=dtype)}


def _load_adapter(result: Result, base: str | None, dtype: torch.dtype | None, quantization: str | None) -> nn.Module:
    """Return the base model with the adapter."""
    from peft import get_peft_model

    name, adapter = base_name(result, base), result.adapter_config
    mismatch = f"{result.folder} is an adapter for {adapter.base_model_name_or_path}, and does not fit {name}"
    revision = None if base or Path(name).is_dir() else adapter.revision
    with reachable(name, "base model", revision) as local:
        config = AutoConfig.from_pretrained(name, **local)
        own = result.config
        if own is not None and own.model_type != config.model_type:
            raise UserError(f"{mismatch}: a {own.model_type} and a {config.model_type}")
        new_head = adapter.task_type != "CAUSAL_LM"
        if new_head:
            if own is None:
                raise UserError(f"{result.folder} lacks the model's config.json, which describes its head")
            for key in ("num_labels", "id2label", "label2id", "pad_token_id", "problem_type"):
                if hasattr(own, key):
                    setattr(config, key, getattr(own, key))
        options = {"config": config, "heads": head_names if new_head else None} | local
        model = _load_base(result, name, options, dtype or torch.float32, quantization)
    if own is not None and getattr(adapter, "trainable_token_indices", None):
        model.resize_token_embeddings(own.get_text_config().vocab_size, mean_resizing=False)
    if lost := {*model.new_parts} - {*(adapter.modules_to_save or [])}:
        raise UserError(f"neither {result.folder} nor its base {name} has the weights of {min(lost)}: train again")
    with refused(mismatch):
        model = get_peft_model(model, adapter)
        _fill_adapter(model, result, mismatch)
    return model


def _fill_adapter(model: nn.Module, result: Result, mismatch: str) -> None:
    """Read an adapter's weights, after checking that every weight was saved."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = _read(result)
    if result.format != "adapter":  # named as in the model, not as in PEFT's file
        weights = get_peft_model_state_dict(model, weights, save_embedding_layers=False)
    if names := expected.keys() ^ weights.keys():  # PEFT would ignore them
        raise UserError(f"{mismatch}: only one of them has {min(names)}")
    set_peft_model_state_dict(model, weights)


def _load_base(result: Result, name: str, options: dict, dtype: torch.dtype, quantization: str | None) -> nn.Module:
    """Return an adapter's base model, in 4 bits if `quantization` or the adapter's config requires it."""
    own = result.config
    stored_in_4_bits = hasattr(options["config"], "quantization_config")
    model_class = AutoModelForCausalLM if own is None else _model_class(own, result.folder)
    wanted = quantization or ("nf4" if hasattr(own, "quantization_config") else "no")
    if wanted == "nf4" and not stored_in_4_bits:
        options |= four_bits(own or options["config"], dtype)
    model = load_weights(model_class, name, **options, dtype=dtype)
    for parameter in model.parameters():
        if parameter.is_floating_point():  # the other weights of a 4-bit model may have two precisions
            parameter.data = parameter.data.to(dtype)
    if stored_in_4_bits and wanted == "no":
        model = model.dequantize(dtype)
        model._weight_conversions = None  # else saving would convert the weights back to 4 bits
    return model


def _read(result: Result) -> dict[str, Tensor]:
    """Read the weights by their names in the model, or in PEFT's file."""
    with refused(f"{result.folder} cannot be read"):
        if result.format == "adapter":
            return load_file(result.folder / "adapter_model.safetensors")
        if result.format == "engine":
            return EngineState.read_weights(result.folder)
        saved = read_index(result.folder).state_dict_metadata
        weights = {
            name: torch.empty(item.size, dtype=item.properties.dtype)
            for name, item in saved.items()
            if name.startswith("model.")
        }
        read_tensors(weights, result.folder, alone=True)
        return {name.removeprefix("model."): tensor for name, tensor in weights.items()}


def _model_class(config: PretrainedConfig, folder: str | Path) -> type[PreTrainedModel]:
    """Return the model class that the config names."""
    name = (config.architectures or [""])[0]
    if not hasattr(transformers, name):
        raise UserError(f"{folder}/config.json names no model class of transformers {transformers.__version__}: {name}")
    return getattr(transformers, name)
