"""Gradients of tiny models: fused, packed and padded against eager ones in 32-bit, for each dtype, on this device.

    python benchmarks/gradient_check.py --out FILE

Right is an error of at most half as much again as eager attention's own in the same dtype. Packed rows are computed by
the kernels that a run of fixed rows would take here, cuDNN's where it gains, and again without those.
"""

import argparse
import copy
import json
from pathlib import Path

import common  # noqa: F401 - first of all: it makes the project importable without an installation
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, BloomConfig, LlamaConfig

from fabric_ladder.models.bloom import fuse_attention
from fabric_ladder.models.packing import support_packing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODES = {  # dtype and precision of 32-bit products
    "32-bit": (torch.float32, "highest"), "TF32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"), "float16": (torch.float16, "highest"),
}  # fmt: skip
KINDS = (
    "full", "padded", "packed", "packed, language model", "packed, BERT", "packed, Llama",
    "packed, Llama, language model",
)  # fmt: skip


def config_of(kind: str, heads: int) -> BloomConfig | BertConfig | LlamaConfig:
    """Return the config of a model of two layers, 128 wide, without dropout."""
    sizes = {"vocab_size": 256, "hidden_size": 128, "pad_token_id": 0, "use_cache": False}
    if "BERT" in kind:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertConfig(num_hidden_layers=2, num_attention_heads=heads, intermediate_size=256, **dropout, **sizes)
    if "Llama" in kind:
        return LlamaConfig(num_hidden_layers=2, num_attention_heads=heads, intermediate_size=256, **sizes)
    return BloomConfig(n_layer=2, n_head=heads, hidden_dropout=0.0, attention_dropout=0.0, **sizes)


def gradients() -> dict:
    """Return the relative errors of gradients by kind of batch, width of a head and dtype."""
    found = {}
    for width, heads in ((64, 2), (128, 1)):
        torch.manual_seed(0)
        ids = torch.randint(4, 256, (4, 120))
        visible = torch.arange(120) < torch.tensor([[120], [77], [30], [5]])
        for kind in KINDS:
            config, packed = config_of(kind, heads), "packed" in kind
            made = AutoModelForCausalLM if "language" in kind else AutoModelForSequenceClassification
            eager = made.from_config(config, attn_implementation="eager")
            fused = made.from_config(config_of(kind, heads))
            with torch.no_grad():
                for weight in eager.parameters():  # where training starts, attention hardly matters
                    if weight.dim() == 2:
                        weight.normal_(0, weight.shape[-1] ** -0.5)
            fused.load_state_dict(eager.state_dict())
            fuse_attention(fused)
            if packed:
                support_packing(fused, ids.numel())
            mask = visible if kind != "full" else torch.ones_like(visible)
            exact = gradient(eager, ids, mask, "32-bit")
            for mode in MODES:
                error = {"eager": gradient(eager, ids, mask, mode), "fused": gradient(fused, ids, mask, mode, packed)}
                if packed:
                    error["fixed"] = gradient(fused, ids, mask, mode, packed, cudnn=True)
                error = {name: ((mine - exact).norm() / exact.norm()).item() for name, mine in error.items()}
                right = max(error.values()) <= 1.5 * error["eager"] + 1e-5
                found[f"{kind}, heads of {width}, {mode}"] = error | {"right": right}
    return {"passed": all(each["right"] for each in found.values()), "errors": found}


def gradient(
    model: nn.Module, ids: Tensor, mask: Tensor, mode: str, packed: bool = False, cudnn: bool = False
) -> Tensor:
    """Return the gradient of all weights as one 64-bit vector.

    Args:
        model: A classifier, or a causal language model, of which each sample's tokens are trained but the first.
        ids: (rows, tokens).
        mask: Like `ids`: which tokens are there.
        mode: One of `MODES`.
        packed: Let all samples share one row.
        cudnn: Allow cuDNN's kernel, which the rungs take for rows of one shape alone (models/kernels.py).
    """
    dtype, precision = MODES[mode]
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    of_tokens, model = model.get_output_embeddings() is not None, copy.deepcopy(model).to(DEVICE, dtype)
    ids, mask = (ids * mask).to(DEVICE), mask.to(DEVICE)  # padding, by which a classifier finds the last token, is 0
    inputs, following = {"input_ids": ids, "attention_mask": mask.long()}, mask[:, 1:]
    if packed:
        positions = torch.arange(ids.shape[1], device=DEVICE).expand_as(ids)
        inputs = {"input_ids": ids[mask][None], "position_ids": positions[mask][None]}
        following = inputs["position_ids"][:, 1:] > 0
        if not of_tokens:
            ends = mask.sum(1).cumsum(0)
            inputs["spans"] = torch.stack([ends - mask.sum(1), ends], 1)
    logits = model(**inputs).logits.float()
    if of_tokens:
        loss = cross_entropy(logits[:, :-1][following], inputs["input_ids"][:, 1:][following])
    else:
        loss = cross_entropy(logits, torch.arange(len(ids), device=DEVICE) % 2)
    (1024 * loss).backward()  # as a scaler does for float16
    return torch.cat(
        [(part.grad.double() / 1024).flatten().cpu() for part in model.parameters() if part.grad is not None]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_text(json.dumps(gradients()), encoding="utf-8")
