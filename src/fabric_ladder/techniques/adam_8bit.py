"""bitsandbytes' Adam with 8-bit moments, without its waits for the device."""

import bitsandbytes
import torch


class Adam8bit(bitsandbytes.optim.Adam8bit):
    """Adam with 8-bit moments in the device's memory.

    bitsandbytes waits for the device after each weight (0.50, `optim/optimizer.py: Optimizer8bit.step`). Only paged
    moments need that, because CPU and GPU share their memory.
    """

    @torch.no_grad()
    def step(self) -> None:
        if not self.initialized:
            self.to_gpu()  # moves state that was read before
            self.initialized = True
        for group_index, group in enumerate(self.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.init_state(group, parameter, group_index, index)
                    self.update_step(group, parameter, group_index, index)
