"""accelerate: dropout of a resumed run differs from that of an uninterrupted one.

The loader's iterator draws a random number when it starts. `load_state` restores the state from the middle of the
epoch, and then the new iterator of `skip_first_batches` draws from it.
"""

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def masks(folder, resume=False):
    """Return the dropout masks of batches 2 and 3, of a whole epoch or of one that continues after batch 1."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(4.0), batch_size=1))
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, 2)
    found = []
    for batch, _ in enumerate(loader, 2 * resume):
        found.append(torch.nn.functional.dropout(torch.ones(8)))
        if batch == 1 and not resume:
            accelerator.save_state(folder)
    return torch.stack(found[-2:])


with tempfile.TemporaryDirectory() as folder:
    print("resumed dropout equals that of the whole run:", torch.equal(masks(folder), masks(folder, resume=True)))
