"""CUDA graphs: record the kernels of a pass once, and launch them all together from then on (`training/graphs.py`)."""

from fabric_ladder.models.configs import load_config
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.checkpointing import may_draw
from fabric_ladder.techniques.technique import Technique


class CudaGraphs(Technique):
    """Replay the forward and backward pass of each shape of micro-batch."""

    keeps_passes = True
    explained_errors = (
        (
            "not permitted when stream is capturing",
            "--cuda_graphs true: a pass of this model waits for the GPU, and a graph cannot; use --cuda_graphs false",
        ),
    )

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if not settings.task.endswith("classification") or settings.task == "token-classification":
            return (
                f"--task {settings.task} trains another number of words or tokens in each micro-batch, and a graph "
                "serves one; leave it out"
            )
        if settings.lora and settings.lora_dropout:
            return f"--lora_dropout {settings.lora_dropout:g} draws random numbers; use --lora_dropout 0"
        config = load_config(settings.model)
        if may_draw(config, settings):
            return (
                f"{settings.model} ({config.model_type}) may draw random numbers in training, such as dropout's; leave "
                "it out, or set the dropout to 0 in a copy of its config.json"
            )
        return None

    def notice(self, settings: Settings) -> str | None:
        if settings.replays:
            return None
        return f"--cuda_graphs on {settings.accelerator}: there are no CUDA graphs here, so each operation starts alone"
