"""Reading back what a run has saved, in one process and without its data, and writing it as a plain folder."""

import argparse
import importlib.util
import io
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple, NoReturn

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from fabric_ladder.checkpoint import OPTIMIZER
from fabric_ladder.errors import UserError
from fabric_ladder.models import load_config, silence_loading
from fabric_ladder.sharded import read_index, read_tensors
from fabric_ladder.zero import only_values
from local_dataset_utilities import reachable

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
PROCESSOR = (".json", ".jinja", ".txt", ".model")  # files of tokenizers and image preprocessors
OTHERS = ("config.json", "adapter_config.json", "generation_config.json", OPTIMIZER)
DTYPES = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


class Result(NamedTuple):
    """What a run has saved.

    Attributes:
        folder: Where it is.
        kind: `model` and `adapter` as transformers and PEFT write them, `sharded` (torch.distributed.checkpoint), or
            `deepspeed`.
        adapter: Only an adapter, whose base model is somewhere else.
    """

    folder: Path
    kind: str
    adapter: bool


class Arguments(argparse.ArgumentParser):
    """A script's arguments; what is wrong with them is one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what `show_errors` prints."""
        raise UserError(f"{message} (see --help)")


def find_result(name: str | Path) -> Result:
    """Return what a run's folder holds, or one of its folders `checkpoint`, `model` and `adapter`.

    Raises:
        UserError: There is no such folder, or nothing that a run has saved.
    """
    if not Path(name).is_dir():
        raise UserError(f"there is no folder {name}: give the folder of a run, say runs/10_fsdp/1, or one below it")
    for folder in (Path(name), *(Path(name) / below for below in ("adapter", "model", "checkpoint"))):
        adapter = (folder / "adapter_config.json").is_file()
        kinds = {
            "sharded": (folder / ".metadata").is_file(),
            "deepspeed": (folder / "latest").is_file(),
            "adapter": (folder / "adapter_model.safetensors").is_file(),
            "model": (folder / "config.json").is_file() and any(any(folder.glob(names)) for names in WEIGHTS),
        }
        if kind := next((kind for kind, there in kinds.items() if there), None):
            if kind != "adapter" and not (folder / "config.json").is_file():
                raise UserError(f"{folder} lacks the model's config.json: it was saved by an older version")
            return Result(folder, kind, adapter)
    raise UserError(f"{name} holds nothing that a run has saved: train with --save sharded or --save consolidated")


def load_result(
    result: Result, base: str | None = None, dtype: torch.dtype | None = None, quantization: str | None = None
) -> nn.Module:
    """Return the model in eval mode on the CPU, or a `PeftModel` where only an adapter was saved.

    Args:
        result: From `find_result`.
        base: Base model of an adapter: a folder or a name on the Hub. Default: the one that it was trained on.
        dtype: Precision of the weights. Default: as they were saved, 32-bit for an adapter's base.
        quantization: `nf4` for 4-bit weights, `no` for none; default: as the adapter's base was while training.

    Raises:
        UserError: Weights are missing or do not fit the config, or the adapter does not fit the base.
        DatasetError: The base or the model cannot be read.
    """
    quiet()
    if result.adapter:
        return _load_adapter(result, base, dtype, quantization).eval()
    config = load_config(str(result.folder))
    if result.kind == "model":
        options = four_bits(config, dtype or config.dtype or torch.float32) if quantization == "nf4" else {}
        kind = _class(config, result.folder)
        with reachable(str(result.folder), "weights") as local:
            return kind.from_pretrained(result.folder, dtype=dtype or "auto", **options, **local).eval()
    if quantization == "nf4":
        raise UserError(f"{result.folder} is read whole: run scripts/export_model.py, and give what it writes")
    with no_init_weights():
        model = _class(config, result.folder)(config)
    weights = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in _read(result).items()
    }
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UserError(f"{result.folder}: the weights do not fit its config.json: {_brief(error)}") from error
    model.tie_weights()
    return model.eval()


def merge(model: nn.Module) -> PreTrainedModel:
    """Return the base with the adapter's changes added to its weights; the model given is used up."""
    return model.merge_and_unload()


def write_plain(model: PreTrainedModel, folder: Path, beside: Path) -> None:
    """Write weights, config, and the tokenizer or preprocessor that lies `beside` the source, for `from_pretrained`."""
    model.save_pretrained(folder)
    for path in beside.iterdir():
        if path.suffix in PROCESSOR and path.name not in OTHERS and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    if (beside / "generation_config.json").is_file():
        shutil.copyfile(beside / "generation_config.json", folder / "generation_config.json")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Give a folder to write into, beside `output`, which it becomes when all is written.

    Raises:
        UserError: `output` is there and not empty, or cannot be made.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output} is there already and is left as it is: choose another --output")
    unfinished = output.absolute().parent / f".{output.name}.unfinished-{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write {output} ({error.strerror}): choose another --output") from error
    try:
        yield unfinished
        if output.exists():
            output.rmdir()
        unfinished.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def quiet() -> None:
    """Leave out what libraries report while they load; progress bars are for a terminal."""
    silence_loading()
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # PEFT asks for it
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where installed, would report that it found none


def base_name(result: Result, base: str | None = None) -> str:
    """Return the base model of an adapter: the one that is asked for, or that it was trained on.

    Raises:
        UserError: The adapter names none, or a folder that is not there.
    """
    from peft import PeftConfig

    name = base or PeftConfig.from_pretrained(result.folder).base_model_name_or_path
    if not name:
        raise UserError(f"{result.folder} does not say which base model it is for: add --base NAME")
    if not Path(name).is_dir() and (Path(name).is_absolute() or name.startswith(".")):
        wanted = f"--base {name}" if base else f"{result.folder} is an adapter for {name}, which"
        raise UserError(f"{wanted} is not there: give --base FOLDER or a name on the Hub")
    return name


def trained_on_other_weights(result: Result, base: str) -> bool:
    """Return whether an adapter was trained on 4-bit weights, and the base has whole ones."""
    own = (result.folder / "config.json").is_file() and load_config(str(result.folder))
    return hasattr(own, "quantization_config") and not hasattr(load_config(base), "quantization_config")


def _load_adapter(result: Result, base: str | None, dtype: torch.dtype | None, quantization: str | None) -> nn.Module:
    """Load the base with its own config, so that nothing of another architecture is made to fit by random weights."""
    from peft import PeftConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    name, adapter = base_name(result, base), PeftConfig.from_pretrained(result.folder)
    own = load_config(str(result.folder)) if (result.folder / "config.json").is_file() else None
    mismatch = f"{result.folder} is an adapter for {adapter.base_model_name_or_path}, and does not fit {name}"
    revision = {"revision": adapter.revision} if adapter.revision and not Path(name).is_dir() and not base else {}
    with reachable(name, "base model") as options:
        config = AutoConfig.from_pretrained(name, **options, **revision)
    if own is not None and own.model_type != config.model_type:
        raise UserError(f"{mismatch}: a {own.model_type} and a {config.model_type}")
    if own is not None and adapter.task_type != "CAUSAL_LM":
        for key in ("num_labels", "id2label", "label2id", "pad_token_id"):
            if hasattr(own, key):
                setattr(config, key, getattr(own, key))
    kind = _class(own, result.folder) if own is not None else _class_of_task(adapter.task_type, result.folder)
    dtype = dtype or torch.float32
    stored_in_4_bits = hasattr(config, "quantization_config")
    wanted = quantization or ("nf4" if hasattr(own, "quantization_config") else "no")
    bits = four_bits(own or config, dtype) if wanted == "nf4" and not stored_in_4_bits else {}
    with reachable(name, "weights of the base model") as options:
        model = kind.from_pretrained(
            name, config=config, dtype=dtype, ignore_mismatched_sizes=True, **bits, **options, **revision
        )
    for parameter in model.parameters():
        if parameter.is_floating_point():  # what a 4-bit model has beside its 4-bit weights may come in two precisions
            parameter.data = parameter.data.to(dtype)
    if stored_in_4_bits and wanted == "no":
        model = model.dequantize(dtype)
        model._weight_conversions = None  # how 4-bit files are read, which saving would undo
    try:
        model = get_peft_model(model, adapter)
    except ValueError as error:  # none of the layers that get adapters
        raise UserError(f"{mismatch}: {_brief(error)}") from error
    weights = _read(result)
    if result.kind == "adapter":
        expected = get_peft_model_state_dict(model, save_embedding_layers=False)
    else:  # named as they are in the model
        ours = (".lora_", ".modules_to_save.")
        expected, weights = ({name: tensor for name, tensor in tensors.items() if any(part in name for part in ours)}
                             for tensors in (model.state_dict(), weights))  # fmt: skip
    if names := expected.keys() ^ weights.keys():
        raise UserError(f"{mismatch}: only one of them has {min(names)}")
    for key, tensor in weights.items():
        if tensor.shape != expected[key].shape:
            raise UserError(f"{mismatch}: {key} has the sizes {[*tensor.shape]} and {[*expected[key].shape]}")
    if result.kind == "adapter":
        set_peft_model_state_dict(model, weights)
    else:
        model.load_state_dict(weights, strict=False)
    return model


def _read(result: Result) -> dict[str, Tensor]:
    """Read the weights, with the names that they have in the model, or in PEFT's file."""
    if result.kind == "sharded":
        try:
            saved = read_index(result.folder).state_dict_metadata
            weights = {name: torch.empty(item.size, dtype=item.properties.dtype)
                       for name, item in saved.items() if name.startswith("model.")}  # fmt: skip
            read_tensors(weights, result.folder, alone=True)
        except (dcp.api.CheckpointException, OSError, RuntimeError, ValueError, UnpicklingError) as error:
            raise UserError(f"{result.folder} cannot be read: {_brief(error)}") from error
        return {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    if result.kind == "deepspeed":
        try:
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
        except ImportError as error:
            raise UserError(f"{result.folder} is DeepSpeed's: pip install deepspeed==0.19.8 to read it") from error
        try:
            with only_values(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                return get_fp32_state_dict_from_zero_checkpoint(str(result.folder))
        except (OSError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
            raise UserError(f"{result.folder} cannot be read: {_brief(error)}") from error
    try:
        return load_file(result.folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{result.folder}/adapter_model.safetensors cannot be read: {_brief(error)}") from error


def _class(config: PretrainedConfig, where: Path) -> type[PreTrainedModel]:
    """The class that was trained, which its config names."""
    name = (config.architectures or [""])[0]
    if not hasattr(transformers, name):
        raise UserError(f"{where}/config.json names no model class of transformers {transformers.__version__}: {name}")
    return getattr(transformers, name)


def _class_of_task(task: str | None, where: Path) -> type:
    """For adapters that others have trained; they keep no config of a classifier's labels."""
    if task != "CAUSAL_LM":
        raise UserError(f"{where} lacks the model's config.json, which says what its {task or 'head'} was made for")
    return AutoModelForCausalLM


def four_bits(config: PretrainedConfig, dtype: torch.dtype) -> dict:
    """Return `from_pretrained`'s options for 4-bit weights: those that the config names, or NF4."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("4-bit weights need bitsandbytes: pip install bitsandbytes==0.50.2, or --quantization no")
    saved = getattr(config, "quantization_config", None) or NF4
    items = (saved if isinstance(saved, dict) else saved.to_dict()).items()
    known = {key: value for key, value in items if key != "quant_method" and not key.startswith("_")}
    return {"quantization_config": BitsAndBytesConfig(**(known | {"bnb_4bit_compute_dtype": dtype}))}


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
