"""A tiny BLOOM's gradients: fused, packed and padded against eager ones in 32-bit, for each dtype, on this device.

    python benchmarks/gradient_check.py --out FILE

Right is an error of at most half as much again as eager attention's own in the same dtype.
"""

import argparse
import copy
import json
from pathlib import Path

import common  # noqa: F401 - first of all: it makes the project importable without an installation
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BloomConfig, BloomForCausalLM, BloomForSequenceClassification

from fabric_ladder.models.bloom import fuse_attention
from fabric_ladder.models.packing import support_packing

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODES = {  # dtype and precision of 32-bit products
    "32-bit": (torch.float32, "highest"), "TF32": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "highest"), "float16": (torch.float16, "highest"),
}  # fmt: skip


def gradients() -> dict:
    """Return the relative errors of gradients by kind of batch, width of a head and dtype."""
    found = {}
    for width, heads in ((64, 2), (128, 1)):
        config = BloomConfig(vocab_size=256, hidden_size=128, n_layer=2, n_head=heads, pad_token_id=0, use_cache=False,
                             hidden_dropout=0.0, attention_dropout=0.0)  # fmt: skip
        torch.manual_seed(0)
        ids = torch.randint(4, 256, (4, 120))
        visible = torch.arange(120) < torch.tensor([[120], [77], [30], [5]])
        for kind in ("full", "padded", "packed", "packed classes"):
            model = BloomForCausalLM(config) if kind == "packed" else BloomForSequenceClassification(config)
            with torch.no_grad():
                for weight in model.parameters():  # where training starts, attention hardly matters
                    if weight.dim() == 2:
                        weight.normal_(0, weight.shape[-1] ** -0.5)
            eager, fused = model, copy.deepcopy(model)
            fuse_attention(fused)
            support_packing(fused, ids.numel())
            mask = visible if kind != "full" else torch.ones_like(visible)
            ids = ids.where(mask, config.pad_token_id)  # a classifier looks for the last token that is none
            exact = gradient(eager, ids, mask, "32-bit")
            for mode in MODES:
                errors = {name: ((mine - exact).norm() / exact.norm()).item() for name, mine in (
                    ("eager", gradient(eager, ids, mask, mode)),
                    ("fused", gradient(fused, ids, mask, mode, packed=kind.startswith("packed"))))}  # fmt: skip
                right = errors["fused"] <= 1.5 * errors["eager"] + 1e-5
                found[f"{kind}, heads of {width}, {mode}"] = errors | {"right": right}
    return {"passed": all(each["right"] for each in found.values()), "errors": found}


def gradient(model: nn.Module, ids: Tensor, mask: Tensor, mode: str, packed: bool = False) -> Tensor:
    """Return the gradient of all weights as one 64-bit vector.

    Args:
        model: A classifier, or a causal language model, of which each sample's tokens are trained but the first.
        ids: (rows, tokens).
        mask: Like `ids`: which tokens are there.
        mode: One of `MODES`.
        packed: Let all samples share one row.
    """
    dtype, precision = MODES[mode]
    torch.set_float32_matmul_precision(precision)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the rungs do for texts, see models/kernels.py
    model = copy.deepcopy(model).to(DEVICE, dtype)
    ids, mask = ids.to(DEVICE), mask.to(DEVICE)
    inputs, following = {"input_ids": ids, "attention_mask": mask.long()}, mask[:, 1:]
    if packed:
        positions = torch.arange(ids.shape[1], device=DEVICE).expand_as(ids)
        inputs = {"input_ids": ids[mask][None], "position_ids": positions[mask][None]}
        following = inputs["position_ids"][:, 1:] > 0
        if not isinstance(model, BloomForCausalLM):
            ends = mask.sum(1).cumsum(0)
            inputs["spans"] = torch.stack([ends - mask.sum(1), ends], 1)
    if isinstance(model, BloomForCausalLM):
        logits = model(**inputs).logits[:, :-1][following]
        loss = cross_entropy(logits.float(), inputs["input_ids"][:, 1:][following])
    else:
        loss = cross_entropy(model(**inputs).logits.float(), torch.arange(len(ids), device=DEVICE) % 2)
    (1024 * loss).backward()  # as a scaler does for float16
    return torch.cat(
        [(part.grad.double() / 1024).flatten().cpu() for part in model.parameters() if part.grad is not None]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_text(json.dumps(gradients()), encoding="utf-8")
