"""Accumulate gradients on two gloo ranks, by DDP and by `DDPInBuckets`, and print how they compare.

Each line has the vocabulary, whether the gradients of all weights are equal bit by bit on both ranks, whether one of
them has a NaN, and the number of elements that this rank sends for embedding tables. The last case has a NaN.
"""

import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import distributed
from transformers import BloomConfig, BloomForSequenceClassification

from fabric_ladder.distributed.ddp import DDPInBuckets
from fabric_ladder.techniques.embedding_rows import add_rows, adding_rows

WIDTH, TOKENS = 8, 12


def gradients(fabric, vocabulary, spoilt):
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=vocabulary, hidden_size=WIDTH, n_layer=1, n_head=2, pad_token_id=0)
    model = BloomForSequenceClassification(config)
    add_rows(model)
    wrapped = fabric.setup(model)
    if spoilt:
        table = model.get_input_embeddings()
        table.register_forward_hook(lambda _, ids, out: out * torch.where(ids[0] == 7, torch.nan, 1)[..., None])
    torch.manual_seed(fabric.global_rank)
    for number in (1, 2, 3):
        ids = torch.randint(4, 90, (2, TOKENS))
        ids[0, 0] = 7
        with fabric.no_backward_sync(wrapped, enabled=number < 3), adding_rows(hooked=True):
            fabric.backward(wrapped(input_ids=ids, labels=torch.tensor([0, 1])).loss)
    if isinstance(fabric.strategy, DDPInBuckets):
        fabric.strategy.average_tables()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def main() -> None:
    torch.set_num_threads(1)
    both = [Fabric(accelerator="cpu", devices=2, strategy=strategy) for strategy in (DDPStrategy(), DDPInBuckets())]
    for fabric in both:
        fabric.launch()
    sent = []
    gather, reduce = distributed.all_gather, distributed.all_reduce
    distributed.all_gather = lambda out, tensor: (sent.append(tensor.numel()), gather(out, tensor))[1]
    distributed.all_reduce = lambda tensor: (sent.append(tensor.numel()), reduce(tensor))[1]
    for vocabulary, spoilt in ((1000, False), (100, False), (1000, True)):
        sent.clear()
        theirs, ours = (gradients(fabric, vocabulary, spoilt) for fabric in both)
        same = all(torch.allclose(ours[name], theirs[name], 0, 0, equal_nan=True) for name in theirs)
        others = [None, None]
        distributed.all_gather_object(others, same)
        broken = any(gradient.isnan().any().item() for gradient in ours.values())
        if both[0].global_rank == 0:
            print(vocabulary, all(others), broken, sum(sent))


if __name__ == "__main__":
    main()
