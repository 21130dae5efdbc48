"""accelerate: a last window with fewer passes is divided by `gradient_accumulation_steps` all the same.

Plain gradient descent with 20 samples: 16 in the first step, 4 in the last. With one sample per pass the last step
should be as long as with 4 samples in one pass.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

lengths = []
for passes in (1, 16):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes)
    model = torch.nn.Linear(8, 1)
    samples = [torch.randn(8) for _ in range(20)]
    descent = torch.optim.SGD(model.parameters(), lr=0.1)
    model, descent, loader = accelerator.prepare(model, descent, DataLoader(samples, batch_size=16 // passes))
    for batch in loader:
        with accelerator.accumulate(model):
            if accelerator.sync_gradients:  # the last of these lines is that of the last step
                before = model.weight.detach().clone()
            accelerator.backward((model(batch) - 1).square().mean())
            descent.step()
            descent.zero_grad()
    lengths.append(float((model.weight.detach() - before).norm()))
print(f"length of the last step in 4 passes / in one pass: {lengths[1] / lengths[0]:.2f}")
